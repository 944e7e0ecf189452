"""Every fused op's reference, lowered to linalg and run by MLIR's JIT, gives what it gives in torch."""

from __future__ import annotations

import pytest
import torch

import mlir_ops
from npu_fuse.runtime.mlir.errors import MlirError
from npu_fuse.runtime.mlir.jit import Jit
from npu_fuse.runtime.ops import CONTRACTS
from npu_fuse.runtime.ops.register import register
from npu_fuse.runtime.target import Target

# Ops whose references read values, so that what is lowered holds for the values of the call.
READING = {
    "npu::npu_scatter_pa_kv_cache",
    "npu::npu_kv_rmsnorm_rope_cache",
    "npu::npu_kv_rmsnorm_rope_cache_v2",
    "npu_fuse::causal_conv1d",
    "npu::causal_conv1d",
    "npu::npu_recurrent_gated_delta_rule",
    "npu::npu_chunk_gated_delta_rule",
}
# Why some can't be lowered. What is added here is to be told in docs/mlir.md.
NOT_LOWERED = {
    "npu::npu_mm_all_reduce_base": (
        "npu::npu_mm_all_reduce_base is computed by all ranks of a group, and a text is for one"
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register(Target())


def test_every_op_has_a_call() -> None:
    assert mlir_ops.CALLS.keys() == CONTRACTS.keys()


# Of several dtypes one, another one from op to op: `python benchmarks/mlir_ops.py` measures all.
TRIED = [(name, dtypes[i % len(dtypes)]) for i, (name, (_, dtypes)) in enumerate(mlir_ops.CALLS.items())]


@pytest.mark.parametrize(("name", "dtype"), [*TRIED, ("npu::npu_rms_norm_quant", torch.bfloat16)])
def test_the_jit_gives_what_the_reference_gives(name: str, dtype: torch.dtype) -> None:
    make, _ = mlir_ops.CALLS[name]
    assert CONTRACTS[name].refusal(Target(), **make(dtype)) is None
    row = mlir_ops.measured(name, dtype)
    assert row.reason == NOT_LOWERED.get(name)
    assert row.is_right, row.errors
    assert row.has_read == (name in READING)
    assert row.errors or name in NOT_LOWERED


@pytest.mark.parametrize(
    ("wanted", "found", "is_right"),
    [
        (torch.tensor([1.0, 4.0]), torch.tensor([1.0, 4.000004]), True),
        (torch.tensor([1.0, 4.0]), torch.tensor([1.0, 4.00004]), False),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]), True),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0]), False),
        (torch.tensor([1.0, torch.inf]), torch.tensor([1.0, 2.0]), False),
        (torch.tensor([1, 2], dtype=torch.int8), torch.tensor([1, 3], dtype=torch.int8), True),
        (torch.tensor([1, 2], dtype=torch.int8), torch.tensor([1, 4], dtype=torch.int8), False),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), False),
        (torch.tensor([1.0]), torch.tensor([1.0]).half(), False),
        (torch.tensor([1.0]), torch.tensor([[1.0]]), False),
        (torch.tensor([1.0]), torch.tensor([0.0]), False),
    ],
)
def test_what_is_off_is_seen(wanted: torch.Tensor, found: torch.Tensor, is_right: bool) -> None:
    row = mlir_ops.Row("an op", torch.float32, (mlir_ops.off_by(found, wanted),))
    assert row.is_right == is_right


def test_a_function_that_is_not_there() -> None:
    with pytest.raises(MlirError, match="there is no function 'main'"):
        Jit("func.func @other(%x: tensor<2xf32>) -> tensor<2xf32> { return %x : tensor<2xf32> }")
