"""silu(gate) * up → npu_swiglu, gelu(gate) * up → npu_geglu, with gate and up as one matmul where they are two."""

from __future__ import annotations

import torch

from ...patterns import values
from ...patterns.glu import Glu
from ...patterns.match import Match
from ...runtime.ops import CONTRACTS
from ...runtime.ops.contract import OpContract
from ..edit import Edit, Refused
from .gate_up import gate_up
from .precision import refuse_other_precision
from .steps import note_written_out

aten = torch.ops.aten

# What npu_geglu calls each activation.
_APPROXIMATE = {"gelu": 0, "gelu_tanh": 1}


def lower(match: Match, edit: Edit) -> OpContract:
    """One op on [gate | up], which lie side by side already or come from one packed projection."""
    p = match.params
    assert isinstance(p, Glu)
    if p.activation != "silu" and p.activation not in _APPROXIMATE:
        raise Refused(f"its activation is {p.activation}; there are ops for silu and gelu")
    is_swiglu = p.activation == "silu"
    contract = CONTRACTS["npu::npu_swiglu" if is_swiglu else "npu::npu_geglu"]
    refuse_other_precision(p.dtype, *p.steps)
    both = gate_up(match, edit)
    if both.arrangement.endswith("in turn"):
        raise Refused(f"gate and up take turns in one tensor; {contract.name} wants them as halves")
    if is_swiglu and both.arrangement == "up first":
        raise Refused("up is the first half and gate the second; npu_swiglu wants gate first")
    if p.dtype != values.dtype(both.node):
        raise Refused(f"its result is {p.dtype} for a gate of {values.dtype(both.node)}")
    # npu_geglu rounds its activation too in float16.
    rounds_once = is_swiglu or p.dtype == torch.bfloat16
    if p.dtype.itemsize < 4 and p.activated_dtype == p.dtype and rounds_once:
        edit.note(f"the op rounds once; the model rounds {p.activation}(gate) to {p.dtype} before the product")
    note_written_out(p.spelling, aten.silu.default if is_swiglu else aten.gelu.default, edit)
    if is_swiglu:
        product = edit.op(contract, input=both.node, dim=-1)
    else:
        results = edit.op(
            contract,
            input=both.node,
            dim=-1,
            approximate=_APPROXIMATE[p.activation],
            activate_left=both.arrangement == "gate first",
        )
        product = edit.item(results, 0)
    edit.replace(match.node, product)
    return contract
