"""GPT-OSS's gated unit with bounds → npu_clipped_swiglu."""

from __future__ import annotations

from ...patterns import values
from ...patterns.clipped_swiglu import ClippedSwiglu
from ...patterns.match import Match
from ...runtime.ops import CONTRACTS
from ...runtime.ops.contract import OpContract
from ..edit import Edit, Refused
from .gate_up import gate_up
from .precision import refuse_other_precision
from .steps import note_order_of_gate


def lower(match: Match, edit: Edit) -> OpContract:
    """One op on gate and up, which are cut from one tensor or come from one packed projection."""
    p = match.params
    assert isinstance(p, ClippedSwiglu)
    contract = CONTRACTS["npu::npu_clipped_swiglu"]
    refuse_other_precision(p.dtype, *p.steps)
    both = gate_up(match, edit)
    if both.arrangement.startswith("up"):
        raise Refused("up comes before gate in the tensor that both are cut from; npu_clipped_swiglu wants gate first")
    if p.dtype != values.dtype(both.node):
        raise Refused(f"its result is {p.dtype} for a gate of {values.dtype(both.node)}")
    if p.dtype.itemsize < 4:
        edit.note(f"the op rounds once; the model rounds to {p.dtype} at each step")
    else:
        note_order_of_gate(p.spelling, edit)
    product = edit.op(
        contract,
        x=both.node,
        dim=-1,
        alpha=p.alpha,
        limit=p.limit,
        bias=p.bias,
        interleaved=both.arrangement == "gate and up in turn",
    )
    edit.replace(match.node, product)
    return contract
