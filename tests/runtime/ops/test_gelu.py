"""npu_fast_gelu and npu_geglu against float64 maths and their limits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_fuse.runtime.ops.gelu import NPU_FAST_GELU, NPU_GEGLU
from npu_fuse.runtime.target import Target

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-7}


def assert_near(actual, expected, dtype):
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def exact_fast_gelu(x):
    x = x.double()
    return x / (1 + torch.exp(-1.702 * x))


def exact_gelu(x, approximate):
    x = x.double()
    if approximate:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


@settings(max_examples=40, deadline=None)
@given(shape=st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple), dtype=st.sampled_from(DTYPES))
def test_fast_gelu_is_the_maths(make_tensor, assert_same_layout, shape, dtype):
    x = 3 * make_tensor(shape, dtype)
    assert NPU_FAST_GELU.refusal(Target(), x) is None
    assert_near(NPU_FAST_GELU.op(x), exact_fast_gelu(x), dtype)
    assert_same_layout(NPU_FAST_GELU.op, x)


def test_fast_gelu_rounds_once(make_tensor):
    x = make_tensor((64, 64), torch.bfloat16)
    wide = x.float()
    assert torch.equal(NPU_FAST_GELU.op(x), (wide * torch.sigmoid(1.702 * wide)).bfloat16())
    assert not torch.equal(NPU_FAST_GELU.op(x), x * torch.sigmoid(1.702 * x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [-1, 0, 1, 2])
@pytest.mark.parametrize("approximate", [0, 1])
@pytest.mark.parametrize("activate_left", [False, True])
def test_geglu_is_the_maths(make_tensor, assert_same_layout, dtype, dim, approximate, activate_left):
    x = make_tensor((4, 6, 32), dtype)
    first, second = x.tensor_split(2, dim)
    gate, value = (first, second) if activate_left else (second, first)
    y, activated = NPU_GEGLU.op(x, dim, approximate, activate_left)
    assert_near(activated, exact_gelu(gate, approximate), dtype)
    assert_near(y, exact_gelu(gate, approximate) * value.double(), dtype)
    assert_same_layout(NPU_GEGLU.op, x, dim, approximate, activate_left)


def test_by_default_geglu_activates_the_second_half_by_tanh(make_tensor):
    x = make_tensor((3, 8))
    for mine, default in zip(NPU_GEGLU.op(x, -1, 1, False), NPU_GEGLU.op(x), strict=True):
        assert torch.equal(mine, default)
    assert NPU_GEGLU.op(torch.tensor([5.0, 0.0]))[0].item() == 0.0
    assert NPU_GEGLU.op(torch.tensor([5.0, 0.0]), activate_left=True)[0].item() == 0.0
    assert NPU_GEGLU.op(torch.tensor([0.0, 5.0]), activate_left=True)[1].item() == 0.0


@pytest.mark.parametrize("approximate", [0, 1])
def test_geglu_rounds_its_activation_before_the_product_in_float16_only(make_tensor, approximate):
    for dtype in (torch.float16, torch.bfloat16):
        x = make_tensor((64, 64), dtype)
        value, gate = x.chunk(2, -1)
        wide = torch.nn.functional.gelu(gate.float(), approximate="tanh" if approximate else "none")
        twice, once = wide.to(dtype) * value, (wide * value.float()).to(dtype)
        assert not torch.equal(once, twice)
        y, activated = NPU_GEGLU.op(x, approximate=approximate)
        assert torch.equal(y, twice if dtype == torch.float16 else once)
        assert torch.equal(activated, wide.to(dtype))


@pytest.mark.parametrize("contract", [NPU_FAST_GELU, NPU_GEGLU], ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(make_tensor, contract, dtype):
    torch.library.opcheck(contract.op, (make_tensor((2, 3, 64), dtype),), test_utils=("test_schema", "test_faketensor"))


def test_symbolic_batch_and_token_dims_are_kept_and_not_refused(symbolic):
    x = symbolic(("B", "S", 64), torch.bfloat16)
    assert NPU_FAST_GELU.refusal(Target(), x) is None
    assert NPU_FAST_GELU.op(x).shape == x.shape
    assert NPU_GEGLU.refusal(Target(), x) is None
    for result in NPU_GEGLU.op(x):
        assert result.shape[:2] == x.shape[:2]
        assert result.shape[2] == 32


def test_a_symbolic_dim_must_be_even_for_all_sizes(symbolic):
    x = symbolic(("B", "S"))
    assert "not known to be even" in NPU_GEGLU.refusal(Target(), x, 1)
    doubled = x.new_empty((x.shape[0], 2 * x.shape[1]))
    assert NPU_GEGLU.refusal(Target(), doubled, 1) is None


ones = torch.ones
SHARED = [
    ((ones(4, 8).double(),), "input is float64 (the kernel takes float16, bfloat16, float32)", (ones(4, 8),)),
    ((ones(()),), "input has 0 dims", (ones(2),)),
    ((ones([1] * 8 + [2]),), "input has 9 dims", (ones([1] * 7 + [2]),)),
    ((ones(0, 8),), "input [0, 8] is empty", (ones(1, 8),)),
    ((ones(8, 4).t(),), "input [4, 8] with strides [1, 4] is not contiguous", (ones(8, 4),)),
]
BORDERS = [(contract, *border) for contract in (NPU_FAST_GELU, NPU_GEGLU) for border in SHARED] + [
    (NPU_GEGLU, (ones(4, 8), 2), "dim 2 is out of range for input [4, 8]", (ones(4, 8), 1)),
    (NPU_GEGLU, (ones(4, 8), -3), "dim -3 is out of range for input [4, 8]", (ones(4, 8), -2)),
    (NPU_GEGLU, (ones(4, 7),), "dim -1 of input [4, 7] is 7, not known to be even", (ones(4, 6),)),
    (
        NPU_GEGLU,
        (ones(4, 8), -1, 2),
        "approximate is 2 (the kernel takes 0 for erf and 1 for tanh)",
        (ones(4, 8), -1, 0),
    ),
    (NPU_GEGLU, (ones(4, 8), -1, -1), "approximate is -1", (ones(4, 8), -1, 1)),
]


@pytest.mark.parametrize(("contract", "outside", "reason", "inside"), BORDERS)
def test_borders(contract, outside, reason, inside):
    assert reason in contract.refusal(Target(), *outside)
    assert contract.refusal(Target(), *inside) is None
    with pytest.raises(ValueError, match=f"{contract.name}: ") as raised:
        contract.op(*outside)
    assert reason in str(raised.value)
    contract.op(*inside)


@pytest.mark.parametrize("contract", [NPU_FAST_GELU, NPU_GEGLU], ids=lambda c: c.name)
@pytest.mark.parametrize("soc", ["ascend910b", "ascend910_93", "ascend950", "ascend310p"])
def test_socs(contract, soc):
    taken = contract.refusal(Target(soc), torch.ones(4, 8)) is None
    assert taken == (soc in ("ascend910b", "ascend910_93"))
