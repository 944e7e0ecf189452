"""silu(group_norm(x)) → npu_group_norm_silu."""

from __future__ import annotations

import torch

from ...patterns.group_norm_silu import GroupNormSilu
from ...patterns.match import Match
from ...runtime.ops import CONTRACTS
from ...runtime.ops.contract import OpContract
from ..edit import Edit, Refused
from .precision import refuse_other_precision, widened
from .steps import note_written_out


def lower(match: Match, edit: Edit) -> OpContract:
    """One op for the norm and the silu behind it."""
    p = match.params
    assert isinstance(p, GroupNormSilu)
    contract = CONTRACTS["npu::npu_group_norm_silu"]
    refuse_other_precision(p.dtype, *p.steps)
    if any(node.users.keys() - {*match.claimed} for node in match.claimed if node is not match.node):
        raise Refused("the norm is used elsewhere too, so that its own kernel would stay")
    x = widened(edit.current(match.inputs["x"]), p.dtype, edit)
    weight, bias = (match.inputs.get(name) for name in ("weight", "bias"))
    if p.dtype.itemsize < 4 and p.normed_dtype == p.dtype:
        edit.note(f"the op rounds once; the model rounds the norm to {p.dtype} before silu")
    note_written_out(p.spelling, torch.ops.aten.silu.default, edit)
    results = edit.op(
        contract,
        input=x,
        weight=None if weight is None else edit.current(weight),
        bias=None if bias is None else edit.current(bias),
        group=p.group,
        eps=p.eps,
    )
    edit.replace(match.node, edit.item(results, 0))
    return contract
