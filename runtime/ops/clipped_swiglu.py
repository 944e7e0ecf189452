"""SwiGLU with bounds, of one tensor that holds gate and value:  y = gate * sigmoid(alpha * gate) * (value + bias)."""

from collections.abc import Iterator

import torch

from ..sizes import known_true
from ..target import Target
from .contract import OpContract
from .layout import row_major
from .reasons import contiguity, dtype_among, emptiness, first_reason, raise_first, rank_between, shape_text

__all__ = ["NPU_CLIPPED_SWIGLU"]

# aclnn kernels take tensors of up to 8 dims.
_MAX_RANK = 8


def _invalid(x: torch.Tensor, group_index: torch.Tensor | None, dim: int, limit: float) -> Iterator[str]:
    yield from dtype_among("x", x)
    yield from rank_between("x", x, 2, _MAX_RANK)
    if group_index is not None:
        yield "group_index is given, and rows behind its groups are undefined"
    if dim not in (-1, x.dim() - 1):
        yield f"dim {dim} is not the last of x {shape_text(x.shape)} (the kernel splits dim and all behind it as one)"
    if not known_true(x.shape[-1] % 2 == 0):
        yield f"the last dim of x {shape_text(x.shape)} is {x.shape[-1]}, not known to be even"
    if not limit > 0:
        yield f"limit is {limit:g}; bounds of -limit and limit want it positive"
    yield from emptiness("x", x)
    yield from contiguity("x", x)


@first_reason
def _refuse(
    target: Target,
    x: torch.Tensor,
    group_index: torch.Tensor | None,
    dim: int,
    alpha: float,
    limit: float,
    bias: float,
    interleaved: bool,
) -> Iterator[str]:
    yield from _invalid(x, group_index, dim, limit)


def clipped_swiglu_reference(
    x: torch.Tensor,
    *,
    group_index: torch.Tensor | None = None,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> torch.Tensor:
    """What `npu::npu_clipped_swiglu` computes: float32 inside, one rounding (the eager spelling rounds at each step).

    Args:
        x: [..., 2 n], float16, bfloat16 or float32; at least two dims, contiguous, not empty.
        group_index: has to be None.
        dim: has to be the last.
        alpha: what the gate is scaled by inside the sigmoid.
        limit: the gate is cut above it, the value above it and below its negative.
        bias: added to the value.
        interleaved: whether gate and value take turns, gate first; else the first half is the gate.

    Returns:
        [..., n], of x's dtype.

    Raises:
        ValueError: dtype, shape, strides, `dim`, `limit` or `group_index` don't fit.

    Source: torch_npu 2.13.0 (formula); float32 inside as in CANN ops-nn, clipped_swiglu.
    """
    raise_first("npu::npu_clipped_swiglu", _invalid(x, group_index, dim, limit))
    wide = x.float()
    gate, value = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    gate, value = gate.clamp(max=limit), value.clamp(-limit, limit)
    return row_major((gate * torch.sigmoid(alpha * gate) * (value + bias)).to(x.dtype))


def clipped_swiglu_fake(
    x: torch.Tensor,
    *,
    group_index: torch.Tensor | None = None,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> torch.Tensor:
    """Shape of `clipped_swiglu_reference`."""
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


NPU_CLIPPED_SWIGLU = OpContract(
    name="npu::npu_clipped_swiglu",
    schema=(
        "npu_clipped_swiglu(Tensor x, *, Tensor? group_index=None, int dim=-1, float alpha=1.702, float limit=7.0,"
        " float bias=1.0, bool interleaved=True) -> Tensor"
    ),
    reference=clipped_swiglu_reference,
    fake=clipped_swiglu_fake,
    refuse=_refuse,
    socs=frozenset({"ascend910b", "ascend910_93"}),
    source="torch_npu 2.13.0 (schema, formula, dtypes, shapes, SoCs)",
)
