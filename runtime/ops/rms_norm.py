"""RMSNorm over the trailing dims that gamma covers, alone, with Gemma's weight, and with the residual add before it.

    y = x * (mean(x^2) + epsilon)^-1/2 * gamma        npu_rms_norm; npu_add_rms_norm with x = x1 + x2
    y = x * (mean(x^2) + epsilon)^-1/2 * (1 + gamma)  npu_gemma_rms_norm

The statistics are fp32 always. Where results are rounded differs, and each reference says so.
"""

from collections.abc import Iterator

import torch

from ..sizes import known_same_shape, known_true
from ..target import Target
from .contract import OpContract
from .layout import row_major
from .reasons import (
    contiguity,
    dtype_among,
    dtype_name,
    emptiness,
    first_reason,
    raise_first,
    rank_between,
    shape_text,
)

__all__ = ["NPU_ADD_RMS_NORM", "NPU_GEMMA_RMS_NORM", "NPU_RMS_NORM"]

# aclnn kernels take tensors of up to 8 dims.
_MAX_RANK = 8


def _gamma_covers(x_name: str, x: torch.Tensor, gamma: torch.Tensor) -> Iterator[str]:
    yield from dtype_among(x_name, x)
    yield from rank_between(x_name, x, 1, _MAX_RANK)
    yield from rank_between("gamma", gamma, 1, x.dim())
    if not known_same_shape(gamma.shape, x.shape[-gamma.dim() :]):
        yield (
            f"gamma {shape_text(gamma.shape)} does not cover the trailing dims of {x_name} {shape_text(x.shape)}"
            f" ({shape_text(x.shape[-gamma.dim() :])})"
        )


def _same_dtype(x_name: str, x: torch.Tensor, name: str, tensor: torch.Tensor) -> Iterator[str]:
    if tensor.dtype != x.dtype:
        yield f"{name} is {dtype_name(tensor.dtype)} but {x_name} is {dtype_name(x.dtype)} (they must be equal)"


def _rstd(wide: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> torch.Tensor:
    # The ops and their order are those of the usual eager spelling, so fp32 statistics agree with it bit for bit.
    return torch.rsqrt(wide.pow(2).mean(tuple(range(-gamma.dim(), 0)), keepdim=True) + epsilon)


def _fake_rstd(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[: x.dim() - gamma.dim()], *(1 for _ in gamma.shape)), dtype=torch.float32)


# npu_rms_norm


def _rms_norm_invalid(input: torch.Tensor, gamma: torch.Tensor) -> Iterator[str]:
    yield from _gamma_covers("input", input, gamma)
    if gamma.dtype not in (input.dtype, torch.float32):
        yield (
            f"gamma is {dtype_name(gamma.dtype)} but input is {dtype_name(input.dtype)}"
            f" (the kernel takes {dtype_name(input.dtype)} or float32)"
        )


@first_reason
def _refuse_rms_norm(target: Target, input: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> Iterator[str]:
    yield from _rms_norm_invalid(input, gamma)
    if target.soc == "ascend310p":
        tail_bytes = input.shape[-1] * input.element_size()
        if not known_true(tail_bytes % 32 == 0):
            yield f"the last dim of input takes {tail_bytes} bytes, no multiple of 32 (ascend310p reads such blocks)"


def rms_norm_reference(
    input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-06
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `npu::npu_rms_norm` computes.

    With gamma of input's dtype the normalised value is rounded to that dtype, then multiplied by gamma and rounded
    again: the order of Llama-like modules, bit for bit. With a float32 gamma of a 16-bit input there is one rounding,
    at the end.

    Args:
        input: [..., *gamma.shape], float16, bfloat16 or float32; any strides, may be empty.
        gamma: the weight, of input's dtype or float32.
        epsilon: added to the mean of squares.

    Returns:
        y of input's shape and dtype; rstd in float32, input's shape with a 1 for every dim of gamma.

    Raises:
        ValueError: dtypes or shapes don't fit.

    Source: roundings by AddRmsNorm of vllm-ascend 182b75ea, taken to hold for CANN's kernel too.
    """
    raise_first("npu::npu_rms_norm", _rms_norm_invalid(input, gamma))
    wide = input.float()
    rstd = _rstd(wide, gamma, epsilon)
    normalised = wide * rstd
    y = gamma * normalised.to(input.dtype) if gamma.dtype == input.dtype else (gamma * normalised).to(input.dtype)
    return row_major(y), row_major(rstd)


def rms_norm_fake(
    input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-06
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes of `rms_norm_reference` and of `gemma_rms_norm_reference`."""
    return input.new_empty(input.shape), _fake_rstd(input, gamma)


NPU_RMS_NORM = OpContract(
    name="npu::npu_rms_norm",
    schema="npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    reference=rms_norm_reference,
    fake=rms_norm_fake,
    refuse=_refuse_rms_norm,
    socs=frozenset({"ascend910b", "ascend910_93", "ascend310p"}),
    source="torch_npu 2.13.0 (schema), op-plugin 517f2e7d (dtypes, shapes, SoCs)",
)


# npu_gemma_rms_norm


def _gemma_rms_norm_invalid(input: torch.Tensor, gamma: torch.Tensor) -> Iterator[str]:
    yield from _gamma_covers("input", input, gamma)
    yield from _same_dtype("input", input, "gamma", gamma)
    yield from emptiness("input", input)
    yield from contiguity("input", input)
    yield from contiguity("gamma", gamma)


@first_reason
def _refuse_gemma_rms_norm(target: Target, input: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> Iterator[str]:
    yield from _gemma_rms_norm_invalid(input, gamma)


def gemma_rms_norm_reference(
    input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-06
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `npu::npu_gemma_rms_norm` computes: all in float32, one rounding at the end, as Gemma's own module does.

    Args:
        input: [..., *gamma.shape], float16, bfloat16 or float32; contiguous, not empty.
        gamma: the weight without its 1, of input's dtype; contiguous.
        epsilon: added to the mean of squares.

    Returns:
        y of input's shape and dtype; rstd in float32, input's shape with a 1 for every dim of gamma.

    Raises:
        ValueError: dtypes, shapes or strides don't fit.

    Source: op-plugin 517f2e7d (formula); the single rounding is taken from the formula, CANN's kernel is closed.
    """
    raise_first("npu::npu_gemma_rms_norm", _gemma_rms_norm_invalid(input, gamma))
    wide = input.float()
    rstd = _rstd(wide, gamma, epsilon)
    y = (wide * rstd * (1.0 + gamma.float())).to(input.dtype)
    return row_major(y), row_major(rstd)


NPU_GEMMA_RMS_NORM = OpContract(
    name="npu::npu_gemma_rms_norm",
    schema="npu_gemma_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    reference=gemma_rms_norm_reference,
    fake=rms_norm_fake,
    refuse=_refuse_gemma_rms_norm,
    socs=frozenset({"ascend910b", "ascend910_93"}),
    source="torch_npu 2.13.0 (schema), op-plugin 517f2e7d (dtypes, shapes, SoCs)",
)


# npu_add_rms_norm


def _add_rms_norm_invalid(x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor) -> Iterator[str]:
    yield from _gamma_covers("x1", x1, gamma)
    yield from _same_dtype("x1", x1, "x2", x2)
    yield from _same_dtype("x1", x1, "gamma", gamma)
    if not known_same_shape(x1.shape, x2.shape):
        yield f"x1 {shape_text(x1.shape)} and x2 {shape_text(x2.shape)} differ in shape (the kernel does not broadcast)"
    yield from emptiness("x1", x1)


@first_reason
def _refuse_add_rms_norm(
    target: Target, x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float
) -> Iterator[str]:
    yield from _add_rms_norm_invalid(x1, x2, gamma)


def add_rms_norm_reference(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-06
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `npu::npu_add_rms_norm` computes.

    bfloat16 normalises the float32 sum before it is rounded to x_out; float16 adds in float16 and normalises that
    rounded sum. Both round the normalised value to their dtype, multiply by gamma and round again. float32 never
    rounds.

    Args:
        x1: [..., *gamma.shape], float16, bfloat16 or float32; not empty.
        x2: of x1's shape and dtype.
        gamma: the weight, of x1's dtype.
        epsilon: added to the mean of squares.

    Returns:
        y and x_out = x1 + x2, of x1's shape and dtype, and between them rstd in float32, x1's shape with a 1 for every
        dim of gamma: (y, rstd, x_out). On ascend310p rstd holds nothing of meaning.

    Raises:
        ValueError: dtypes or shapes don't fit.

    Source: roundings by AddRmsNorm of vllm-ascend 182b75ea, taken to hold for CANN's kernel too.
    """
    raise_first("npu::npu_add_rms_norm", _add_rms_norm_invalid(x1, x2, gamma))
    if x1.dtype == torch.float16:
        x_out = x1 + x2
        wide = x_out.float()
    else:
        wide = x1.float() + x2.float()
        x_out = wide.to(x1.dtype)
    rstd = _rstd(wide, gamma, epsilon)
    y = gamma * (wide * rstd).to(x1.dtype)
    return row_major(y), row_major(rstd), row_major(x_out)


def add_rms_norm_fake(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-06
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shapes of `add_rms_norm_reference`."""
    return x1.new_empty(x1.shape), _fake_rstd(x1, gamma), x1.new_empty(x1.shape)


NPU_ADD_RMS_NORM = OpContract(
    name="npu::npu_add_rms_norm",
    schema="npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor, Tensor)",
    reference=add_rms_norm_reference,
    fake=add_rms_norm_fake,
    refuse=_refuse_add_rms_norm,
    socs=frozenset({"ascend910b", "ascend910_93", "ascend950", "ascend310p"}),
    source="torch_npu 2.13.0 (schema), op-plugin 517f2e7d (dtypes, shapes, SoCs)",
)
