"""The prologue of attention:  q, k, v = split(projection(x));  q, k = rope(norm(heads(q))), rope(norm(heads(k))).

The projection is one (its columns are [q | k | v], in this order or another, or head by head) or three of one x; behind
each head of q a gate may lie; the norm is per head, over the whole width, or missing; transposes may stand anywhere.
Reads the smaller matches, norms and ropes, and the movement between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import fx

from ..runtime.sizes import is_contiguous
from . import called_rope, qk_rope, tp_rms_norm, values
from .canonical import Canonicaliser
from .heads import Heads, heads
from .linear import Linear, linear, projections_of
from .lookup import Lookup, looked_up
from .match import Findings, Match, Miss
from .movement import is_movement, trace
from .pairs import share_columns
from .rms_norm import RmsNorm
from .rope import Rope
from .tp_rms_norm import TpRmsNorm

CHAIN = "norm_rope_chain"
ROPE_THEN_NORM = "rope_then_norm"
KIND = "qkv"


@dataclass(frozen=True, slots=True)
class Chain:
    """A rotated tensor with the norm before it.

    Args:
        per_head: whether the norm is over one head, not over all heads together.
    """

    per_head: bool

    def public(self) -> dict[str, Any]:
        return {"per_head": self.per_head}


@dataclass(frozen=True, slots=True)
class RopeThenNorm:
    """A norm of a rotated tensor."""

    def public(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, slots=True)
class Head:
    """How one of q and k comes from its projection: `norm` is None where there is none."""

    layout: Heads
    norm: RmsNorm | None


@dataclass(frozen=True, slots=True)
class Qkv:
    """What a prologue fixes.

    Args:
        style: "fused" for one projection, "separate" for three.
        q, k: heads of q and k in the columns of their projection.
        rope: the rotation, the same for both.
        gate: the heads of a gate that lie behind those of q; None where there are none.
        lookup: how the tables are looked up by position; None where they are not.
        ranks: the name of the group over whose ranks the norm is, and their number; None where it is of one rank.
        shares_columns: whether both elements of a pair are turned by one column of cos and sin, or by equal ones.
    """

    style: Literal["fused", "separate"]
    q: Head
    k: Head
    rope: Rope
    gate: Heads | None
    lookup: Lookup | None
    ranks: tuple[str, int] | None
    shares_columns: bool

    def public(self) -> dict[str, Any]:
        norm = self.q.norm
        return {
            "style": self.style,
            "num_heads": self.q.layout.num_heads,
            "num_kv_heads": self.k.layout.num_heads,
            "head_dim": self.q.layout.head_dim,
            "rope_dim": self.rope.rope_dim,
            "rope_style": self.rope.style,
            "norm": norm is not None,
            "eps": None if norm is None else norm.eps,
            "gate": self.gate is not None,
            "looked_up": self.lookup is not None,
            **({"process_group": self.ranks[0], "ranks": self.ranks[1]} if self.ranks is not None else {}),
            "dtype": self.rope.dtype,
        }


@dataclass(frozen=True, slots=True)
class _Strand:
    """One rotated tensor, followed down to what it was cut from."""

    rope: Match
    norm: Match | None
    base: fx.Node
    path: tuple[fx.Node, ...]
    norm_path: tuple[fx.Node, ...]

    @property
    def rms_norm(self) -> RmsNorm | None:
        """The norm, of this rank's part where it is over several."""
        params = self.norm.params if self.norm is not None else None
        if isinstance(params, TpRmsNorm):
            return params.norm
        assert params is None or isinstance(params, RmsNorm)
        return params

    @property
    def ranks(self) -> tuple[str, int] | None:
        """The group that the norm is over, and its size."""
        params = self.norm.params if self.norm is not None else None
        return (params.group, params.ranks) if isinstance(params, TpRmsNorm) else None

    @property
    def is_called(self) -> bool:
        """Whether it is turned by a call that takes heads side by side, and looks its tables up itself."""
        return "cache" in self.rope.inputs

    @property
    def claimed(self) -> tuple[fx.Node, ...]:
        norm = self.norm.claimed if self.norm is not None else ()
        return tuple(sorted({*self.rope.claimed, *norm, *self.path}))


def _moves(node: fx.Node) -> bool:
    return (is_movement(node) and linear(node) is None) or values.is_float_cast(node)


def _strand(rope: Match, findings: Findings) -> _Strand:
    below, after = trace(rope.inputs["x"], lambda n: _moves(n) and _norm_at(n, findings) is None)
    norm = _norm_at(below, findings)
    if norm is None:
        return _Strand(rope, None, below, after, ())
    base, before = trace(norm.inputs["x"], _moves)
    return _Strand(rope, norm, base, (*before, *after), before)


def _origin(strand: _Strand) -> fx.Node:
    """What both strands of a prologue come from: the x of their projections, or the tensor that they are cut from."""
    projection = linear(strand.base)
    return strand.base if projection is None else projection.x


def _norm_at(node: fx.Node, findings: Findings) -> Match | None:
    """The norm whose result a node is, of one rank or of several."""
    return findings.at("rms_norm", node) or findings.at(tp_rms_norm.KIND, node)


def _movement_only(path: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
    return tuple(n for n in path if is_movement(n))


def match_chain(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | Miss | None:
    """Recognises a rotation of a normed tensor, nothing but movement and casts between."""
    rope = findings.at("rope", node)
    if rope is None:
        return None
    strand = _strand(rope, findings)
    if strand.norm is None:
        return None
    assert strand.rms_norm is not None
    assert isinstance(rope.params, Rope)
    per_head = strand.ranks is None and strand.rms_norm.hidden_size == rope.params.head_dim
    inputs = {"x": strand.norm.inputs["x"]}
    return Match(CHAIN, node, inputs, Chain(per_head), strand.claimed, (strand.norm, rope))


def match_rope_then_norm(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | Miss | None:
    """Recognises a norm of a rotated tensor, nothing but movement and casts between."""
    norm = findings.at("rms_norm", node)
    if norm is None:
        return None
    below, _ = trace(norm.inputs["x"], lambda n: _moves(n) and findings.at("rope", n) is None)
    rope = findings.at("rope", below)
    if rope is None:
        return None
    return Match(ROPE_THEN_NORM, node, {"x": rope.inputs["x"]}, RopeThenNorm(), (*rope.claimed, *norm.claimed))


def match(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | Miss | None:
    """Recognises the prologue at the later of its two rotations."""
    rope = findings.at("rope", node)
    if rope is None:
        return _match_called(node, c, findings)
    strand = _strand(rope, findings)
    earlier: list[_Strand] = c.readings.setdefault((KIND, _origin(strand)), [])
    standing = [partner for partner in reversed(earlier) if findings.stands(partner.rope)]
    earlier.append(strand)
    for partner in standing:
        other = partner.rope
        if other.params != rope.params or not qk_rope.same_rotation(rope, other, c):
            continue
        if partner.base is strand.base:
            return _fused(node, partner, strand, c, findings)
        if (pair := _projections(partner, strand)) is not None:
            return _separate(node, partner, strand, *pair, c, findings)
    return _no_projection(node, strand)


def _match_called(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | Miss | None:
    """Likewise, where one call turns q and k."""
    called = called_rope.read(node, c)
    if isinstance(called, str):
        return Miss(KIND, node, called)
    if called is None:
        return None
    first, second = (_strand(rope, findings) for rope in called)
    if first.base is second.base:
        return _fused(node, first, second, c, findings)
    pair = _projections(first, second)
    return _separate(node, first, second, *pair, c, findings) if pair is not None else _no_projection(node, second)


def _no_projection(node: fx.Node, strand: _Strand) -> Miss | None:
    if strand.base.op == "placeholder" or linear(strand.base) is not None:
        return None
    message = "the rotated tensor comes from {}, not from a projection (and at most an RMSNorm after it)"
    return Miss(KIND, node, message, (strand.base.target,), matched=1)


def _projections(a: _Strand, b: _Strand) -> tuple[Linear, Linear] | None:
    """The two projections, where both strands come whole from projections of one x."""
    first, second = linear(a.base), linear(b.base)
    return (first, second) if first is not None and second is not None and first.x is second.x else None


def _head(strand: _Strand) -> Head | str:
    """How a strand is cut into heads, or why that can't be said."""
    assert isinstance(strand.rope.params, Rope)
    side_by_side = strand.rope.params.head_dim if strand.is_called else None
    layout = heads(strand.base, _movement_only(strand.path), head_dim=side_by_side)
    if layout is None:
        return "its heads are no plain cut of the projection's columns"
    norm = strand.rms_norm
    if norm is None:
        return Head(layout, None)
    normed = heads(strand.base, _movement_only(strand.norm_path), in_rows=True)
    whole = normed is not None and normed.width == layout.width and normed.starts[0] == layout.starts[0]
    per_head = normed is not None and normed.head_dim == layout.head_dim and {*layout.starts} <= {*normed.starts}
    if (norm.hidden_size == layout.head_dim and not per_head) or (norm.hidden_size == layout.width and not whole):
        return "the rows that are normed are not the heads that are rotated"
    return Head(layout, norm)


def _heads(node: fx.Node, a: _Strand, b: _Strand) -> tuple[Head, Head] | Miss:
    first, second = _head(a), _head(b)
    for strand, head in ((a, first), (b, second)):
        if isinstance(head, str):
            between = strand.base.target
            return Miss(KIND, node, "between the rotation and {} {}", (between, head), matched=2)
    assert isinstance(first, Head)
    assert isinstance(second, Head)
    return first, second


def _fused(node: fx.Node, a: _Strand, b: _Strand, c: Canonicaliser, findings: Findings) -> Match | Miss | None:
    """q and k cut from one tensor. The wider one is q; of two of one width, the one whose columns come first."""
    cuts = _heads(node, a, b)
    if isinstance(cuts, Miss):
        return cuts
    if (cuts[0].layout.width, -cuts[0].layout.starts[0]) < (cuts[1].layout.width, -cuts[1].layout.starts[0]):
        (a, b), cuts = (b, a), cuts[::-1]
    q, k = (cut.layout for cut in cuts)
    has_gates = values.last_dim(a.base) == 2 * (q.width + k.width) and k.starts[0] == 2 * q.width
    gate = _gate(a.base, q) if has_gates and k.side_by_side else None
    return _match(node, "fused", (a, b), cuts, {"projection": a.base}, gate, c, findings)


def _separate(
    node: fx.Node, a: _Strand, b: _Strand, first: Linear, second: Linear, c: Canonicaliser, findings: Findings
) -> Match | Miss | None:
    """q, k and v projected apart from one x. The wider one is q; v is a third projection as wide as k."""
    cuts = _heads(node, a, b)
    if isinstance(cuts, Miss):
        return cuts
    if cuts[0].layout.width < cuts[1].layout.width:
        (a, b), cuts, (first, second) = (b, a), cuts[::-1], (second, first)
    v = _value_projection(first, second)
    if v is None:
        width = cuts[1].layout.width
        return Miss(KIND, node, "no third projection of the same x is {} wide, as v must be", (width,), matched=3)
    inputs = {"x": first.x}
    for name, projection in (("q", first), ("k", second), ("v", v)):
        inputs[name] = projection.node
    q = cuts[0].layout
    gate = _gate(first.node, q) if values.last_dim(first.node) == 2 * q.width else None
    return _match(node, "separate", (a, b), cuts, inputs, gate, c, findings)


def _value_projection(q: Linear, k: Linear) -> Linear | None:
    """The first further projection of x with k's width: one that attends, if it isn't v, still splits off rightly."""
    width = values.shape(k.weight)[:1]
    for other in projections_of(q.x):
        if other.node in (q.node, k.node) or (other.bias is None) != (k.bias is None):
            continue
        if values.same_shape(values.shape(other.weight)[:1], width):
            return other
    return None


def _gate(base: fx.Node, q: Heads) -> tuple[fx.Node, Heads] | None:
    """The heads that lie behind those of q in the first columns of `base`, where the model has them dense."""
    if q.starts[0] != 0 or not q.every(2 * q.head_dim):
        return None
    behind = tuple(start + q.head_dim for start in q.starts)
    pending: list[tuple[fx.Node, ...]] = [()]
    while pending:
        path = pending.pop()
        for user in (path[-1] if path else base).users:
            if not is_movement(user):
                continue
            through = (*path, user)
            layout = heads(base, through)
            if layout is None or layout.starts != behind:
                pending.append(through)
                continue
            value = values.tensor(user)
            movers = [further for further in user.users if is_movement(further)]
            if (value is not None and is_contiguous(value)) or len(movers) != 1 or len(user.users) != 1:
                return user, layout
            pending.append(through)
    return None


def _match(
    node: fx.Node,
    style: Literal["fused", "separate"],
    strands: tuple[_Strand, _Strand],
    cuts: tuple[Head, Head],
    inputs: dict[str, fx.Node],
    gate: tuple[fx.Node, Heads] | None,
    c: Canonicaliser,
    findings: Findings,
) -> Match | Miss:
    a, b = strands
    assert isinstance(a.rope.params, Rope)
    if a.ranks != b.ranks:
        return Miss(KIND, node, "q is normed over ranks {}, and k over {}", (a.ranks, b.ranks), matched=3)
    inputs["rotated_q"], inputs["rotated_k"] = a.rope.node, b.rope.node
    for name, strand in (("q_weight", a), ("k_weight", b)):
        if strand.norm is not None and "weight" in strand.norm.inputs:
            inputs[name] = strand.norm.inputs["weight"]
    if gate is not None:
        inputs["gate"] = gate[0]
    lookup, shares_columns = _read_tables(a, inputs, c)
    together = findings.at(qk_rope.KIND, node)
    parts = tuple(m for strand in strands for m in (strand.norm, strand.rope) if m is not None)
    claimed = tuple(sorted({*a.claimed, *b.claimed}))
    params = Qkv(
        style,
        *cuts,
        a.rope.params,
        gate[1] if gate is not None else None,
        lookup,
        a.ranks,
        shares_columns,
    )
    return Match(KIND, node, inputs, params, claimed, parts if together is None else (*parts, together))


def _read_tables(strand: _Strand, inputs: dict[str, fx.Node], c: Canonicaliser) -> tuple[Lookup | None, bool]:
    """How the tables are looked up, if they are, and whether a pair shares their columns; adds them to the inputs."""
    rope = strand.rope
    if strand.is_called:
        inputs.update({name: rope.inputs[name] for name in ("cache", "positions")})
        return called_rope.looked_up(rope), True
    assert isinstance(rope.params, Rope)
    tables = {name: rope.inputs[name] for name in ("cos", "sin")}
    found = looked_up(tables["cos"], tables["sin"], rope.params.rope_dim, c)
    inputs.update(tables, **(found.inputs if found is not None else {}))
    shares_columns = all(share_columns(table, rope.params, c) for table in tables.values())
    return found.params if found is not None else None, shares_columns
