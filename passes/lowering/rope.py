"""Rotary position embedding of one tensor → npu_interleave_rope, npu_rotary_mul."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import fx

from ...patterns import values
from ...patterns.match import Match
from ...patterns.movement import Role
from ...patterns.rope import Rope
from ...runtime.ops.contract import OpContract
from ...runtime.sizes import static_int
from ..edit import Edit, Refused
from ..layout import inverse, row_order
from .candidates import first_legal
from .precision import refuse_other_precision
from .tables import TokenTables, table_part

aten = torch.ops.aten


def lower(match: Match, edit: Edit) -> OpContract:
    """One op for the rotated part; the rest passes."""
    p = match.params
    assert isinstance(p, Rope)
    refuse_backward(p)
    refuse_other_precision(p.dtype, *p.steps)
    candidates: dict[str, Callable[[OpContract], None]] = {}
    if p.style == "deinterleave":
        candidates["npu::npu_interleave_rope"] = partial(_take_apart, match, p, edit)
    candidates["npu::npu_rotary_mul"] = partial(_rotate, match, p, edit)
    return first_legal(candidates, edit)


def _rotate(match: Match, p: Rope, edit: Edit, contract: OpContract) -> None:
    """Computed in the type that the model computes it in."""
    x = edit.current(match.inputs["x"])
    order = row_order(x)
    cos = _table(edit.current(match.inputs["cos"]), "cos", order, p, edit)
    sin = _table(edit.current(match.inputs["sin"]), "sin", order, p, edit)
    x = edit.permuted(x, order)
    part = edit.cast(_deinterleaved(rotated_part(x, p, edit), p, edit), p.compute_dtype)
    if p.dtype.itemsize < 4:
        edit.note(f"the op rounds once at its end; the model rounds each product to {p.compute_dtype}")
    mode = "interleave" if p.style == "interleave" else "half"
    y = edit.op(contract, input=edit.contiguous(part), r1=cos, r2=sin, rotary_mode=mode)
    y = with_rest(edit.cast(y, p.dtype), x, p, edit)
    edit.replace(match.node, edit.permuted(y, inverse(order)))


def _take_apart(match: Match, p: Rope, edit: Edit, contract: OpContract) -> None:
    """Pairs of neighbours are taken apart by the op itself, whose axes are batch, heads, tokens, dim."""
    x = edit.current(match.inputs["x"])
    rank, sizes = len(values.shape(x)), edit.sizes(x)
    tables, head_axis = token_tables(match, edit)
    if rank == 4 and head_axis == 1:
        shape = [sizes[0], sizes[1], sizes[2], p.rope_dim]
        table_shape: list[int | fx.Node] = [sizes[0], 1, sizes[2], p.rope_dim]
    elif head_axis == rank - 2:
        shape, table_shape = [-1, sizes[head_axis], 1, p.rope_dim], [-1, 1, 1, p.rope_dim]
    else:
        raise Refused(f"axis {head_axis} of {rank} counts heads; the op wants batch, heads, tokens, or tokens, heads")
    part = edit.view(edit.contiguous(rotated_part(x, p, edit)), shape)
    cos, sin = (edit.view(tables.full(name), table_shape) for name in _TABLES)
    if p.compute_dtype.itemsize < 4:
        edit.note(f"the op rounds once at its end; the model rounds each product to {p.compute_dtype}")
    turned = edit.op(contract, x=part, cos=cos, sin=sin)
    turned = edit.view(turned, [*sizes[:-1], p.rope_dim])
    edit.replace(match.node, with_rest(turned, x, p, edit))


def token_tables(match: Match, edit: Edit) -> tuple[TokenTables, int]:
    """The tables of a rotation, token by token, and the axis of x that counts heads.

    Raises:
        Refused: the tables differ along all axes.
    """
    p = match.params
    assert isinstance(p, Rope)
    x = edit.current(match.inputs["x"])
    rank = len(values.shape(x))
    head_axis = _head_axis(match, rank)
    tokens = [axis for axis in range(rank - 1) if axis != head_axis]
    roles: list[Role] = [tokens.index(axis) if axis in tokens else "head" for axis in range(rank - 1)]
    sizes = edit.sizes(x)
    leading = [sizes[axis] for axis in tokens]
    of = (*roles, "dim")
    return TokenTables(match.inputs, p, p.table_dim != p.rope_dim, None, of, of, leading, edit), head_axis


_TABLES: tuple[Literal["cos"], Literal["sin"]] = ("cos", "sin")


def _head_axis(match: Match, rank: int) -> int:
    """The axis of x that the tables are the same along: the second where it can be, as most models have it."""
    shapes = [values.shape(match.inputs[name]) for name in _TABLES]
    axes: list[int] = [1, *range(rank - 2, -1, -1)]
    for axis in axes:
        if all(axis < rank - len(shape) or static_int(shape[axis - rank]) == 1 for shape in shapes):
            return axis
    raise Refused("cos and sin differ along all axes of x; the op wants them alike for all heads")


def rotated_part(x: fx.Node, p: Rope, edit: Edit) -> fx.Node:
    """The elements of x that are rotated."""
    return x if p.rope_dim == p.head_dim else _cut(x, p.rope_start, p.rope_start + p.rope_dim, edit)


def with_rest(turned: fx.Node, x: fx.Node, p: Rope, edit: Edit) -> fx.Node:
    """The rotated elements between those of x that pass."""
    end = p.rope_start + p.rope_dim
    before = [edit.cast(_cut(x, 0, p.rope_start, edit), p.dtype)] if p.rope_start else []
    after = [edit.cast(_cut(x, end, p.head_dim, edit), p.dtype)] if end != p.head_dim else []
    return edit.call(aten.cat.default, [*before, turned, *after], -1) if before or after else turned


def _cut(x: fx.Node, start: int, end: int, edit: Edit) -> fx.Node:
    return edit.call(aten.slice.Tensor, x, -1, start, end)


def refuse_backward(p: Rope) -> None:
    """Refuses a rotation by the negative angle.

    Raises:
        Refused: it is one.
    """
    if p.backward:
        raise Refused("it turns by the negative angle (x * cos - rotate(x) * sin); the op turns by the positive one")


def _deinterleaved(x: fx.Node, p: Rope, edit: Edit) -> fx.Node:
    """x with the first elements of all pairs in front of the second ones, as the result has them."""
    if p.style != "deinterleave":
        return x
    leading = edit.sizes(x)[:-1]
    pairs = edit.view(edit.contiguous(x), [*leading, p.rope_dim // 2, 2])
    return edit.view(edit.contiguous(edit.call(aten.transpose.int, pairs, -1, -2)), [*leading, p.rope_dim])


def _table(table: fx.Node, name: Literal["cos", "sin"], order: list[int], p: Rope, edit: Edit) -> fx.Node:
    """cos or sin as wide as the rotated part, in the type of the products, its axes ordered as those of x."""

    def build() -> fx.Node:
        full = edit.cast(table_part(table, name, p, edit), p.compute_dtype)
        if p.table_dim != p.rope_dim:
            halves = [full, full]
            if p.style != "interleave":
                full = edit.call(aten.cat.default, halves, -1)
            else:
                pairs = edit.call(aten.stack.default, halves, -1)
                full = edit.view(pairs, [*edit.sizes(full)[:-1], p.rope_dim])
        missing = len(order) - len(values.shape(full))
        if missing:
            full = edit.view(full, [*[1] * missing, *edit.sizes(full)])
        return edit.contiguous(edit.permuted(full, order))

    return edit.share(("table", table, name, p.style, p.rope_dim, p.compute_dtype, tuple(order)), build)
