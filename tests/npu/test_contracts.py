"""Our contracts of torch_npu's ops, against the schemas and meta kernels of torch_npu itself."""

from collections.abc import Mapping, Sequence

import pytest
import torch
import torch_npu  # noqa: F401  (registers the ops)
from torch._subclasses.fake_tensor import FakeTensorMode

from npu_fuse.runtime.ops import CONTRACTS, OpContract
from npu_fuse.runtime.target import Target

NPU_CONTRACTS = {name: contract for name, contract in CONTRACTS.items() if contract.namespace == "npu"}

# Asked while tests are collected: later, tests of the backend may have registered kernels of ours.
HAVE_THEIR_META = {name for name in NPU_CONTRACTS if torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta")}

# Shapes of the tensor arguments, in the order of the schema, and what follows them. All are legal calls.
Call = tuple[Sequence[Sequence[int]], Mapping[str, object]]
CALLS: Mapping[str, Sequence[Call]] = {
    "npu::npu_rms_norm": [
        (([16], [16]), {}),
        (([3, 16], [16]), {"epsilon": 1e-5}),
        (([2, 3, 4, 16], [4, 16]), {}),
    ],
    "npu::npu_gemma_rms_norm": [
        (([3, 16], [16]), {}),
        (([2, 3, 4, 16], [16]), {"epsilon": 1e-5}),
    ],
    "npu::npu_add_rms_norm": [
        (([3, 16], [3, 16], [16]), {}),
        (([2, 3, 4, 16], [2, 3, 4, 16], [16]), {"epsilon": 1e-5}),
    ],
    "npu::npu_rotary_mul": [
        (([2, 4, 8, 16], [1, 1, 8, 16], [1, 1, 8, 16]), {}),
        (([2, 8, 4, 16], [1, 8, 1, 16], [1, 8, 1, 16]), {"rotary_mode": "interleave"}),
        (([8, 4, 16], [8, 1, 16], [8, 1, 16]), {}),
    ],
    "npu::npu_swiglu": [
        (([32],), {}),
        (([3, 5, 32],), {}),
        (([3, 6, 8],), {"dim": 1}),
        (([3, 6, 8],), {"dim": -2}),
    ],
}


def test_every_contract_has_calls() -> None:
    assert CALLS.keys() == NPU_CONTRACTS.keys() == HAVE_THEIR_META


@pytest.mark.parametrize("contract", NPU_CONTRACTS.values(), ids=NPU_CONTRACTS)
def test_the_schema_is_theirs(contract: OpContract) -> None:
    assert str(contract.parsed_schema) == str(contract.op._schema)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("name", "shapes", "rest"),
    [(name, shapes, rest) for name, calls in CALLS.items() for shapes, rest in calls],
)
def test_the_fake_kernel_agrees_with_their_meta_kernel(
    name: str, shapes: Sequence[Sequence[int]], rest: Mapping[str, object], dtype: torch.dtype
) -> None:
    contract = NPU_CONTRACTS[name]
    with FakeTensorMode():
        tensors = [torch.empty(shape, dtype=dtype, device="npu") for shape in shapes]
        theirs = contract.op(*tensors, **rest)
        ours = contract.fake(*tensors, **rest)
        assert contract.refusal(Target(), *tensors, **rest) is None
    assert described(ours) == described(theirs)


def described(result: torch.Tensor | tuple[torch.Tensor, ...]) -> list[tuple[torch.Size, torch.dtype, str]]:
    """What must agree of a result, as values that are safe to print."""
    results = (result,) if isinstance(result, torch.Tensor) else result
    return [(tensor.shape, tensor.dtype, tensor.device.type) for tensor in results]
