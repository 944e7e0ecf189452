"""npu_mm_all_reduce_base on one rank against float64 maths, and its limits."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from npu_fuse.runtime.ops.mm_all_reduce import NPU_MM_ALL_REDUCE_BASE as CONTRACT
from npu_fuse.runtime.target import Target

Tensor = torch.Tensor


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield
    dist.destroy_process_group()


def half(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).half()


@pytest.mark.parametrize("shape", [(3, 16), (2, 3, 16)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_it_is_the_maths(shape, dtype):
    x1, weight, bias = half(*shape).to(dtype), half(8, 16).to(dtype), half(8).to(dtype)
    for x2 in (weight.t(), weight.t().contiguous()):
        y = CONTRACT.op(x1, x2, "0", bias=bias)
        wanted = x1.double() @ x2.double() + bias.double()
        torch.testing.assert_close(y.double(), wanted, rtol=2**-6, atol=2**-4)
        assert y.dtype == dtype
        assert y.is_contiguous()


def test_the_fake_has_the_layout_of_the_real(assert_same_layout):
    assert_same_layout(CONTRACT.op, half(3, 16), half(8, 16).t(), "0")
    assert_same_layout(CONTRACT.op, half(2, 3, 16), half(16, 8), "0")


@pytest.mark.parametrize(
    ("x1", "x2", "others", "reason"),
    [
        (half(3, 16).float(), half(16, 8), {}, "x1 is float32 (the kernel takes"),
        (half(3, 16).bfloat16(), half(16, 8), {}, "x2 is float16 but x1 is bfloat16"),
        (half(16), half(16, 8), {}, "x1 has 1 dims"),
        (half(3, 16), half(1, 16, 8), {}, "x2 has 3 dims"),
        (half(3, 15), half(16, 8), {}, "x2 [16, 8] does not fit x1 [3, 15]"),
        (half(0, 16), half(16, 8), {}, "x1 [0, 16] is empty"),
        (half(3, 16), half(16, 8), {"bias": half(7)}, "bias [7] is not one row of x2 [16, 8]"),
        (half(3, 16), half(16, 8), {"bias": half(8, 1)}, "bias [8, 1] is not one row of x2 [16, 8]"),
        (half(3, 16), half(16, 8), {"bias": half(8).float()}, "bias is float32 but x1 is float16"),
        (half(3, 16), half(16, 8), {"reduce_op": "max"}, "reduce_op is 'max' (npu_fuse supports its default"),
        (half(3, 16), half(16, 8), {"x3": half(3, 8)}, "x3 is given"),
    ],
)
def test_borders(x1, x2, others, reason):
    assert reason in CONTRACT.refusal(Target(), x1, x2, "0", **others)
    with pytest.raises(ValueError, match="npu::npu_mm_all_reduce_base: ") as raised:
        CONTRACT.op(x1, x2, "0", **others)
    assert reason in str(raised.value)
    assert CONTRACT.refusal(Target(), half(3, 16), half(16, 8), "0") is None


@pytest.mark.parametrize("soc", ["ascend910b", "ascend910_93", "ascend950", "ascend310p"])
def test_socs(soc):
    assert (CONTRACT.refusal(Target(soc), half(3, 16), half(16, 8), "0") is None) == (soc == "ascend910b")
