"""RMSNorm whose result is wanted in another type: quantised with given scales or each row's own, or cast to float32.

    x_out = x1 + x2
    y = x_out * (mean(x_out^2) + epsilon)^-1/2 * gamma
    npu_add_rms_norm_quant           round(y / scales1 + zero_points1)
    npu_add_rms_norm_dynamic_quant   round(y * smooth / scale), scale = max|y * smooth| / 127 of each row
    npu_add_rms_norm_cast            y, and y in float32
    npu_rms_norm_quant               round((y + beta) / scale + offset), of a lone x

The statistics are fp32 always. What is rounded before the quantiser sees it differs from op to op and from type to
type, and each reference says so. Roundings are those of the kernels for ascend910b and ascend910_93 in ops-nn 68b00d49
(CANN's open norm and quant kernels).
"""

from collections.abc import Iterator, Sequence

import torch

from ..sizes import known_equal, known_same_shape, known_true
from ..target import Target
from .contract import OpContract
from .layout import row_major
from .quantize import int8_only, quantized_rows, to_int8
from .reasons import (
    dtype_among,
    dtype_name,
    emptiness,
    first_reason,
    raise_first,
    rank_between,
    shape_text,
)

__all__ = ["NPU_ADD_RMS_NORM_CAST", "NPU_ADD_RMS_NORM_DYNAMIC_QUANT", "NPU_ADD_RMS_NORM_QUANT", "NPU_RMS_NORM_QUANT"]

# aclnn kernels take tensors of up to 8 dims.
_MAX_RANK = 8
_LOW_PRECISION = (torch.float16, torch.bfloat16)

# Vector instructions of ascend310p read and write blocks of as many bytes; so does the norm kernel that quantises.
_BLOCK_BYTES = 32


def _same_shape(name: str, tensor: torch.Tensor, wanted_name: str, wanted: torch.Tensor) -> Iterator[str]:
    if not known_same_shape(tensor.shape, wanted.shape):
        yield f"{name} {shape_text(tensor.shape)} has not the shape of {wanted_name} {shape_text(wanted.shape)}"


def _add_norm_invalid(x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, lowest_rank: int) -> Iterator[str]:
    """What the three ops with a residual add share."""
    yield from dtype_among("x1", x1, _LOW_PRECISION)
    yield from rank_between("x1", x1, lowest_rank, _MAX_RANK)
    yield from dtype_among("x2", x2, (x1.dtype,))
    if not known_same_shape(x1.shape, x2.shape):
        yield f"x1 {shape_text(x1.shape)} and x2 {shape_text(x2.shape)} differ in shape (the kernel does not broadcast)"
    yield from dtype_among("gamma", gamma, (x1.dtype,))
    yield from rank_between("gamma", gamma, 1, x1.dim())
    if not known_same_shape(gamma.shape, x1.shape[-gamma.dim() :]):
        yield f"gamma {shape_text(gamma.shape)} does not cover the trailing dims of x1 {shape_text(x1.shape)}"
    yield from emptiness("x1", x1)


def _rstd(wide: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> torch.Tensor:
    return torch.rsqrt(wide.pow(2).mean(tuple(range(-gamma.dim(), 0)), keepdim=True) + epsilon)


def _add(x1: torch.Tensor, x2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum as it is normalised, in float32, and x_out: float16 adds in float16, bfloat16 in float32."""
    if x1.dtype == torch.float16:
        x_out = x1 + x2
        return x_out.float(), x_out
    wide = x1.float() + x2.float()
    return wide, wide.to(x1.dtype)


def _weighted(wide: torch.Tensor, rstd: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    """The norm in float32: float16 rounds the normalised value and its product with gamma, bfloat16 neither."""
    if gamma.dtype == torch.float16:
        return (gamma * (wide * rstd).half()).float()
    return wide * rstd * gamma.float()


# npu_add_rms_norm_cast


@first_reason
def _refuse_add_rms_norm_cast(
    target: Target, x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float
) -> Iterator[str]:
    yield from _add_norm_invalid(x1, x2, gamma, 1)


def add_rms_norm_cast_reference(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-06
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `npu::npu_add_rms_norm_cast` computes.

    float16 adds in float16, and rounds the normalised value and its product with gamma. bfloat16 normalises the float32
    sum, and rounds the product with gamma alone.

    Args:
        x1: [..., *gamma.shape], float16 or bfloat16; not empty.
        x2: of x1's shape and dtype.
        gamma: the weight, of x1's dtype.
        epsilon: added to the mean of squares.

    Returns:
        (y in float32, y, rstd, x_out): y and x_out = x1 + x2 of x1's shape and dtype, rstd in float32 with a 1 for
        every dim of gamma. The first is y cast; where there is but one bfloat16 row for each core, the kernel gives it
        before y is rounded.

    Raises:
        ValueError: dtypes or shapes don't fit.
    """
    raise_first("npu::npu_add_rms_norm_cast", _add_norm_invalid(x1, x2, gamma, 1))
    wide, x_out = _add(x1, x2)
    rstd = _rstd(wide, gamma, epsilon)
    y = row_major(_weighted(wide, rstd, gamma).to(x1.dtype))
    return y.float(), y, row_major(rstd), row_major(x_out)


def add_rms_norm_cast_fake(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-06
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shapes of `add_rms_norm_cast_reference`."""
    ones = (1 for _ in gamma.shape)
    rstd = x1.new_empty((*x1.shape[: x1.dim() - gamma.dim()], *ones), dtype=torch.float32)
    return x1.new_empty(x1.shape, dtype=torch.float32), x1.new_empty(x1.shape), rstd, x1.new_empty(x1.shape)


NPU_ADD_RMS_NORM_CAST = OpContract(
    name="npu::npu_add_rms_norm_cast",
    schema=(
        "npu_add_rms_norm_cast(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06)"
        " -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    reference=add_rms_norm_cast_reference,
    fake=add_rms_norm_cast_fake,
    refuse=_refuse_add_rms_norm_cast,
    socs=frozenset({"ascend910b", "ascend910_93"}),
    source="torch_npu 2.13.0 (schema), op-plugin 517f2e7d (dtypes, shapes, SoCs), ops-nn 68b00d49 (roundings)",
)


# npu_add_rms_norm_quant


def _add_rms_norm_quant_invalid(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    scales1: torch.Tensor,
    zero_points1: torch.Tensor | None,
    beta: torch.Tensor | None,
    scales2: torch.Tensor | None,
    zero_points2: torch.Tensor | None,
    axis: int,
    dst_type: int | None,
) -> Iterator[str]:
    yield from _add_norm_invalid(x1, x2, gamma, 1)
    if axis != -1:
        yield f"axis is {axis} (the kernel takes -1)"
    if x1.dtype == torch.float16:
        scales, zero_points = torch.float32, torch.int32
    else:
        scales, zero_points = torch.bfloat16, torch.bfloat16
    vectors = (
        ("scales1", scales1, scales),
        ("zero_points1", zero_points1, zero_points),
        ("beta", beta, x1.dtype),
        ("scales2", scales2, scales),
        ("zero_points2", zero_points2, zero_points),
    )
    for name, vector, dtype in vectors:
        if vector is not None:
            if vector.dtype != dtype:
                yield (
                    f"{name} is {dtype_name(vector.dtype)}"
                    f" (for a {dtype_name(x1.dtype)} x1 the kernel takes {dtype_name(dtype)})"
                )
            yield from _same_shape(name, vector, "gamma", gamma)
    if zero_points2 is not None and scales2 is None:
        yield "zero_points2 is given without scales2"
    yield from int8_only("dst_type", dst_type)
    tail_bytes = x1.shape[-1] * x1.element_size()
    if not known_true(tail_bytes % _BLOCK_BYTES == 0):
        yield f"the last dim of x1 takes {tail_bytes} bytes, no multiple of {_BLOCK_BYTES}"


@first_reason
def _refuse_add_rms_norm_quant(
    target: Target,
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    scales1: torch.Tensor,
    zero_points1: torch.Tensor | None,
    beta: torch.Tensor | None,
    scales2: torch.Tensor | None,
    zero_points2: torch.Tensor | None,
    axis: int,
    epsilon: float,
    div_mode: bool,
    dst_type: int | None,
) -> Iterator[str]:
    yield from _add_rms_norm_quant_invalid(
        x1, x2, gamma, scales1, zero_points1, beta, scales2, zero_points2, axis, dst_type
    )
    newer = [name for name, given in (("beta", beta), ("scales2", scales2)) if given is not None]
    newer += [] if div_mode else ["div_mode=False"]
    if newer:
        yield f"{newer[0]} needs CANN 8.3 or later, and which CANN the target has is not known"
    yield from _whole_blocks(target, "x1", x1)


def _whole_blocks(target: Target, name: str, x: torch.Tensor) -> Iterator[str]:
    if target.soc == "ascend310p" and not known_true(x.shape[-1] >= _BLOCK_BYTES):
        yield f"the last dim of {name} is {x.shape[-1]}; ascend310p writes int8 in blocks of {_BLOCK_BYTES}"


def add_rms_norm_quant_reference(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    scales1: torch.Tensor,
    zero_points1: torch.Tensor | None,
    beta: torch.Tensor | None = None,
    scales2: torch.Tensor | None = None,
    zero_points2: torch.Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-06,
    div_mode: bool = True,
    dst_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `npu::npu_add_rms_norm_quant` computes; the quantiser itself works in float32.

    float16 adds in float16, and rounds the normalised value and its product with gamma, which is then quantised.
    bfloat16 quantises what it got from the float32 sum without any rounding between. (The kernels for one row a core,
    and for beta, take the statistics of bfloat16 from the rounded sum.)

    Args:
        x1: [..., *gamma.shape], float16 or bfloat16; not empty, a row takes a multiple of 32 bytes.
        x2: of x1's shape and dtype.
        gamma: the weight, of x1's dtype.
        scales1: of gamma's shape; float32 for float16, bfloat16 for bfloat16. With div_mode no element is 0.
        zero_points1: of gamma's shape; int32 for float16, bfloat16 for bfloat16.
        beta: of gamma's shape and x1's dtype; added before the quantiser.
        scales2: as scales1, of a second quantiser.
        zero_points2: as zero_points1, with scales2 only.
        axis: -1.
        epsilon: added to the mean of squares.
        div_mode: whether the norm is divided by the scales, or multiplied.
        dst_type: 1, int8, or None for the same.

    Returns:
        (y1, y2, x_out): y1 and y2 in int8 and x_out = x1 + x2 in x1's dtype, all of x1's shape. Without scales2, y2
        holds nothing of meaning on the device; here it is zeros.

    Raises:
        ValueError: dtypes, shapes or numbers don't fit.
    """
    raise_first(
        "npu::npu_add_rms_norm_quant",
        _add_rms_norm_quant_invalid(x1, x2, gamma, scales1, zero_points1, beta, scales2, zero_points2, axis, dst_type),
    )
    wide, x_out = _add(x1, x2)
    y = _weighted(wide, _rstd(wide, gamma, epsilon), gamma)
    if beta is not None:
        y = y + beta.float()

    def quantized(scales: torch.Tensor, zero_points: torch.Tensor | None) -> torch.Tensor:
        scaled = y / scales.float() if div_mode else y * scales.float()
        return to_int8(scaled if zero_points is None else scaled + zero_points.float())

    y1 = quantized(scales1, zero_points1)
    y2 = torch.zeros_like(y1) if scales2 is None else quantized(scales2, zero_points2)
    return y1, y2, row_major(x_out)


def add_rms_norm_quant_fake(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    scales1: torch.Tensor,
    zero_points1: torch.Tensor | None,
    beta: torch.Tensor | None = None,
    scales2: torch.Tensor | None = None,
    zero_points2: torch.Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-06,
    div_mode: bool = True,
    dst_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shapes of `add_rms_norm_quant_reference`."""
    y1, y2 = (x1.new_empty(x1.shape, dtype=torch.int8) for _ in range(2))
    return y1, y2, x1.new_empty(x1.shape)


NPU_ADD_RMS_NORM_QUANT = OpContract(
    name="npu::npu_add_rms_norm_quant",
    schema=(
        "npu_add_rms_norm_quant(Tensor x1, Tensor x2, Tensor gamma, Tensor scales1, Tensor? zero_points1,"
        " Tensor? beta=None, Tensor? scales2=None, Tensor? zero_points2=None, *, int axis=-1, float epsilon=1e-06,"
        " bool div_mode=True, int? dst_type=None) -> (Tensor, Tensor, Tensor)"
    ),
    reference=add_rms_norm_quant_reference,
    fake=add_rms_norm_quant_fake,
    refuse=_refuse_add_rms_norm_quant,
    socs=frozenset({"ascend910b", "ascend910_93", "ascend310p"}),
    source="torch_npu 2.13.0 (schema), op-plugin 517f2e7d (dtypes, shapes, SoCs), ops-nn 68b00d49 (roundings)",
)


# npu_add_rms_norm_dynamic_quant


def _outputs(
    smooth_scale1: torch.Tensor | None, smooth_scale2: torch.Tensor | None, output_mask: Sequence[bool] | None
) -> tuple[bool, bool]:
    """Which of the two quantisers are on."""
    if output_mask is None:
        return True, smooth_scale1 is not None and smooth_scale2 is not None
    first, second = output_mask
    return first, second


def _add_rms_norm_dynamic_quant_invalid(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    smooth_scale1: torch.Tensor | None,
    smooth_scale2: torch.Tensor | None,
    beta: torch.Tensor | None,
    output_mask: Sequence[bool] | None,
    y_dtype: int | None,
) -> Iterator[str]:
    yield from _add_norm_invalid(x1, x2, gamma, 2)
    yield from rank_between("gamma", gamma, 1, 1)
    vectors = (("smooth_scale1", smooth_scale1), ("smooth_scale2", smooth_scale2), ("beta", beta))
    for name, vector in vectors:
        if vector is not None:
            yield from dtype_among(name, vector, (x1.dtype,))
            yield from _same_shape(name, vector, "gamma", gamma)
    outputs = _outputs(smooth_scale1, smooth_scale2, output_mask)
    if not any(outputs):
        yield "output_mask turns both quantisers off"
    for (name, vector), on in zip(vectors[:2], outputs, strict=True):
        if vector is not None and not on:
            yield f"{name} is given for a quantiser that is off"
    yield from int8_only("y_dtype", y_dtype)


@first_reason
def _refuse_add_rms_norm_dynamic_quant(
    target: Target,
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    smooth_scale1: torch.Tensor | None,
    smooth_scale2: torch.Tensor | None,
    beta: torch.Tensor | None,
    epsilon: float,
    output_mask: Sequence[bool] | None,
    y_dtype: int | None,
) -> Iterator[str]:
    yield from _add_rms_norm_dynamic_quant_invalid(
        x1, x2, gamma, smooth_scale1, smooth_scale2, beta, output_mask, y_dtype
    )


def add_rms_norm_dynamic_quant_reference(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    *,
    smooth_scale1: torch.Tensor | None = None,
    smooth_scale2: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    epsilon: float = 1e-06,
    output_mask: Sequence[bool] | None = None,
    y_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `npu::npu_add_rms_norm_dynamic_quant` computes: float32 from the sum on, one rounding to int8.

    The norm is not rounded to x1's dtype before it is quantised. As in `npu::npu_dynamic_quant`, a row is multiplied by
    127 / max, and the inverse of that is its scale.

    Args:
        x1: [..., n] of 2 to 8 dims, float16 or bfloat16; not empty.
        x2: of x1's shape and dtype.
        gamma: the weight [n], of x1's dtype.
        smooth_scale1: [n], of x1's dtype: what the norm is multiplied by before the first quantiser.
        smooth_scale2: likewise, before the second.
        beta: [n], of x1's dtype; added to the norm.
        epsilon: added to the mean of squares.
        output_mask: which quantisers are on; None is the first, and the second if both smooth scales are given.
        y_dtype: 1, int8, or None for the same.

    Returns:
        (y1, y2, x_out, scale1, scale2): y1 and y2 in int8 and x_out = x1 + x2 in x1's dtype, of x1's shape; the scales
        in float32, without the last dim. Those of a quantiser that is off have shape [0].

    Raises:
        ValueError: dtypes, shapes or numbers don't fit.
    """
    raise_first(
        "npu::npu_add_rms_norm_dynamic_quant",
        _add_rms_norm_dynamic_quant_invalid(x1, x2, gamma, smooth_scale1, smooth_scale2, beta, output_mask, y_dtype),
    )
    wide = x1.float() + x2.float()
    y = wide * _rstd(wide, gamma, epsilon) * gamma.float()
    if beta is not None:
        y = y + beta.float()

    def quantized(on: bool, smooth: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if not on:
            return y.new_empty(0, dtype=torch.int8), y.new_empty(0)
        return quantized_rows(y if smooth is None else y * smooth.float())

    first, second = _outputs(smooth_scale1, smooth_scale2, output_mask)
    y1, scale1 = quantized(first, smooth_scale1)
    y2, scale2 = quantized(second, smooth_scale2)
    return y1, y2, row_major(wide.to(x1.dtype)), scale1, scale2


def add_rms_norm_dynamic_quant_fake(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    *,
    smooth_scale1: torch.Tensor | None = None,
    smooth_scale2: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    epsilon: float = 1e-06,
    output_mask: Sequence[bool] | None = None,
    y_dtype: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shapes of `add_rms_norm_dynamic_quant_reference`."""
    on = _outputs(smooth_scale1, smooth_scale2, output_mask)
    y1, y2 = (x1.new_empty(x1.shape if is_on else (0,), dtype=torch.int8) for is_on in on)
    scale1, scale2 = (x1.new_empty(x1.shape[:-1] if is_on else (0,), dtype=torch.float32) for is_on in on)
    return y1, y2, x1.new_empty(x1.shape), scale1, scale2


NPU_ADD_RMS_NORM_DYNAMIC_QUANT = OpContract(
    name="npu::npu_add_rms_norm_dynamic_quant",
    schema=(
        "npu_add_rms_norm_dynamic_quant(Tensor x1, Tensor x2, Tensor gamma, *, Tensor? smooth_scale1=None,"
        " Tensor? smooth_scale2=None, Tensor? beta=None, float epsilon=1e-06, bool[2]? output_mask=None,"
        " int? y_dtype=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    reference=add_rms_norm_dynamic_quant_reference,
    fake=add_rms_norm_dynamic_quant_fake,
    refuse=_refuse_add_rms_norm_dynamic_quant,
    socs=frozenset({"ascend910b", "ascend910_93"}),
    source="torch_npu 2.13.0 (schema), op-plugin 517f2e7d (dtypes, shapes, SoCs), ops-nn 83325c23 (arithmetic)",
)


# npu_rms_norm_quant


def _rms_norm_quant_invalid(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor,
    dst_dtype: int | None,
) -> Iterator[str]:
    yield from dtype_among("x", x, _LOW_PRECISION)
    yield from rank_between("x", x, 1, _MAX_RANK)
    yield from dtype_among("gamma", gamma, (x.dtype,))
    yield from rank_between("gamma", gamma, 1, 2)
    if not known_equal(gamma.shape[-1], x.shape[-1]) or not all(known_equal(size, 1) for size in gamma.shape[:-1]):
        yield f"gamma {shape_text(gamma.shape)} does not cover the last dim of x {shape_text(x.shape)}"
    yield from dtype_among("beta", beta, (x.dtype,))
    yield from _same_shape("beta", beta, "gamma", gamma)
    yield from dtype_among("scale", scale, (x.dtype,))
    yield from dtype_among("offset", offset, (torch.int8,))
    for name, tensor in (("scale", scale), ("offset", offset)):
        if not known_same_shape(tensor.shape, (1,)):
            yield f"{name} has shape {shape_text(tensor.shape)} (the kernel takes [1])"
    yield from emptiness("x", x)
    yield from int8_only("dst_dtype", dst_dtype)


@first_reason
def _refuse_rms_norm_quant(
    target: Target,
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor,
    epsilon: float,
    dst_dtype: int | None,
) -> Iterator[str]:
    yield from _rms_norm_quant_invalid(x, gamma, beta, scale, offset, dst_dtype)
    yield from _whole_blocks(target, "x", x)


def rms_norm_quant_reference(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor,
    epsilon: float = 1e-06,
    *,
    dst_dtype: int | None = None,
) -> torch.Tensor:
    """What `npu::npu_rms_norm_quant` computes: float32 up to the quantised value, which is rounded to float16 first.

    The norm is divided by scale, as a product with its inverse. CANN's first manuals wrote it as a product with scale
    itself; the kernel, torch_npu's own test and the later manuals agree on the quotient.

    Args:
        x: [..., n], float16 or bfloat16; not empty.
        gamma: the weight [n] or [1, n], of x's dtype.
        beta: what is added to the norm, of gamma's shape and dtype.
        scale: [1], of x's dtype, not 0.
        offset: [1], int8.
        epsilon: added to the mean of squares.
        dst_dtype: 1, int8, or None for the same.

    Returns:
        int8, of x's shape.

    Raises:
        ValueError: dtypes, shapes or numbers don't fit.

    Source: ops-nn 0df30986 (arithmetic).
    """
    raise_first("npu::npu_rms_norm_quant", _rms_norm_quant_invalid(x, gamma, beta, scale, offset, dst_dtype))
    wide, weight = x.float(), gamma.flatten()
    y = wide * _rstd(wide, weight, epsilon) * weight.float() + beta.float().flatten()
    return to_int8((y * (1 / scale.float()) + offset.float()).half())


def rms_norm_quant_fake(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor,
    epsilon: float = 1e-06,
    *,
    dst_dtype: int | None = None,
) -> torch.Tensor:
    """Shape of `rms_norm_quant_reference`."""
    return x.new_empty(x.shape, dtype=torch.int8)


NPU_RMS_NORM_QUANT = OpContract(
    name="npu::npu_rms_norm_quant",
    schema=(
        "npu_rms_norm_quant(Tensor x, Tensor gamma, Tensor beta, Tensor scale, Tensor offset, float epsilon=1e-06, *,"
        " int? dst_dtype=None) -> Tensor"
    ),
    reference=rms_norm_quant_reference,
    fake=rms_norm_quant_fake,
    refuse=_refuse_rms_norm_quant,
    socs=frozenset({"ascend910b", "ascend910_93", "ascend950", "ascend310p"}),
    source="torch_npu 2.13.0 (schema), op-plugin 517f2e7d (dtypes, shapes, SoCs), ops-nn 0df30986 (arithmetic)",
)
