"""Experts by sigmoid, out of groups: recognised as models spell it, both results repeated bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers import Compiled, compiled, repeats, same
from npu_fuse.patterns.expert_groups import Groups
from npu_fuse.patterns.match import Match

BF16, FP32 = torch.bfloat16, torch.float32
Tensor = torch.Tensor
Gating = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
TOKENS, EXPERTS, GROUPS, K_GROUP, K = 6, 16, 4, 2, 3
SIZE = EXPERTS // GROUPS


def check(found: Compiled) -> Match:
    (match,) = found.findings().of("grouped_moe_gating")
    values = found.values()
    assert repeats(match, values), match.params
    experts = match.params.experts(**{name: values[match.inputs[name]] for name in match.params.experts.inputs})
    assert same(experts, values[match.inputs["experts"]])
    assert not found.findings().near_misses()
    return match


def mask_of_groups(choice: Tensor, k_group: int = K_GROUP) -> Tensor:
    """Zeros and ones [tokens, experts], as transformers has it."""
    scores = choice.view(-1, GROUPS, SIZE).topk(2, dim=-1)[0].sum(dim=-1)
    best = torch.topk(scores, k=k_group, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(scores)
    mask.scatter_(1, best, 1)
    return mask.unsqueeze(-1).expand(-1, GROUPS, SIZE).reshape(-1, EXPERTS)


def weighed(scores: Tensor, experts: Tensor) -> Tensor:
    weights = scores.gather(1, experts)
    weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return weights * 2.5


def deepseek_v3(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = x.sigmoid()
    choice = scores + bias
    choice = choice.masked_fill(~mask_of_groups(choice).bool(), float("-inf"))
    experts = torch.topk(choice, k=K, dim=-1, sorted=False)[1]
    return weighed(scores, experts), experts


def deepseek_v3_remote(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """As DeepSeek's own inference code has it: groups stay an axis, and what is masked is marked."""
    scores = x.float().sigmoid()
    original = scores
    scores = (scores + bias).view(x.shape[0], GROUPS, -1)
    group_scores = scores.topk(2, dim=-1)[0].sum(dim=-1)
    indices = group_scores.topk(K_GROUP, dim=-1)[1]
    mask = scores.new_ones(x.shape[0], GROUPS, dtype=torch.bool).scatter_(1, indices, False)
    scores = scores.masked_fill_(mask.unsqueeze(-1), float("-inf")).flatten(1)
    experts = torch.topk(scores, K, dim=-1)[1]
    weights = original.gather(1, experts)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights * 2.5, experts


def by_highest(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.sigmoid(x)
    choice = scores + bias.unsqueeze(0)
    best = torch.topk(choice.view(-1, GROUPS, SIZE).max(dim=-1).values, k=K_GROUP, dim=-1).indices
    mask = torch.zeros(x.shape[0], GROUPS).scatter(1, best, 1.0)
    mask = mask.unsqueeze(-1).expand(-1, GROUPS, SIZE).reshape(-1, EXPERTS)
    experts = choice.masked_fill(mask.bool().logical_not(), -math.inf).topk(K).indices
    return weighed(scores, experts), experts


def by_amax(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.sigmoid(x)
    choice = bias + scores
    best = choice.unflatten(-1, (GROUPS, SIZE)).amax(-1).topk(K_GROUP).indices
    mask = torch.ones(x.shape[0], GROUPS, dtype=torch.bool).scatter(1, best, False)
    experts = choice.masked_fill(mask[:, :, None].expand(-1, -1, SIZE).flatten(1), -math.inf).topk(K).indices
    return weighed(scores, experts), experts


def without_groups(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = x.sigmoid()
    experts = (scores + bias).topk(K, dim=-1).indices
    return weighed(scores, experts), experts


def without_bias(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = x.sigmoid()
    experts = scores.topk(K, dim=-1).indices
    return weighed(scores, experts), experts


def unscaled(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = x.sigmoid()
    experts = (scores + bias).topk(K, dim=-1).indices
    weights = scores.gather(-1, experts)
    return weights / (weights.sum(-1, keepdim=True) + 1e-9), experts


def not_renormalised(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = x.sigmoid()
    experts = (scores + bias).topk(K, dim=-1).indices
    return scores.gather(-1, experts) * 2.5, experts


FOUR = {"groups": Groups(GROUPS, K_GROUP, 2), "renormalised": True, "eps": 1e-20, "scale": 2.5}
ONE = {**FOUR, "groups": Groups()}
SPELLINGS: dict[Gating, dict[str, Any]] = {
    deepseek_v3: {**FOUR, "is_sorted": False},
    deepseek_v3_remote: {**FOUR, "eps": 0.0},
    by_highest: {**FOUR, "groups": Groups(GROUPS, K_GROUP, 1)},
    by_amax: {**FOUR, "groups": Groups(GROUPS, K_GROUP, 1)},
    without_groups: ONE,
    without_bias: ONE,
    unscaled: {**ONE, "eps": 1e-9, "scale": 1.0},
    not_renormalised: {**ONE, "renormalised": False, "eps": 0.0},
}


@pytest.mark.parametrize("gating", SPELLINGS)
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("dynamic", [None, True])
def test_every_spelling(gating: Gating, dtype: torch.dtype, dynamic: bool | None) -> None:
    x, bias = torch.randn(TOKENS, EXPERTS).to(dtype), torch.randn(EXPERTS).to(dtype)
    torch._dynamo.mark_static(x, 1)
    torch._dynamo.mark_static(bias)
    match = check(compiled(gating, x, bias, dynamic=dynamic))
    assert match.params.k == K
    for name, value in SPELLINGS[gating].items():
        assert getattr(match.params, name) == value, name
    assert ("bias" in match.inputs) == (gating is not without_bias)


def filled(fill: float) -> Gating:
    def gating(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = x.sigmoid()
        choice = scores + bias
        experts = choice.masked_fill(~mask_of_groups(choice).bool(), fill).topk(K).indices
        return weighed(scores, experts), experts

    return gating


def test_what_other_groups_count_is_read() -> None:
    for fill in (0.0, -1.0, -math.inf):
        x, bias = torch.randn(TOKENS, EXPERTS), torch.randn(EXPERTS)
        assert check(compiled(filled(fill), x, bias)).params.groups.fill == fill


def masked(mask: Callable[[Tensor], Tensor], chosen_by: Callable[[Tensor, Tensor], Tensor] | None = None) -> Gating:
    def gating(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = x.sigmoid()
        choice = scores + bias if chosen_by is None else chosen_by(scores, bias)
        experts = choice.masked_fill(mask(choice), -math.inf).topk(K).indices
        return weighed(scores, experts), experts

    return gating


def strided_groups(choice: Tensor) -> Tensor:
    """Groups of every fourth expert."""
    scores = choice.view(-1, GROUPS, SIZE).topk(2, dim=-1)[0].sum(dim=-1)
    mask = torch.zeros_like(scores).scatter(1, scores.topk(K_GROUP).indices, 1)
    return ~mask.unsqueeze(1).expand(-1, SIZE, GROUPS).reshape(-1, EXPERTS).bool()


def groups_of_the_worst(choice: Tensor) -> Tensor:
    scores = choice.view(-1, GROUPS, SIZE).topk(2, dim=-1)[0].sum(dim=-1)
    mask = torch.zeros_like(scores).scatter(1, scores.topk(K_GROUP, largest=False).indices, 1)
    return ~mask.unsqueeze(-1).expand(-1, GROUPS, SIZE).reshape(-1, EXPERTS).bool()


def groups_by_mean(choice: Tensor) -> Tensor:
    scores = choice.view(-1, GROUPS, SIZE).mean(-1)
    mask = torch.zeros_like(scores).scatter(1, scores.topk(K_GROUP).indices, 1)
    return ~mask.unsqueeze(-1).expand(-1, GROUPS, SIZE).reshape(-1, EXPERTS).bool()


def groups_by_other_scores(choice: Tensor) -> Tensor:
    return ~mask_of_groups(choice.cos()).bool()


MISSES: dict[str, tuple[Gating, str]] = {
    "the groups that are kept are masked": (
        masked(lambda choice: mask_of_groups(choice).bool()),
        "what masks the choice is not whether a group is one of the highest",
    ),
    "the worst groups": (masked(groups_of_the_worst), "what masks the choice is not whether a group is one"),
    "any other mask": (masked(lambda choice: choice < 0), "what masks the choice is not whether a group is one"),
    "groups by mean": (masked(groups_by_mean), "a group counts neither by its highest choice nor by the sum"),
    "groups by other scores": (masked(groups_by_other_scores), "groups and experts are chosen by different scores"),
    "groups of every fourth expert": (masked(strided_groups), "the mask of a group does not cover its experts"),
    "a bias a token": (
        masked(lambda choice: ~mask_of_groups(choice).bool(), lambda scores, bias: scores + bias * scores[:, :1]),
        "the experts are chosen by something else than their scores and a bias",
    ),
    "scores that are scaled": (
        masked(lambda choice: ~mask_of_groups(choice).bool(), lambda scores, bias: 2 * scores + bias),
        "the experts are chosen by something else than their scores and a bias",
    ),
}


@pytest.mark.parametrize("name", MISSES)
def test_nearly_such_a_choice_says_where_it_differs(name: str) -> None:
    gating, reason = MISSES[name]
    findings = compiled(gating, torch.randn(TOKENS, EXPERTS), torch.randn(EXPERTS)).findings()
    assert not findings.of("grouped_moe_gating")
    (miss,) = findings.near_misses()
    assert miss.kind == "grouped_moe_gating"
    assert miss.reason.startswith(reason)


def softmax_scores(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = x.softmax(-1)
    experts = (scores + bias).topk(K).indices
    return weighed(scores, experts), experts


def other_weights(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    experts = (x.sigmoid() + bias).topk(K).indices
    return weighed(x, experts), experts


def computed_experts(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = x.sigmoid()
    experts = (scores + bias).argsort(-1)[:, :K]
    return weighed(scores, experts), experts


@pytest.mark.parametrize("gating", [softmax_scores, other_weights, computed_experts])
def test_another_gating_is_none(gating: Gating) -> None:
    findings = compiled(gating, torch.randn(TOKENS, EXPERTS), torch.randn(EXPERTS)).findings()
    assert not findings.of("grouped_moe_gating")


def test_another_quotient_is_left_behind_the_weights() -> None:
    def gating(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = x.sigmoid()
        experts = (scores + bias).topk(K).indices
        weights = scores.gather(1, experts)
        return weights / weights.amax(-1, keepdim=True), experts

    match = check(compiled(gating, torch.randn(TOKENS, EXPERTS), torch.randn(EXPERTS)))
    assert not match.params.renormalised
    assert match.node.name.startswith("gather")
