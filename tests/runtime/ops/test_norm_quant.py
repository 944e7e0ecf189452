"""The norms that quantise or cast, against float64 maths, the roundings of their kernels, and their limits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_fuse.runtime.ops.norm_quant import (
    NPU_ADD_RMS_NORM_CAST,
    NPU_ADD_RMS_NORM_DYNAMIC_QUANT,
    NPU_ADD_RMS_NORM_QUANT,
    NPU_RMS_NORM_QUANT,
)
from npu_fuse.runtime.target import Target

FP16, BF16, FP32, INT8, INT32 = torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int32
DTYPES = (FP16, BF16)
ADDING = (NPU_ADD_RMS_NORM_CAST, NPU_ADD_RMS_NORM_QUANT, NPU_ADD_RMS_NORM_DYNAMIC_QUANT)
# Two roundings to a dtype, of values that are a few units large.
TOLERANCE = {FP16: 2**-9, BF16: 2**-6}
# The types of scales and zero points that npu_add_rms_norm_quant takes.
SCALES = {FP16: (FP32, INT32), BF16: (BF16, BF16)}

rows = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)
layouts = st.sampled_from(["plain", "transposed", "sliced", "expanded"])


@pytest.fixture
def inputs(make_tensor):
    """x1, x2 and gamma of one dtype."""

    def make(dtype, shape=(3, 5, 64), gamma_rank=1):
        gamma = make_tensor(shape[-gamma_rank:], dtype, seed=2)
        return make_tensor(shape, dtype), make_tensor(shape, dtype, seed=1), gamma

    return make


def exact_norm(x, gamma, epsilon=1e-5):
    x, gamma = x.double(), gamma.double()
    dims = tuple(range(-gamma.dim(), 0))
    return x / ((x**2).mean(dims, keepdim=True) + epsilon).sqrt() * gamma


def exact_sum(x1, x2):
    return x1.double() + x2.double()


def assert_quantised(actual, exact, off):
    """Each element is the exact value rounded and clamped, but for what roundings before may have moved it."""
    assert actual.dtype == INT8
    assert ((actual.double() - exact.clamp(-128, 127)).abs() <= 0.5 + off).all()


# Numbers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gamma_rank", [1, 2])
def test_cast_is_the_maths(inputs, dtype, gamma_rank):
    x1, x2, gamma = inputs(dtype, gamma_rank=gamma_rank)
    y_float, y, rstd, x_out = NPU_ADD_RMS_NORM_CAST.op(x1, x2, gamma, 1e-5)
    assert (y_float.dtype, y.dtype, rstd.dtype, x_out.dtype) == (FP32, dtype, FP32, dtype)
    assert rstd.shape == (3, 5, 1) if gamma_rank == 1 else rstd.shape == (3, 1, 1)
    exact = exact_norm(exact_sum(x1, x2), gamma)
    torch.testing.assert_close(y.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(y_float, y.float())
    assert torch.equal(x_out, x1 + x2)
    torch.testing.assert_close(exact, (x_out.double() * rstd * gamma.double()), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gamma_rank", [1, 2])
@pytest.mark.parametrize("with_zero_points", [False, True])
def test_static_quantiser_is_the_maths(inputs, make_tensor, dtype, gamma_rank, with_zero_points):
    x1, x2, gamma = inputs(dtype, gamma_rank=gamma_rank)
    scale_dtype, zero_dtype = SCALES[dtype]
    scales = (make_tensor(gamma.shape, seed=3).abs() * 0.02 + 0.02).to(scale_dtype)
    zero_points = (torch.arange(gamma.numel()) % 9 - 4).reshape(gamma.shape).to(zero_dtype)
    zero_points = zero_points if with_zero_points else None
    y1, y2, x_out = NPU_ADD_RMS_NORM_QUANT.op(x1, x2, gamma, scales, zero_points, epsilon=1e-5)
    norm = exact_norm(exact_sum(x1, x2), gamma)
    exact = norm / scales.double() + (0 if zero_points is None else zero_points.double())
    # bfloat16 isn't rounded on the way; float16 is, to the sum, the normalised value and the product.
    off = 1e-4 if dtype == BF16 else 2**-9 * norm.abs() / scales.double() + 0.05
    assert_quantised(y1, exact, off)
    assert y1.float().std() > 5
    assert torch.equal(y2, torch.zeros_like(y1))
    assert torch.equal(x_out, x1 + x2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_static_quantiser_with_all_that_newer_kernels_take(inputs, make_tensor, dtype):
    x1, x2, gamma = inputs(dtype)
    scale_dtype, zero_dtype = SCALES[dtype]
    scales1, scales2 = ((make_tensor((64,), seed=s).abs() * 9 + 5).to(scale_dtype) for s in (3, 4))
    zero1, zero2 = (torch.arange(64).to(zero_dtype), -torch.arange(64).to(zero_dtype))
    beta = make_tensor((64,), dtype, seed=5)
    y1, y2, _ = NPU_ADD_RMS_NORM_QUANT.op(
        x1, x2, gamma, scales1, zero1, beta, scales2, zero2, epsilon=1e-5, div_mode=False
    )
    norm = exact_norm(exact_sum(x1, x2), gamma) + beta.double()
    for y, scales, zero in ((y1, scales1, zero1), (y2, scales2, zero2)):
        off = 1e-3 if dtype == BF16 else 2**-8 * norm.abs() * scales.double() + 0.05
        assert_quantised(y, norm * scales.double() + zero.double(), off)
    assert not torch.equal(y1, y2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothed", [False, True])
@pytest.mark.parametrize("with_beta", [False, True])
def test_dynamic_quantiser_is_the_maths(inputs, make_tensor, dtype, smoothed, with_beta):
    x1, x2, gamma = inputs(dtype)
    smooth = make_tensor((64,), dtype, seed=3).abs() + 0.5 if smoothed else None
    beta = make_tensor((64,), dtype, seed=4) if with_beta else None
    y1, y2, x_out, scale1, scale2 = NPU_ADD_RMS_NORM_DYNAMIC_QUANT.op(
        x1, x2, gamma, smooth_scale1=smooth, beta=beta, epsilon=1e-5
    )
    value = exact_norm(exact_sum(x1, x2), gamma)
    value = value if beta is None else value + beta.double()
    value = value if smooth is None else value * smooth.double()
    scale = value.abs().amax(-1) / 127
    assert_quantised(y1, value / scale.unsqueeze(-1), 1e-4)
    torch.testing.assert_close(scale1.double(), scale, rtol=1e-6, atol=0)
    assert y1.abs().amax(-1).eq(127).all()
    assert torch.equal(x_out, x1 + x2)
    assert y2.shape == scale2.shape == (0,)


def test_both_dynamic_quantisers(inputs, make_tensor):
    x1, x2, gamma = inputs(BF16)
    first, second = (make_tensor((64,), BF16, seed=seed).abs() + 0.5 for seed in (3, 4))
    op = NPU_ADD_RMS_NORM_DYNAMIC_QUANT.op
    y1, y2, x_out, scale1, scale2 = op(x1, x2, gamma, smooth_scale1=first, smooth_scale2=second)
    alone = op(x1, x2, gamma, smooth_scale2=second, output_mask=[False, True])
    assert alone[0].shape == alone[3].shape == (0,)
    assert torch.equal(y2, alone[1])
    assert torch.equal(scale2, alone[4])
    single = op(x1, x2, gamma, smooth_scale1=first, output_mask=[True, False])
    assert torch.equal(y1, single[0])
    assert torch.equal(scale1, single[3])
    assert all(torch.equal(x_out, other[2]) for other in (alone, single))
    assert not torch.equal(scale1, scale2)


def test_a_row_of_zeros_has_scale_zero(inputs):
    x1, x2, gamma = inputs(FP16)
    x1[0, 0] = x2[0, 0] = 0
    y1, _, _, scale1, _ = NPU_ADD_RMS_NORM_DYNAMIC_QUANT.op(x1, x2, gamma)
    assert y1[0, 0].eq(0).all()
    assert scale1[0, 0] == 0
    assert scale1[0, 1] > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gamma_shape", [(64,), (1, 64)])
def test_rms_norm_quant_is_the_maths(make_tensor, dtype, gamma_shape):
    x, gamma, beta = make_tensor((3, 5, 64), dtype), *(make_tensor(gamma_shape, dtype, seed=s) for s in (1, 2))
    scale, offset = torch.tensor([0.03], dtype=dtype), torch.tensor([-7], dtype=INT8)
    y = NPU_RMS_NORM_QUANT.op(x, gamma, beta, scale, offset, 1e-5)
    exact = (exact_norm(x, gamma.flatten()) + beta.double().flatten()) / scale.double() - 7
    assert_quantised(y, exact, exact.abs() * 2**-10 + 1e-3)  # a rounding to float16 comes before the one to int8
    assert y.float().std() > 5


def test_rms_norm_quant_rounds_to_float16_first():
    x = torch.full((1, 16), 2.0, dtype=BF16)
    gamma, beta = torch.ones(16, dtype=BF16), torch.zeros(16, dtype=BF16)
    gamma[0], beta[0] = 100.5, 0.005  # 100.505 is 100.5 in float16, which goes to 100
    gamma[1], beta[1] = 100.5, 0.25
    y = NPU_RMS_NORM_QUANT.op(x, gamma, beta, torch.ones(1, dtype=BF16), torch.zeros(1, dtype=INT8), 0.0)
    assert y[0, :3].tolist() == [100, 101, 1]


def test_bfloat16_is_quantised_unrounded_and_float16_rounded(inputs):
    for dtype in DTYPES:
        x1, x2, gamma = inputs(dtype)
        scales = torch.full((64,), 0.0301, dtype=SCALES[dtype][0])
        y1 = NPU_ADD_RMS_NORM_QUANT.op(x1, x2, gamma, scales, None)[0]
        total = (x1 + x2).float() if dtype == FP16 else x1.float() + x2.float()
        normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)
        rounded = (gamma * normed.to(dtype)).float()
        unrounded = normed * gamma.float()
        expected = rounded if dtype == FP16 else unrounded
        other = unrounded if dtype == FP16 else rounded
        assert torch.equal(y1, (expected / scales.float()).round().clamp(-128, 127).to(INT8))
        assert not torch.equal(y1, (other / scales.float()).round().clamp(-128, 127).to(INT8))


def test_default_epsilon_is_1e_6(inputs):
    x1, x2, gamma = (tensor * 1e-3 if index < 2 else tensor for index, tensor in enumerate(inputs(BF16)))
    scales, one, zero = gamma.abs() + 1, torch.ones(1, dtype=BF16), torch.zeros(1, dtype=INT8)
    assert torch.equal(NPU_ADD_RMS_NORM_CAST.op(x1, x2, gamma)[0], NPU_ADD_RMS_NORM_CAST.op(x1, x2, gamma, 1e-6)[0])
    for contract, arguments in (
        (NPU_ADD_RMS_NORM_QUANT, (x1, x2, gamma, scales * 0.01, None)),
        (NPU_ADD_RMS_NORM_DYNAMIC_QUANT, (x1, x2, gamma)),
    ):
        given = contract.op(*arguments, epsilon=1e-6)
        assert all(map(torch.equal, contract.op(*arguments), given))
        assert not all(map(torch.equal, contract.op(*arguments, epsilon=1e-3), given))
    arguments = (x1, gamma, gamma, one * 0.01, zero)
    assert torch.equal(NPU_RMS_NORM_QUANT.op(*arguments), NPU_RMS_NORM_QUANT.op(*arguments, 1e-6))


# Shapes


def calls(x1, x2, gamma):
    """A legal call of each op, of what tensors there are."""
    dtype = x1.dtype
    scales, zero_points = (torch.ones(gamma.shape, dtype=t) for t in SCALES[dtype])
    one, zero = torch.ones(1, dtype=dtype), torch.zeros(1, dtype=INT8)
    return {
        NPU_ADD_RMS_NORM_CAST: ((x1, x2, gamma, 1e-6), {}),
        NPU_ADD_RMS_NORM_QUANT: ((x1, x2, gamma, scales, zero_points), {}),
        NPU_ADD_RMS_NORM_DYNAMIC_QUANT: ((x1, x2, gamma), {"smooth_scale1": gamma}),
        NPU_RMS_NORM_QUANT: ((x1, gamma, gamma, one, zero), {}),
    }


@settings(max_examples=60, deadline=None)
@given(lead=rows, dtype=st.sampled_from(DTYPES), layout=layouts)
def test_fakes_have_the_real_layout(make_tensor, assert_same_layout, lead, dtype, layout):
    x1, x2, gamma = make_tensor((*lead, 16), dtype, layout), make_tensor((*lead, 16), dtype), make_tensor((16,), dtype)
    for contract, (args, _) in calls(x1, x2, gamma).items():
        assert_same_layout(contract.op, *args)


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(inputs, dtype):
    for contract, (args, kwargs) in calls(*inputs(dtype)).items():
        torch.library.opcheck(contract.op, args, kwargs, test_utils=("test_schema", "test_faketensor"))


def test_symbolic_batch_and_token_dims_are_kept_and_not_refused(symbolic):
    x1, x2, gamma = symbolic(("B", "S", 64), BF16), symbolic(("B", "S", 64), BF16), symbolic((64,), BF16)
    one, zero = symbolic((1,), BF16), symbolic((1,), INT8)
    for contract, args in (
        (NPU_ADD_RMS_NORM_CAST, (x1, x2, gamma)),
        (NPU_ADD_RMS_NORM_QUANT, (x1, x2, gamma, gamma, gamma)),
        (NPU_ADD_RMS_NORM_DYNAMIC_QUANT, (x1, x2, gamma)),
        (NPU_RMS_NORM_QUANT, (x1, gamma, gamma, one, zero)),
    ):
        assert contract.refusal(Target(), *args) is None
        results = contract.op(*args)
        first = results if isinstance(results, torch.Tensor) else results[0]
        assert first.shape == x1.shape
    assert NPU_ADD_RMS_NORM_DYNAMIC_QUANT.op(x1, x2, gamma)[3].shape == x1.shape[:2]


def test_different_symbols_are_no_equal_shapes(symbolic):
    x1, x2, gamma = symbolic(("B", "S", 64), BF16), symbolic(("S", "B", 64), BF16), symbolic((64,), BF16)
    for contract in ADDING:
        scales = (gamma, None) if contract is NPU_ADD_RMS_NORM_QUANT else ()
        assert "differ in shape" in contract.refusal(Target(), x1, x2, gamma, *scales)


# Borders

X, G = torch.ones(4, 16, dtype=FP16), torch.ones(16, dtype=FP16)
S, Z = torch.ones(16), torch.ones(16, dtype=INT32)
ONE, ZERO = torch.ones(1, dtype=FP16), torch.zeros(1, dtype=INT8)


def adding_borders():
    """What the three ops with an add share: x1, x2, gamma just outside, the reason, and just inside."""
    ones = torch.ones
    lone = ones([1] * 9, dtype=FP16)
    return [
        ((X.float(), X.float(), G.float()), "x1 is float32 (the kernel takes float16, bfloat16)", (X, X, G)),
        ((X, X.bfloat16(), G), "x2 is bfloat16 (the kernel takes float16)", (X, X, G)),
        ((X, X, G.float()), "gamma is float32 (the kernel takes float16)", (X, X, G)),
        ((X, X[:1], G), "x1 [4, 16] and x2 [1, 16] differ in shape", (X[:1], X[:1], G)),
        ((lone, lone, lone[0, 0]), "x1 has 9 dims", None),
        ((X, X, G[:15]), "gamma [15] does not cover the trailing dims of x1 [4, 16]", (X, X, G)),
        ((X, X, X.reshape(1, 4, 16)), "gamma has 3 dims", (X, X, G)),
        ((X[:0], X[:0], G), "x1 [0, 16] is empty", (X[:1], X[:1], G)),
    ]


BORDERS = [
    (contract, outside, {}, reason, inside, {})
    for contract in ADDING
    for outside, reason, inside in adding_borders()
    if inside is not None
]
QUANT, DYNAMIC = NPU_ADD_RMS_NORM_QUANT, NPU_ADD_RMS_NORM_DYNAMIC_QUANT
BF = (X.bfloat16(), X.bfloat16(), G.bfloat16())
BORDERS += [
    (QUANT, (X, X, G, G, None), {}, "scales1 is float16 (for a float16 x1 the kernel takes float32", (X, X, G), {}),
    (QUANT, (*BF, S, None), {}, "scales1 is float32 (for a bfloat16 x1 the kernel takes bfloat16", (*BF, BF[2]), {}),
    (QUANT, (X, X, G, S[:1], None), {}, "scales1 [1] has not the shape of gamma [16]", (X, X, G, S), {}),
    (QUANT, (X, X, G, S, Z.to(INT8)), {}, "zero_points1 is int8 (for a float16 x1", (X, X, G, S, Z), {}),
    (QUANT, (*BF, BF[2], Z), {}, "zero_points1 is int32 (for a bfloat16 x1", (*BF, BF[2], BF[2]), {}),
    (QUANT, (X, X, G, S, Z[:1]), {}, "zero_points1 [1] has not the shape", (X, X, G, S, Z), {}),
    (QUANT, (X, X, G, S, Z, None, None, Z), {}, "zero_points2 is given without scales2", (X, X, G, S, Z), {}),
    (QUANT, (X, X, G, S, None), {"axis": 1}, "axis is 1 (the kernel takes -1)", (X, X, G, S), {"axis": -1}),
    (QUANT, (X, X, G, S, None), {"dst_type": 16}, "dst_type is 16", (X, X, G, S), {"dst_type": 1}),
    (
        QUANT,
        (X[:, :15], X[:, :15], G[:15], S[:15], None),
        {},
        "the last dim of x1 takes 30 bytes, no multiple of 32",
        (X, X, G, S),
        {},
    ),
    (DYNAMIC, (X[0], X[0], G), {}, "x1 has 1 dims [16] (the kernel takes 2 to 8)", (X[:1], X[:1], G), {}),
    (DYNAMIC, (X, X, X), {}, "gamma has 2 dims", (X, X, G), {}),
    (DYNAMIC, (X, X, G), {"smooth_scale1": S}, "smooth_scale1 is float32", (X, X, G), {"smooth_scale1": G}),
    (DYNAMIC, (X, X, G), {"smooth_scale1": G[:1]}, "smooth_scale1 [1] has not", (X, X, G), {"smooth_scale1": G}),
    (DYNAMIC, (X, X, G), {"beta": S}, "beta is float32", (X, X, G), {"beta": G}),
    (
        DYNAMIC,
        (X, X, G),
        {"output_mask": [False, False]},
        "output_mask turns both quantisers off",
        (X, X, G),
        {"output_mask": [False, True]},
    ),
    (
        DYNAMIC,
        (X, X, G),
        {"smooth_scale2": G},
        "smooth_scale2 is given for a quantiser that is off",
        (X, X, G),
        {"smooth_scale1": G, "smooth_scale2": G},
    ),
    (
        DYNAMIC,
        (X, X, G),
        {"smooth_scale1": G, "output_mask": [False, True]},
        "smooth_scale1 is given for a quantiser that is off",
        (X, X, G),
        {"smooth_scale1": G, "output_mask": [True, False]},
    ),
    (DYNAMIC, (X, X, G), {"y_dtype": 16}, "y_dtype is 16 (only int8, 1, is known here)", (X, X, G), {"y_dtype": 1}),
]
LONE = (X, G, G, ONE, ZERO)
BORDERS += [
    (NPU_RMS_NORM_QUANT, outside, kwargs, reason, LONE, {})
    for outside, kwargs, reason in [
        ((X.float(), G.float(), G.float(), ONE.float(), ZERO), {}, "x is float32 (the kernel takes float16, bfloat16)"),
        ((X.reshape([1] * 7 + [4, 16]), *LONE[1:]), {}, "x has 9 dims"),
        ((X, G.float(), *LONE[2:]), {}, "gamma is float32 (the kernel takes float16)"),
        ((X, G[:15], G[:15], *LONE[3:]), {}, "gamma [15] does not cover the last dim of x [4, 16]"),
        ((X, X, X, *LONE[3:]), {}, "gamma [4, 16] does not cover the last dim"),
        ((X, G.reshape(1, 1, 16), G.reshape(1, 1, 16), *LONE[3:]), {}, "gamma has 3 dims"),
        ((X, G, S, *LONE[3:]), {}, "beta is float32"),
        ((X, G, X[:1], *LONE[3:]), {}, "beta [1, 16] has not the shape of gamma [16]"),
        ((X, G, G, ONE.float(), ZERO), {}, "scale is float32 (the kernel takes float16)"),
        ((X, G, G, G, ZERO), {}, "scale has shape [16] (the kernel takes [1])"),
        ((X, G, G, ONE[0], ZERO), {}, "scale has shape [] (the kernel takes [1])"),
        ((X, G, G, ONE, ZERO.int()), {}, "offset is int32 (the kernel takes int8)"),
        ((X, G, G, ONE, ZERO[0]), {}, "offset has shape [] (the kernel takes [1])"),
        ((X[:0], *LONE[1:]), {}, "x [0, 16] is empty"),
        (LONE, {"dst_dtype": 16}, "dst_dtype is 16 (only int8, 1, is known here)"),
    ]
]


def completed(contract, args):
    """The call with the scales that npu_add_rms_norm_quant wants, and its zero points, which have no default."""
    if contract is QUANT and len(args) == 3:
        scales = torch.ones(args[2].shape, dtype=SCALES.get(args[0].dtype, (FP32,))[0])
        return (*args, scales, None)
    return (*args, None) if contract is QUANT and len(args) == 4 else args


@pytest.mark.parametrize(("contract", "outside", "kwargs", "reason", "inside", "legal"), BORDERS)
def test_borders(contract, outside, kwargs, reason, inside, legal):
    outside, inside = completed(contract, outside), completed(contract, inside)
    assert reason in contract.refusal(Target(), *outside, **kwargs)
    assert contract.refusal(Target(), *inside, **legal) is None
    with pytest.raises(ValueError, match=contract.name) as raised:
        contract.op(*outside, **kwargs)
    assert reason in str(raised.value)
    contract.op(*inside, **legal)


@pytest.mark.parametrize("contract", ADDING, ids=lambda contract: contract.name)
def test_nine_dims_are_too_many(contract):
    for rank, taken in ((9, False), (8, True)):
        x = X.reshape([1] * (rank - 2) + [4, 16])
        reason = contract.refusal(Target(), *completed(contract, (x, x, G)))
        assert reason is None if taken else "x1 has 9 dims" in reason


@pytest.mark.parametrize(
    ("what", "args", "kwargs"),
    [
        ("beta", (X, X, G, S, Z, G), {}),
        ("scales2", (X, X, G, S, Z, None, S), {}),
        ("div_mode=False", (X, X, G, S, Z), {"div_mode": False}),
    ],
)
def test_what_needs_a_newer_cann_is_refused_and_computed(what, args, kwargs):
    reason = QUANT.refusal(Target(), *args, **kwargs)
    assert reason == f"{what} needs CANN 8.3 or later, and which CANN the target has is not known"
    QUANT.op(*args, **kwargs)
    assert QUANT.refusal(Target(), X, X, G, S, Z, div_mode=True) is None


def test_ascend310p_wants_float16_rows_of_32_and_more():
    target = Target("ascend310p")
    for contract, args in ((QUANT, (X, X, G, S, None)), (NPU_RMS_NORM_QUANT, LONE)):
        name = "x" if contract is NPU_RMS_NORM_QUANT else "x1"
        assert contract.refusal(Target(), *args) is None
        reason = contract.refusal(target, *args)
        assert reason == f"the last dim of {name} is 16; ascend310p writes int8 in blocks of 32"
        wide = [torch.cat((arg, arg), -1) if arg is not None and arg.shape[-1] == 16 else arg for arg in args]
        assert contract.refusal(target, *wide) is None
    assert "x1 is bfloat16, which ascend310p" in QUANT.refusal(target, *BF, BF[2], None)


@pytest.mark.parametrize("soc", ["ascend910b", "ascend910_93", "ascend950", "ascend310p"])
def test_socs(soc):
    x, gamma = torch.ones(4, 32, dtype=FP16), torch.ones(32, dtype=FP16)
    missing = {
        NPU_ADD_RMS_NORM_CAST: {"ascend950", "ascend310p"},
        QUANT: {"ascend950"},
        DYNAMIC: {"ascend950", "ascend310p"},
        NPU_RMS_NORM_QUANT: set(),
    }
    for contract, (args, kwargs) in calls(x, x, gamma).items():
        reason = contract.refusal(Target(soc), *args, **kwargs)
        assert (reason is not None) == (soc in missing[contract])
        assert reason is None or f"{contract.name} has no kernel on {soc}" in reason
