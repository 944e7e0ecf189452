"""A quantised norm becomes one op with the model's numbers, or stays with the reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from helpers import Compiled, compiled
from helpers import refusal as refusal_if
from npu_fuse import Target
from npu_fuse.passes.edit import Edit, Refused
from npu_fuse.passes.lowering.norm_quant import _row_scale
from npu_fuse.passes.rewriter import Rewriter

BF16, FP16, FP32, FP64, INT8, INT32 = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.int32,
)
Tensor = torch.Tensor
X1, X2 = torch.randn(2, 3, 64), torch.randn(2, 3, 64)
W = torch.rand(64) + 0.5
CHANNELS, ONE = torch.rand(64) * 0.02 + 0.02, torch.tensor([0.03125])
OFFSETS = torch.arange(64, dtype=INT32) - 30
SCALE_TYPE = {BF16: BF16, FP16: FP32}

STATIC, DYNAMIC, ALONE = "npu::npu_add_rms_norm_quant", "npu::npu_add_rms_norm_dynamic_quant", "npu::npu_rms_norm_quant"
ADD = "npu::npu_add_rms_norm"


def norm(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rounded(value: Tensor) -> Tensor:
    return value.round().clamp(-128, 127).to(INT8)


def by_rows(y: Tensor) -> tuple[Tensor, Tensor]:
    wide = y.float()
    scale = wide.abs().amax(-1, keepdim=True) / 127
    return torch.round(wide / scale).to(INT8), scale


def residual(
    quantise: Callable[..., object], *given: Tensor, dtype: torch.dtype = BF16, **settings: object
) -> Compiled:
    """The residual sum, its norm and what `quantise` makes of it, compiled."""

    def model(x1: Tensor, x2: Tensor, w: Tensor, *given: Tensor) -> object:
        total = x1 + x2
        return total, quantise(norm(total, w), *given)

    return compiled(model, X1.to(dtype), X2.to(dtype), W.to(dtype), *given, **settings)


def exact_norm(dtype: torch.dtype) -> Tensor:
    """The norm of the exact sum in float64."""
    total = X1.to(dtype).double() + X2.to(dtype).double()
    return total / (total.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * W.to(dtype).double()


def assert_quantised(actual: Tensor, exact: Tensor, off: float | Tensor) -> None:
    """Each element is the exact value rounded and clamped, but for what roundings before may have moved it."""
    assert actual.dtype == INT8
    assert ((actual.double() - exact.clamp(-128, 127)).abs() <= 0.5 + off).all()


def assert_same_sum(found: Compiled, dtype: torch.dtype) -> None:
    assert torch.equal(found.output[0], X1.to(dtype) + X2.to(dtype))


def site(found: Compiled, kind: str = "norm_quant"):
    (only,) = [site for site in found.report.sites if site.kind == kind]
    return only


def refusal(found: Compiled) -> str:
    assert site(found).status == "refused"
    return site(found).reason


# Static --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("with_zero_point", [False, True])
def test_a_scale_for_each_channel_is_one_launch(dtype: torch.dtype, with_zero_point: bool) -> None:
    scale = CHANNELS.to(SCALE_TYPE[dtype])
    zero_point = OFFSETS.to(INT32 if dtype == FP16 else BF16)
    given = (scale, zero_point) if with_zero_point else (scale,)
    found = residual(lambda y, s, z=0: rounded(y / s + z), *given, dtype=dtype)
    assert found.report.ops == {STATIC: 1}
    assert found.report.launches_after == 1
    assert {s.kind: s.op for s in found.report.sites} == dict.fromkeys(
        ("rms_norm", "add_rms_norm", "norm_quant"), STATIC
    )
    exact = exact_norm(dtype)
    off = 2**-9 * exact.abs() / scale.double() + 0.05 if dtype == FP16 else 1e-4
    assert_quantised(found.output[1], exact / scale.double() + (zero_point.double() if with_zero_point else 0), off)
    assert_same_sum(found, dtype)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_npu_quantize_goes_into_the_norm(dtype: torch.dtype) -> None:
    scale = CHANNELS.to(SCALE_TYPE[dtype])
    found = residual(lambda y, s: torch.ops.npu.npu_quantize(y, s, None, 12, -1), scale, dtype=dtype)
    assert found.report.ops == {STATIC: 1}
    assert found.report.launches_after == 1
    if dtype == FP16:
        total = X1.half() + X2.half()
        assert torch.equal(found.output[1], torch.ops.npu.npu_quantize(norm(total, W.half()), scale, None, 12, -1))
        assert not site(found).roundings
    else:
        assert_quantised(found.output[1], exact_norm(dtype) / scale.double(), 1e-4)


@pytest.mark.parametrize("scale", [ONE, ONE[0], ONE.view(1, 1, 1)], ids=str)
def test_one_scale_is_spread_over_the_channels(scale: Tensor) -> None:
    found = residual(lambda y, s: rounded(y / s), scale.bfloat16())
    assert found.report.ops == {STATIC: 1}
    assert found.report.launches_after == 2
    assert_quantised(found.output[1], exact_norm(BF16) / 0.03125, 1e-4)


def test_the_spread_scale_of_many_norms_is_one() -> None:
    def model(x1: Tensor, x2: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return rounded(norm(x1 + x2, w) / s), rounded(norm(x1 + 2 * x2, w) / s)

    found = compiled(model, X1.bfloat16(), X2.bfloat16(), W.bfloat16(), ONE.bfloat16())
    assert found.report.ops == {STATIC: 2}
    assert found.targets().count("aten.expand.default") == 1


def test_numbers_become_constants() -> None:
    found = residual(lambda y: rounded(y / 0.03125 + 3))
    assert found.report.ops == {STATIC: 1}
    assert found.report.launches_after == 1
    assert_quantised(found.output[1], exact_norm(BF16) / 0.03125 + 3, 1e-4)
    found = residual(lambda y: rounded(y / 0.05), dtype=FP16)  # whose scales are float32
    assert found.report.ops == {STATIC: 1}
    assert_quantised(found.output[1], exact_norm(FP16) / 0.05, 2**-9 * exact_norm(FP16).abs() / 0.05 + 0.05)


def test_an_int8_zero_point_is_cast() -> None:
    found = residual(lambda y, s, z: rounded(y / s + z), CHANNELS.bfloat16(), OFFSETS.to(INT8))
    assert found.report.ops == {STATIC: 1}
    assert found.report.launches_after == 2
    assert_quantised(found.output[1], exact_norm(BF16) / CHANNELS.bfloat16().double() + OFFSETS, 1e-4)


def test_a_zero_point_behind_the_rounding_is_noted() -> None:
    found = residual(
        lambda y, s, z: ((y.float() / s).round() + z).clamp(-128, 127).to(INT8), CHANNELS, OFFSETS, dtype=FP16
    )
    assert found.report.ops == {STATIC: 1}
    assert site(found).roundings == ("the op rounds after it has added the zero point; the model rounds before",)
    scaled = exact_norm(FP16) / CHANNELS.double()
    assert_quantised(found.output[1], scaled + OFFSETS, 2**-9 * scaled.abs() + 0.05)


def test_rows_that_are_flattened_first_stay_flat() -> None:
    found = residual(lambda y, s: rounded(y.view(-1, 64) / s), CHANNELS.bfloat16())
    assert found.report.ops == {STATIC: 1}
    assert found.report.launches_after == 1
    assert found.output[1].shape == (6, 64)
    assert_quantised(found.output[1], exact_norm(BF16).view(6, 64) / CHANNELS.bfloat16().double(), 1e-4)


def test_a_sum_that_is_flattened_before_the_norm_keeps_its_shape() -> None:
    def model(x1: Tensor, x2: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        total = x1 + x2
        return total, rounded(norm(total.view(-1, 64), w) / s)

    found = compiled(model, X1.bfloat16(), X2.bfloat16(), W.bfloat16(), CHANNELS.bfloat16())
    assert found.report.ops == {STATIC: 1}
    assert found.report.launches_after == 1
    assert_same_sum(found, BF16)
    assert_quantised(found.output[1], exact_norm(BF16).view(6, 64) / CHANNELS.bfloat16().double(), 1e-4)


def test_a_sum_that_is_rounded_before_the_norm_is_refused() -> None:
    def model(x1: Tensor, x2: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        total = x1 + x2
        return total, rounded(norm(total.bfloat16(), w) / s)

    found = compiled(model, X1, X2, W.bfloat16(), ONE.bfloat16())
    assert STATIC not in found.report.ops
    assert site(found).reason == "the sum is rounded to torch.bfloat16 before the norm; the op norms it as it is"


def test_nor_may_it_have_been_rounded_and_cast_back() -> None:
    def model(x1: Tensor, x2: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        total = x1 + x2
        return total, rounded(norm(total.bfloat16().half(), w) / s)

    found = compiled(model, X1.half(), X2.half(), W.half(), ONE.half())
    assert STATIC not in found.report.ops
    assert site(found).reason == "the sum is rounded to torch.bfloat16 before the norm; the op norms it as it is"


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("zero_point", [None, torch.tensor([-7], dtype=INT8)], ids=["none", "int8"])
def test_a_lone_norm_with_one_scale_is_one_launch(dtype: torch.dtype, zero_point: Tensor | None) -> None:
    scale = torch.tensor([0.0301], dtype=dtype)
    given = (scale,) if zero_point is None else (scale, zero_point)
    found = compiled(lambda x, w, s, z=0: rounded(norm(x, w) / s + z), X1.to(dtype), W.to(dtype), *given)
    assert found.report.ops == {ALONE: 1}
    assert found.report.launches_after == 1
    x = X1.to(dtype).double()
    exact = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * W.to(dtype).double() / scale.double()
    assert_quantised(found.output, exact + (0 if zero_point is None else -7), exact.abs() * 2**-10 + 1e-3)
    assert "multiplies by the inverse of the scale" in " ".join(site(found).roundings)


def test_a_transposed_x_keeps_its_layout() -> None:
    x = torch.randn(2, 64, 32, dtype=FP16).transpose(1, 2)
    w, s = W.half(), ONE.half()

    def model(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return rounded(norm(x, w) / s)

    found = compiled(model, x, w, s)
    assert found.report.ops == {ALONE: 1}
    assert found.output.stride() == model(x, w, s).stride()
    assert (found.output.int() - model(x, w, s).int()).abs().max() <= 1


# Dynamic -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("smoothed", [False, True])
def test_a_scale_for_each_row_is_one_launch(dtype: torch.dtype, smoothed: bool) -> None:
    smooth = (torch.rand(64) + 0.5).to(dtype)
    given = (smooth,) if smoothed else ()
    found = residual(lambda y, s=None: by_rows(y.float() if s is None else y.float() * s), *given, dtype=dtype)
    assert found.report.ops == {DYNAMIC: 1}
    assert found.report.launches_after == 1
    exact = exact_norm(dtype) * (smooth.double() if smoothed else 1)
    scale = exact.abs().amax(-1, keepdim=True) / 127
    quantised, rows = found.output[1]
    assert_quantised(quantised, exact / scale, 1e-4)
    assert rows.dtype == FP32
    torch.testing.assert_close(rows.double(), scale, rtol=1e-6, atol=0)
    assert_same_sum(found, dtype)


@pytest.mark.parametrize("smoothed", [False, True])
def test_npu_dynamic_quant_goes_into_the_norm(smoothed: bool) -> None:
    given = (W.bfloat16() / 2,) if smoothed else ()
    found = residual(lambda y, s=None: torch.ops.npu.npu_dynamic_quant(y, smooth_scales=s), *given)
    assert found.report.ops == {DYNAMIC: 1}
    assert found.report.launches_after == 1
    exact = exact_norm(BF16) * (given[0].double() if given else 1)
    scale = exact.abs().amax(-1, keepdim=True) / 127
    assert_quantised(found.output[1][0], exact / scale, 1e-4)
    torch.testing.assert_close(found.output[1][1].double(), scale.squeeze(-1), rtol=1e-6, atol=0)


def in_bfloat16(y: Tensor) -> tuple[Tensor, Tensor]:
    scale = y.abs().amax(-1, keepdim=True) / 127
    return rounded(y / scale), scale


def squeezed(y: Tensor) -> tuple[Tensor, Tensor]:
    rows = y.view(-1, 64).float()
    scale = rows.abs().max(-1)[0] / 127
    return rounded(rows / scale.unsqueeze(-1)), scale


@pytest.mark.parametrize("quantise", [in_bfloat16, squeezed])
def test_the_scale_of_a_row_keeps_its_type_and_shape(quantise: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    found = residual(quantise)
    assert found.report.ops == {DYNAMIC: 1}
    wanted = quantise(norm(X1.bfloat16() + X2.bfloat16(), W.bfloat16()))
    for actual, expected in zip(found.output[1], wanted, strict=True):
        assert (actual.dtype, actual.shape, actual.stride()) == (expected.dtype, expected.shape, expected.stride())
    assert (found.output[1][0].int() - wanted[0].int()).abs().max() <= 2
    torch.testing.assert_close(found.output[1][1], wanted[1], rtol=2**-6, atol=0)
    rounds = any("rounds the scale of a row to torch.bfloat16" in note for note in site(found).roundings)
    assert rounds == (quantise is in_bfloat16)


def test_batch_and_tokens_may_be_symbols() -> None:
    def model(x1: Tensor, x2: Tensor, w: Tensor, s: Tensor) -> tuple[object, Tensor]:
        return squeezed(norm(x1 + x2, w)), rounded(norm(x1 + 2 * x2, w) / s)

    x1, x2, w, s = X1.bfloat16(), X2.bfloat16(), W.bfloat16(), CHANNELS.bfloat16()
    found = compiled(model, x1, x2, w, s, dynamic=True)
    assert found.report.ops == {STATIC: 1, DYNAMIC: 1}
    for shape in ((2, 3, 64), (5, 7, 64)):
        first, second = torch.randn(shape, dtype=BF16), torch.randn(shape, dtype=BF16)
        (quantised, rows), static = found.function(first, second, w, s)
        (wanted, wanted_rows), wanted_static = model(first, second, w, s)
        assert (quantised.int() - wanted.int()).abs().max() <= 2
        assert (static.int() - wanted_static.int()).abs().max() <= 2
        torch.testing.assert_close(rows, wanted_rows, rtol=2**-6, atol=0)


# Refused -------------------------------------------------------------------------------------------------------------

Quantise = Callable[..., object]
BF = CHANNELS.bfloat16()
REFUSED: dict[str, tuple[Quantise, tuple[Tensor, ...], torch.dtype, str]] = {
    "y is used": (
        lambda y, s: (rounded(y / s), y),
        (BF,),
        BF16,
        "the norm's result is used elsewhere too; the op gives the quantised one only",
    ),
    "a step is used": (
        lambda y, s: (rounded(step := y / s), step.sin()),
        (BF,),
        BF16,
        "a step of the quantiser, is used elsewhere too",
    ),
    "float32": (lambda y, s: rounded(y / s), (CHANNELS,), FP32, "its norm is in torch.float32; the ops that"),
    "a fine scale": (
        lambda y, s: rounded(y / s),
        (CHANNELS,),
        BF16,
        "the scale is torch.float32; for an x of torch.bfloat16 the op takes torch.bfloat16",
    ),
    "a fine number": (lambda y: rounded(y / 0.05), (), BF16, "the scale 0.05 is no torch.bfloat16"),
    "a product": (lambda y, s: rounded(y * s), (1 / BF,), BF16, "div_mode=False needs CANN 8.3 or later"),
    "a narrow clamp": (
        lambda y, s: (y / s).round().clamp(-127, 127).to(INT8),
        (BF,),
        BF16,
        "the model clamps to -127 to 127, the op to -128 to 127",
    ),
    "an int32 zero point": (
        lambda y, s, z: rounded(y / s + z),
        (BF, OFFSETS),
        BF16,
        "the zero point is torch.int32; for an x of torch.bfloat16 the op takes torch.bfloat16 or torch.int8",
    ),
    "a float zero point": (
        lambda y, s, z: rounded(y / s + z),
        (CHANNELS, OFFSETS.half()),
        FP16,
        "the zero point is torch.float16; for an x of torch.float16 the op takes torch.int32",
    ),
    "a broken zero point": (lambda y: rounded(y / 0.5 + 0.5), (), BF16, "the zero point 0.5 is no int8"),
    "a large zero point": (lambda y: rounded(y / 0.5 + 128), (), BF16, "the zero point 128 is no int8"),
    "a float zero point behind the rounding": (
        lambda y, s, z: ((y / s).round() + z).clamp(-128, 127).to(INT8),
        (BF, OFFSETS.bfloat16()),
        BF16,
        "adds a zero point after it has rounded, which is not known to be an integer",
    ),
    "float64": (
        lambda y, s: rounded(y.double() / s),
        (BF,),
        BF16,
        "the model quantises in torch.float64, the op in torch.float32",
    ),
    "16 bits unclamped": (
        lambda y: (y / (y.abs().amax(-1, keepdim=True) / 127)).round().to(INT8),
        (),
        BF16,
        "does not clamp what it rounds in 16 bits to 127, and wraps round where that is 128",
    ),
    "a floor": (
        lambda y: rounded(y / (y.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-5)),
        (),
        BF16,
        "the model keeps the scale of a row above 1e-05; the op does not",
    ),
    "a smooth scale of another type": (
        lambda y, s: by_rows(y * s),
        (W,),
        BF16,
        "smooth_scale1 is float32 (the kernel takes bfloat16)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_leave_the_model_and_fuse_less(name: str) -> None:
    quantise, given, dtype, reason = REFUSED[name]
    found = residual(quantise, *given, dtype=dtype)
    assert reason in refusal(found)
    assert found.report.ops == {ADD: 1}
    assert_same_sum(found, dtype)


def test_the_first_legal_neighbours_of_refusals() -> None:
    for quantise, given, dtype in (
        (lambda y, s: (rounded(y / s), s), (BF,), BF16),
        (lambda y: rounded(y / 0.0625), (), BF16),
        (lambda y: rounded(y / 0.5 + 1), (), BF16),
        (lambda y: rounded(y / 0.5 + 127), (), BF16),
        (lambda y, s, z: rounded(y / s + z), (CHANNELS, OFFSETS), FP16),
        (lambda y, s, z: rounded(y / s + z), (BF, OFFSETS.bfloat16()), BF16),
        (lambda y, s: rounded(y.float() / s), (BF,), BF16),
    ):
        assert residual(quantise, *given, dtype=dtype).report.ops == {STATIC: 1}


LONE: dict[str, tuple[Quantise, tuple[Tensor, ...], str]] = {
    "many scales": (lambda y, s: rounded(y / s), (BF,), "scale has shape [64] (the kernel takes [1])"),
    "a product": (lambda y, s: rounded(y * s), (ONE.bfloat16(),), "multiplies by its scale; npu::npu_rms_norm_quant"),
    "an int32 zero point": (
        lambda y, s, z: rounded(y / s + z),
        (ONE.bfloat16(), OFFSETS[:1].clone()),
        "the zero point is torch.int32; for an x of torch.bfloat16 the op takes torch.int8",
    ),
    "a float32 scale": (lambda y, s: rounded(y / s), (ONE,), "the scale is torch.float32"),
    "by rows": (by_rows, (), "there is no residual add before the norm"),
}


@pytest.mark.parametrize("name", LONE)
def test_refusals_of_a_lone_norm(name: str) -> None:
    quantise, given, reason = LONE[name]
    found = compiled(lambda x, w, *given: quantise(norm(x, w), *given), X1.bfloat16(), W.bfloat16(), *given)
    assert reason in refusal(found)
    assert found.report.ops == {"npu::npu_rms_norm": 1}


def test_the_gemma_form_is_refused() -> None:
    def model(x1: Tensor, x2: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return rounded(norm(x1 + x2, 1 + w) / s)

    found = compiled(model, X1.bfloat16(), X2.bfloat16(), W.bfloat16(), BF)
    assert refusal(found) == "1 is added to the weight, which the op does not do"


def test_a_scale_that_comes_from_the_sum_is_refused() -> None:
    def model(x1: Tensor, x2: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        total = x1 + x2
        return total, rounded(norm(total, w) / (total[0, 0].abs() + 1))

    found = compiled(model, X1.bfloat16(), X2.bfloat16(), W.bfloat16())
    assert refusal(found) == "an input of the fused op depends on its result"
    assert torch.equal(found.output[0], X1.bfloat16() + X2.bfloat16())


@pytest.mark.parametrize("soc", ["ascend950", "ascend310p"])
def test_a_soc_without_the_op_keeps_the_quantiser(soc: str) -> None:
    static = residual(lambda y, s: rounded(y / s), CHANNELS, dtype=FP16, target=Target(soc))
    dynamic = residual(by_rows, dtype=FP16, target=Target(soc))
    if soc == "ascend950":
        assert refusal(static).startswith(f"{STATIC} has no kernel on ascend950")
    else:
        assert static.report.ops == {STATIC: 1}
    assert refusal(dynamic).startswith(f"{DYNAMIC} has no kernel on {soc}")


def test_exact_numerics_keep_all_but_what_is_exact() -> None:
    scale = CHANNELS
    exact = residual(
        lambda y, s: torch.ops.npu.npu_quantize(y, s, None, 12, -1), scale, dtype=FP16, numerics="exact"
    )
    assert exact.report.ops == {STATIC: 1}
    for quantise, given in ((lambda y, s: rounded(y / s), (BF,)), (by_rows, ())):
        found = residual(quantise, *given, numerics="exact")
        assert refusal(found).startswith("Options.numerics is 'exact', and ")
        total = X1.bfloat16() + X2.bfloat16()
        wanted = quantise(norm(total, W.bfloat16()), *given)
        actual = found.output[1]
        pairs = zip(actual, wanted, strict=True) if isinstance(wanted, tuple) else [(actual, wanted)]
        assert all(torch.equal(a, b) for a, b in pairs)


def test_the_kind_can_be_turned_off() -> None:
    found = residual(lambda y, s: rounded(y / s), BF, disable={"norm_quant"})
    assert refusal(found) == "norm_quant is turned off by Options.disable"
    assert found.report.ops == {ADD: 1}


@pytest.fixture(scope="module")
def sites() -> dict[str, Compiled]:
    """Each op's smallest site, in float16."""
    scale, one = CHANNELS, ONE.half()

    def alone(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return rounded(norm(x, w) / s)

    found = {
        STATIC: residual(lambda y, s: rounded(y / s), scale, dtype=FP16),
        DYNAMIC: residual(by_rows, dtype=FP16),
        ALONE: compiled(alone, X1.half(), W.half(), one),
    }
    assert all(site(of).op == op for op, of in found.items())
    return found


@pytest.mark.parametrize("op", [STATIC, DYNAMIC, ALONE])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"norm.bias": True}, "its norm has a bias, a gate, groups or a scale before it"),
        ({"norm.groups": 4}, "its norm has a bias, a gate, groups or a scale before it"),
        ({"norm.offset": 1.0}, "1 is added to the weight"),
        ({"norm.steps": frozenset({FP64})}, "the model computes in torch.float64"),
        ({"norm.dtype": BF16, "norm.steps": frozenset()}, "the norm's result is torch.bfloat16 for an x of"),
        ({"quantiser.steps": frozenset({FP64})}, "the model quantises in torch.float64"),
    ],
)
def test_what_else_a_norm_may_be(sites: dict[str, Compiled], op: str, changes: dict, reason: str) -> None:
    assert reason in refusal_if(sites[op], "norm_quant", {f"params.{path}": value for path, value in changes.items()})


@pytest.mark.parametrize("op", [STATIC, ALONE])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rounds_last": False, "zero_point": 0.5}, "a zero point after it has rounded, which is not known to be an"),
        ({"zero_point": 0.5}, "the zero point 0.5 is no int8"),
        ({"zero_point": -129.0}, "the zero point -129 is no int8"),
        ({"zero_point": 128.0}, "the zero point 128 is no int8"),
    ],
)
def test_what_else_a_quantiser_may_add(sites: dict[str, Compiled], op: str, changes: dict, reason: str) -> None:
    given = {f"params.quantiser.{name}": value for name, value in changes.items()}
    assert reason in refusal_if(sites[op], "norm_quant", given)


@pytest.mark.parametrize("op", [STATIC, DYNAMIC, ALONE])
def test_coarse_statistics_are_not_exact(sites: dict[str, Compiled], op: str) -> None:
    coarse = {"params.norm.statistics_dtype": FP16, "params.quantiser.steps": frozenset()}
    assert "takes its statistics in torch.float16" in refusal_if(sites[op], "norm_quant", coarse, numerics="exact")


def test_a_norm_that_is_rounded_at_its_end_is_not_exact(sites: dict[str, Compiled]) -> None:
    late = {"params.norm.normed_dtype": FP32}
    said = refusal_if(sites[STATIC], "norm_quant", late, numerics="exact")
    assert "the op rounds the normed x to torch.float16 before the weight; the model does not" in said


def test_what_rows_are_multiplied_by_is_noted() -> None:
    found = residual(by_rows, dtype=FP16)
    assert any("multiplies a row by 127 / max" in rounding for rounding in site(found).roundings)


def test_a_sum_with_two_quantised_norms_goes_with_the_first() -> None:
    def model(x1: Tensor, x2: Tensor, v: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        total = x1 + x2
        return rounded(norm(total, v) / s), rounded(norm(total, w) / s)

    found = compiled(model, X1.half(), X2.half(), W.half(), W.half() * 2, CHANNELS)
    assert found.report.ops[STATIC] == 1
    first, second = (site for site in found.report.sites if site.kind == "norm_quant")
    assert (first.status, second.reason) == ("lowered", "the add has been taken by another fusion")


def test_scales_of_rows_have_one_unknown_size_at_most() -> None:
    module = make_fx(lambda x: (x.sin(), x.cos()), tracing_mode="fake")(torch.randn(6))
    given, wanted = (node for node in module.graph.nodes if node.op == "call_function")
    edit = Edit(Rewriter(module, Target(), {}, pack_weights=True), wanted, [wanted])
    sizes = [ShapeEnv().create_unbacked_symint() for _ in range(2)]
    wanted.meta["val"] = torch.empty(sizes, device="meta")
    with pytest.raises(Refused, match="with more than one symbol"):
        _row_scale(given, wanted, edit)
