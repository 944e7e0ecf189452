"""npu_swiglu against float64 maths and its limits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_fuse.runtime.ops.swiglu import NPU_SWIGLU
from npu_fuse.runtime.target import Target

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def exact(x, dim):
    gate, value = x.double().tensor_split(2, dim)
    return gate / (1 + torch.exp(-gate)) * value


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [-1, 0, 1, 2])
def test_swiglu_is_the_maths(make_tensor, dtype, dim):
    x = make_tensor((4, 6, 32), dtype)
    y = NPU_SWIGLU.op(x, dim)
    torch.testing.assert_close(y.double(), exact(x, dim), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_any_shape_and_dim(make_tensor, assert_same_layout, data, dtype):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    shape[dim] *= 2
    x = make_tensor(tuple(shape), dtype)
    assert NPU_SWIGLU.refusal(Target(), x, dim) is None
    assert_same_layout(NPU_SWIGLU.op, x, dim)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(NPU_SWIGLU.op(x, dim).double(), exact(x, dim), rtol=tolerance, atol=tolerance)


def test_the_first_half_is_the_gate_and_the_last_dim_the_default():
    assert NPU_SWIGLU.op(torch.tensor([0.0, 5.0])).item() == 0.0
    assert NPU_SWIGLU.op(torch.tensor([5.0, 0.0])).item() == 0.0
    assert NPU_SWIGLU.op(torch.tensor([[-20.0, 1.0]])).item() == pytest.approx(-20 / (1 + 2.718281828459045**20))


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(make_tensor, dtype):
    arguments = (make_tensor((2, 3, 64), dtype),)
    torch.library.opcheck(NPU_SWIGLU.op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_symbolic_batch_and_token_dims_are_kept_and_not_refused(symbolic):
    x = symbolic(("B", "S", 64), torch.bfloat16)
    assert NPU_SWIGLU.refusal(Target(), x) is None
    y = NPU_SWIGLU.op(x)
    assert y.shape[:2] == x.shape[:2]
    assert y.shape[2] == 32


def test_a_symbolic_dim_must_be_even_for_all_sizes(symbolic):
    x = symbolic(("B", "S"))
    assert "not known to be even" in NPU_SWIGLU.refusal(Target(), x, 1)
    doubled = x.new_empty((x.shape[0], 2 * x.shape[1]))
    assert NPU_SWIGLU.refusal(Target(), doubled, 1) is None


@pytest.mark.parametrize(
    ("outside", "reason", "inside"),
    [
        (
            (torch.ones(4, 8).double(),),
            "input is float64 (the kernel takes float16, bfloat16, float32)",
            (torch.ones(4, 8),),
        ),
        ((torch.ones(()),), "input has 0 dims", (torch.ones(2),)),
        ((torch.ones([1] * 8 + [2]),), "input has 9 dims", (torch.ones([1] * 7 + [2]),)),
        ((torch.ones(4, 8), 2), "dim 2 is out of range for input [4, 8]", (torch.ones(4, 8), 1)),
        ((torch.ones(4, 8), -3), "dim -3 is out of range for input [4, 8]", (torch.ones(4, 8), -2)),
        ((torch.ones(4, 7),), "dim -1 of input [4, 7] is 7, not known to be even", (torch.ones(4, 6),)),
        ((torch.ones(0, 8),), "input [0, 8] is empty", (torch.ones(1, 8),)),
        ((torch.ones(8, 4).t(),), "input [4, 8] with strides [1, 4] is not contiguous", (torch.ones(8, 4),)),
    ],
)
def test_borders(outside, reason, inside):
    assert reason in NPU_SWIGLU.refusal(Target(), *outside)
    assert NPU_SWIGLU.refusal(Target(), *inside) is None
    with pytest.raises(ValueError, match="npu::npu_swiglu: ") as raised:
        NPU_SWIGLU.op(*outside)
    assert reason in str(raised.value)
    NPU_SWIGLU.op(*inside)


@pytest.mark.parametrize("soc", ["ascend910b", "ascend910_93", "ascend950", "ascend310p"])
def test_socs(soc):
    taken = NPU_SWIGLU.refusal(Target(soc), torch.ones(4, 8)) is None
    assert taken == (soc in ("ascend910b", "ascend910_93"))
