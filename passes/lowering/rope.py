"""Rotary position embedding of one tensor → npu_rotary_mul."""

from __future__ import annotations

import torch
from torch import fx

from ...patterns import values
from ...patterns.match import Match
from ...patterns.rope import Rope
from ...runtime.ops import CONTRACTS
from ...runtime.ops.contract import OpContract
from ..rewriter import Edit, inverse, row_order

aten = torch.ops.aten


def lower(match: Match, edit: Edit) -> OpContract:
    """One op for the rotated part, computed in the type that the model computes it in; the rest passes."""
    p = match.params
    assert isinstance(p, Rope)
    contract = CONTRACTS["npu::npu_rotary_mul"]
    x = edit.current(match.inputs["x"])
    order = row_order(x)
    cos, sin = (_table(edit.current(match.inputs[name]), order, p, edit) for name in ("cos", "sin"))
    x = edit.permuted(x, order)
    rotated = x
    if p.rope_dim != p.head_dim:
        rotated = edit.call(aten.slice.Tensor, x, -1, 0, p.rope_dim)
    rotated = edit.contiguous(edit.cast(rotated, p.compute_dtype))
    if p.dtype.itemsize < 4:
        edit.note(f"the op rounds once at its end; the model rounds each product to {p.compute_dtype}")
    y = edit.op(contract, input=rotated, r1=cos, r2=sin, rotary_mode=p.style)
    y = edit.cast(y, p.dtype)
    if p.rope_dim != p.head_dim:
        passed = edit.cast(edit.call(aten.slice.Tensor, x, -1, p.rope_dim, p.head_dim), p.dtype)
        y = edit.call(aten.cat.default, [y, passed], -1)
    edit.replace(match.node, edit.permuted(y, inverse(order)))
    return contract


def _table(table: fx.Node, order: list[int], p: Rope, edit: Edit) -> fx.Node:
    """cos or sin as wide as the rotated part, in the type of the products, its axes ordered as those of x."""

    def build() -> fx.Node:
        full = edit.cast(table, p.compute_dtype)
        if p.table_dim != p.rope_dim:
            halves = [full, full]
            if p.style == "half":
                full = edit.call(aten.cat.default, halves, -1)
            else:
                pairs = edit.call(aten.stack.default, halves, -1)
                full = edit.view(pairs, [*edit.sizes(full)[:-1], p.rope_dim])
        missing = len(order) - len(values.shape(full))
        if missing:
            full = edit.view(full, [*[1] * missing, *edit.sizes(full)])
        return edit.contiguous(edit.permuted(full, order))

    return edit.share(("table", table, p.style, p.rope_dim, p.compute_dtype, tuple(order)), build)
