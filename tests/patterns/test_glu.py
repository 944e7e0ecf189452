"""Gated units: recognised with their activation, repeated bit for bit; a product that only looks like one is none."""

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
Unit = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

ACTIVATIONS: dict[str, tuple[str, Activation]] = {
    "F.silu": ("silu", functional.silu),
    "x * sigmoid(x)": ("silu", lambda x: x * torch.sigmoid(x)),
    "sigmoid(x) * x": ("silu", lambda x: torch.sigmoid(x) * x),
    "sigmoid": ("sigmoid", torch.sigmoid),
    "gelu": ("gelu", functional.gelu),
    "gelu_tanh": ("gelu_tanh", lambda x: functional.gelu(x, approximate="tanh")),
    "relu": ("relu", functional.relu),
}


def inputs(dtype: torch.dtype = FP32, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = torch.randn(2, *(shape or (3, 16))).to(dtype)
    return gate, up


def check(found: Compiled) -> Match:
    (match,) = found.findings().of("glu")
    assert repeats(match, found.values()), match.params
    assert not found.findings().near_misses()
    return match


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_every_activation_and_order(name: str, dtype: torch.dtype) -> None:
    activation, function = ACTIVATIONS[name]
    for unit in (lambda gate, up: function(gate) * up, lambda gate, up: up * function(gate)):
        match = check(compiled(unit, *inputs(dtype)))
        assert (match.params.activation, match.params.dtype) == (activation, dtype)
        assert [match.inputs[name].name for name in ("gate", "up")] == ["arg0_1", "arg1_1"]


CASTS: dict[str, Unit] = {
    "wide activation": lambda gate, up: functional.silu(gate.float()).to(gate.dtype) * up,
    "all wide": lambda gate, up: functional.silu(gate.float()) * up.float(),
    "all wide, cast back": lambda gate, up: (functional.silu(gate.float()) * up.float()).to(gate.dtype),
    "narrow activation, wide product": lambda gate, up: functional.silu(gate).float() * up,
    "narrow activation, wide up": lambda gate, up: functional.silu(gate) * up.float(),
}


@pytest.mark.parametrize("name", CASTS)
def test_casts(name: str) -> None:
    check(compiled(CASTS[name], *inputs(BF16)))


CUTS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "chunk": lambda x: x.chunk(2, -1),
    "split": lambda x: x.split(8, -1),
    "slices": lambda x: (x[..., :8], x[..., 8:]),
    "strides": lambda x: (x[..., ::2], x[..., 1::2]),
    "unbind": lambda x: x.unflatten(-1, (2, 8)).unbind(-2),
}


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("dynamic", [None, True])
def test_gate_and_up_may_be_cut_from_one_tensor(name: str, dynamic: bool | None) -> None:
    def unit(x: torch.Tensor) -> torch.Tensor:
        gate, up = CUTS[name](x)
        return functional.silu(gate) * up

    x = torch.randn(3, 5, 16)
    torch._dynamo.mark_static(x, 2)
    check(compiled(unit, x, dynamic=dynamic))


def test_one_gate_may_serve_two_units() -> None:
    found = compiled(lambda gate, up: [functional.silu(gate) * up, functional.silu(gate) * up.cos()], *inputs())
    assert len(found.findings().of("glu")) == 2


def test_the_gate_of_a_gate() -> None:
    """act(silu(a) * b) * c: the outer unit reads the inner one as its gate."""
    found = compiled(lambda a, b: functional.gelu(functional.silu(a) * b) * b.cos(), *inputs())
    assert [match.params.activation for match in found.findings().of("glu")] == ["silu", "gelu"]


OTHERS: dict[str, Unit] = {
    "silu itself": lambda gate, up: gate * torch.sigmoid(gate),
    "a number": lambda gate, up: functional.silu(gate) * 2,
    "a row for all": lambda gate, up: functional.silu(gate) * up[0],
    "one gate for a row": lambda gate, up: functional.silu(gate[:, :1]) * up,
    "a sum": lambda gate, up: functional.silu(gate) + up,
    "a quotient": lambda gate, up: functional.silu(gate) / up,
    "another activation": lambda gate, up: torch.tanh(gate) * up,
    "leaky": lambda gate, up: functional.leaky_relu(gate) * up,
    "a product behind the activation": lambda gate, up: functional.silu(gate) * 2.0 * up,
    "negated": lambda gate, up: -functional.silu(gate) * up,
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_product_is_none(name: str) -> None:
    assert not compiled(OTHERS[name], *inputs()).findings().of("glu")


ROUNDED: dict[str, Unit] = {
    "twice": lambda gate, up: functional.silu(gate).half().bfloat16() * up,
    "inside": lambda gate, up: gate * torch.sigmoid(gate).bfloat16().float() * up,
    "the gate on one way": lambda gate, up: (gate.bfloat16().float() * torch.sigmoid(gate)) * up,
}


@pytest.mark.parametrize("name", ROUNDED)
def test_inner_roundings_are_repeated_and_known(name: str) -> None:
    found = compiled(ROUNDED[name], *inputs())
    assert BF16 in check(found).params.steps
    assert not found.report.ops


def test_silu_may_be_written_with_exp_and_in_any_order() -> None:
    written = [
        lambda gate, up: gate / (1 + torch.exp(-gate)) * up,
        lambda gate, up: gate * (up * torch.sigmoid(gate)),
        lambda gate, up: up * gate * (1 / (torch.exp(-gate) + 1)),
    ]
    for unit in written:
        match = check(compiled(unit, *inputs()))
        assert match.params.activation == "silu"
        assert {match.inputs[name].name for name in ("gate", "up")} == {"arg0_1", "arg1_1"}


dtypes = st.sampled_from([None, None, BF16, FP16, FP32, FP64])
STEPS = ("gate", "sigmoid", "activated", "again", "up", "result")


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(ACTIVATIONS)),
    casts=st.fixed_dictionaries(dict.fromkeys(STEPS, dtypes)),
    dtype=st.sampled_from([BF16, FP16, FP32]),
    first=st.booleans(),
)
def test_what_is_recognised_is_repeated_wherever_it_is_cast(
    name: str, casts: dict[str, torch.dtype | None], dtype: torch.dtype, first: bool
) -> None:
    def cast(step: str, value: torch.Tensor) -> torch.Tensor:
        return value if casts[step] is None else value.to(casts[step])

    def unit(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = cast("gate", gate), cast("up", up)
        spelled_out = gate * cast("sigmoid", torch.sigmoid(gate))
        activated = spelled_out if name == "x * sigmoid(x)" else ACTIVATIONS[name][1](gate)
        activated = cast("again", cast("activated", activated))
        return cast("result", activated * up if first else up * activated)

    found = compiled(unit, *inputs(dtype))
    for match in found.findings().of("glu"):
        assert repeats(match, found.values()), match.params
