"""Rotary position embedding that takes pairs of neighbours apart, as DeepSeek has it.

[a0, b0, a1, b1, …] → [a | b] = [a0, a1, … | b0, b1, …],    y = [a | b] * cos + [-b | a] * sin
"""

from collections.abc import Iterator

import torch

from ..sizes import known_equal, known_same_shape
from ..target import Target
from .contract import OpContract
from .layout import row_major
from .reasons import contiguity, dtype_among, dtype_name, emptiness, first_reason, raise_first, rank_between, shape_text
from .rotary import rotate_half

__all__ = ["NPU_INTERLEAVE_ROPE", "apart"]

_HEAD_DIM = 64


def _invalid(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Iterator[str]:
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        yield from dtype_among(name, tensor, (torch.float16, torch.bfloat16))
        if tensor.dtype != x.dtype:
            yield f"{name} is {dtype_name(tensor.dtype)} but x is {dtype_name(x.dtype)}"
        yield from rank_between(name, tensor, 4, 4)
        if not known_equal(tensor.shape[-1], _HEAD_DIM):
            yield f"{name} is {tensor.shape[-1]} wide (the kernel takes {_HEAD_DIM})"
        yield from emptiness(name, tensor)
        yield from contiguity(name, tensor)
    batch, _, tokens, width = x.shape
    if not any(known_same_shape(cos.shape, (batch, 1, length, width)) for length in (1, tokens)):
        yield (
            f"cos {shape_text(cos.shape)} is not broadcast to x {shape_text(x.shape)} (the kernel takes"
            f" {shape_text((batch, 1, tokens, width))} and {shape_text((batch, 1, 1, width))})"
        )
    if not known_same_shape(cos.shape, sin.shape):
        yield f"cos {shape_text(cos.shape)} and sin {shape_text(sin.shape)} differ in shape"


@first_reason
def _refuse(target: Target, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Iterator[str]:
    yield from _invalid(x, cos, sin)


def interleave_rope_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """What `npu::npu_interleave_rope` computes: float32 inside, one rounding.

    Args:
        x: [B, N, S, 64], float16 or bfloat16; contiguous, not empty. Pairs are neighbours.
        cos: [B, 1, S, 64] or [B, 1, 1, 64], of x's dtype; contiguous. Its halves belong to the halves of the result.
        sin: of cos's shape, likewise.

    Returns:
        The rotated tensor, of x's shape and dtype: first all first elements of the pairs, then all second ones.

    Raises:
        ValueError: dtypes, shapes or strides don't fit.

    Source: op-plugin 517f2e7d; CANN's open kernel of InterleaveRope (float32 inside, rounded once).
    """
    raise_first("npu::npu_interleave_rope", _invalid(x, cos, sin))
    halves = apart(x.float())
    return row_major((halves * cos.float() + rotate_half(halves) * sin.float()).to(x.dtype))


def apart(x: torch.Tensor) -> torch.Tensor:
    """The first elements of all pairs of neighbours along the last dim, then the second ones."""
    return torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)


def interleave_rope_fake(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Shape of `interleave_rope_reference`."""
    return x.new_empty(x.shape)


NPU_INTERLEAVE_ROPE = OpContract(
    name="npu::npu_interleave_rope",
    schema="npu_interleave_rope(Tensor x, Tensor cos, Tensor sin) -> Tensor",
    reference=interleave_rope_reference,
    fake=interleave_rope_fake,
    refuse=_refuse,
    socs=frozenset({"ascend910b", "ascend910_93"}),
    source="torch_npu 2.13.0 (schema), op-plugin 517f2e7d (shapes), CANN's kernel of InterleaveRope (rounding)",
)
