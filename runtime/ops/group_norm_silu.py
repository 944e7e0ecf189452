"""Group normalisation and the silu behind it:  y = silu((x - mean) * rstd * weight + bias)."""

import math
from collections.abc import Iterator

import torch
from torch.nn.functional import silu

from ..sizes import known_same_shape, known_true
from ..target import Target
from .contract import OpContract
from .layout import row_major
from .reasons import dtype_among, dtype_name, emptiness, first_reason, raise_first, rank_between, shape_text

__all__ = ["NPU_GROUP_NORM_SILU"]

# aclnn kernels take tensors of up to 8 dims.
_MAX_RANK = 8


def _invalid(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, group: int, eps: float
) -> Iterator[str]:
    yield from dtype_among("input", input)
    yield from rank_between("input", input, 2, _MAX_RANK)
    if group < 1 or not known_true(input.shape[1] % group == 0):
        yield (
            f"dim 1 of input {shape_text(input.shape)} is {input.shape[1]}, not known to be a multiple of group {group}"
        )
    if weight is None or bias is None:
        yield f"{'weight' if weight is None else 'bias'} is missing (the kernel is documented with both only)"
        return
    for name, tensor in (("weight", weight), ("bias", bias)):
        if not known_same_shape(tensor.shape, input.shape[1:2]):
            yield f"{name} {shape_text(tensor.shape)} does not cover dim 1 of input {shape_text(input.shape)}"
        if tensor.dtype not in (input.dtype, torch.float32):
            yield (
                f"{name} is {dtype_name(tensor.dtype)} but input is {dtype_name(input.dtype)}"
                f" (the kernel takes {dtype_name(input.dtype)} or float32)"
            )
    if weight.dtype != bias.dtype:
        yield f"weight is {dtype_name(weight.dtype)} but bias is {dtype_name(bias.dtype)} (they must be equal)"
    if not eps > 0:
        yield f"eps is {eps:g}, not positive"
    yield from emptiness("input", input)


@first_reason
def _refuse(
    target: Target,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    group: int,
    eps: float,
) -> Iterator[str]:
    yield from _invalid(input, weight, bias, group, eps)


def group_norm_silu_reference(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, group: int, eps: float = 1e-05
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `npu::npu_group_norm_silu` computes: float32 inside, one rounding (eager group_norm and silu round twice).

    Args:
        input: [N, C, *], float16, bfloat16 or float32; any strides, not empty.
        weight: [C], of input's dtype or float32.
        bias: [C], of weight's dtype.
        group: into how many groups the channels are cut; divides C.
        eps: added to the variance; positive.

    Returns:
        y of input's shape and dtype; mean and rstd [N, group], of input's dtype.

    Raises:
        ValueError: dtypes, shapes, `group` or `eps` don't fit; weight or bias is None.

    Source: torch_npu 2.13.0 (formula, dtypes of the results); float32 inside is inferred.
    """
    raise_first("npu::npu_group_norm_silu", _invalid(input, weight, bias, group, eps))
    assert weight is not None
    assert bias is not None
    batch, channels, *rest = input.shape
    normed, mean, rstd = torch.native_group_norm(
        input.float().contiguous(), weight.float(), bias.float(), batch, channels, math.prod(rest), group, eps
    )
    y, mean, rstd = (row_major(result.to(input.dtype)) for result in (silu(normed), mean, rstd))
    return y, mean, rstd


def group_norm_silu_fake(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, group: int, eps: float = 1e-05
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shapes of `group_norm_silu_reference`."""
    statistics = (input.shape[0], group)
    return input.new_empty(input.shape), input.new_empty(statistics), input.new_empty(statistics)


NPU_GROUP_NORM_SILU = OpContract(
    name="npu::npu_group_norm_silu",
    schema=(
        "npu_group_norm_silu(Tensor input, Tensor? weight, Tensor? bias, int group, float eps=1e-05)"
        " -> (Tensor, Tensor, Tensor)"
    ),
    reference=group_norm_silu_reference,
    fake=group_norm_silu_fake,
    refuse=_refuse,
    socs=frozenset({"ascend910b", "ascend310p"}),
    source="torch_npu 2.13.0 (schema, dtypes, shapes, SoCs)",
)
