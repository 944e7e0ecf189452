"""What latent attention (MLA) keeps of a token, written into its two caches, both at the same slots:

[latent | k] = kv
ckv_cache[slots] = rms_norm(latent)
k_cache[slots] = rope(k)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import fx

from . import values
from .canonical import Canonicaliser
from .kv_cache_write import KIND as KV_CACHE_WRITE
from .kv_cache_write import KvCacheWrite
from .match import Findings, Match
from .movement import ROW_MAJOR_VIEWS, Sizes, layout, source, trace
from .rms_norm import RmsNorm
from .rope import Rope
from .spelling import Spelling

KIND = "latent_cache_write"

Name = Literal["key", "value"]


@dataclass(frozen=True, slots=True)
class LatentCacheWrite:
    """What a site fixes.

    Its inputs are kv, [*tokens, latent_dim + rope_dim], and those of the pair of writes.

    Args:
        write: the pair of writes.
        norm: the norm.
        rope: the rotation.
        latent: which of the pair writes the normed latent.
        spelling: how the second write's new value is computed, bit for bit.
    """

    write: KvCacheWrite
    norm: RmsNorm
    rope: Rope
    latent: Name
    spelling: Spelling = field(repr=False)

    @property
    def rotated(self) -> Name:
        """Which of the pair writes the rotated k."""
        return "value" if self.latent == "key" else "key"

    def public(self) -> dict[str, Any]:
        return {
            **self.write.public(),
            "latent_dim": self.norm.hidden_size,
            "rope_dim": self.rope.rope_dim,
            "style": self.rope.style,
            "eps": self.norm.eps,
        }


def match(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | None:
    """Recognises a pair of writes of which one writes a norm and one a rotation, of the two parts of one tensor."""
    write = findings.at(KV_CACHE_WRITE, node)
    if write is None:
        return None
    names: tuple[tuple[Name, Name], ...] = (("key", "value"), ("value", "key"))
    for latent, rotated in names:
        norm, latent_path = _computed("rms_norm", write.inputs[latent], findings)
        rope, k_path = _computed("rope", write.inputs[rotated], findings)
        if norm is None or rope is None:
            continue
        kv = _parted(norm.inputs["x"], rope.inputs["x"], c)
        if kv is None:
            continue
        assert isinstance(write.params, KvCacheWrite)
        assert isinstance(norm.params, RmsNorm)
        assert isinstance(rope.params, Rope)
        params = LatentCacheWrite(write.params, norm.params, rope.params, latent, write.params.spelling)
        claimed = {*write.claimed, *norm.claimed, *rope.claimed, *latent_path, *k_path}
        return Match(KIND, node, {**write.inputs, "kv": kv}, params, tuple(sorted(claimed)), (write, norm, rope))
    return None


def _computed(kind: str, tokens: fx.Node, findings: Findings) -> tuple[Match | None, list[fx.Node]]:
    """What computes the tokens, and the views between."""
    path = []
    while (found := findings.at(kind, tokens)) is None and tokens.target in ROW_MAJOR_VIEWS:
        path.append(tokens)
        tokens = source(tokens)
    return found, path


def _parted(latent: fx.Node, k: fx.Node, c: Canonicaliser) -> fx.Node | None:
    """The tensor whose last axis is the latent and then k, both with all of its tokens in order; else None."""
    kv, to_latent = trace(latent)
    other, to_k = trace(k)
    widths = values.last_dim(latent), values.last_dim(k)
    if c.numbers[kv] != c.numbers[other] or widths[0] is None or widths[1] is None:
        return None
    if values.last_dim(kv) != widths[0] + widths[1]:
        return None
    starts = (_start(kv, path, width) for path, width in ((to_latent, widths[0]), (to_k, widths[1])))
    return kv if tuple(starts) == (0, widths[0]) else None


def _start(kv: fx.Node, path: tuple[fx.Node, ...], width: int) -> int | None:
    """Where the columns begin that a path of views takes of each row, in order; None where it takes something else."""
    starts = set()
    for index in range(Sizes.COUNT):
        found = layout(kv, path, Sizes(index))
        if found is None or found.sizes[-1] != width or found.strides[-1] != 1:
            return None
        expected = found.source_sizes[-1]
        for size, stride in reversed(list(zip(found.sizes[:-1], found.strides[:-1], strict=True))):
            if size != 1 and stride != expected:
                return None
            expected *= size
        if found.offset >= found.source_sizes[-1]:
            return None
        starts.add(found.offset)
    return starts.pop() if len(starts) == 1 else None
