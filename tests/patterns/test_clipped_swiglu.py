"""GPT-OSS's gated unit: recognised in every spelling, repeated bit for bit; with other bounds it is none."""

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
Tensor = torch.Tensor
Unit = Callable[[Tensor, Tensor], Tensor]


def check(found: Compiled) -> Match:
    (match,) = found.findings().of("clipped_swiglu")
    assert repeats(match, found.values()), match.params
    assert not found.findings().near_misses()
    return match


def inputs(dtype: torch.dtype = FP32) -> tuple[Tensor, Tensor]:
    gate, up = 5 * torch.randn(2, 3, 16)
    return gate.to(dtype), up.to(dtype)


def gpt_oss(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(min=None, max=7.0)
    up = up.clamp(min=-7.0, max=7.0)
    glu = gate * torch.sigmoid(gate * 1.702)
    return (up + 1) * glu


def in_place(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clone().clamp_(max=7.0)
    up = up.clone().clamp_(-7.0, 7.0)
    return gate.mul_(torch.sigmoid(1.702 * gate)).mul_(up.add_(1))


def wide(gate: Tensor, up: Tensor) -> Tensor:
    return gpt_oss(gate.float(), up.float()).to(gate.dtype)


def clamped_narrow(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=7.0).float(), up.clamp(-7.0, 7.0).float()
    return ((up + 1.0) * (gate * torch.sigmoid(1.702 * gate))).to(BF16)


def clamps_of_one_side(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = torch.clamp_max(gate, 7), torch.clamp_min(torch.clamp_max(up, 7), -7)
    return torch.sigmoid(1.702 * gate) * gate * (1 + up)


def clipped(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = torch.clip(gate, max=7.0), torch.clip(up, -7.0, 7.0)
    return gate * (1.0 + up) * torch.sigmoid(1.702 * gate)


def silu_scaled(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return functional.silu(1.702 * gate) / 1.702 * (up + 1)


SPELLINGS: dict[str, Unit] = {
    function.__name__: function
    for function in (gpt_oss, in_place, wide, clamped_narrow, clamps_of_one_side, clipped, silu_scaled)
}


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_every_spelling(name: str, dtype: torch.dtype) -> None:
    match = check(compiled(SPELLINGS[name], *inputs(dtype)))
    assert (match.params.alpha, match.params.limit, match.params.bias) == (1.702, 7.0, 1.0)
    if name != "in_place":
        assert [match.inputs[name].name for name in ("gate", "up")] == ["arg0_1", "arg1_1"]


def test_the_fast_gelu_in_it_is_a_part() -> None:
    findings = compiled(gpt_oss, *inputs()).findings()
    (match,) = findings.of("clipped_swiglu")
    assert set(match.parts) == {*findings.of("fast_gelu"), *findings.of("glu")}


@pytest.mark.parametrize(
    ("alpha", "limit", "bias"), [(1.702, 7.0, 1.0), (1.0, 7.0, 1.0), (1.702, 0.5, 0.0), (2.0, 10.0, -0.25), (1.0, 1, 0)]
)
def test_its_numbers_are_read(alpha: float, limit: float, bias: float) -> None:
    def unit(gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + bias if bias else up)

    params = check(compiled(unit, *inputs())).params
    assert (params.alpha, params.limit, params.bias) == (alpha, limit, bias)


CUTS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "in turn": lambda x: (x[..., ::2], x[..., 1::2]),
    "halves": lambda x: x.chunk(2, -1),
    "unbind": lambda x: x.unflatten(-1, (8, 2)).unbind(-1),
}


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("dynamic", [None, True])
def test_gate_and_up_may_be_cut_from_one_tensor(name: str, dynamic: bool | None) -> None:
    x = 5 * torch.randn(3, 5, 16)
    torch._dynamo.mark_static(x, 2)
    check(compiled(lambda x: gpt_oss(*CUTS[name](x)), x, dynamic=dynamic))


def unit_of(gate_bounds: tuple, up_bounds: tuple, alpha: float = 1.702) -> Unit:
    def unit(gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(*gate_bounds), up.clamp(*up_bounds)
        return gate * torch.sigmoid(alpha * gate) * (up + 1)

    return unit


@pytest.mark.parametrize(
    ("gate_bounds", "up_bounds"),
    [
        ((None, 7.0), (-7.0, 6.0)),
        ((None, 7.0), (-6.0, 7.0)),
        ((None, 6.0), (-7.0, 7.0)),
        ((-7.0, 7.0), (-7.0, 7.0)),
        ((None, 7.0), (None, 7.0)),
        ((-7.0, None), (-7.0, 7.0)),
    ],
)
def test_other_bounds_are_a_near_miss(gate_bounds: tuple, up_bounds: tuple) -> None:
    findings = compiled(unit_of(gate_bounds, up_bounds), *inputs()).findings()
    assert not findings.of("clipped_swiglu")
    (miss,) = findings.near_misses()
    assert miss.kind == "clipped_swiglu"
    assert "not by one limit" in miss.reason


OTHERS: dict[str, Unit] = {
    "no bounds": lambda gate, up: gate * torch.sigmoid(1.702 * gate) * (up + 1),
    "no bound of up": lambda gate, up: gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7)) * (up + 1),
    "a sigmoid of the gate without bounds": lambda gate, up: (
        gate.clamp(max=7) * torch.sigmoid(1.702 * gate) * (up.clamp(-7, 7) + 1)
    ),
    "twice up": lambda gate, up: (
        gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7)) * (2 * up.clamp(-7, 7) + 1)
    ),
    "one up for all": lambda gate, up: (
        gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7)) * (up[:1].clamp(-7, 7) + 1)
    ),
    "a sum": lambda gate, up: gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7)) + (up.clamp(-7, 7) + 1),
    "bounds that are tensors": lambda gate, up: (
        gate.clamp(max=up) * torch.sigmoid(1.702 * gate.clamp(max=up)) * (up.clamp(-7, 7) + 1)
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_product_is_none(name: str) -> None:
    assert not compiled(OTHERS[name], *inputs()).findings().of("clipped_swiglu")


dtypes = st.sampled_from([None, None, BF16, FP16, FP32, FP64])


@settings(max_examples=40, deadline=None)
@given(
    casts=st.fixed_dictionaries(dict.fromkeys(("gate", "up", "clamped", "sigmoid", "glu", "biased", "result"), dtypes)),
    dtype=st.sampled_from([BF16, FP16, FP32]),
)
def test_what_is_recognised_is_repeated_wherever_it_is_cast(
    casts: dict[str, torch.dtype | None], dtype: torch.dtype
) -> None:
    def cast(step: str, value: Tensor) -> Tensor:
        return value if casts[step] is None else value.to(casts[step])

    def unit(gate: Tensor, up: Tensor) -> Tensor:
        gate = cast("clamped", cast("gate", gate).clamp(max=7.0))
        up = cast("up", up).clamp(-7.0, 7.0)
        glu = cast("glu", gate * cast("sigmoid", torch.sigmoid(1.702 * gate)))
        return cast("result", cast("biased", up + 1) * glu)

    found = compiled(unit, *inputs(dtype))
    for match in found.findings().of("clipped_swiglu"):
        assert repeats(match, found.values()), match.params
