"""Where an op rounds otherwise than the model it is said, and where only exact numerics are wanted it is the reason."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F  # noqa: N812  # its usual name

from helpers import Compiled, compiled, refusal

Tensor = torch.Tensor
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
X1, X2, W = torch.randn(2, 3, 64), torch.randn(2, 3, 64), torch.rand(64) + 0.5
SCALE, ONE = torch.rand(64) * 0.02 + 0.02, torch.tensor([0.03125])
TABLES = tuple(table[None, None] for table in (torch.randn(3, 64).cos(), torch.randn(3, 64).sin()))


def norm(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rounded(value: Tensor) -> Tensor:
    return value.round().clamp(-128, 127).to(torch.int8)


def add_norm(x1: Tensor, x2: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    total = x1 + x2
    return total, norm(total, w)


def add_norm_wide(x1: Tensor, x2: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    total = x1.float() + x2.float()
    normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)
    return total.to(x1.dtype), normed.to(x1.dtype) * w


def add_norm_cast(x1: Tensor, x2: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    total, y = add_norm(x1, x2, w)
    return total, y, y.float()


def add_norm_static(x1: Tensor, x2: Tensor, w: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    total, y = add_norm(x1, x2, w)
    return total, rounded(y / scale)


def add_norm_dynamic(x1: Tensor, x2: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    total, y = add_norm(x1, x2, w)
    scale = (y.float().abs().amax(-1, keepdim=True) / 127).to(x1.dtype)
    return total, torch.round(y.float() / scale).to(torch.int8), scale


def norm_static(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return rounded(norm(x, w) / scale)


def half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def apart(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return half(x.unflatten(-1, (-1, 2)).transpose(-1, -2).reshape(x.shape), cos, sin)


def glu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def attention(q: Tensor, bias: Tensor) -> Tensor:
    return ((q @ q.sin().mT) * 0.125 + bias).softmax(-1) @ q.cos()


def given(dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.to(dtype) for tensor in tensors)


SITES = {
    "add norm": lambda dtype: (add_norm, *given(dtype, X1, X2, W)),
    "wide add norm": lambda dtype: (add_norm_wide, *given(dtype, X1, X2, W)),
    "add norm cast": lambda dtype: (add_norm_cast, *given(dtype, X1, X2, W)),
    "static": lambda dtype: (add_norm_static, *given(dtype, X1, X2, W), SCALE.to(FP32 if dtype == FP16 else dtype)),
    "dynamic": lambda dtype: (add_norm_dynamic, *given(dtype, X1, X2, W)),
    "alone": lambda dtype: (norm_static, *given(dtype, X1, W, ONE)),
    "half": lambda dtype: (half, *given(dtype, X1[None], *TABLES)),
    "apart": lambda dtype: (apart, *given(dtype, X1[None], *TABLES)),
    "glu": lambda dtype: (glu, *given(dtype, X1)),
    "group norm": lambda dtype: (lambda x, w: F.silu(F.group_norm(x, 4, w, w)), *given(dtype, X1.view(2, 64, 3), W)),
    "attention": lambda dtype: (attention, *given(dtype, X1.view(1, 2, 3, 64), torch.randn(1, 2, 3, 16)[..., :3])),
}


@functools.cache
def site(name: str, dtype: torch.dtype) -> Compiled:
    return compiled(*SITES[name](dtype))


EARLY = {"params.norm.normed_dtype": FP32}
COARSE = {"params.quantiser.steps": frozenset({FP16})}
NO_STEPS = {"params.quantiser.steps": frozenset()}


@pytest.mark.parametrize(
    ("name", "dtype", "kind", "changes", "rounding"),
    [
        ("add norm", FP16, "rms_norm", {"params.offset": 1.0}, "the model rounds the normed x to torch.float16"),
        ("add norm", FP16, "rms_norm", {"params.normed_dtype": FP32}, "the op rounds the normed x to torch.float16"),
        ("add norm", FP16, "add_rms_norm", {}, "the op takes the statistics from the sum before it is rounded to"),
        ("wide add norm", FP16, "add_rms_norm", {}, "the op rounds the sum to torch.float16 before it norms it"),
        ("wide add norm", BF16, "add_rms_norm", EARLY, "the op rounds the normed x to torch.bfloat16"),
        ("add norm cast", BF16, "norm_cast", {}, "the op normalises the sum before it is rounded"),
        ("add norm cast", FP16, "norm_cast", EARLY, "the op rounds the normed x to torch.float16"),
        (
            "static",
            FP16,
            "norm_quant",
            {"params.quantiser.rounds_last": False, "params.quantiser.zero_point": 1.0},
            "the op rounds after it has added the zero point; the model rounds before",
        ),
        ("static", FP16, "norm_quant", COARSE, "the model quantises in torch.float16, the op in torch.float32"),
        ("static", FP16, "norm_quant", EARLY | NO_STEPS, "the op rounds the normed x to torch.float16"),
        ("static", BF16, "norm_quant", NO_STEPS, "the op quantises the norm before it is rounded"),
        ("alone", FP16, "norm_quant", NO_STEPS, "the op quantises the norm before it is rounded"),
        ("dynamic", FP16, "norm_quant", {}, "the op quantises the norm before it is rounded"),
        ("half", FP16, "rope", {}, "the op rounds once at its end; the model rounds each product to"),
        ("apart", FP16, "rope", {}, "the op rounds once at its end; the model rounds each product to"),
        ("glu", FP16, "glu", {}, "the op rounds once; the model rounds silu(gate) to torch.float16"),
        ("group norm", FP16, "group_norm_silu", {}, "the op rounds once; the model rounds the norm to torch.float16"),
        ("attention", FP16, "attention", {}, "the op adds the bias in float32; the model in torch.float16"),
    ],
)
def test_a_rounding_is_a_reason(name: str, dtype: torch.dtype, kind: str, changes: dict, rounding: str) -> None:
    said = refusal(site(name, dtype), kind, changes, numerics="exact")
    assert "Options.numerics is 'exact', and " in said
    assert rounding in said


@pytest.mark.parametrize(
    ("name", "dtype", "kind", "rounding"),
    [
        ("add norm cast", BF16, "norm_cast", "the float32 result of the op may be that before it is rounded to"),
        ("dynamic", FP16, "norm_quant", "the op multiplies a row by 127 / max"),
    ],
)
def test_a_rounding_behind_another_is_said(name: str, dtype: torch.dtype, kind: str, rounding: str) -> None:
    (found,) = (found for found in compiled(*SITES[name](dtype)).report.sites if found.kind == kind)
    assert any(rounding in said for said in found.roundings)


# The order of a norm --------------------------------------------------------------------------------------------------


def by_division(x: Tensor, w: Tensor) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def by_inverse(x: Tensor, w: Tensor) -> Tensor:
    return x * (1 / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) * w


def weight_first(x: Tensor, w: Tensor) -> Tensor:
    return x * w * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def weighted_root(x: Tensor, w: Tensor) -> Tensor:
    return x * (torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w)


def summed(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) * (1 / x.shape[-1]) + 1e-6) * w


def divided_sum(x: Tensor, w: Tensor) -> Tensor:
    return w * (x * (x.square().sum(-1, keepdim=True) / x.shape[-1] + 1e-6) ** -0.5)


ORDERS = {
    by_division: "the model takes the inverse root in steps that each round",
    by_inverse: "the model takes the inverse root in steps that each round",
    weight_first: "in another order than the op",
    weighted_root: "in another order than the op",
    summed: "multiplies the sum of squares by 1 / size, which is rounded",
    norm: None,
    divided_sum: None,
}


@pytest.mark.parametrize("function", ORDERS)
@pytest.mark.parametrize("width", [64, 96])
def test_exact_norms_round_in_the_order_of_the_op(function: Callable[..., Tensor], width: int) -> None:
    x, w = torch.randn(50, width), torch.rand(width) + 0.5
    said = ORDERS[function]
    exact, fused = (compiled(function, x, w, numerics=numerics) for numerics in ("exact", "fused"))
    assert torch.equal(exact.output, function(x, w))
    (of_exact,), (of_fused,) = ([s for s in c.report.sites if s.kind == "rms_norm"] for c in (exact, fused))
    assert of_fused.status == "lowered"
    assert (said is None) == (of_exact.status == "lowered")
    if said is None:
        assert not of_fused.roundings
    else:
        assert said in of_exact.reason
        assert said in of_fused.roundings[0]


# The steps of an activation -------------------------------------------------------------------------------------------


def gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def unit(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return activation(gate) * up

    return unit


def clipped(x: Tensor, *, late: bool) -> Tensor:
    gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
    sigmoid = torch.sigmoid(1.702 * gate)
    return gate * (sigmoid * (up + 1)) if late else (up + 1) * (gate * sigmoid)


def normed_in_groups(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: activation(F.group_norm(x.mT.contiguous(), 4, W, W))


def by_exp(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


STEPS = "in steps that each round"
ACTIVATED: dict[str, tuple[str, Callable[[Tensor], Tensor], str | None]] = {
    "silu": ("glu", gated(F.silu), None),
    "silu by a sigmoid": ("glu", gated(lambda x: x * torch.sigmoid(x)), STEPS),
    "silu by exp": ("glu", gated(by_exp), STEPS),
    "gelu": ("glu", gated(F.gelu), None),
    "gelu by tanh": ("glu", gated(lambda x: F.gelu(x, approximate="tanh")), None),
    "fast gelu": ("fast_gelu", lambda x: x * torch.sigmoid(1.702 * x), None),
    "fast gelu by silu": ("fast_gelu", lambda x: F.silu(1.702 * x) / 1.702, STEPS),
    "fast gelu by exp": ("fast_gelu", lambda x: x / (1 + torch.exp(-1.702 * x)), STEPS),
    "clipped": ("clipped_swiglu", functools.partial(clipped, late=False), None),
    "clipped in another order": ("clipped_swiglu", functools.partial(clipped, late=True), "in another order"),
    "group norm": ("group_norm_silu", normed_in_groups(F.silu), None),
    "group norm and a sigmoid": ("group_norm_silu", normed_in_groups(lambda x: x * torch.sigmoid(x)), STEPS),
}


@pytest.mark.parametrize("name", ACTIVATED)
def test_exact_activations_round_in_the_steps_of_the_op(name: str) -> None:
    kind, function, said = ACTIVATED[name]
    x = torch.randn(50, 3, 64)
    exact, fused = (compiled(function, x, numerics=numerics) for numerics in ("exact", "fused"))
    assert torch.equal(exact.output, function(x))
    (of_exact,), (of_fused,) = ([s for s in c.report.sites if s.kind == kind] for c in (exact, fused))
    assert of_fused.status == "lowered"
    assert (said is None) == (of_exact.status == "lowered")
    if said is None:
        assert not of_fused.roundings
    else:
        assert said in of_exact.reason
        assert said in of_fused.roundings[0]
