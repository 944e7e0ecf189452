"""SwiGLU of one tensor that holds gate and value side by side:  y = silu(first half) * second half."""

from collections.abc import Iterator

import torch
from torch.nn.functional import silu

from ..sizes import known_true
from ..target import Target
from .contract import OpContract
from .layout import row_major
from .reasons import contiguity, dtype_among, emptiness, first_reason, raise_first, rank_between, shape_text

__all__ = ["NPU_SWIGLU"]

# aclnn kernels take tensors of up to 8 dims.
_MAX_RANK = 8


def _invalid(input: torch.Tensor, dim: int) -> Iterator[str]:
    yield from dtype_among("input", input)
    yield from rank_between("input", input, 1, _MAX_RANK)
    if not -input.dim() <= dim < input.dim():
        yield f"dim {dim} is out of range for input {shape_text(input.shape)}"
    if not known_true(input.shape[dim] % 2 == 0):
        yield f"dim {dim} of input {shape_text(input.shape)} is {input.shape[dim]}, not known to be even"
    yield from emptiness("input", input)
    yield from contiguity("input", input)


@first_reason
def _refuse(target: Target, input: torch.Tensor, dim: int) -> Iterator[str]:
    yield from _invalid(input, dim)


def swiglu_reference(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """What `npu::npu_swiglu` computes: float32 inside, one rounding (eager silu and mul round twice).

    Args:
        input: float16, bfloat16 or float32; contiguous, not empty, even in `dim`. The first half goes through silu.
        dim: the dim that is halved.

    Returns:
        Of input's dtype and shape, `dim` halved.

    Raises:
        ValueError: dtype, shape or strides don't fit.

    Source: op-plugin 517f2e7d (formula); float32 inside is inferred, CANN's kernel is closed.
    """
    raise_first("npu::npu_swiglu", _invalid(input, dim))
    gate, value = input.float().chunk(2, dim)
    return row_major((silu(gate) * value).to(input.dtype))


def swiglu_fake(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Shape of `swiglu_reference`."""
    shape = list(input.shape)
    shape[dim] = shape[dim] // 2
    return input.new_empty(shape)


NPU_SWIGLU = OpContract(
    name="npu::npu_swiglu",
    schema="npu_swiglu(Tensor input, int dim=-1) -> Tensor",
    reference=swiglu_reference,
    fake=swiglu_fake,
    refuse=_refuse,
    socs=frozenset({"ascend910b", "ascend910_93"}),
    source="torch_npu 2.13.0 (schema), op-plugin 517f2e7d (dtypes, shapes); ascend910_93 as used in practice",
)
