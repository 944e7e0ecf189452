"""Rotary position embedding of one tensor → npu_rotary_mul."""

from __future__ import annotations

from typing import Literal

import torch
from torch import fx

from ...patterns import values
from ...patterns.match import Match
from ...patterns.rope import Rope
from ...runtime.ops import CONTRACTS
from ...runtime.ops.contract import OpContract
from ..rewriter import Edit, Refused, inverse, row_order
from .precision import refuse_other_precision

aten = torch.ops.aten


def lower(match: Match, edit: Edit) -> OpContract:
    """One op for the rotated part, computed in the type that the model computes it in; the rest passes."""
    p = match.params
    assert isinstance(p, Rope)
    contract = CONTRACTS["npu::npu_rotary_mul"]
    refuse_backward(p)
    refuse_other_precision(p.dtype, *p.steps)
    x = edit.current(match.inputs["x"])
    order = row_order(x)
    cos = _table(edit.current(match.inputs["cos"]), "cos", order, p, edit)
    sin = _table(edit.current(match.inputs["sin"]), "sin", order, p, edit)
    x = edit.permuted(x, order)
    rotated = x
    if p.rope_dim != p.head_dim:
        rotated = edit.call(aten.slice.Tensor, x, -1, p.rope_start, p.rope_start + p.rope_dim)
    rotated = edit.contiguous(edit.cast(_deinterleaved(rotated, p, edit), p.compute_dtype))
    if p.dtype.itemsize < 4:
        edit.note(f"the op rounds once at its end; the model rounds each product to {p.compute_dtype}")
    mode = "interleave" if p.style == "interleave" else "half"
    y = edit.op(contract, input=rotated, r1=cos, r2=sin, rotary_mode=mode)
    y = edit.cast(y, p.dtype)
    if p.rope_dim != p.head_dim:
        parts = [
            edit.cast(edit.call(aten.slice.Tensor, x, -1, start, end), p.dtype)
            for start, end in ((0, p.rope_start), (p.rope_start + p.rope_dim, p.head_dim))
            if start != end
        ]
        y = edit.call(aten.cat.default, [*parts[: p.rope_start > 0], y, *parts[p.rope_start > 0 :]], -1)
    edit.replace(match.node, edit.permuted(y, inverse(order)))
    return contract


def refuse_backward(p: Rope) -> None:
    """Refuses a rotation by the negative angle.

    Raises:
        Refused: it is one.
    """
    if p.backward:
        raise Refused("it turns by the negative angle (x * cos - rotate(x) * sin); the op turns by the positive one")


def table_part(table: fx.Node, name: Literal["cos", "sin"], p: Rope, edit: Edit) -> fx.Node:
    """A table as a real tensor: where it is complex, cos is its real part and sin its imaginary one."""
    if not p.is_complex:
        return table
    parts = edit.call(aten.view_as_real.default, table)
    return edit.call(aten.select.int, parts, -1, 0 if name == "cos" else 1)


def _deinterleaved(x: fx.Node, p: Rope, edit: Edit) -> fx.Node:
    """x with the first elements of all pairs in front of the second ones, as the result has them."""
    if p.style != "deinterleave":
        return x
    leading = edit.sizes(x)[:-1]
    pairs = edit.view(edit.contiguous(x), [*leading, p.rope_dim // 2, 2])
    return edit.view(edit.contiguous(edit.call(aten.transpose.int, pairs, -1, -2)), [*leading, p.rope_dim])


def _table(
    table: fx.Node, name: Literal["cos", "sin"], order: list[int], p: Rope, edit: Edit
) -> fx.Node:
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
