"""GELU-like activations, alone and as a gated unit of one tensor that holds gate and value side by side.

y = x * sigmoid(1.702 x)               npu_fast_gelu, also known as QuickGELU
y = gelu(one half) * the other half    npu_geglu, gelu by erf or by tanh
"""

from collections.abc import Iterator

import torch
from torch.nn.functional import gelu

from ..sizes import known_true
from ..target import Target
from .contract import OpContract
from .layout import row_major
from .reasons import contiguity, dtype_among, emptiness, first_reason, raise_first, rank_between, shape_text

__all__ = ["FAST_GELU_ALPHA", "NPU_FAST_GELU", "NPU_GEGLU"]

FAST_GELU_ALPHA = 1.702

# aclnn kernels take tensors of up to 8 dims.
_MAX_RANK = 8


# npu_fast_gelu


def _fast_gelu_invalid(input: torch.Tensor) -> Iterator[str]:
    yield from dtype_among("input", input)
    yield from rank_between("input", input, 1, _MAX_RANK)
    yield from emptiness("input", input)
    yield from contiguity("input", input)


@first_reason
def _refuse_fast_gelu(target: Target, input: torch.Tensor) -> Iterator[str]:
    yield from _fast_gelu_invalid(input)


def fast_gelu_reference(input: torch.Tensor) -> torch.Tensor:
    """What `npu::npu_fast_gelu` computes: float32 inside, one rounding (the eager spelling rounds three times).

    Args:
        input: float16, bfloat16 or float32; contiguous, not empty.

    Returns:
        Of input's dtype and shape.

    Raises:
        ValueError: dtype, shape or strides don't fit.

    Source: torch_npu 2.13.0 (formula); float32 inside is inferred, CANN's kernel is closed.
    """
    raise_first("npu::npu_fast_gelu", _fast_gelu_invalid(input))
    wide = input.float()
    return row_major((wide * torch.sigmoid(FAST_GELU_ALPHA * wide)).to(input.dtype))


def fast_gelu_fake(input: torch.Tensor) -> torch.Tensor:
    """Shape of `fast_gelu_reference`."""
    return input.new_empty(input.shape)


NPU_FAST_GELU = OpContract(
    name="npu::npu_fast_gelu",
    schema="npu_fast_gelu(Tensor input) -> Tensor",
    reference=fast_gelu_reference,
    fake=fast_gelu_fake,
    refuse=_refuse_fast_gelu,
    # On ascend310p the op of this name computes another formula; of ascend950 nothing is said.
    socs=frozenset({"ascend910b", "ascend910_93"}),
    source="torch_npu 2.13.0 (schema, formula, dtypes, SoCs)",
)


# npu_geglu


def _geglu_invalid(input: torch.Tensor, dim: int, approximate: int) -> Iterator[str]:
    yield from dtype_among("input", input)
    yield from rank_between("input", input, 1, _MAX_RANK)
    if approximate not in (0, 1):
        yield f"approximate is {approximate} (the kernel takes 0 for erf and 1 for tanh)"
    if not -input.dim() <= dim < input.dim():
        yield f"dim {dim} is out of range for input {shape_text(input.shape)}"
    if not known_true(input.shape[dim] % 2 == 0):
        yield f"dim {dim} of input {shape_text(input.shape)} is {input.shape[dim]}, not known to be even"
    yield from emptiness("input", input)
    yield from contiguity("input", input)


@first_reason
def _refuse_geglu(
    target: Target, input: torch.Tensor, dim: int, approximate: int, activate_left: bool
) -> Iterator[str]:
    yield from _geglu_invalid(input, dim, approximate)


def geglu_reference(
    input: torch.Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `npu::npu_geglu` computes.

    The activation is computed in float32. bfloat16 multiplies it by the other half before it is rounded, so the product
    is rounded once; float16 rounds it first and multiplies in float16, as the eager spelling does.

    Args:
        input: float16, bfloat16 or float32; contiguous, not empty, even in `dim`.
        dim: the dim that is halved.
        approximate: 0 for gelu by erf, 1 for gelu by tanh.
        activate_left: whether the first half goes through gelu; the second does otherwise.

    Returns:
        The product and the activation, of input's dtype and shape, `dim` halved.

    Raises:
        ValueError: dtype, shape, strides or `approximate` don't fit.

    Source: torch_npu 2.13.0 (approximate), CANN ops-nn, ge_glu_v2 (activate_left, roundings).
    """
    raise_first("npu::npu_geglu", _geglu_invalid(input, dim, approximate))
    first, second = input.chunk(2, dim)
    gate, value = (first, second) if activate_left else (second, first)
    activated = gelu(gate.float(), approximate="tanh" if approximate else "none")
    rounded = activated.to(input.dtype)
    product = rounded * value if input.dtype == torch.float16 else (activated * value.float()).to(input.dtype)
    return row_major(product), row_major(rounded)


def geglu_fake(
    input: torch.Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes of `geglu_reference`."""
    shape = list(input.shape)
    shape[dim] = shape[dim] // 2
    return input.new_empty(shape), input.new_empty(shape)


NPU_GEGLU = OpContract(
    name="npu::npu_geglu",
    schema="npu_geglu(Tensor input, int dim=-1, int approximate=1, bool activate_left=False) -> (Tensor, Tensor)",
    reference=geglu_reference,
    fake=geglu_fake,
    refuse=_refuse_geglu,
    socs=frozenset({"ascend910b", "ascend910_93"}),
    source="torch_npu 2.13.0 (schema, dtypes), CANN ops-nn, ge_glu_v2 (activate_left, SoCs)",
)
