"""npu_clipped_swiglu against float64 maths and its limits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_fuse.runtime.ops.clipped_swiglu import NPU_CLIPPED_SWIGLU
from npu_fuse.runtime.target import Target

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def exact(x, alpha=1.702, limit=7.0, bias=1.0, interleaved=True):
    x = x.double()
    gate, value = (x[..., ::2], x[..., 1::2]) if interleaved else x.tensor_split(2, -1)
    gate = torch.where(gate > limit, limit, gate)
    value = torch.where(value > limit, limit, torch.where(value < -limit, -limit, value))
    return gate / (1 + torch.exp(-alpha * gate)) * (value + bias)


@settings(max_examples=60, deadline=None)
@given(
    leading=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    half=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
    alpha=st.sampled_from([1.702, 1.0, -0.5]),
    limit=st.sampled_from([7.0, 0.5, 2.0]),
    bias=st.sampled_from([1.0, 0.0, -2.5]),
    interleaved=st.booleans(),
)
def test_it_is_the_maths(make_tensor, leading, half, dtype, alpha, limit, bias, interleaved):
    x = 4 * make_tensor((*leading, 2 * half), dtype)
    arguments = {"alpha": alpha, "limit": limit, "bias": bias, "interleaved": interleaved}
    assert NPU_CLIPPED_SWIGLU.refusal(Target(), x, **arguments) is None
    tolerance = 8 * TOLERANCE[dtype]
    torch.testing.assert_close(
        NPU_CLIPPED_SWIGLU.op(x, **arguments).double(), exact(x, **arguments), rtol=tolerance, atol=tolerance
    )


def test_by_default_it_is_gpt_oss(make_tensor, assert_same_layout):
    x = 6 * make_tensor((16, 64))
    torch.testing.assert_close(NPU_CLIPPED_SWIGLU.op(x).double(), exact(x), rtol=1e-5, atol=1e-5)
    assert_same_layout(NPU_CLIPPED_SWIGLU.op, x)


def test_the_gate_is_bounded_above_only():
    far = torch.tensor([[-100.0, 0.0], [100.0, 0.0], [7.0, 0.0]])
    low, high, at_limit = NPU_CLIPPED_SWIGLU.op(far).flatten().tolist()
    assert low == pytest.approx(0.0)
    assert high == at_limit == pytest.approx(7 / (1 + 2.718281828459045 ** (-1.702 * 7)))


def test_it_rounds_once(make_tensor):
    x = make_tensor((64, 64), torch.bfloat16)
    assert torch.equal(NPU_CLIPPED_SWIGLU.op(x), NPU_CLIPPED_SWIGLU.op(x.float()).bfloat16())
    gate, value = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
    assert not torch.equal(NPU_CLIPPED_SWIGLU.op(x), (value + 1) * (gate * torch.sigmoid(gate * 1.702)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(make_tensor, dtype):
    arguments = (make_tensor((2, 3, 64), dtype),)
    torch.library.opcheck(NPU_CLIPPED_SWIGLU.op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_symbolic_batch_and_token_dims_are_kept_and_not_refused(symbolic):
    x = symbolic(("B", "S", 64), torch.bfloat16)
    assert NPU_CLIPPED_SWIGLU.refusal(Target(), x) is None
    y = NPU_CLIPPED_SWIGLU.op(x)
    assert y.shape[:2] == x.shape[:2]
    assert y.shape[2] == 32
    assert "not known to be even" in NPU_CLIPPED_SWIGLU.refusal(Target(), symbolic((4, "S")))


ones = torch.ones


@pytest.mark.parametrize(
    ("outside", "reason", "inside"),
    [
        ((ones(4, 8).double(), {}), "x is float64 (the kernel takes float16, bfloat16, float32)", (ones(4, 8), {})),
        ((ones(8), {}), "x has 1 dims [8] (the kernel takes 2 to 8)", (ones(1, 8), {})),
        ((ones([1] * 8 + [2]), {}), "x has 9 dims", (ones([1] * 7 + [2]), {})),
        ((ones(4, 8), {"group_index": ones(1).long()}), "group_index is given", (ones(4, 8), {"group_index": None})),
        ((ones(4, 8), {"dim": 0}), "dim 0 is not the last of x [4, 8]", (ones(4, 8), {"dim": 1})),
        ((ones(4, 8), {"dim": -2}), "dim -2 is not the last of x [4, 8]", (ones(4, 8), {"dim": -1})),
        ((ones(4, 7), {}), "the last dim of x [4, 7] is 7, not known to be even", (ones(4, 6), {})),
        ((ones(4, 8), {"limit": 0.0}), "limit is 0;", (ones(4, 8), {"limit": 1e-3})),
        ((ones(4, 8), {"limit": float("nan")}), "limit is nan;", (ones(4, 8), {"limit": 7.0})),
        ((ones(0, 8), {}), "x [0, 8] is empty", (ones(1, 8), {})),
        ((ones(8, 4).t(), {}), "x [4, 8] with strides [1, 4] is not contiguous", (ones(8, 4), {})),
    ],
)
def test_borders(outside, reason, inside):
    x, arguments = outside
    assert reason in NPU_CLIPPED_SWIGLU.refusal(Target(), x, **arguments)
    with pytest.raises(ValueError, match="npu::npu_clipped_swiglu: ") as raised:
        NPU_CLIPPED_SWIGLU.op(x, **arguments)
    assert reason in str(raised.value)
    x, arguments = inside
    assert NPU_CLIPPED_SWIGLU.refusal(Target(), x, **arguments) is None
    NPU_CLIPPED_SWIGLU.op(x, **arguments)


@pytest.mark.parametrize("soc", ["ascend910b", "ascend910_93", "ascend950", "ascend310p"])
def test_socs(soc):
    taken = NPU_CLIPPED_SWIGLU.refusal(Target(soc), torch.ones(4, 8)) is None
    assert taken == (soc in ("ascend910b", "ascend910_93"))
