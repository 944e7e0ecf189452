"""Experts by softmax: recognised with and without renormalised weights, both results repeated bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch.nn import functional

from helpers import Compiled, compiled, repeats, same
from npu_fuse.patterns.match import Match

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Tensor = torch.Tensor
Gating = Callable[[Tensor], tuple[Tensor, Tensor]]


def check(found: Compiled) -> Match:
    (match,) = found.findings().of("moe_gating")
    values = found.values()
    assert repeats(match, values), match.params
    experts = match.params.experts(**{name: values[match.inputs[name]] for name in match.params.experts.inputs})
    assert same(experts, values[match.inputs["experts"]])
    assert not found.findings().near_misses()
    return match


def softmax(logits: Tensor) -> Tensor:
    return functional.softmax(logits, dim=-1, dtype=torch.float)


def qwen2_moe(logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, experts = torch.topk(functional.softmax(logits, dim=1, dtype=torch.float), 4, dim=-1)
    return weights.to(logits.dtype), experts


def mixtral(logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, experts = torch.topk(softmax(logits), 4, dim=-1)
    weights /= weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype), experts


def with_eps(logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, experts = torch.topk(softmax(logits), 4, dim=-1)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20), experts


def scaled(logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, experts = softmax(logits).topk(4, sorted=False)
    return weights * 2.5, experts


def narrow(logits: Tensor) -> tuple[Tensor, Tensor]:
    return torch.softmax(logits, -1).topk(4)


def upcast(logits: Tensor) -> tuple[Tensor, Tensor]:
    return torch.softmax(logits.float(), -1).topk(k=4, dim=1, largest=True, sorted=True)


def experts_first(logits: Tensor) -> tuple[Tensor, Tensor]:
    chosen = softmax(logits).topk(4)
    experts = chosen.indices + 1
    return chosen.values, experts


SPELLINGS: dict[str, tuple[Gating, bool]] = {
    "qwen2_moe": (qwen2_moe, False),
    "mixtral": (mixtral, True),
    "with eps": (with_eps, True),
    "scaled": (scaled, False),
    "narrow": (narrow, False),
    "upcast": (upcast, False),
    "experts first": (experts_first, False),
}


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("dynamic", [None, True])
def test_every_spelling(name: str, dtype: torch.dtype, dynamic: bool | None) -> None:
    gating, renormalised = SPELLINGS[name]
    logits = torch.randn(6, 16).to(dtype)
    torch._dynamo.mark_static(logits, 1)
    params = check(compiled(gating, logits, dynamic=dynamic)).params
    assert (params.k, params.renormalised, params.is_sorted) == (4, renormalised, name != "scaled")


def test_any_number_of_leading_axes() -> None:
    check(compiled(narrow, torch.randn(2, 5, 16)))


OTHERS: dict[str, Gating] = {
    "another axis of softmax": lambda x: x.softmax(0).topk(4),
    "another axis of the choice": lambda x: x.softmax(-1).topk(4, dim=0),
    "the lowest": lambda x: x.softmax(-1).topk(4, largest=False),
    "of the logits": lambda x: x.topk(4),
    "of log_softmax": lambda x: x.log_softmax(-1).topk(4),
    "softmax behind the choice": lambda x: (x.topk(4).values.softmax(-1), x.topk(4).indices),
    "scaled scores": lambda x: (2 * x.softmax(-1)).topk(4),
    "experts alone": lambda x: (x.softmax(-1).topk(4).indices, x),
    "weights alone": lambda x: (x.softmax(-1).topk(4).values, x),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_choice_is_none(name: str) -> None:
    assert not compiled(OTHERS[name], torch.randn(6, 16)).findings().of("moe_gating")


MISSES = {
    "another axis of softmax": "the softmax is taken along another axis than the choice",
    "another axis of the choice": "the experts are not the highest along the last axis",
    "the lowest": "the experts are not the highest along the last axis",
}


@pytest.mark.parametrize("name", MISSES)
def test_nearly_such_a_choice_says_where_it_differs(name: str) -> None:
    (miss,) = compiled(OTHERS[name], torch.randn(6, 16)).findings().near_misses()
    assert (miss.kind, miss.reason) == ("moe_gating", MISSES[name])


@pytest.mark.parametrize(
    "divide",
    [
        lambda w: w / w.sum(0, keepdim=True),
        lambda w: w / w.sum(),
        lambda w: w / (2 * w.sum(-1, keepdim=True)),
        lambda w: w / w.amax(-1, keepdim=True),
        lambda w: w / w.mean(-1, keepdim=True),
        lambda w: w.sum(-1, keepdim=True) / w,
        lambda w: w / w.flip(0).sum(-1, keepdim=True),
    ],
)
def test_another_quotient_is_left_behind_the_choice(divide: Callable[[Tensor], Tensor]) -> None:
    def gating(x: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = x.softmax(-1).topk(4)
        return divide(weights), experts

    match = check(compiled(gating, torch.randn(6, 16)))
    assert not match.params.renormalised
    assert isinstance(match.node, fx.Node)
    assert match.node.name.startswith("getitem")
