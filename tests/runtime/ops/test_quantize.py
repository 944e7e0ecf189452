"""The quantisers against float64 maths and their limits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_fuse.runtime.ops.quantize import NPU_DYNAMIC_QUANT, NPU_QUANTIZE
from npu_fuse.runtime.target import Target

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
RESULTS = {1: torch.int8, 12: torch.int8, 13: torch.uint8, 3: torch.int32}
SOCS = ("ascend910b", "ascend910_93", "ascend950", "ascend310p")

shapes = st.lists(st.integers(1, 7), min_size=2, max_size=4).map(tuple)
layouts = st.sampled_from(["plain", "transposed", "sliced", "expanded"])


def assert_rounded(actual, exact, result=torch.int8):
    """Each element is the exact value, rounded and clamped; just beside a tie either neighbour will do."""
    limits = torch.iinfo(result)
    assert actual.dtype == result
    clamped = exact.clamp(limits.min, limits.max)
    assert (actual.double() - clamped).abs().max() <= 0.5 + 1e-4


def exact_quantize(x, scales, zero_points, axis, div_mode=True):
    covered = [1] * x.dim()
    covered[axis] = scales.numel()
    scales = scales.double().reshape(covered)
    value = x.double() / scales if div_mode else x.double() * scales
    return value if zero_points is None else value + zero_points.double().reshape(covered)


@pytest.mark.parametrize("dtype", RESULTS)
@pytest.mark.parametrize("x_dtype", [FP16, BF16, FP32])
@pytest.mark.parametrize("scale_dtype", [FP32, BF16])
@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_quantize_is_the_maths(make_tensor, dtype, x_dtype, scale_dtype, axis):
    x = make_tensor((5, 6, 32), x_dtype)
    scales = (make_tensor((x.shape[axis],), FP32, seed=1).abs() * 0.02 + 0.01).to(scale_dtype)
    zero_points = torch.arange(x.shape[axis], dtype=torch.int32) - 3
    for zero_point in (None, zero_points, zero_points.to(torch.int8), zero_points.to(BF16)):
        actual = NPU_QUANTIZE.op(x, scales, zero_point, dtype, axis)
        assert_rounded(actual, exact_quantize(x, scales, zero_point, axis), RESULTS[dtype])


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32])
@pytest.mark.parametrize("axis", [-1, -2])
def test_without_div_mode_it_multiplies(make_tensor, dtype, axis):
    x = make_tensor((5, 6, 32), dtype)
    scales = (make_tensor((x.shape[axis],), seed=1).abs() * 20 + 10).to(dtype)
    zero_points = make_tensor((x.shape[axis],), dtype, seed=2)
    actual = NPU_QUANTIZE.op(x, scales, zero_points, 12, axis, False)
    assert_rounded(actual, exact_quantize(x, scales, zero_points, axis, div_mode=False))
    spread = [1] * 3
    spread[axis] = x.shape[axis]
    again = NPU_QUANTIZE.op(x, scales.reshape(spread), zero_points.reshape(spread), 12, axis, False)
    assert torch.equal(again, actual)


def test_one_scale_serves_the_whole_tensor(make_tensor):
    x, zero = make_tensor((4, 5)), torch.tensor([3], dtype=torch.int32)
    expected = exact_quantize(x, torch.tensor([0.02]), zero, -1)
    for axis in (0, 1, -1):
        assert_rounded(NPU_QUANTIZE.op(x, torch.tensor([0.02]), zero, 1, axis), expected)


def test_axis_is_1_by_default_and_halves_go_to_even(make_tensor):
    x, scales = make_tensor((3, 4, 5)), torch.tensor([0.1, 0.2, 0.3, 0.4])
    assert torch.equal(NPU_QUANTIZE.op(x, scales, None, 1), NPU_QUANTIZE.op(x, scales, None, 1, 1))
    halves = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5])
    assert NPU_QUANTIZE.op(halves, torch.ones(1), None, 1, 0).tolist() == [-2, -2, 0, 0, 2, 2]


def test_results_are_clamped():
    x = torch.tensor([-3e9, -200.0, -128.4, 127.4, 300.0, 3e9])
    one = torch.ones(1)
    assert NPU_QUANTIZE.op(x, one, None, 1, 0).tolist() == [-128, -128, -128, 127, 127, 127]
    assert NPU_QUANTIZE.op(x, one, None, 13, 0).tolist() == [0, 0, 0, 127, 255, 255]
    assert NPU_QUANTIZE.op(x, one, None, 3, 0).tolist() == [-(2**31), -200, -128, 127, 300, 2**31 - 1]


def exact_rows(x, smooth=None):
    value = x.double() if smooth is None else x.double() * smooth.double()
    scale = value.abs().amax(-1) / 127
    return value / scale.unsqueeze(-1), scale


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("smoothed", [False, True])
def test_dynamic_quant_is_the_maths(make_tensor, dtype, smoothed):
    x = make_tensor((3, 5, 64), dtype)
    smooth = make_tensor((64,), dtype, seed=1).abs() + 0.5 if smoothed else None
    y, scale = NPU_DYNAMIC_QUANT.op(x, smooth_scales=smooth)
    exact, exact_scale = exact_rows(x, smooth)
    assert_rounded(y, exact)
    assert y.abs().amax(-1).eq(127).all()
    assert scale.dtype == FP32
    torch.testing.assert_close(scale.double(), exact_scale, rtol=1e-6, atol=0)


def test_a_row_of_zeros_stays_zeros(make_tensor):
    x = make_tensor((3, 16), FP16)
    x[1] = 0
    y, scale = NPU_DYNAMIC_QUANT.op(x)
    assert y[1].eq(0).all()
    assert scale[1] == 0
    assert y[0].abs().max() == y[2].abs().max() == 127


@settings(max_examples=60, deadline=None)
@given(shape=shapes, dtype=st.sampled_from([FP16, BF16]), layout=layouts, axis=st.integers(-2, 1))
def test_fakes_have_the_real_layout(make_tensor, assert_same_layout, shape, dtype, layout, axis):
    x = make_tensor(shape, dtype, layout)
    assert_same_layout(NPU_DYNAMIC_QUANT.op, x)
    for number in RESULTS:
        assert_same_layout(NPU_QUANTIZE.op, x, torch.ones(shape[axis]), None, number, axis)


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_opcheck(make_tensor, dtype):
    x, utils = make_tensor((2, 3, 64), dtype), ("test_schema", "test_faketensor")
    torch.library.opcheck(NPU_QUANTIZE.op, (x, torch.ones(64), torch.ones(64).int(), 12, -1), test_utils=utils)
    torch.library.opcheck(NPU_QUANTIZE.op, (x, x[0, 0], None, 1, -1, False), test_utils=utils)
    torch.library.opcheck(NPU_DYNAMIC_QUANT.op, (x,), {"smooth_scales": x[0, 0]}, test_utils=utils)


def test_symbolic_batch_and_token_dims_are_kept_and_not_refused(symbolic):
    x, scales = symbolic(("B", "S", 64), BF16), symbolic((64,), BF16)
    assert NPU_QUANTIZE.refusal(Target(), x, scales, None, 1, -1) is None
    assert NPU_QUANTIZE.op(x, scales, None, 1, -1).shape == x.shape
    assert NPU_DYNAMIC_QUANT.refusal(Target(), x, smooth_scales=scales) is None
    y, scale = NPU_DYNAMIC_QUANT.op(x, smooth_scales=scales)
    assert y.shape == x.shape
    assert scale.shape == x.shape[:-1]


def test_a_scale_for_each_of_a_symbolic_axis_must_be_known_to_fit(symbolic):
    x = symbolic(("B", "S", 64))
    assert NPU_QUANTIZE.refusal(Target(), x, symbolic(("S",)), None, 1, 1) is None
    assert "neither one element nor one for each" in NPU_QUANTIZE.refusal(Target(), x, symbolic(("B",)), None, 1, 1)


ONES = torch.ones


def quantize_borders():
    x, s, z = ONES(4, 8), ONES(8), ONES(8, dtype=torch.int32)
    half = x.half()
    last = (None, 1, -1)
    return [
        ((x.double(), s, *last), "input is float64 (the kernel takes float16", (half, s, *last)),
        ((ONES(()), ONES(1), *last), "input has 0 dims", (ONES(8), ONES(1), *last)),
        ((ONES([1] * 9), ONES(1), *last), "input has 9 dims", (ONES([1] * 8), ONES(1), *last)),
        ((ONES(0, 8), s, *last), "input [0, 8] is empty", (ONES(1, 8), s, *last)),
        ((x, s, None, 1, 2), "axis 2 is out of range for input [4, 8]", (x, s, None, 1, 1)),
        ((x, s, None, 1, -3), "axis -3 is out of range", (x, ONES(4), None, 1, -2)),
        (
            (half, s.half(), *last),
            "scales is float16 (the kernel takes float32, bfloat16)",
            (half, s.bfloat16(), *last),
        ),
        ((x, ONES(1, 8), *last), "scales has 2 dims [1, 8]", (x, s, *last)),
        ((x, s, z.float(), 1, -1), "zero_points is float32 (the kernel takes int8", (x, s, z.bfloat16(), 1, -1)),
        ((x, s, None, 16, -1), "dtype is 16 (known here with div_mode=True: 1, 12, 13, 3)", (x, s, None, 13, -1)),
        ((x, s, None, 1, 0), "scales [8] has neither one element nor one for each of axis 0", (x, ONES(4), None, 1, 0)),
        ((x, ONES(7), *last), "scales [7] has neither one element", (x, ONES(1), *last)),
        ((x, s, z[:1], 1, -1), "zero_points [1] and scales [8] differ in shape", (x, s, z, 1, -1)),
        ((half, s, None, 1, -1, False), "scales is float32 (the kernel takes float16)", (half, s.half(), *last, False)),
        (
            (x, ONES(4), None, 1, 0, False),
            "axis is 0 (with div_mode=False the kernel",
            (x, ONES(4), None, 1, -2, False),
        ),
        ((x, s, None, 13, -1, False), "dtype is 13 (known here with div_mode=False: 1, 12)", (x, s, *last, False)),
        ((x, s, z, 1, -1, False), "zero_points is int32 (the kernel takes float32)", (x, s, z.float(), 1, -1, False)),
        ((x, ONES(4, 8), *last, False), "scales [4, 8] has neither", (x, ONES(1, 8), *last, False)),
        ((ONES(2, 4, 8), ONES(1, 8), *last, False), "scales [1, 8] has", (ONES(2, 4, 8), ONES(1, 1, 8), *last, False)),
    ]


@pytest.mark.parametrize(("outside", "reason", "inside"), quantize_borders())
def test_borders_of_quantize(outside, reason, inside):
    assert reason in NPU_QUANTIZE.refusal(Target(), *outside)
    assert NPU_QUANTIZE.refusal(Target(), *inside) is None
    with pytest.raises(ValueError, match="npu::npu_quantize: ") as raised:
        NPU_QUANTIZE.op(*outside)
    assert reason in str(raised.value)
    NPU_QUANTIZE.op(*inside)


HALF = ONES(4, 8).half()


@pytest.mark.parametrize(
    ("outside", "kwargs", "reason", "inside", "legal"),
    [
        (ONES(4, 8), {}, "input is float32 (the kernel takes float16, bfloat16)", HALF, {}),
        (HALF[0], {}, "input has 1 dims [8] (the kernel takes 2 to 8)", HALF[:1], {}),
        (ONES([1] * 9).half(), {}, "input has 9 dims", ONES([1] * 8).half(), {}),
        (HALF[:0], {}, "input [0, 8] is empty", HALF, {}),
        (HALF, {"smooth_scales": ONES(8)}, "smooth_scales is float32", HALF, {"smooth_scales": HALF[0]}),
        (HALF, {"smooth_scales": HALF[0, :7]}, "smooth_scales [7] does not cover", HALF, {"smooth_scales": HALF[0]}),
        (HALF, {"smooth_scales": HALF[:1]}, "smooth_scales [1, 8] does not cover", HALF, {"smooth_scales": HALF[0]}),
        (HALF, {"group_index": ONES(1).int()}, "group_index is given", HALF, {"group_index": None}),
        (HALF, {"dst_type": 16}, "dst_type is 16 (only int8, 1, is known here)", HALF, {"dst_type": 1}),
        (HALF, {"quant_mode": "pertensor"}, "quant_mode is 'pertensor'", HALF, {"quant_mode": "pertoken"}),
        (HALF, {"dst_type_max": 15.0}, "dst_type_max is 15.0", HALF, {"dst_type_max": 0.0}),
    ],
)
def test_borders_of_dynamic_quant(outside, kwargs, reason, inside, legal):
    assert reason in NPU_DYNAMIC_QUANT.refusal(Target(), outside, **kwargs)
    assert NPU_DYNAMIC_QUANT.refusal(Target(), inside, **legal) is None
    with pytest.raises(ValueError, match="npu::npu_dynamic_quant: ") as raised:
        NPU_DYNAMIC_QUANT.op(outside, **kwargs)
    assert reason in str(raised.value)
    NPU_DYNAMIC_QUANT.op(inside, **legal)


@pytest.mark.parametrize("soc", SOCS)
def test_socs(soc):
    for contract, arguments in ((NPU_QUANTIZE, (HALF, ONES(8), None, 1, -1)), (NPU_DYNAMIC_QUANT, (HALF,))):
        reason = contract.refusal(Target(soc), *arguments)
        assert (reason is None) == (soc != "ascend950")
        assert reason is None or f"{contract.name} has no kernel on ascend950" in reason
    assert "input is bfloat16" in NPU_DYNAMIC_QUANT.refusal(Target("ascend310p"), HALF.bfloat16())
    assert "scales is bfloat16" in NPU_QUANTIZE.refusal(Target("ascend310p"), HALF, ONES(8).bfloat16(), None, 1, -1)
