"""Projection, split, norm and rotation of q and k → the split_qkv ops of sgl_kernel_npu."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from ...patterns import values
from ...patterns.heads import Heads
from ...patterns.match import Match
from ...patterns.movement import Role
from ...patterns.qkv import Qkv
from ...patterns.rms_norm import RmsNorm
from ...runtime.ops.contract import OpContract
from ..edit import Edit, Refused
from ..effects import communicates
from .candidates import first_legal
from .packing import packed_projection, projections
from .precision import refuse_other_precision
from .rms_norm import note_statistics, vector
from .rope import refuse_backward
from .tables import TokenTables, with_tables

aten = torch.ops.aten


def lower(match: Match, edit: Edit) -> OpContract:
    """One op from the rows of the projection to rotated q and k, v, and the gate where there is one."""
    p = match.params
    assert isinstance(p, Qkv)
    _refuse_other_rotations(p)
    norm = _norm(p)
    _check_columns(match, p)
    source = edit.current(match.inputs["projection" if p.style == "fused" else "q"])
    if p.rope.dtype != values.dtype(source):
        raise Refused(f"q and k are {p.rope.dtype} after the rotation, the projection is {values.dtype(source)}")
    roundings = [values.dtype(node) for node in match.claimed if values.is_rounding(node)]
    refuse_other_precision(p.rope.dtype, *roundings, *p.rope.steps, *(norm.steps if norm is not None else ()))
    projection = _projection(match, p, edit)
    width = values.last_dim(projection)
    assert width is not None
    leading = edit.sizes(source)[:-1]
    rows = edit.view(edit.contiguous(projection), [-1, width])
    roles = (p.q.layout.roles, p.k.layout.roles)
    inputs = match.inputs if "cos" in match.inputs else with_tables(match.inputs, edit)
    tables = TokenTables(inputs, p.rope, p.shares_columns, p.lookup, *roles, leading, edit)
    prologue = Prologue(match, p, norm, rows, tables, edit)
    suited = {name: arguments for name, (suits, arguments) in CANDIDATES.items() if suits(p)}
    return first_legal({name: partial(prologue.become, arguments) for name, arguments in suited.items()}, edit)


@dataclass(frozen=True, slots=True)
class Prologue:
    """A site whose rows are ready: what the ops that may stand for it differ in is their arguments.

    Args:
        norm: the norm of q and k, None without one.
        rows: the projection as [tokens, width].
        tables: cos and sin.
    """

    match: Match
    params: Qkv
    norm: RmsNorm | None
    rows: fx.Node
    tables: TokenTables
    edit: Edit

    def become(self, arguments: Callable[[Prologue], dict[str, Any]], contract: OpContract) -> None:
        """Puts an op in place of the site.

        Raises:
            Refused: its contract doesn't allow it.
        """
        match, p, edit, leading = self.match, self.params, self.edit, self.tables.leading
        fused = edit.op(contract, **arguments(self))
        q, k, v = (edit.item(fused, index) for index in range(3))
        edit.replace(match.inputs["rotated_q"], _in_layout(q, p.q.layout, leading, edit), any_layout=True)
        edit.replace(match.inputs["rotated_k"], _in_layout(k, p.k.layout, leading, edit), any_layout=True)
        if p.style == "separate":
            edit.replace(match.inputs["v"], edit.view(v, [*leading, p.k.layout.width]))
        if p.gate is not None:
            edit.replace(match.inputs["gate"], _in_layout(edit.item(fused, 3), p.gate, leading, edit))

    @property
    def sizes(self) -> dict[str, Any]:
        q, k = self.params.q.layout, self.params.k.layout
        return {"q_hidden_size": q.width, "kv_hidden_size": k.width, "head_dim": q.head_dim}

    def weights(self, offset: float = 0.0) -> dict[str, Any]:
        """The weights of the norms of q and k for an op that adds `offset` to them.

        Raises:
            Refused: the model adds something else, and what is left would be rounded.
        """
        norm = self.norm
        assert norm is not None
        note_statistics(norm, self.edit)
        if offset and norm.weight and norm.offset != offset:
            raise Refused(f"{norm.offset:g} is added to the weights of its norms; the op adds {offset:g}")
        return {f"{name}_weight": self._weight(name, norm.offset - offset) for name in ("q", "k")}

    def _weight(self, name: str, added: float) -> fx.Node:
        """The weight of q's or k's norm with something added; that of a norm without one has no effect."""
        edit = self.edit
        node = self.match.inputs.get(f"{name}_weight")
        if node is None:
            head = self.params.q if name == "q" else self.params.k
            assert head.norm is not None
            return edit.filled(1.0 + added, head.norm.hidden_size, torch.float32, like=self.match.node)
        weight = vector(edit.current(node), edit)
        if not added:
            return weight
        return edit.share(
            ("offset weight", weight, added),
            lambda: edit.call(aten.add.Tensor, edit.cast(weight, torch.float32), added),
        )

    def note_roundings(self, *, rounds_norm: bool) -> None:
        """Notes where an op rounds otherwise that computes in float32 and rounds its results, and normed values or not.

        The model may round more often, and normed values where the op does not.
        """
        p, norm, dtype = self.params, self.norm, self.params.rope.dtype
        if dtype.itemsize >= 4:
            return
        if norm is not None and rounds_norm != (norm.dtype.itemsize < 4):
            who, other = ("the op", "the model") if rounds_norm else ("the model", "the op")
            self.edit.note(f"{who} rounds normed values to {dtype} before it rotates them, {other} does not")
        normed_twice = norm is not None and norm.weight and norm.normed_dtype.itemsize < 4
        if normed_twice or p.rope.compute_dtype.itemsize < 4:
            self.edit.note("the op computes in float32 and rounds once, at its end; the model rounds at each step")


# The ops -----------------------------------------------------------------------------------------------------------


def _whole(p: Qkv) -> bool:
    """Whether q and k are normed over all their heads together, on one rank or several."""
    if p.gate is not None:
        return False
    if p.ranks is not None:
        return True
    heads = (p.q, p.k)
    norms = [head.norm.hidden_size if head.norm is not None else None for head in heads]
    whole = [head.layout.width for head in heads]
    return norms == whole and norms != [head.layout.head_dim for head in heads]


def _split_qkv(s: Prologue) -> dict[str, Any]:
    """Halves or neighbours; a norm per head or none; float32 up to the end."""
    rope = s.params.rope
    arguments = {"input": s.rows, "sin": s.tables.full("sin"), "cos": s.tables.full("cos"), **s.sizes}
    if s.norm is not None:
        arguments |= {"eps": s.norm.eps, **s.weights()}
    s.note_roundings(rounds_norm=False)
    return {**arguments, "is_neox_style": rope.style == "half"}


def _looked_up(s: Prologue) -> dict[str, Any]:
    """Likewise, halves only, with the tables looked up inside; normed values rounded or not, as the model does."""
    _refuse_pairs(s.params)
    lookup, cache = s.params.lookup, s.edit.current(s.match.inputs["cache"])
    assert lookup is not None
    rounds_norm = s.norm is None or s.norm.dtype.itemsize < 4
    arguments = {"input_tensor": s.rows, "positions": s.tables.positions(), "cos_sin_cache": cache, **s.sizes}
    if s.norm is not None:
        arguments |= {"eps": s.norm.eps, **s.weights()}
    if lookup.dtype != values.dtype(cache):
        s.edit.note(f"the model rounds cos and sin to {lookup.dtype}; the op takes them as they are in the cache")
    s.note_roundings(rounds_norm=rounds_norm)
    return {**arguments, "rope_dim": s.params.rope.rope_dim, "cast_norm_to_bf16": rounds_norm}


def _gated(s: Prologue) -> dict[str, Any]:
    """Heads of q with a gate behind each, a norm per head whose weight 1 is added to, halves."""
    _refuse_pairs(s.params)
    if s.norm is None:
        raise Refused("q and k are not normed; the op for heads with gates norms them")
    arguments = {"input": s.rows, "sin": s.tables.full("sin"), "cos": s.tables.full("cos"), **s.sizes}
    arguments |= {"rope_dim": s.params.rope.rope_dim, "eps": s.norm.eps, **s.weights(offset=1.0)}
    s.note_roundings(rounds_norm=False)
    return arguments


def _normed_whole(s: Prologue) -> dict[str, Any]:
    """A norm over all heads together, rounded; halves, both elements of a pair by one column."""
    _refuse_pairs(s.params)
    assert s.norm is not None
    s.tables.refuse_own_columns()
    arguments = {"input": s.rows, "cos": s.tables.full("cos"), "sin": s.tables.full("sin"), **s.sizes}
    arguments |= {"eps": s.norm.eps, **s.weights(), "rotary_dim": s.params.rope.rope_dim, "tp_world": 1}
    if s.params.ranks is not None:
        arguments["tp_group"], arguments["tp_world"] = s.params.ranks
        s.edit.absorb(node for node in s.match.claimed if communicates(node))
    s.note_roundings(rounds_norm=True)
    return arguments


Suits = Callable[[Qkv], bool]
Arguments = Callable[[Prologue], dict[str, Any]]

# In order of preference: the sites that an op is for, and its arguments.
CANDIDATES: Mapping[str, tuple[Suits, Arguments]] = {
    "sgl_kernel_npu::split_qkvgate_gemma_rmsnorm_rope": (lambda p: p.gate is not None, _gated),
    "sgl_kernel_npu::split_qkv_tp_rmsnorm_rope": (_whole, _normed_whole),
    "sgl_kernel_npu::split_qkv_rmsnorm_rope_pos_cache_half_npu": (
        lambda p: p.lookup is not None and p.gate is None and not _whole(p),
        _looked_up,
    ),
    "sgl_kernel_npu::split_qkv_rmsnorm_rope": (lambda p: p.gate is None and not _whole(p), _split_qkv),
}


# What no op does ---------------------------------------------------------------------------------------------------


def _refuse_other_rotations(p: Qkv) -> None:
    refuse_backward(p.rope)
    if p.rope.style == "deinterleave":
        raise Refused("it takes pairs of neighbours apart (de-interleaves); the op leaves every element in its place")
    if p.rope.rope_start:
        raise Refused(f"its first {p.rope.rope_start} elements pass and the next are rotated; the op rotates the first")


def _refuse_pairs(p: Qkv) -> None:
    if p.rope.style != "half":
        raise Refused("it rotates pairs of neighbours; the op rotates halves")


def _norm(p: Qkv) -> RmsNorm | None:
    """The norm of q and k, where there is an op for it."""
    q, k = p.q.norm, p.k.norm
    if q is None and k is None:
        return None
    if q is None or k is None:
        raise Refused(f"only {'k' if q is None else 'q'} is normed; the op norms q and k or neither")
    for name, head, norm in (("q", p.q, q), ("k", p.k, k)):
        if norm.groups != 1 or norm.is_composite:
            raise Refused("its norm has a bias, a gate, groups or a scale before it")
        if p.ranks is not None and p.gate is not None:
            raise Refused("it has gates, and its norm is over several ranks; no op has both")
        if p.ranks is not None and norm.hidden_size != head.layout.width:
            raise Refused(f"the norm of {name} is over {norm.hidden_size} of its {head.layout.width} columns on a rank")
        if norm.hidden_size != head.layout.head_dim and not _whole(p):
            raise Refused(
                f"the norm of {name} is over {norm.hidden_size} elements; ops norm per head of {head.layout.head_dim}, "
                f"or both q and k over all heads together"
            )
    if q.eps != k.eps:
        raise Refused(f"the norms of q and k have different eps: {q.eps:g} and {k.eps:g}")
    if q.offset != k.offset or q.weight != k.weight:
        raise Refused("the norms of q and k are of different kinds")
    return q


def _check_columns(match: Match, p: Qkv) -> None:
    """Refuses where q, k and v are not the op's columns: [q | k | v], or with a gate behind each head of q."""
    if p.gate is not None:
        return
    for name, head in (("q", p.q), ("k", p.k)):
        if not head.layout.side_by_side:
            starts = ", ".join(map(str, head.layout.starts[:4]))
            raise Refused(
                f"heads of {name} start at columns {starts}, …, with others between; the op wants rows [q | k | v], "
                "and a weight whose rows were put in that order could not stay the model's parameter"
            )
    if p.style == "fused":
        width = values.last_dim(match.inputs["projection"])
        found = (p.q.layout.starts[0], p.k.layout.starts[0], width)
        wanted = (0, p.q.layout.width, p.q.layout.width + 2 * p.k.layout.width)
        if found != wanted:
            raise Refused(
                f"q and k start at columns {found[0]} and {found[1]} of {width}; the op wants rows [q | k | v], with q "
                f"and k at {wanted[0]} and {wanted[1]} of {wanted[2]}"
            )
        return
    for name, head in (("q", p.q), ("k", p.k)):
        width = values.last_dim(match.inputs[name])
        if (head.layout.starts[0], head.layout.width) != (0, width):
            raise Refused(f"{name} is {head.layout.width} of the {width} columns of its projection")


# Rows and layouts --------------------------------------------------------------------------------------------------


def _projection(match: Match, p: Qkv, edit: Edit) -> fx.Node:
    """q, k and v as columns of one tensor."""
    if p.style == "fused":
        return edit.current(match.inputs["projection"])
    parts = projections([match.inputs[name] for name in ("q", "k", "v")])
    if parts is None:
        raise Refused("its projections have been taken by another fusion")
    return packed_projection(parts, edit)


def _in_layout(flat: fx.Node, layout: Heads, leading: list[int | fx.Node], edit: Edit) -> fx.Node:
    """Rows [tokens, heads * head_dim] in the layout that the model has them in."""
    # An axis of size one is taken for the next such axis of the projection, so that its stride is the usual one too.
    units = iter([i for i, size in enumerate(leading) if size == 1])
    roles: list[Role] = [next(units, "unit") if role == "unit" else role for role in layout.roles]
    axes: list[Role] = sorted((role for role in roles if role not in ("head", "dim", "unit")), key=str)
    sizes: list[int | fx.Node] = [-1 if role == "tokens" else leading[int(role)] for role in axes]
    if "head" in roles:
        axes.append("head")
        sizes.append(layout.num_heads)
    node = edit.view(flat, [*sizes, layout.head_dim if "head" in roles else layout.width])
    axes.append("dim")
    node = edit.permuted(node, [axes.index(role) for role in roles if role != "unit"])
    for axis, role in enumerate(roles):
        if role == "unit":
            node = edit.call(aten.unsqueeze.default, node, axis)
    return node
