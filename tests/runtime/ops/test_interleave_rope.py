"""npu_interleave_rope against float64 maths, and its limits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_fuse.runtime.ops.interleave_rope import NPU_INTERLEAVE_ROPE as CONTRACT
from npu_fuse.runtime.target import Target

DTYPES = (torch.float16, torch.bfloat16)
TOLERANCE = {torch.float16: 2**-9, torch.bfloat16: 2**-6}


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    tokens=st.integers(1, 4),
    one_row=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_any_shape_is_the_maths(make_tensor, assert_same_layout, batch, heads, tokens, one_row, dtype):
    x = make_tensor((batch, heads, tokens, 64), dtype)
    cos, sin = (make_tensor((batch, 1, 1 if one_row else tokens, 64), dtype, seed=seed) for seed in (1, 2))
    assert CONTRACT.refusal(Target(), x, cos, sin) is None
    assert_same_layout(CONTRACT.op, x, cos, sin)
    wanted = torch.empty(x.shape, dtype=torch.float64)
    for i in range(32):
        a, b = x[..., 2 * i].double(), x[..., 2 * i + 1].double()
        wanted[..., i] = a * cos[..., i].double() - b * sin[..., i].double()
        wanted[..., i + 32] = b * cos[..., i + 32].double() + a * sin[..., i + 32].double()
    actual = CONTRACT.op(x, cos, sin)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), wanted, rtol=TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])


def call(x=(2, 4, 3, 64), cos=(2, 1, 3, 64), sin=None, dtype=torch.float16):
    tensors = (torch.ones(shape, dtype=dtype) for shape in (x, cos, sin or cos))
    return dict(zip(("x", "cos", "sin"), tensors, strict=True))


BORDERS = [
    (call(dtype=torch.float32), "x is float32 (the kernel takes float16, bfloat16)", call()),
    (call() | {"cos": torch.ones(2, 1, 3, 64).bfloat16()}, "cos is bfloat16 but x is float16", call()),
    (call() | {"sin": torch.ones(2, 1, 3, 64)}, "sin is float32", call()),
    (call(x=(8, 3, 64)), "x has 3 dims [8, 3, 64] (the kernel takes 4)", call()),
    (call(cos=(3, 64)), "cos has 2 dims", call()),
    (call(x=(2, 4, 3, 128), cos=(2, 1, 3, 128)), "x is 128 wide (the kernel takes 64)", call()),
    (call(cos=(2, 1, 3, 32)), "cos is 32 wide (the kernel takes 64)", call()),
    (call(x=(0, 4, 3, 64)), "x [0, 4, 3, 64] is empty", call()),
    (
        call() | {"x": torch.ones(2, 3, 4, 64).half().transpose(1, 2)},
        "x [2, 4, 3, 64] with strides [768, 64, 256, 1] is not contiguous",
        call(),
    ),
    (call() | {"cos": torch.ones(1, 1, 3, 64).half().expand(2, 1, 3, 64)}, "is not contiguous", call()),
    (
        call(cos=(1, 1, 3, 64)),
        "cos [1, 1, 3, 64] is not broadcast to x [2, 4, 3, 64] (the kernel takes [2, 1, 3, 64] and [2, 1, 1, 64])",
        call(cos=(2, 1, 1, 64)),
    ),
    (call(cos=(2, 4, 3, 64)), "cos [2, 4, 3, 64] is not broadcast", call()),
    (call(cos=(2, 1, 2, 64)), "cos [2, 1, 2, 64] is not broadcast", call()),
    (call(sin=(2, 1, 1, 64)), "cos [2, 1, 3, 64] and sin [2, 1, 1, 64] differ in shape", call(cos=(2, 1, 1, 64))),
]


@pytest.mark.parametrize(("outside", "reason", "inside"), BORDERS)
def test_borders(assert_border, outside, reason, inside):
    assert_border(CONTRACT, outside, reason, inside)


@pytest.mark.parametrize("soc", ["ascend910b", "ascend910_93", "ascend950", "ascend310p"])
def test_socs(soc):
    assert (CONTRACT.refusal(Target(soc), **call()) is None) == (soc in ("ascend910b", "ascend910_93"))


def test_symbolic_batch_and_tokens_are_kept_and_not_refused(symbolic):
    x, cos = symbolic(("B", 4, "S", 64), torch.bfloat16), symbolic(("B", 1, "S", 64), torch.bfloat16)
    assert CONTRACT.refusal(Target(), x, cos, cos) is None
    assert CONTRACT.op(x, cos, cos).shape == x.shape
    other = symbolic(("B", 1, "T", 64), torch.bfloat16)
    assert "is not broadcast" in CONTRACT.refusal(Target(), x, other, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(make_tensor, dtype):
    arguments = call(dtype=dtype) | {"x": make_tensor((2, 4, 3, 64), dtype)}
    torch.library.opcheck(CONTRACT.op, (), arguments, test_utils=("test_schema", "test_faketensor"))
