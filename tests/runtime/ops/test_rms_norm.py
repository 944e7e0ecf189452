"""The RMSNorm ops against float64 maths, the eager spellings they stand for, and their limits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_fuse.runtime.ops.rms_norm import NPU_ADD_RMS_NORM, NPU_GEMMA_RMS_NORM, NPU_RMS_NORM
from npu_fuse.runtime.target import Target

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Two roundings to a dtype, of values that are a few units large; float32 sums lose a little more than one.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}

shapes = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)
epsilons = st.sampled_from([1e-6, 1e-5, 1e-3])


def exact(x, gamma, epsilon, offset=0.0):
    x, gamma = x.double(), gamma.double()
    dims = tuple(range(-gamma.dim(), 0))
    rstd = 1 / ((x**2).mean(dims, keepdim=True) + epsilon).sqrt()
    return x * rstd * (offset + gamma), rstd


def assert_near(actual, expected, dtype):
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("dtype", "gamma_dtype"), [*zip(DTYPES, DTYPES, strict=True), *((d, torch.float32) for d in DTYPES[1:])]
)
@pytest.mark.parametrize("gamma_rank", [1, 2])
def test_rms_norm_is_the_maths(make_tensor, dtype, gamma_dtype, gamma_rank):
    x = make_tensor((2, 5, 6, 64), dtype)
    gamma = make_tensor((6, 64)[-gamma_rank:], gamma_dtype, seed=1)
    y, rstd = NPU_RMS_NORM.op(x, gamma, 1e-5)
    expected, expected_rstd = exact(x, gamma, 1e-5)
    assert_near(y, expected, dtype)
    assert_near(rstd, expected_rstd, torch.float32)
    assert rstd.shape == (2, 5, 6, 1) if gamma_rank == 1 else rstd.shape == (2, 5, 1, 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemma_rms_norm_is_the_maths(make_tensor, dtype):
    x, gamma = make_tensor((2, 5, 64), dtype), make_tensor((64,), dtype, seed=1)
    y, rstd = NPU_GEMMA_RMS_NORM.op(x, gamma, 1e-5)
    expected, expected_rstd = exact(x, gamma, 1e-5, offset=1.0)
    assert_near(y, expected, dtype)
    assert_near(rstd, expected_rstd, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_is_the_maths(make_tensor, dtype):
    x1, x2, gamma = (make_tensor(shape, dtype, seed=seed) for seed, shape in enumerate([(2, 5, 64), (2, 5, 64), (64,)]))
    y, rstd, x_out = NPU_ADD_RMS_NORM.op(x1, x2, gamma, 1e-5)
    expected, expected_rstd = exact(x1.double() + x2.double(), gamma, 1e-5)
    assert_near(y, expected, dtype)
    assert_near(rstd, expected_rstd, torch.float16 if dtype == torch.float16 else torch.float32)
    assert torch.equal(x_out, x1 + x2)


def test_default_epsilon_is_1e_6(make_tensor):
    x, gamma = make_tensor((3, 64)) * 1e-3, make_tensor((64,), seed=1)
    assert torch.equal(NPU_RMS_NORM.op(x, gamma)[0], NPU_RMS_NORM.op(x, gamma, 1e-6)[0])
    assert torch.equal(NPU_GEMMA_RMS_NORM.op(x, gamma)[0], NPU_GEMMA_RMS_NORM.op(x, gamma, 1e-6)[0])
    assert torch.equal(NPU_ADD_RMS_NORM.op(x, x, gamma)[0], NPU_ADD_RMS_NORM.op(x, x, gamma, 1e-6)[0])


@settings(max_examples=60, deadline=None)
@given(
    shape=shapes,
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["plain", "transposed", "sliced", "expanded"]),
    eps=epsilons,
    seed=st.integers(0, 99),
)
def test_rms_norm_is_llamas_spelling_bit_for_bit(make_tensor, shape, dtype, layout, eps, seed):
    x, w = make_tensor(shape, dtype, layout, seed), make_tensor(shape[-1:], dtype, seed=seed + 1)
    spelled = w * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    assert torch.equal(NPU_RMS_NORM.op(x, w, eps)[0], spelled)


@settings(max_examples=60, deadline=None)
@given(shape=shapes, dtype=st.sampled_from(DTYPES), eps=epsilons, seed=st.integers(0, 99))
def test_gemma_rms_norm_is_gemmas_spelling_bit_for_bit(make_tensor, shape, dtype, eps, seed):
    x, w = make_tensor(shape, dtype, seed=seed), make_tensor(shape[-1:], dtype, seed=seed + 1)
    wide = x.float()
    spelled = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + w.float())).to(x.dtype)
    assert torch.equal(NPU_GEMMA_RMS_NORM.op(x, w, eps)[0], spelled)


def test_a_float32_gamma_rounds_once(make_tensor):
    x, gamma = make_tensor((64, 64), torch.bfloat16), make_tensor((64,), torch.float32, seed=1)
    wide = x.float()
    once = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * gamma).bfloat16()
    assert torch.equal(NPU_RMS_NORM.op(x, gamma)[0], once)


def test_add_rms_norm_normalises_the_unrounded_sum_in_bfloat16_and_the_rounded_one_in_float16(make_tensor):
    for dtype in (torch.bfloat16, torch.float16):
        x1, x2, gamma = make_tensor((64, 64), dtype), make_tensor((64, 64), dtype, seed=1), make_tensor((64,), dtype)
        rounded = NPU_RMS_NORM.op(x1 + x2, gamma)
        unrounded = NPU_RMS_NORM.op(x1.float() + x2.float(), torch.ones(64))
        y, rstd, _ = NPU_ADD_RMS_NORM.op(x1, x2, gamma)
        if dtype == torch.float16:
            assert torch.equal(y, rounded[0])
            assert torch.equal(rstd, rounded[1])
        else:
            assert torch.equal(y, gamma * unrounded[0].to(dtype))
            assert torch.equal(rstd, unrounded[1])
            assert not torch.equal(y, rounded[0])


@settings(max_examples=60, deadline=None)
@given(
    shape=shapes,
    gamma_rank=st.integers(1, 2),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["plain", "transposed", "sliced", "expanded"]),
)
def test_fakes_have_the_real_layout(make_tensor, assert_same_layout, shape, gamma_rank, dtype, layout):
    x, gamma = make_tensor(shape, dtype, layout), make_tensor(shape[-gamma_rank:], dtype)
    assert_same_layout(NPU_RMS_NORM.op, x, gamma, 1e-6)
    assert_same_layout(NPU_ADD_RMS_NORM.op, x, x.contiguous(), gamma, 1e-6)
    assert_same_layout(NPU_GEMMA_RMS_NORM.op, x.contiguous(), gamma, 1e-6)


def test_rms_norm_takes_empty_tensors(make_tensor, assert_same_layout):
    assert_same_layout(NPU_RMS_NORM.op, make_tensor((0, 64)), make_tensor((64,)), 1e-6)


@pytest.mark.parametrize("contract", [NPU_RMS_NORM, NPU_GEMMA_RMS_NORM, NPU_ADD_RMS_NORM], ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(make_tensor, contract, dtype):
    inputs = [make_tensor((2, 3, 64), dtype, seed=seed) for seed in range(2 if contract is NPU_ADD_RMS_NORM else 1)]
    arguments = (*inputs, make_tensor((64,), dtype), 1e-6)
    torch.library.opcheck(contract.op, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("contract", [NPU_RMS_NORM, NPU_GEMMA_RMS_NORM, NPU_ADD_RMS_NORM], ids=lambda c: c.name)
def test_symbolic_batch_and_token_dims_are_kept_and_not_refused(symbolic, contract):
    inputs = [symbolic(("B", "S", 64), torch.bfloat16) for _ in range(2 if contract is NPU_ADD_RMS_NORM else 1)]
    gamma = symbolic((64,), torch.bfloat16)
    assert contract.refusal(Target(), *inputs, gamma) is None
    y, rstd, *x_out = contract.op(*inputs, gamma)
    assert y.shape == inputs[0].shape
    assert [str(size) for size in rstd.shape] == [*map(str, inputs[0].shape[:2]), "1"]
    assert all(tensor.shape == inputs[0].shape for tensor in x_out)


def test_different_symbols_are_no_equal_shapes(symbolic):
    x1, x2, gamma = symbolic(("B", "S", 64)), symbolic(("S", "B", 64)), symbolic((64,))
    assert "differ in shape" in NPU_ADD_RMS_NORM.refusal(Target(), x1, x2, gamma)


def shared_borders(contract):
    """For each rule that all three ops share: a call just outside, its reason, and a call just inside."""
    wide = torch.ones

    def call(x, gamma):
        return (x, x, gamma) if contract is NPU_ADD_RMS_NORM else (x, gamma)

    return [
        (call(wide(4, 8).double(), wide(8).double()), "is float64 (the kernel takes", call(wide(4, 8), wide(8))),
        (call(wide(4, 8).int(), wide(8).int()), "is int32 (the kernel takes", call(wide(4, 8).half(), wide(8).half())),
        (call(wide(()), wide(1)), "has 0 dims [] (the kernel takes 1 to 8)", call(wide(8), wide(8))),
        (call(wide([1] * 9), wide(1)), "has 9 dims", call(wide([1] * 8), wide(1))),
        (call(wide(4, 8), wide(())), "gamma has 0 dims", call(wide(4, 8), wide(8))),
        (call(wide(4, 8), wide(1, 4, 8)), "gamma has 3 dims", call(wide(4, 8), wide(4, 8))),
        (call(wide(4, 8), wide(7)), "gamma [7] does not cover the trailing dims", call(wide(4, 7), wide(7))),
        (call(wide(4, 8), wide(1, 8)), "gamma [1, 8] does not cover", call(wide(1, 8), wide(1, 8))),
    ]


def own_borders():
    ones = torch.ones
    strided = ones(8, 4).t()
    bf16, fp16 = torch.bfloat16, torch.float16
    return [
        (NPU_RMS_NORM, (ones(4, 8), ones(8).half()), "gamma is float16 but input is float32", (ones(4, 8), ones(8))),
        (
            NPU_RMS_NORM,
            (ones(4, 8).to(bf16), ones(8).half()),
            "takes bfloat16 or float32",
            (ones(4, 8).to(bf16), ones(8)),
        ),
        (
            NPU_GEMMA_RMS_NORM,
            (ones(4, 8).to(bf16), ones(8)),
            "gamma is float32 but input is bfloat16 (they must be equal)",
            (ones(4, 8).to(bf16), ones(8).to(bf16)),
        ),
        (NPU_GEMMA_RMS_NORM, (ones(0, 8), ones(8)), "input [0, 8] is empty", (ones(1, 8), ones(8))),
        (
            NPU_GEMMA_RMS_NORM,
            (strided, ones(8)),
            "input [4, 8] with strides [1, 4] is not contiguous",
            (strided.contiguous(), ones(8)),
        ),
        (NPU_GEMMA_RMS_NORM, (ones(4, 8), ones(16)[::2]), "gamma [8] with strides [2]", (ones(4, 8), ones(16)[:8])),
        (
            NPU_ADD_RMS_NORM,
            (ones(4, 8), ones(4, 8).half(), ones(8)),
            "x2 is float16 but x1 is float32",
            (ones(4, 8), ones(4, 8), ones(8)),
        ),
        (
            NPU_ADD_RMS_NORM,
            (ones(4, 8).to(fp16), ones(4, 8).to(fp16), ones(8)),
            "gamma is float32 but x1 is float16",
            (ones(4, 8).to(fp16), ones(4, 8).to(fp16), ones(8).to(fp16)),
        ),
        (
            NPU_ADD_RMS_NORM,
            (ones(4, 8), ones(1, 8), ones(8)),
            "x1 [4, 8] and x2 [1, 8] differ in shape (the kernel does not broadcast)",
            (ones(1, 8), ones(1, 8), ones(8)),
        ),
        (
            NPU_ADD_RMS_NORM,
            (ones(0, 8), ones(0, 8), ones(8)),
            "x1 [0, 8] is empty",
            (strided, strided, ones(8)),
        ),
    ]


BORDERS = own_borders() + [
    (contract, *border)
    for contract in (NPU_RMS_NORM, NPU_GEMMA_RMS_NORM, NPU_ADD_RMS_NORM)
    for border in shared_borders(contract)
]


@pytest.mark.parametrize(("contract", "outside", "reason", "inside"), BORDERS)
def test_borders(contract, outside, reason, inside):
    assert reason in contract.refusal(Target(), *outside)
    assert contract.refusal(Target(), *inside) is None
    with pytest.raises(ValueError, match=contract.name) as raised:
        contract.op(*outside)
    assert reason in str(raised.value)
    contract.op(*inside)


def test_ascend310p_wants_blocks_of_32_bytes_and_no_bfloat16():
    target = Target("ascend310p")
    for dtype, width in ((torch.float16, 16), (torch.float32, 8)):
        assert NPU_RMS_NORM.refusal(target, torch.ones(4, width, dtype=dtype), torch.ones(width)) is None
        narrow = NPU_RMS_NORM.refusal(target, torch.ones(4, width - 1, dtype=dtype), torch.ones(width - 1))
        assert f"takes {(width - 1) * dtype.itemsize} bytes, no multiple of 32" in narrow
        assert NPU_RMS_NORM.refusal(Target(), torch.ones(4, width - 1, dtype=dtype), torch.ones(width - 1)) is None
    x = torch.ones(4, 16, dtype=torch.bfloat16)
    assert "input is bfloat16, which ascend310p" in NPU_RMS_NORM.refusal(target, x, torch.ones(16))
    assert "x1 is bfloat16, which ascend310p" in NPU_ADD_RMS_NORM.refusal(target, x, x, x[0])
    assert NPU_ADD_RMS_NORM.refusal(target, x.half(), x.half(), x[0].half()) is None


@pytest.mark.parametrize(
    ("contract", "missing"),
    [(NPU_RMS_NORM, {"ascend950"}), (NPU_GEMMA_RMS_NORM, {"ascend950", "ascend310p"}), (NPU_ADD_RMS_NORM, set())],
    ids=lambda value: getattr(value, "name", ""),
)
@pytest.mark.parametrize("soc", ["ascend910b", "ascend910_93", "ascend950", "ascend310p"])
def test_socs(contract, missing, soc):
    x = torch.ones(4, 16)
    reason = contract.refusal(Target(soc), *([x] if contract is not NPU_ADD_RMS_NORM else [x, x]), x[0])
    assert (reason is not None) == (soc in missing)
    assert reason is None or f"{contract.name} has no kernel on {soc}" in reason
