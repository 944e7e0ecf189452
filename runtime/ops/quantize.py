"""Quantisers:  y = round(x / scales + zero_points), with scales that are given or the largest |x| of each row.

Both round half to even, and clamp to the range of their result. What they compute, the norms that quantise compute too.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch

from ..sizes import known_equal, known_same_shape
from ..target import Target
from .contract import OpContract
from .layout import row_major
from .reasons import dtype_among, emptiness, first_reason, raise_first, rank_between, shape_text

__all__ = ["INT8", "INT8_MAX", "NPU_DYNAMIC_QUANT", "NPU_QUANTIZE", "int8_only", "quantized_rows", "to_int8"]

# The op arguments that name a dtype are numbers: those of torch's ScalarType.
INT8 = 1
_QINT8 = 12
_RESULTS: Mapping[int, torch.dtype] = {INT8: torch.int8, _QINT8: torch.int8, 13: torch.uint8, 3: torch.int32}

INT8_MAX = 127

# aclnn kernels take tensors of up to 8 dims.
_MAX_RANK = 8
_LOW_PRECISION = (torch.float16, torch.bfloat16)


def to_int8(value: torch.Tensor) -> torch.Tensor:
    """The value rounded half to even and clamped to -128..127, fresh and contiguous."""
    return row_major(value.round().clamp(-INT8_MAX - 1, INT8_MAX).to(torch.int8))


def quantized_rows(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric quantisation of each row of a float32 value by its largest magnitude.

    Returns:
        The rows in int8; their scales in float32, without the last dim. A row of zeros has scale 0 and stays zeros:
        taken literally, the kernels compute 0 * inf for it, and what that is as an int8 is nowhere said.
    """
    inverse = INT8_MAX / value.abs().amax(-1, keepdim=True)
    quantized = torch.where(torch.isinf(inverse), 0.0, value * inverse)
    return to_int8(quantized), row_major((1 / inverse).squeeze(-1))


def int8_only(name: str, dtype: int | None) -> Iterator[str]:
    """The number of the result's dtype is that of int8, or not given."""
    if dtype not in (None, INT8):
        yield f"{name} is {dtype} (only int8, {INT8}, is known here)"


# npu_quantize


def _covers(scales: torch.Tensor, input: torch.Tensor, axis: int) -> bool:
    """Whether scales is [1], [n] or [1, ..., n, ..., 1] with the n of input's axis."""
    sizes = list(input.shape)
    if scales.dim() == 1:
        return known_equal(scales.shape[0], 1) or known_equal(scales.shape[0], sizes[axis])
    return scales.dim() == input.dim() and all(
        known_equal(size, 1) or (dim == axis % input.dim() and known_equal(size, sizes[dim]))
        for dim, size in enumerate(scales.shape)
    )


def _quantize_invalid(
    input: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    dtype: int,
    axis: int,
    div_mode: bool,
) -> Iterator[str]:
    yield from dtype_among("input", input, (*_LOW_PRECISION, torch.float32))
    yield from rank_between("input", input, 1, _MAX_RANK)
    yield from emptiness("input", input)
    if not -input.dim() <= axis < input.dim():
        yield f"axis {axis} is out of range for input {shape_text(input.shape)}"
    if div_mode:
        results: Sequence[int] = tuple(_RESULTS)
        yield from dtype_among("scales", scales, (torch.float32, torch.bfloat16))
        yield from rank_between("scales", scales, 1, 1)
        if zero_points is not None:
            integers = (torch.int8, torch.uint8, torch.int32)
            yield from dtype_among("zero_points", zero_points, (*integers, torch.bfloat16))
    else:
        results = (INT8, _QINT8)
        if axis not in (-1, -2):
            yield f"axis is {axis} (with div_mode=False the kernel takes -1 and -2)"
        yield from dtype_among("scales", scales, (input.dtype,))
        if zero_points is not None:
            yield from dtype_among("zero_points", zero_points, (scales.dtype,))
    if dtype not in results:
        yield f"dtype is {dtype} (known here with div_mode={div_mode}: {', '.join(map(str, results))})"
    if not _covers(scales, input, axis):
        yield (
            f"scales {shape_text(scales.shape)} has neither one element nor one for each of axis {axis} of input"
            f" {shape_text(input.shape)}"
        )
    if zero_points is not None and not known_same_shape(zero_points.shape, scales.shape):
        yield f"zero_points {shape_text(zero_points.shape)} and scales {shape_text(scales.shape)} differ in shape"


@first_reason
def _refuse_quantize(
    target: Target,
    input: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    dtype: int,
    axis: int,
    div_mode: bool,
) -> Iterator[str]:
    yield from _quantize_invalid(input, scales, zero_points, dtype, axis, div_mode)


def quantize_reference(
    input: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    dtype: int,
    axis: int = 1,
    div_mode: bool = True,
) -> torch.Tensor:
    """What `npu::npu_quantize` computes: float32 inside, one rounding to the result.

    Args:
        input: float16, bfloat16 or float32; not empty.
        scales: [1], or one for each of `axis`. With div_mode float32 or bfloat16; without it of input's dtype, and all
            dims of input may be there, as ones.
        zero_points: of scales' shape. With div_mode int8, uint8, int32 or bfloat16; without it of scales' dtype.
        dtype: 1 or 12 for int8, with div_mode also 13 for uint8 and 3 for int32.
        axis: the dim of input that scales covers; the default is 1, not the last. Without div_mode -1 or -2.
        div_mode: whether input is divided by scales, or multiplied.

    Returns:
        Of input's shape.

    Raises:
        ValueError: dtypes, shapes or numbers don't fit.

    Source: op-plugin 517f2e7d (formula, dtypes); the rounding by ascend_quant_v2 of ops-nn 68b00d49, taken to hold for
    div_mode too.
    """
    raise_first("npu::npu_quantize", _quantize_invalid(input, scales, zero_points, dtype, axis, div_mode))
    covered = [1] * input.dim()
    covered[axis] = scales.numel()
    scale = scales.float().reshape(covered)
    value = input.float() / scale if div_mode else input.float() * scale
    if zero_points is not None:
        value = value + zero_points.float().reshape(covered)
    result = _RESULTS[dtype]
    limits = torch.iinfo(result)
    # In float64, where the limits of int32 are numbers too.
    return row_major(value.round().double().clamp(limits.min, limits.max).to(result))


def quantize_fake(
    input: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    dtype: int,
    axis: int = 1,
    div_mode: bool = True,
) -> torch.Tensor:
    """Shape and dtype of `quantize_reference`."""
    return input.new_empty(input.shape, dtype=_RESULTS.get(dtype, torch.int8))


NPU_QUANTIZE = OpContract(
    name="npu::npu_quantize",
    schema=(
        "npu_quantize(Tensor input, Tensor scales, Tensor? zero_points, int dtype, int axis=1, bool div_mode=True)"
        " -> Tensor"
    ),
    reference=quantize_reference,
    fake=quantize_fake,
    refuse=_refuse_quantize,
    socs=frozenset({"ascend910b", "ascend910_93", "ascend310p"}),
    source="torch_npu 2.13.0 (schema), op-plugin 517f2e7d (formula, dtypes, SoCs)",
)


# npu_dynamic_quant


def _dynamic_quant_invalid(
    input: torch.Tensor,
    smooth_scales: torch.Tensor | None,
    group_index: torch.Tensor | None,
    dst_type: int | None,
    quant_mode: str,
    dst_type_max: float,
) -> Iterator[str]:
    yield from dtype_among("input", input, _LOW_PRECISION)
    yield from rank_between("input", input, 2, _MAX_RANK)
    yield from emptiness("input", input)
    if smooth_scales is not None:
        yield from dtype_among("smooth_scales", smooth_scales, (input.dtype,))
        if not known_same_shape(smooth_scales.shape, input.shape[-1:]):
            yield (
                f"smooth_scales {shape_text(smooth_scales.shape)} does not cover the last dim of input"
                f" {shape_text(input.shape)}"
            )
    if group_index is not None:
        yield "group_index is given (only one group of smooth_scales is known here)"
    yield from int8_only("dst_type", dst_type)
    if quant_mode != "pertoken":
        yield f"quant_mode is {quant_mode!r} (only 'pertoken' is known here)"
    if dst_type_max != 0:
        yield f"dst_type_max is {dst_type_max} (only 0.0, int8's own, is known here)"


@first_reason
def _refuse_dynamic_quant(
    target: Target,
    input: torch.Tensor,
    smooth_scales: torch.Tensor | None,
    group_index: torch.Tensor | None,
    dst_type: int | None,
    quant_mode: str,
    dst_type_max: float,
) -> Iterator[str]:
    yield from _dynamic_quant_invalid(input, smooth_scales, group_index, dst_type, quant_mode, dst_type_max)


def dynamic_quant_reference(
    input: torch.Tensor,
    *,
    smooth_scales: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `npu::npu_dynamic_quant` computes in its per-token mode: float32 inside, one rounding to int8.

    It multiplies a row by 127 / max, and gives the inverse of that as the row's scale.

    Args:
        input: [..., n] of 2 to 8 dims, float16 or bfloat16; not empty.
        smooth_scales: [n], of input's dtype: what input is multiplied by first.
        group_index: None.
        dst_type: 1, int8, or None for the same.
        quant_mode: "pertoken".
        dst_type_max: 0.0.

    Returns:
        y in int8, of input's shape; scale in float32, without the last dim.

    Raises:
        ValueError: dtypes, shapes or numbers don't fit.

    Source: op-plugin 517f2e7d (dtypes, shapes); dynamic_quant of ops-nn for the arithmetic.
    """
    raise_first(
        "npu::npu_dynamic_quant",
        _dynamic_quant_invalid(input, smooth_scales, group_index, dst_type, quant_mode, dst_type_max),
    )
    value = input.float()
    return quantized_rows(value if smooth_scales is None else value * smooth_scales.float())


def dynamic_quant_fake(
    input: torch.Tensor,
    *,
    smooth_scales: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes of `dynamic_quant_reference`."""
    return (
        input.new_empty(input.shape, dtype=torch.int8),
        input.new_empty(input.shape[:-1], dtype=torch.float32),
    )


NPU_DYNAMIC_QUANT = OpContract(
    name="npu::npu_dynamic_quant",
    schema=(
        "npu_dynamic_quant(Tensor input, *, Tensor? smooth_scales=None, Tensor? group_index=None, int? dst_type=None,"
        ' str quant_mode="pertoken", float dst_type_max=0.) -> (Tensor, Tensor)'
    ),
    reference=dynamic_quant_reference,
    fake=dynamic_quant_fake,
    refuse=_refuse_dynamic_quant,
    socs=frozenset({"ascend910b", "ascend910_93", "ascend310p"}),
    source="torch_npu 2.13.0 (schema), op-plugin 517f2e7d (dtypes, shapes, SoCs)",
)
