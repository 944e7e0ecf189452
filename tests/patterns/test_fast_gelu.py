"""The fast GELU: recognised in every order, repeated bit for bit; with another factor it is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from helpers import Compiled, compiled, repeats
from npu_fuse.patterns.match import Match

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
Activation = Callable[[torch.Tensor], torch.Tensor]


def check(found: Compiled) -> Match:
    (match,) = found.findings().of("fast_gelu")
    assert repeats(match, found.values()), match.params
    assert not found.findings().near_misses()
    return match


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 1.702
    y.sigmoid_()
    return y.mul_(x)


SPELLINGS: dict[str, Activation] = {
    "CLIP": lambda x: x * torch.sigmoid(1.702 * x),
    "sigmoid first": lambda x: torch.sigmoid(x * 1.702) * x,
    "methods": lambda x: x.mul(1.702).sigmoid().mul(x),
    "in place": in_place,
    "as a quotient": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "as a quotient of one": lambda x: x * (1 / (1 + torch.exp(-(1.702 * x)))),
    "silu, scaled back": lambda x: functional.silu(1.702 * x) / 1.702,
    "silu, multiplied back": lambda x: (1 / 1.702) * functional.silu(x * 1.702),
    "all wide, cast back": lambda x: (x.float() * torch.sigmoid(1.702 * x.float())).to(x.dtype),
    "wide sigmoid": lambda x: x * torch.sigmoid(1.702 * x.float()).to(x.dtype),
    "wide product": lambda x: x * torch.sigmoid(1.702 * x.float()),
    "a view between": lambda x: x * torch.sigmoid((1.702 * x).view(x.shape)),
}


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("dynamic", [None, True])
def test_every_spelling(name: str, dtype: torch.dtype, dynamic: bool | None) -> None:
    match = check(compiled(SPELLINGS[name], torch.randn(3, 16).to(dtype), dynamic=dynamic))
    assert match.inputs["x"].op == "placeholder"


def test_of_a_sum_of_a_product_and_of_a_part() -> None:
    activation = SPELLINGS["CLIP"]
    x, y = torch.randn(2, 3, 16)
    for function in (
        lambda x, y: activation(x + y),
        lambda x, y: activation(x * y),
        lambda x, y: activation(x - y),
        lambda x, y: activation(x[..., ::2]),
        lambda x, y: activation(x.mT),
        lambda x, y: 2 * activation(x) * y,
    ):
        check(compiled(function, x, y))


OTHERS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "silu": lambda x, y: x * torch.sigmoid(x),
    "gelu": lambda x, y: functional.gelu(x, approximate="tanh"),
    "of something else": lambda x, y: x * torch.sigmoid(1.702 * y),
    "half of it": lambda x, y: 0.5 * x * torch.sigmoid(1.702 * x),
    "a sum": lambda x, y: x + torch.sigmoid(1.702 * x),
    "a quotient": lambda x, y: x / torch.sigmoid(1.702 * x),
    "negated inside": lambda x, y: x * torch.sigmoid(-1.702 * x),
    "negated outside": lambda x, y: -x * torch.sigmoid(1.702 * x),
    "moved inside": lambda x, y: x * torch.sigmoid(1.702 * x + 1e-3),
    "tanh": lambda x, y: x * torch.tanh(1.702 * x),
    "of a row": lambda x, y: x * torch.sigmoid(1.702 * x[:1]),
    "squared": lambda x, y: x * x * torch.sigmoid(1.702 * x),
    "quite another factor": lambda x, y: x * torch.sigmoid(1.5 * x),
    "with noise": lambda x, y: torch.rand_like(x) * torch.sigmoid(1.702 * torch.rand_like(x)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_value_is_none(name: str) -> None:
    findings = compiled(OTHERS[name], *torch.randn(2, 3, 16)).findings()
    assert not findings.of("fast_gelu")
    assert not [miss for miss in findings.near_misses() if miss.kind == "fast_gelu"]


@pytest.mark.parametrize("alpha", [1.7, 1.701, 1.7020001, 1.703, 1.71])
@pytest.mark.parametrize("name", ["sigmoid", "silu"])
def test_nearly_its_factor_is_a_near_miss(alpha: float, name: str) -> None:
    def activation(x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(alpha * x) if name == "sigmoid" else functional.silu(alpha * x) / alpha

    findings = compiled(activation, torch.randn(3, 16)).findings()
    assert not findings.of("fast_gelu")
    (miss,) = findings.near_misses()
    assert miss.kind == "fast_gelu"
    assert "x; a fast GELU takes 1.702 x" in miss.reason


dtypes = st.sampled_from([None, None, BF16, FP16, FP32, FP64])


@settings(max_examples=40, deadline=None)
@given(
    casts=st.fixed_dictionaries(dict.fromkeys(("x", "inside", "scaled", "sigmoid", "result"), dtypes)),
    dtype=st.sampled_from([BF16, FP16, FP32]),
    first=st.booleans(),
)
def test_what_is_recognised_is_repeated_wherever_it_is_cast(
    casts: dict[str, torch.dtype | None], dtype: torch.dtype, first: bool
) -> None:
    def cast(step: str, value: torch.Tensor) -> torch.Tensor:
        return value if casts[step] is None else value.to(casts[step])

    def activation(x: torch.Tensor) -> torch.Tensor:
        x = cast("x", x)
        gate = cast("sigmoid", torch.sigmoid(cast("scaled", 1.702 * cast("inside", x))))
        return cast("result", x * gate if first else gate * x)

    found = compiled(activation, torch.randn(3, 16).to(dtype))
    for match in found.findings().of("fast_gelu"):
        assert repeats(match, found.values()), match.params
