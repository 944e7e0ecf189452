"""Which experts a token goes to, and with what weight.

    weight = top_k(softmax(x))                                                  npu_moe_gating_top_k_softmax
    score = sigmoid(x) or softmax(x);  experts = top_k(score + bias) of the best groups
    weight = score[experts], for a sigmoid divided by their sum; scaled         npu_moe_gating_top_k

Of equal scores the lower index comes first, in both.
"""

import math
from collections.abc import Iterator

import torch

from ..sizes import known_same_shape, known_true, static_int
from ..target import Target
from .contract import OpContract
from .layout import row_major
from .reasons import dtype_among, dtype_name, emptiness, first_reason, raise_first, rank_between, shape_text

__all__ = ["NPU_MOE_GATING_TOP_K", "NPU_MOE_GATING_TOP_K_SOFTMAX", "SIGMOID", "SOFTMAX"]

# Values of norm_type.
SOFTMAX, SIGMOID = 0, 1

_MAX_K = 1024
_MAX_EXPERTS = 2048
_EXPERT_BLOCK = 32


def _top(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k highest along the last dim, of equal ones the lower index first (`topk` promises no order)."""
    return torch.argsort(scores, dim=-1, descending=True, stable=True)[..., :k]


# npu_moe_gating_top_k_softmax


def _softmax_invalid(x: torch.Tensor, finished: torch.Tensor | None, k: int) -> Iterator[str]:
    yield from dtype_among("x", x)
    yield from rank_between("x", x, 2, 3)
    if finished is not None:
        yield "finished is given, and what it gives for rows that are finished is not documented"
    if not 1 <= k <= _MAX_K:
        yield f"k is {k} (the kernel takes 1 to {_MAX_K})"
    if not known_true(x.shape[-1] >= k):
        yield f"the last dim of x {shape_text(x.shape)} is not known to hold k = {k} experts"
    yield from emptiness("x", x)


@first_reason
def _refuse_softmax(target: Target, x: torch.Tensor, finished: torch.Tensor | None, k: int) -> Iterator[str]:
    yield from _softmax_invalid(x, finished, k)


def moe_gating_top_k_softmax_reference(
    x: torch.Tensor, finished: torch.Tensor | None = None, k: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `npu::npu_moe_gating_top_k_softmax` computes: a float32 softmax, its k highest, rounded once.

    Args:
        x: [T, E] or [B, S, E], float16, bfloat16 or float32; any strides, not empty.
        finished: has to be None.
        k: how many experts, at most E and 1024.

    Returns:
        [..., k] each: the scores in x's dtype, from high to low, not divided by their sum; their experts in int32; and
        rows in int32, numbered down the columns of [T, k].

    Raises:
        ValueError: dtype, shape or k don't fit, or `finished` is given.

    Source: torch_npu 2.13.0 (shapes, dtypes), op-plugin 517f2e7d (order, rows); float32 inside is inferred.
    """
    raise_first("npu::npu_moe_gating_top_k_softmax", _softmax_invalid(x, finished, k))
    scores = torch.softmax(x.float(), -1)
    experts = _top(scores, k)
    rows = math.prod(x.shape[:-1])
    row_idx = torch.arange(rows * k, dtype=torch.int32, device=x.device).reshape(k, rows).t().reshape(experts.shape)
    return row_major(scores.gather(-1, experts).to(x.dtype)), row_major(experts.int()), row_major(row_idx)


def moe_gating_top_k_softmax_fake(
    x: torch.Tensor, finished: torch.Tensor | None = None, k: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shapes of `moe_gating_top_k_softmax_reference`."""
    shape = (*x.shape[:-1], k)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int32), x.new_empty(shape, dtype=torch.int32)


NPU_MOE_GATING_TOP_K_SOFTMAX = OpContract(
    name="npu::npu_moe_gating_top_k_softmax",
    schema="npu_moe_gating_top_k_softmax(Tensor x, Tensor? finished=None, int k=1) -> (Tensor, Tensor, Tensor)",
    reference=moe_gating_top_k_softmax_reference,
    fake=moe_gating_top_k_softmax_fake,
    refuse=_refuse_softmax,
    socs=frozenset({"ascend910b", "ascend910_93"}),
    source="torch_npu 2.13.0 (schema, dtypes, shapes), op-plugin 517f2e7d (order); ascend910_93 as used in practice",
)


# npu_moe_gating_top_k


def _invalid(
    x: torch.Tensor,
    k: int,
    bias: torch.Tensor | None,
    hashed: bool,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
) -> Iterator[str]:
    yield from dtype_among("x", x)
    yield from rank_between("x", x, 2, 2)
    if hashed:
        yield "input_ids or tid2eid is given, which look experts up by token"
    for name, value, allowed in (
        ("group_select_mode", group_select_mode, (0, 1)),
        ("renorm", renorm, (0,)),
        ("norm_type", norm_type, (SOFTMAX, SIGMOID)),
    ):
        if value not in allowed:
            yield f"{name} is {value} (the kernel takes {' or '.join(map(str, allowed))})"
    if bias is not None:
        if not known_same_shape(bias.shape, x.shape[1:]):
            yield f"bias {shape_text(bias.shape)} does not cover the experts of x {shape_text(x.shape)}"
        if bias.dtype != x.dtype:
            yield f"bias is {dtype_name(bias.dtype)} but x is {dtype_name(x.dtype)} (they must be equal)"
    experts = static_int(x.shape[1])
    if experts is None or experts > _MAX_EXPERTS:
        yield f"x {shape_text(x.shape)} is not known to have at most {_MAX_EXPERTS} experts"
        return
    if group_count < 1 or experts % group_count or experts // group_count <= 2:
        yield f"group_count is {group_count} for {experts} experts (the kernel wants equal groups of more than 2)"
        return
    group_size = experts // group_count
    padded = group_count * math.ceil(group_size / _EXPERT_BLOCK) * _EXPERT_BLOCK
    if padded > _MAX_EXPERTS:
        yield (
            f"{group_count} groups of {group_size} experts, each padded to a multiple of {_EXPERT_BLOCK}, take {padded}"
            f" places (the kernel has {_MAX_EXPERTS})"
        )
    if not 1 <= k_group <= group_count:
        yield f"k_group is {k_group} for {group_count} groups"
    if not 1 <= k <= group_size * k_group:
        yield f"k is {k} for {k_group} groups of {group_size} experts"
    yield from emptiness("x", x)


@first_reason
def _refuse(
    target: Target,
    x: torch.Tensor,
    k: int,
    bias: torch.Tensor | None,
    input_ids: torch.Tensor | None,
    tid2eid: torch.Tensor | None,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    out_flag: bool,
    routed_scaling_factor: float,
    eps: float,
) -> Iterator[str]:
    hashed = input_ids is not None or tid2eid is not None
    yield from _invalid(x, k, bias, hashed, k_group, group_count, group_select_mode, renorm, norm_type)


def moe_gating_top_k_reference(
    x: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
    tid2eid: torch.Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `npu::npu_moe_gating_top_k` computes: float32 inside, weights rounded once.

    Args:
        x: [T, E], float16, bfloat16 or float32; any strides, not empty. E at most 2048.
        k: how many experts, at most E / group_count * k_group.
        bias: [E], of x's dtype; added to the scores that experts and groups are chosen by, not to the weights.
        input_ids: has to be None.
        tid2eid: likewise.
        k_group: how many groups are chosen from.
        group_count: into how many groups the experts are cut, of more than 2 each.
        group_select_mode: a group counts by its highest score (0) or by the sum of its two highest (1).
        renorm: has to be 0.
        norm_type: softmax (0) or sigmoid (1). The weights of the latter are divided by their sum.
        out_flag: whether the scores of all experts are given.
        routed_scaling_factor: multiplies the weights.
        eps: added to the sum.

    Returns:
        Weights [T, k] in x's dtype and experts [T, k] in int32, by falling score; scores [T, E] in float32, which hold
        nothing of meaning unless `out_flag`.

    Raises:
        ValueError: dtypes, shapes or numbers don't fit.

    Source: torch_npu 2.13.0 (shapes, limits), op-plugin 517f2e7d (formula, order).
    """
    hashed = input_ids is not None or tid2eid is not None
    raise_first(
        "npu::npu_moe_gating_top_k",
        _invalid(x, k, bias, hashed, k_group, group_count, group_select_mode, renorm, norm_type),
    )
    scores = torch.sigmoid(x.float()) if norm_type == SIGMOID else torch.softmax(x.float(), -1)
    grouped = (scores if bias is None else scores + bias.float()).reshape(len(x), group_count, -1)
    group_scores = grouped.topk(2, -1).values.sum(-1) if group_select_mode else grouped.amax(-1)
    chosen = torch.zeros_like(group_scores, dtype=torch.bool).scatter(-1, _top(group_scores, k_group), True)
    experts = _top(grouped.masked_fill(~chosen.unsqueeze(-1), -math.inf).flatten(1), k)
    weights = scores.gather(-1, experts)
    if norm_type == SIGMOID:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    weights = (weights * routed_scaling_factor).to(x.dtype)
    return row_major(weights), row_major(experts.int()), scores if out_flag else torch.full_like(scores, math.nan)


def moe_gating_top_k_fake(
    x: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
    tid2eid: torch.Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shapes of `moe_gating_top_k_reference`."""
    chosen = (x.shape[0], k)
    scores = x.new_empty(x.shape, dtype=torch.float32)
    return x.new_empty(chosen), x.new_empty(chosen, dtype=torch.int32), scores


NPU_MOE_GATING_TOP_K = OpContract(
    name="npu::npu_moe_gating_top_k",
    schema=(
        "npu_moe_gating_top_k(Tensor x, int k, *, Tensor? bias=None, Tensor? input_ids=None, Tensor? tid2eid=None,"
        " int k_group=1, int group_count=1, int group_select_mode=0, int renorm=0, int norm_type=0,"
        " bool out_flag=False, float routed_scaling_factor=1.0, float eps=1e-20) -> (Tensor, Tensor, Tensor)"
    ),
    reference=moe_gating_top_k_reference,
    fake=moe_gating_top_k_fake,
    refuse=_refuse,
    socs=frozenset({"ascend910b", "ascend910_93"}),
    source="torch_npu 2.13.0 (schema, dtypes, shapes), op-plugin 517f2e7d (formula)",
)
