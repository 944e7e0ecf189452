"""silu(gate) * up → npu_swiglu, with gate and up as one matmul where they are two."""

from __future__ import annotations

import torch
from torch import fx

from ...patterns import values
from ...patterns.glu import Glu
from ...patterns.match import Match
from ...patterns.movement import Sizes, layout, trace
from ...runtime.ops import CONTRACTS
from ...runtime.ops.contract import OpContract
from ..rewriter import Edit, Refused
from .packing import packed_projection, projections
from .precision import refuse_other_precision

aten = torch.ops.aten


def lower(match: Match, edit: Edit) -> OpContract:
    """One op on [gate | up], which lie side by side already or come from one packed projection."""
    p = match.params
    assert isinstance(p, Glu)
    if p.activation != "silu":
        raise Refused(f"its activation is {p.activation}; npu_swiglu computes silu")
    contract = CONTRACTS["npu::npu_swiglu"]
    refuse_other_precision(p.dtype, *p.steps)
    gate, up = (edit.current(match.inputs[name]) for name in ("gate", "up"))
    gate_up = _halves(gate, up)
    if gate_up is None:
        parts = projections((gate, up))
        if parts is None:
            raise Refused("gate and up are neither halves of one tensor nor projections of one x")
        if any(part.node.users.keys() - {*match.claimed} for part in parts):
            raise Refused("gate or up is used elsewhere too, so that its own matmul would stay")
        gate_up = packed_projection(parts, edit)
    if p.dtype.itemsize < 4 and p.activated_dtype == p.dtype:
        edit.note(f"the op rounds once; the model rounds silu(gate) to {p.dtype} before the product")
    if p.dtype != values.dtype(gate_up):
        raise Refused(f"its result is {p.dtype} for a gate of {values.dtype(gate_up)}")
    edit.replace(match.node, edit.op(contract, input=gate_up, dim=-1))
    return contract


def _halves(gate: fx.Node, up: fx.Node) -> fx.Node | None:
    """The tensor of which gate is the first half and up the second along the last axis."""
    base, gate_path = trace(gate)
    other, up_path = trace(up)
    if base is not other or values.tensor(base) is None:
        return None
    if not values.same_shape(values.shape(base)[:-1], values.shape(gate)[:-1]):
        return None
    for index in range(Sizes.COUNT):
        sizes = Sizes(index)
        first, second = layout(base, gate_path, sizes), layout(base, up_path, sizes)
        if first is None or second is None or first.strides != second.strides:
            return None
        half = first.sizes[-1]
        whole = torch.empty(first.source_sizes, device="meta").stride()
        if first.source_sizes[-1] != 2 * half or first.strides != whole:
            return None
        if (first.offset, second.offset) == (half, 0):
            raise Refused("up is the first half and gate the second; npu_swiglu wants gate first")
        if (first.offset, second.offset) != (0, half):
            return None
    return base
