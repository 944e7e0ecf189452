"""A norm and its quantiser: every spelling is read exactly; what only looks like a quantised norm is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from helpers import Compiled, compiled, repeats
from npu_fuse.patterns.match import Match
from npu_fuse.patterns.norm_quant import NormQuant
from npu_fuse.patterns.quantiser import Dynamic, Static

BF16, FP16, FP32, FP64, INT8 = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8
Tensor = torch.Tensor
X1, X2 = torch.randn(2, 3, 64), torch.randn(2, 3, 64)
W = torch.rand(64) + 0.5
CHANNELS, ONE = torch.rand(64) * 0.02 + 0.02, torch.tensor([0.03125])
OFFSETS = torch.arange(64, dtype=torch.int32) - 30


def norm(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def quantised(quantise: Callable[..., object], *given: Tensor, dtype: torch.dtype = BF16) -> Compiled:
    """The residual sum and norm of fixed inputs, with a quantiser behind them, compiled."""

    def model(x1: Tensor, x2: Tensor, w: Tensor, *given: Tensor) -> object:
        total = x1 + x2
        return total, quantise(norm(total, w), *given)

    return compiled(model, X1.to(dtype), X2.to(dtype), W.to(dtype), *given)


def the_match(found: Compiled) -> Match:
    """The one match, which repeats the model bit for bit and is made of the norm and its add."""
    findings = found.findings()
    (match,) = findings.of("norm_quant")
    assert repeats(match, found.values()), match.params
    assert match.parts[:2] == (*findings.of("add_rms_norm"), *findings.of("rms_norm"))
    assert match.inputs["y"] is match.parts[0].node
    assert not [miss for miss in findings.near_misses() if miss.kind == "norm_quant"]
    return match


def quantiser(match: Match) -> Static | Dynamic:
    assert isinstance(match.params, NormQuant)
    return match.params.quantiser


def near_miss(found: Compiled) -> str:
    findings = found.findings()
    assert not findings.of("norm_quant")
    (miss,) = [miss for miss in findings.near_misses() if miss.kind == "norm_quant"]
    return miss.reason


def nothing(found: Compiled) -> bool:
    findings = found.findings()
    return not findings.of("norm_quant") and not [m for m in findings.near_misses() if m.kind == "norm_quant"]


# Static --------------------------------------------------------------------------------------------------------------

STATIC: dict[str, Callable[..., Tensor]] = {
    "round, clamp": lambda y, s: torch.round(y / s).clamp(-128, 127).to(INT8),
    "clamp, round": lambda y, s: (y / s).clamp(-128, 127).round().to(INT8),
    "torch.clamp": lambda y, s: torch.clamp(torch.round(torch.div(y, s)), min=-128, max=127).to(INT8),
    "two clamps": lambda y, s: (y / s).round().clamp_min(-128).clamp_max(127).to(INT8),
    "clip": lambda y, s: torch.clip((y / s).round(), -128, 127).to(INT8),
    "in place": lambda y, s: (y / s).round_().clamp_(-128, 127).to(INT8),
    "wide": lambda y, s: torch.round(y.float() / s.float()).clamp(-128, 127).to(INT8),
    "narrowed before the rounding": lambda y, s: (y.float() / s).to(y.dtype).round().clamp(-128, 127).to(INT8),
    "type()": lambda y, s: (y / s).round().clamp(-128, 127).type(INT8),
    "char()": lambda y, s: (y / s).round().clamp(-128, 127).char(),
    "flattened": lambda y, s: (y.view(-1, 64) / s).round().clamp(-128, 127).to(INT8),
    "flattened later": lambda y, s: (y.reshape(6, 64).contiguous() / s).round().clamp(-128, 127).to(INT8),
}


@pytest.mark.parametrize("name", STATIC)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("scale", [CHANNELS, ONE, torch.tensor(0.05)], ids=["channels", "one", "scalar"])
def test_every_spelling_of_a_static_quantiser(name: str, dtype: torch.dtype, scale: Tensor) -> None:
    match = the_match(quantised(STATIC[name], scale.to(dtype), dtype=dtype))
    read = quantiser(match)
    assert isinstance(read, Static)
    assert read.divides
    assert read.limits == (-128, 127)
    assert read.scale is read.zero_point is None
    assert match.inputs["scale"].op == "placeholder"
    assert "zero_point" not in match.inputs
    assert match.params.public()["mode"] == "static"


ZERO_POINTS: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "before the rounding": (lambda y, s, z: torch.round(y / s + z).clamp(-128, 127).to(INT8), True),
    "the other way round": (lambda y, s, z: torch.round(z + y / s).clamp(-128, 127).to(INT8), True),
    "clamped, then rounded": (lambda y, s, z: (y / s + z).clamp(-128, 127).round().to(INT8), True),
    "after the rounding": (lambda y, s, z: ((y / s).round() + z).clamp(-128, 127).to(INT8), False),
}


@pytest.mark.parametrize("name", ZERO_POINTS)
@pytest.mark.parametrize("zero_point", [OFFSETS, OFFSETS.to(INT8), OFFSETS.float(), torch.tensor([-7])])
def test_zero_points(name: str, zero_point: Tensor) -> None:
    spelling, rounds_last = ZERO_POINTS[name]
    match = the_match(quantised(spelling, CHANNELS, zero_point))
    read = quantiser(match)
    assert isinstance(read, Static)
    assert read.rounds_last == rounds_last
    assert match.inputs["zero_point"] is not match.inputs["scale"]


def test_numbers_are_parameters() -> None:
    for quantise, scale, zero_point, divides, limits in (
        (lambda y: torch.round(y / 0.05 + -3).clamp(-128, 127).to(INT8), 0.05, -3, True, (-128, 127)),
        (lambda y: torch.round(20 * y + 3).clamp(-127, 127).to(INT8), 20, 3, False, (-127, 127)),
    ):
        match = the_match(quantised(quantise))
        read = quantiser(match)
        assert isinstance(read, Static)
        assert (read.scale, read.zero_point, read.divides, read.limits) == (scale, zero_point, divides, limits)
        assert not match.inputs.keys() & {"scale", "zero_point"}


def test_a_product_with_the_scale_is_no_quotient() -> None:
    for spelling in (
        lambda y, s: (y * s).round().clamp(-128, 127).to(INT8),
        lambda y, s: (s * y).round().clamp(-128, 127).to(INT8),
    ):
        read = quantiser(the_match(quantised(spelling, 1 / CHANNELS)))
        assert isinstance(read, Static)
        assert not read.divides


def test_a_lone_norm_is_quantised_too() -> None:
    found = compiled(
        lambda x, w, s: (norm(x, w) / s).round().clamp(-128, 127).to(INT8), X1.bfloat16(), W.bfloat16(), ONE.bfloat16()
    )
    findings = found.findings()
    (match,) = findings.of("norm_quant")
    assert repeats(match, found.values())
    assert match.params.public()["residual"] is False
    assert match.parts == tuple(findings.of("rms_norm"))


# Dynamic -------------------------------------------------------------------------------------------------------------


def amax(y: Tensor) -> tuple[Tensor, Tensor]:
    scale = y.abs().amax(-1, keepdim=True) / 127
    return torch.round(y / scale).to(INT8), scale


def squeezed(y: Tensor) -> tuple[Tensor, Tensor]:
    scale = y.abs().max(dim=-1)[0].float() / 127.0
    return (y / scale.unsqueeze(-1)).round().clamp(-128, 127).to(INT8), scale


def wide(y: Tensor) -> tuple[Tensor, Tensor]:
    y = y.float()
    scale = torch.max(torch.abs(y), dim=-1, keepdim=True).values * (1 / 127)
    return torch.clamp((y / scale).round(), -127, 127).to(INT8), scale


def inverted(y: Tensor) -> tuple[Tensor, Tensor]:
    scale = y.float().abs().amax(-1, keepdim=True) / 127
    return (y.float() * (1 / scale)).round().to(INT8), scale.squeeze(-1)


def flat(y: Tensor) -> tuple[Tensor, Tensor]:
    rows = y.view(-1, 64)
    scale = (rows.abs().amax(-1) / 127).view(-1, 1)
    return (rows / scale).clamp(-128, 127).round().to(INT8), scale


DYNAMIC = {"amax": amax, "squeezed": squeezed, "wide": wide, "inverted": inverted, "flat": flat}


@pytest.mark.parametrize("name", DYNAMIC)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_every_spelling_of_a_dynamic_quantiser(name: str, dtype: torch.dtype) -> None:
    found = quantised(DYNAMIC[name], dtype=dtype)
    match = the_match(found)
    read = quantiser(match)
    assert isinstance(read, Dynamic)
    assert read.floor is None
    assert read.clamps == (name not in ("amax", "inverted"))
    assert match.params.public()["mode"] == "dynamic"
    values = found.values()
    exact = values[match.inputs["rows"]].double().abs().amax(-1) / 127
    scale = values[match.inputs["row_scale"]]
    torch.testing.assert_close(scale.double().flatten(), exact.flatten(), rtol=2**-7, atol=0)


def test_of_a_lone_row_too_the_scale_is_its_own() -> None:
    def model(x1: Tensor, x2: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return amax(norm(x1 + x2, w))

    found = compiled(model, X1[:1, :1], X2[:1, :1], W)
    assert isinstance(quantiser(the_match(found)), Dynamic)


def test_a_lone_row_may_have_a_given_scale() -> None:
    def model(x1: Tensor, x2: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return (norm(x1 + x2, w) / s).round().clamp(-128, 127).to(INT8)

    found = compiled(model, X1[:1, :1], X2[:1, :1], W, ONE.view(1, 1, 1))
    assert isinstance(quantiser(the_match(found)), Static)


def test_a_smooth_scale_multiplies_first() -> None:
    match = the_match(quantised(lambda y, s: amax(y * s), W.bfloat16()))
    assert isinstance(quantiser(match), Dynamic)
    assert match.inputs["smooth"].op == "placeholder"
    assert match.inputs["smooth"] is not match.inputs["weight"]


FLOORS: dict[str, Callable[[Tensor], Tensor]] = {
    "the scale": lambda y: (y.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-5),
    "the magnitude": lambda y: y.abs().amax(-1, keepdim=True).clamp_min(1e-5) / 127,
}


@pytest.mark.parametrize("name", FLOORS)
def test_what_a_scale_is_kept_above_is_read(name: str) -> None:
    def quantise(y: Tensor) -> tuple[Tensor, Tensor]:
        scale = FLOORS[name](y)
        return (y / scale).round().to(INT8), scale

    read = quantiser(the_match(quantised(quantise)))
    assert isinstance(read, Dynamic)
    assert read.floor == 1e-5


# The ops -------------------------------------------------------------------------------------------------------------

NPU = torch.ops.npu


@pytest.mark.parametrize("dtype", [1, 12, torch.qint8])
@pytest.mark.parametrize("axis", [-1, 2])
@pytest.mark.parametrize("zero_point", [None, OFFSETS])
def test_npu_quantize(dtype: object, axis: int, zero_point: Tensor | None) -> None:
    given = (CHANNELS,) if zero_point is None else (CHANNELS, zero_point)
    found = quantised(lambda y, s, z=None: NPU.npu_quantize(y, s, z, dtype, axis), *given)
    match = the_match(found)
    read = quantiser(match)
    assert isinstance(read, Static)
    assert (read.divides, read.rounds_last, read.limits) == (True, True, (-128, 127))
    assert ("zero_point" in match.inputs) == (zero_point is not None)


def test_npu_quantize_that_multiplies_or_has_one_scale() -> None:
    read = quantiser(the_match(quantised(lambda y, s: NPU.npu_quantize(y, s, None, 1, -1, False), W.bfloat16())))
    assert isinstance(read, Static)
    assert not read.divides
    the_match(quantised(lambda y, s: NPU.npu_quantize(y, s, None, 1), ONE))  # of one scale the axis does not matter
    the_match(quantised(lambda y, s: NPU.npu_quantize(y.view(6, 64), s, None, 1), CHANNELS))


@pytest.mark.parametrize("smoothed", [False, True])
def test_npu_dynamic_quant(smoothed: bool) -> None:
    given = (W.bfloat16(),) if smoothed else ()
    match = the_match(quantised(lambda y, s=None: NPU.npu_dynamic_quant(y, smooth_scales=s), *given))
    assert isinstance(quantiser(match), Dynamic)
    assert ("smooth" in match.inputs) == smoothed
    assert match.inputs["row_scale"].args[1] == 1


def test_npu_dynamic_quant_whose_scale_is_not_used() -> None:
    assert "row_scale" not in the_match(quantised(lambda y: NPU.npu_dynamic_quant(y)[0])).inputs


def test_npu_quantize_along_another_axis() -> None:
    reason = near_miss(quantised(lambda y, s: NPU.npu_quantize(y, s, None, 1, 1), CHANNELS[:3].clone()))
    assert reason == "it is quantised along axis 1, and normed along axis 2"


# Nearly --------------------------------------------------------------------------------------------------------------


def asymmetric(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True)
    scale = (high - low) / 255
    zero = -128 - low / scale
    return torch.round(y / scale + zero).clamp(-128, 127).to(INT8), scale, zero


def of_127_5(y: Tensor) -> Tensor:
    return torch.round(y / (y.abs().amax(-1, keepdim=True) / 127.5)).clamp(-128, 127).to(INT8)


NEAR: dict[str, tuple[Callable[..., object], str]] = {
    "no clamp": (lambda y: (y / CHANNELS).round().to(INT8), "is not clamped to int8, and wraps round"),
    "a wide clamp": (lambda y: (y / 0.1).round().clamp(-200, 200).to(INT8), "clamped to -200 to 200, not to int8's"),
    "the range of uint8": (lambda y: (y / 0.1).round().clamp(0, 255).to(INT8), "clamped to 0 to 255, not to int8's"),
    "half a clamp": (lambda y: (y / 0.1).round().clamp(max=127).to(INT8), "clamped to -inf to 127, not to int8's"),
    "half a limit": (lambda y: (y / 0.1).clamp(-127.5, 127).round().to(INT8), "clamped to -127.5 to 127"),
    "asymmetric": (asymmetric, "an asymmetric quantiser"),
    "of 127.5": (of_127_5, "not its largest magnitude, divided by 127"),
    "of the mean": (
        lambda y: (y / (y.abs().mean(-1, keepdim=True) / 127)).round().clamp(-128, 127).to(INT8),
        "not its largest magnitude",
    ),
    "of the maximum": (
        lambda y: (y / (y.amax(-1, keepdim=True) / 127)).round().clamp(-128, 127).to(INT8),
        "not its largest magnitude",
    ),
    "of another value": (
        lambda y: (y / (y.sin().abs().amax(-1, keepdim=True) / 127)).round().to(INT8),
        "not its largest magnitude",
    ),
    "clamped within a row": (
        lambda y: (y / (y.abs().amax(-1, keepdim=True) / 127)).round().clamp(-100, 100).to(INT8),
        "clamped to -100 to 100; its rows reach from -127 to 127",
    ),
    "127 twice": (
        lambda y: (y / (y.abs().amax(-1, keepdim=True) / 127 / 127)).round().to(INT8),
        "not its largest magnitude, divided by 127",
    ),
    "a bounded scale": (
        lambda y: (y / (y.abs().amax(-1, keepdim=True) / 127).clamp(1e-5, 1)).round().to(INT8),
        "not its largest magnitude",
    ),
    "a scale of its own for each row": (lambda y: rounded(y / (X1[..., :1].abs() + 1)), "not its largest magnitude"),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_misses_say_what_differs(name: str) -> None:
    quantise, reason = NEAR[name]
    assert reason in near_miss(quantised(quantise))


def test_a_number_is_no_smooth_scale() -> None:
    reason = near_miss(quantised(lambda y: amax(y * 2.0)))
    assert reason == "what multiplies it before is no vector over the last axis"


def test_the_maximum_over_another_axis_is_not_a_rows() -> None:
    def model(x1: Tensor, x2: Tensor, w: Tensor) -> Tensor:  # 64 rows of 64, so that either maximum has a row's shape
        y = norm(x1 + x2, w)
        return (y / (y.abs().amax(0, keepdim=True).view(64, 1) / 127)).round().clamp(-128, 127).to(INT8)

    reason = near_miss(compiled(model, torch.randn(64, 64), torch.randn(64, 64), W))
    assert reason == "the scale of a row is not its largest magnitude, divided by 127"


# None at all ---------------------------------------------------------------------------------------------------------


def rounded(value: Tensor) -> Tensor:
    return value.round().clamp(-128, 127).to(INT8)


OTHERS: dict[str, Callable[..., object]] = {
    "no int8": lambda y: (y / 0.1).round().clamp(-128, 127),
    "int16": lambda y: (y / 0.1).round().clamp(-128, 127).to(torch.int16),
    "uint8": lambda y: (y / 0.1).round().clamp(0, 255).to(torch.uint8),
    "no rounding": lambda y: (y / 0.1).clamp(-128, 127).to(INT8),
    "floor": lambda y: (y / 0.1).floor().clamp(-128, 127).to(INT8),
    "rounded to decimals": lambda y: torch.round(y / 0.1, decimals=1).clamp(-128, 127).to(INT8),
    "no scale": lambda y: rounded(y),
    "two scales": lambda y: rounded(y / CHANNELS / CHANNELS),
    "rounded before the scale": lambda y: (y.round() / 0.1).clamp(-128, 127).to(INT8),
    "a zero point behind the clamp": lambda y: ((y / 0.1).round().clamp(-128, 127) + 1).to(INT8),
    "a quotient with rounding": lambda y: rounded(torch.div(y, 0.1, rounding_mode="floor")),
    "a scaled zero point": lambda y: rounded(torch.add(y / 0.1, OFFSETS, alpha=2)),
    "another value": lambda y: rounded(y.sin() / 0.1),
    "transposed": lambda y: rounded(y.transpose(1, 2) / 0.1),
    "other rows": lambda y: rounded(y.reshape(2, -1) / 0.1),
    "a part": lambda y: rounded(y[..., :32] / 0.1),
    "a scale for each element": lambda y: rounded(y / (X1 + 4)),
    "a zero point for each row": lambda y: rounded(y / 0.1 + X1[..., :1]),
    "a zero point for each element": lambda y: rounded(y / 0.1 + X1),
    "two scales, one for each element of a row": lambda y: rounded(y / 0.1 * X1[0]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_value_is_none(name: str) -> None:
    found = quantised(OTHERS[name])
    assert nothing(found)
    assert len(found.findings().of("rms_norm")) == 1


def test_a_scale_before_the_weight_is_none() -> None:
    def model(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return rounded(w * (normed / s))

    assert nothing(compiled(model, X1.bfloat16(), W.bfloat16(), CHANNELS.bfloat16()))


def test_a_quantised_input_of_the_norm_is_none() -> None:
    def model(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return norm(x, w), rounded(x / 0.1)

    assert nothing(compiled(model, X1, W))


def test_batch_and_tokens_may_be_symbols() -> None:
    def model(x1: Tensor, x2: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y = norm(x1 + x2, w)
        return rounded(y / s), flat(norm(x1, w))

    x1, x2 = X1.clone(), X2.clone()
    for axis in (0, 1):
        torch._dynamo.mark_dynamic(x1, axis)
        torch._dynamo.mark_dynamic(x2, axis)
    found = compiled(model, x1, x2, W, CHANNELS)
    matches = found.findings().of("norm_quant")
    assert [type(quantiser(match)) for match in matches] == [Static, Dynamic]
    values = found.values()
    assert all(repeats(match, values) for match in matches)
