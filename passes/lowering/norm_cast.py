"""Residual add, norm, and a cast of its result to float32 → npu_add_rms_norm_cast."""

from __future__ import annotations

import torch

from ...patterns import values
from ...patterns.match import Match
from ...patterns.norm_cast import NormCast
from ...runtime.ops import CONTRACTS
from ...runtime.ops.contract import OpContract
from ..edit import Edit
from .norm_quant import check_norm, replace_sum, summands
from .rms_norm import gamma


def lower(match: Match, edit: Edit) -> OpContract:
    """One op, whose results are the norm in both types and the sum."""
    p = match.params
    assert isinstance(p, NormCast)
    contract = CONTRACTS["npu::npu_add_rms_norm_cast"]
    check_norm(p.norm)
    x1, x2 = summands(match, p.norm, edit)
    dtype = p.norm.dtype
    if dtype == torch.bfloat16:
        edit.note(f"the op normalises the sum before it is rounded to {dtype}, and rounds the normed x only once")
        edit.note(f"the float32 result of the op may be that before it is rounded to {dtype}")
    elif p.norm.weight and p.norm.normed_dtype != dtype:
        edit.note(f"the op rounds the normed x to {dtype} before the weight; the model does not")
    added = edit.op(contract, x1=x1, x2=x2, gamma=gamma(match, x1, edit), epsilon=p.norm.eps)
    wide = edit.item(added, 0)
    y = match.inputs["y"]
    for user in list(y.users):
        if values.is_float_cast(user) and values.dtype(user) == torch.float32:
            edit.replace(user, wide)
    edit.replace(y, edit.item(added, 1))
    replace_sum(match, edit.item(added, 3), edit)
    return contract
