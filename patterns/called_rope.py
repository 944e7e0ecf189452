"""q and k turned by a call of a fused op that looks its tables up by position, as SGLang has it on an NPU:

    q, k = npu_mrope(positions, q, k, cache, head_size, mrope_section=[0, 0, 0], rotary_mode="half")

The op computes in float32 and rounds once; the halves of the cache's rows are cos and sin.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..runtime.sizes import static_int
from . import values
from .canonical import Canonicaliser
from .lookup import Lookup
from .match import Match
from .movement import source
from .rope import KIND, Rope, Style
from .spelling import spell

_NAME = "npu::npu_mrope"
_STYLES: dict[str, Style] = {"half": "half", "interleave": "interleave"}


def read(node: fx.Node, c: Canonicaliser) -> tuple[Match, Match] | str | None:
    """Both results of a call as rotations, at the later of the two; or a sentence, what else it does than turn them.

    Instead of "cos" and "sin", each reads "cache" [max_positions, rope_dim] and "positions" [tokens].
    """
    if node.target is not operator.getitem or getattr(source(node).target, "_schema", None) is None:
        return None
    call = source(node)
    items = sorted(call.users)
    if call.target._schema.name != _NAME or node is not items[-1]:  # type: ignore[union-attr]  # an OpOverload
        return None
    if [item.args[1] for item in items] not in ([0, 1], [1, 0]):
        return None  # one of them is not used: there is no pair
    given = values.arguments(call)
    if any(given["mrope_section"] or ()):
        return f"each of its tokens has a position for each of the sections {list(given['mrope_section'])}"
    head_dim, rope_dim = static_int(given["head_size"]), values.last_dim(given["cos_sin_cache"])
    style = _STYLES.get(given["rotary_mode"])
    if head_dim is None or rope_dim is None or style is None or given["cache_mode"] != "default":
        return None
    first, second = (_rotation(item, given, head_dim, rope_dim, style, c) for item in items)
    return None if first is None or second is None else (first, second)


def looked_up(rope: Match) -> Lookup:
    """How a call looks its tables up: as they are in the cache, and never from its end."""
    return Lookup(wraps=False, dtype=values.dtype(rope.inputs["cache"]))


def _rotation(
    item: fx.Node, given: dict[str, Any], head_dim: int, rope_dim: int, style: Style, c: Canonicaliser
) -> Match | None:
    own, other = (given[name] for name in (("query", "key") if item.args[1] == 0 else ("key", "query")))
    inputs = {"x": own, "other": other, "positions": given["positions"], "cache": given["cos_sin_cache"]}
    spelling = spell(item, inputs, c)
    if spelling is None:
        return None
    dtype = values.dtype(item)
    rope = Rope(
        style=style,
        backward=False,
        head_dim=head_dim,
        rope_dim=rope_dim,
        rope_start=0,
        table_dim=rope_dim // 2,
        is_complex=False,
        compute_dtype=torch.float32,
        dtype=dtype,
        steps=frozenset({torch.float32, dtype}),
        spelling=spelling,
    )
    return Match(KIND, item, inputs, rope, (source(item), item))
