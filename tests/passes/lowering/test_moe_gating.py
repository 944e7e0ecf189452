"""The gating of experts becomes one op, or is refused with the reason."""

import math

import pytest
import torch
from torch.nn import functional as F  # noqa: N812  # its usual name

from helpers import compiled
from npu_fuse import Target

Tensor = torch.Tensor
SOFTMAX, TOP_K = {"npu::npu_moe_gating_top_k_softmax": 1}, {"npu::npu_moe_gating_top_k": 1}


def distinct(tokens: int = 6, num_experts: int = 16) -> Tensor:
    """Logits that are not equal in any type: of equal ones torch may choose either."""
    return torch.stack([torch.randperm(num_experts) for _ in range(tokens)]) / 4 - 2


def check(found, gating, *inputs: Tensor) -> None:
    """Weights and experts are eager's, in eager's types; the experts of a token in any order."""
    (weights, experts), (wanted, wanted_experts) = found.output, gating(*inputs)
    assert experts.dtype == torch.int64
    order, wanted_order = experts.argsort(-1), wanted_experts.argsort(-1)
    assert torch.equal(experts.gather(-1, order), wanted_experts.gather(-1, wanted_order))
    torch.testing.assert_close(weights.gather(-1, order), wanted.gather(-1, wanted_order))


# By softmax


def by_softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    return torch.topk(F.softmax(logits, dim=-1, dtype=torch.float), 4, dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [None, True])
def test_softmax_and_choice_are_one_op(dtype: torch.dtype, dynamic: bool | None) -> None:
    logits = distinct().to(dtype)
    torch._dynamo.mark_static(logits, 1)
    found = compiled(by_softmax, logits, dynamic=dynamic)
    assert found.report.ops == SOFTMAX
    assert not found.report.sites[0].roundings
    check(found, by_softmax, logits)


def test_weights_that_the_model_divides_by_their_sum_are_refused() -> None:
    def mixtral(logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = by_softmax(logits)
        weights /= weights.sum(dim=-1, keepdim=True)
        return weights, experts

    logits = torch.randn(6, 16)
    found = compiled(mixtral, logits)
    assert not found.report.ops
    (site,) = found.report.sites
    assert "its weights are divided by their sum, which the gating ops do behind a sigmoid only" in site.reason
    for result, wanted in zip(found.output, mixtral(logits), strict=True):
        assert torch.equal(result, wanted)


def test_an_open_order_is_noted() -> None:
    def gating(logits: Tensor) -> tuple[Tensor, Tensor]:
        return torch.topk(logits.softmax(-1), 4, sorted=False)

    logits = torch.randn(6, 16)
    found = compiled(gating, logits)
    assert found.report.ops == SOFTMAX
    assert "leaves the order of a token's experts open" in found.report.sites[0].roundings[0]
    check(found, gating, logits)
    assert not compiled(gating, logits, numerics="exact").report.ops


def scores_elsewhere(logits: Tensor) -> tuple[Tensor, ...]:
    scores = logits.softmax(-1)
    return (*scores.topk(4), scores.mean(0))


@pytest.mark.parametrize(
    ("gating", "logits", "reason"),
    [
        (scores_elsewhere, torch.randn(6, 16), "the scores of all experts are used elsewhere too"),
        (lambda x: x.softmax(-1).topk(4), torch.randn(16), "x has 1 dims"),
        (lambda x: x.softmax(-1).topk(1025), torch.randn(2, 2000), "k is 1025"),
        (lambda x: x.softmax(-1).topk(4), torch.randn(6, 16).double(), "x is float64"),
    ],
)
def test_what_the_op_does_not_do_is_refused(gating, logits: Tensor, reason: str) -> None:
    found = compiled(gating, logits)
    assert not found.report.ops
    assert reason in found.report.sites[0].reason
    for result, wanted in zip(found.output, gating(logits), strict=True):
        assert torch.equal(result, wanted)


# By sigmoid, out of groups


def by_sigmoid(
    x: Tensor,
    bias: Tensor,
    num_groups: int = 4,
    k_group: int = 2,
    k: int = 3,
    best: int = 2,
    fill: float = -math.inf,
    is_sorted: bool = True,
    renormalise: bool = True,
) -> tuple[Tensor, Tensor]:
    num_experts = x.shape[-1]
    scores = x.sigmoid()
    choice = scores + bias
    group_scores = choice.view(-1, num_groups, num_experts // num_groups).topk(best, dim=-1)[0].sum(dim=-1)
    groups = torch.topk(group_scores, k=k_group, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(group_scores)
    mask.scatter_(1, groups, 1)
    mask = mask.unsqueeze(-1).expand(-1, num_groups, num_experts // num_groups).reshape(-1, num_experts)
    choice = choice.masked_fill(~mask.bool(), fill)
    experts = torch.topk(choice, k=k, dim=-1, sorted=is_sorted)[1]
    weights = scores.gather(1, experts)
    if renormalise:
        weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return weights * 2.5, experts


def by_two_highest(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return by_sigmoid(x, bias)


def by_highest(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return by_sigmoid(x, bias, best=1)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("gating", [by_two_highest, by_highest])
def test_scores_groups_choice_and_weights_are_one_op(gating, dynamic: bool | None) -> None:
    x, bias = torch.randn(6, 16), torch.randn(16)
    torch._dynamo.mark_static(x, 1)
    torch._dynamo.mark_static(bias)
    found = compiled(gating, x, bias, dynamic=dynamic)
    assert found.report.ops == TOP_K
    assert found.report.launches_after == 2
    assert not found.report.sites[0].roundings
    check(found, gating, x, bias)


def test_logits_and_bias_in_a_narrower_type_are_widened() -> None:
    def gating(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return by_sigmoid(x.float(), bias)

    x, bias = distinct().bfloat16(), torch.randn(16).bfloat16()
    found = compiled(gating, x, bias)
    assert found.report.ops == TOP_K
    check(found, gating, x, bias)


def test_without_groups_or_bias() -> None:
    def gating(x: Tensor) -> tuple[Tensor, Tensor]:
        scores = x.sigmoid()
        experts = scores.topk(3, dim=-1).indices
        weights = scores.gather(1, experts)
        return weights / weights.sum(-1, keepdim=True), experts

    x = torch.randn(6, 16)
    found = compiled(gating, x)
    assert found.report.ops == TOP_K
    check(found, gating, x)


def test_where_all_groups_are_kept_it_does_not_matter_what_others_count() -> None:
    def gating(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return by_sigmoid(x, bias, k_group=4, fill=0.0)

    x, bias = torch.randn(6, 16), torch.randn(16)
    found = compiled(gating, x, bias)
    assert found.report.ops == TOP_K
    check(found, gating, x, bias)


def grouped(**settings):
    return lambda x, bias: by_sigmoid(x, bias, **settings)


def grouped_scores_elsewhere(x: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    scores = x.sigmoid()
    experts = (scores + bias).topk(3).indices
    weights = scores.gather(1, experts)
    return weights / weights.sum(-1, keepdim=True), experts, scores.mean(0)


X, BIAS = torch.randn(6, 16), torch.randn(16)


@pytest.mark.parametrize(
    ("gating", "x", "bias", "reason"),
    [
        (grouped(renormalise=False), X, BIAS, "its weights are not divided by their sum"),
        (grouped(fill=0.0), X, BIAS, "experts of other groups count 0, and may be chosen where a choice is lower"),
        (grouped(best=3), X, BIAS, "a group counts by the sum of its 3 highest"),
        (grouped(num_groups=8), X, BIAS, "group_count is 8 for 16 experts (the kernel wants equal groups of more than"),
        (grouped(), X.double(), BIAS.double(), "the model computes in torch.float64"),
        (grouped(), X.bfloat16(), BIAS.bfloat16(), "experts are chosen by scores in torch.bfloat16"),
        (grouped(), X.half(), BIAS.half(), "experts are chosen by scores in torch.float16"),
        (grouped_scores_elsewhere, X, BIAS, "the scores of all experts are used elsewhere too"),
        (grouped(), torch.randn(2, 4096), torch.randn(4096), "not known to have at most 2048 experts"),
    ],
)
def test_what_the_grouped_op_does_not_do_is_refused(gating, x: Tensor, bias: Tensor, reason: str) -> None:
    found = compiled(gating, x, bias)
    assert not found.report.ops
    assert reason in found.report.sites[0].reason
    for result, wanted in zip(found.output, gating(x, bias), strict=True):
        assert torch.equal(result, wanted)


def test_an_open_order_of_the_grouped_op_is_noted() -> None:
    found = compiled(grouped(is_sorted=False), X, BIAS)
    assert found.report.ops == TOP_K
    assert "leaves the order of a token's experts open" in found.report.sites[0].roundings[0]
    assert not compiled(grouped(is_sorted=False), X, BIAS, numerics="exact").report.ops


@pytest.mark.parametrize("soc", ["ascend910b", "ascend910_93", "ascend950", "ascend310p"])
def test_both_are_chosen_by_soc(soc: str) -> None:
    there = soc in ("ascend910b", "ascend910_93")
    assert compiled(by_softmax, X, target=Target(soc)).report.ops == (SOFTMAX if there else {})
    assert compiled(grouped(), X, BIAS, target=Target(soc)).report.ops == (TOP_K if there else {})
