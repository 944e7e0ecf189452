"""q and k turned by the same tables, where one op for both has something to gain:

all heads of q share one head of k, or the tables are looked up by position.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from ..runtime.sizes import Size, static_int
from . import values
from .canonical import Canonicaliser
from .lookup import Lookup, looked_up
from .match import Findings, Match, Miss
from .pairs import share_columns
from .rope import Rope

KIND = "qk_rope"


@dataclass(frozen=True, slots=True)
class QkRope:
    """What a pair of rotations fixes.

    Args:
        q, k: the rotations; they may differ in what passes around the rotated part.
        head_axis: which axis of q and k counts heads; all others but the last count tokens.
        num_heads, num_kv_heads: how many heads they have; None where that is a symbol.
        lookup: how the tables are looked up by position; None where they are not.
        shares_columns: whether both elements of a pair are turned by one column of cos and sin, or by equal ones.
    """

    q: Rope
    k: Rope
    head_axis: int
    num_heads: int | None
    num_kv_heads: int | None
    lookup: Lookup | None
    shares_columns: bool

    def public(self) -> dict[str, Any]:
        return {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.q.head_dim,
            "rope_dim": self.q.rope_dim,
            "rope_style": self.q.style,
            "looked_up": self.lookup is not None,
            "dtype": self.q.dtype,
        }


def match(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | Miss | None:
    """Recognises the pair at the later of its two rotations; the one with more heads is q."""
    later = findings.at("rope", node)
    if later is None:
        return None
    pairs: dict[Match, Match] = c.readings.setdefault(KIND, {})  # by either of its rotations
    within = set(later.claimed)

    def is_taken(rope: Match) -> bool:
        pair = pairs.get(rope)
        # A pair with a smaller rotation, which this one is the rest of, makes room.
        return pair is not None and findings.stands(pair) and not any(part.node in within for part in pair.parts)

    for earlier in reversed(findings.of("rope")):
        if earlier is not later and not is_taken(earlier) and same_rotation(earlier, later, c):
            found = _match(node, earlier, later, c)
            pairs.update(dict.fromkeys(found.parts, found) if found is not None else ())
            return found
    return None


def same_rotation(a: Match, b: Match, c: Canonicaliser) -> bool:
    """Whether two tensors are turned alike and by the same cos and sin, whatever passes around the rotated part."""
    p, q = a.params, b.params
    assert isinstance(p, Rope)
    assert isinstance(q, Rope)
    pairs = [(a.inputs[name], b.inputs[name]) for name in ("cos", "sin")]
    alike = replace(p, head_dim=q.head_dim, rope_start=q.rope_start) == q
    return alike and all(c.numbers[x] == c.numbers[y] for x, y in pairs)


def _match(node: fx.Node, q: Match, k: Match, c: Canonicaliser) -> Match | None:
    axis = _head_axis(q, k)
    if axis is None:
        return None
    q_heads, k_heads = (static_int(values.shape(rope.inputs["x"])[axis]) for rope in (q, k))
    if q_heads == 1 and k_heads != 1:
        (q, k), (q_heads, k_heads) = (k, q), (k_heads, q_heads)
    cos, sin = q.inputs["cos"], q.inputs["sin"]
    assert isinstance(q.params, Rope)
    assert isinstance(k.params, Rope)
    found = looked_up(cos, sin, q.params.rope_dim, c)
    if found is None and (k_heads != 1 or q_heads == 1):
        return None
    inputs = {"q": q.inputs["x"], "k": k.inputs["x"], "cos": cos, "sin": sin}
    inputs |= {"rotated_q": q.node, "rotated_k": k.node, **(found.inputs if found is not None else {})}
    lookup = found.params if found is not None else None
    shared = all(share_columns(table, q.params, c) for table in (cos, sin))
    params = QkRope(q.params, k.params, axis, q_heads, k_heads, lookup, shared)
    return Match(KIND, node, inputs, params, tuple(sorted({*q.claimed, *k.claimed})), (q, k))


def _head_axis(q: Match, k: Match) -> int | None:
    """The axis along which q and k may differ and the tables don't; where both have as many heads, the last such."""
    q_shape, k_shape = (values.shape(rope.inputs["x"])[:-1] for rope in (q, k))
    if len(q_shape) != len(k_shape) or len(q_shape) < 2:
        return None
    tables = [_aligned(values.shape(q.inputs[name])[:-1], len(q_shape)) for name in ("cos", "sin")]
    shared = [i for i in range(len(q_shape)) if all(static_int(table[i]) == 1 for table in tables)]
    differ = [i for i in range(len(q_shape)) if not values.same_shape(q_shape[i : i + 1], k_shape[i : i + 1])]
    if len(differ) > 1 or not {*differ} <= {*shared}:
        return None
    long = [i for i in shared if static_int(q_shape[i]) != 1]
    return next(iter((*differ, *long[-1:], *shared[-1:])), None)


def _aligned(shape: tuple[Size, ...], rank: int) -> tuple[Size, ...]:
    return (*[1] * (rank - len(shape)), *shape)
