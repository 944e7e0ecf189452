"""x * sigmoid(1.702 x) → npu_fast_gelu."""

from __future__ import annotations

from ...patterns import values
from ...patterns.fast_gelu import FastGelu
from ...patterns.match import Match
from ...runtime.ops import CONTRACTS
from ...runtime.ops.contract import OpContract
from ..edit import Edit
from ..layout import inverse, physical_order
from .precision import refuse_other_precision, widened
from .steps import note_order_of_gate


def lower(match: Match, edit: Edit) -> OpContract:
    """One op, on the elements of x in the order in which they lie."""
    p = match.params
    assert isinstance(p, FastGelu)
    contract = CONTRACTS["npu::npu_fast_gelu"]
    refuse_other_precision(p.dtype, *p.steps)
    x = widened(edit.current(match.inputs["x"]), p.dtype, edit)
    if p.dtype.itemsize < 4:
        edit.note(f"the op rounds once; the model rounds to {p.dtype} at each step")
    else:
        note_order_of_gate(p.spelling, edit)
    value = values.tensor(x)
    assert value is not None
    order = physical_order(value)
    activated = edit.op(contract, input=edit.contiguous(edit.permuted(x, order)))
    edit.replace(match.node, edit.permuted(activated, inverse(order)))
    return contract
