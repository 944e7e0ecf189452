"""Experts by softmax → npu_moe_gating_top_k_softmax; by sigmoid, out of groups → npu_moe_gating_top_k."""

from __future__ import annotations

import math

import torch
from torch import fx

from ...patterns.grouped_moe_gating import GroupedMoeGating
from ...patterns.match import Match
from ...patterns.moe_gating import MoeGating
from ...runtime.ops import CONTRACTS
from ...runtime.ops.contract import OpContract
from ...runtime.ops.moe_gating import SIGMOID
from ..edit import Edit, Refused
from .precision import refuse_other_precision, widened
from .rms_norm import vector


def lower(match: Match, edit: Edit) -> OpContract:
    """One op for softmax and choice. Its experts are int32, which the model's type is made of."""
    p = match.params
    assert isinstance(p, MoeGating)
    contract = CONTRACTS["npu::npu_moe_gating_top_k_softmax"]
    if p.renormalised:
        raise Refused("its weights are divided by their sum, which the gating ops do behind a sigmoid only")
    _refuse_shared_scores(match)
    _note_order(p.is_sorted, edit)
    gating = edit.op(contract, x=widened(edit.current(match.inputs["x"]), p.dtype, edit), k=p.k)
    _replace(match, gating, edit)
    return contract


def lower_grouped(match: Match, edit: Edit) -> OpContract:
    """One op for scores, groups, choice and weights."""
    p = match.params
    assert isinstance(p, GroupedMoeGating)
    contract = CONTRACTS["npu::npu_moe_gating_top_k"]
    if not p.renormalised:
        raise Refused("its weights are not divided by their sum, as npu_moe_gating_top_k does behind a sigmoid")
    groups = p.groups
    if groups.fill != -math.inf and groups.k_group < groups.num_groups:
        raise Refused(
            f"experts of other groups count {groups.fill:g}, and may be chosen where a choice is lower; the op leaves"
            " them out"
        )
    if groups.best > 2:
        raise Refused(f"a group counts by the sum of its {groups.best} highest; the op takes the highest or two")
    refuse_other_precision(p.dtype, *p.steps)
    if p.dtype.itemsize < 4:
        raise Refused(f"experts are chosen by scores in {p.dtype}; by the op's, in torch.float32, others may be")
    _refuse_shared_scores(match)
    _note_order(p.is_sorted, edit)
    bias = match.inputs.get("bias")
    gating = edit.op(
        contract,
        x=widened(edit.current(match.inputs["x"]), p.dtype, edit),
        k=p.k,
        bias=None if bias is None else widened(vector(edit.current(bias), edit), p.dtype, edit),
        k_group=groups.k_group,
        group_count=groups.num_groups,
        group_select_mode=groups.best - 1,
        renorm=0,
        norm_type=SIGMOID,
        out_flag=False,
        routed_scaling_factor=p.scale,
        eps=p.eps,
    )
    _replace(match, gating, edit)
    return contract


def _refuse_shared_scores(match: Match) -> None:
    if match.inputs["scores"].users.keys() - {*match.claimed}:
        raise Refused("the scores of all experts are used elsewhere too, so that they would be computed twice")


def _note_order(is_sorted: bool, edit: Edit) -> None:
    if not is_sorted:
        edit.note("the model leaves the order of a token's experts open; the op gives them by falling score")


def _replace(match: Match, gating: fx.Node, edit: Edit) -> None:
    edit.replace(match.node, edit.item(gating, 0))
    edit.replace(match.inputs["experts"], edit.cast(edit.item(gating, 1), torch.int64))
