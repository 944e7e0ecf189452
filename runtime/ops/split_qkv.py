"""The prologue of attention in one kernel: split a packed projection into q, k and v, norm and rotate q and k per head.

    q, k, v = split(input)
    h = head * (mean(head^2) + eps)^-1/2 * weight + bias      for each head of q and k; h = head without eps
    h[:rope_dim] = h[:rope_dim] * cos + rotate(h[:rope_dim]) * sin
"""

from collections.abc import Iterator

import torch

from ..target import Target
from .contract import OpContract
from .packed_qkv import (
    head_sizes,
    norm_of_heads,
    normed,
    packed_heads,
    packed_rows,
    rotated,
    split_rows,
    token_rows,
    unified_buffer,
)
from .reasons import dtype_name, first_reason, raise_first
from .rotary import rotate_half, rotate_interleaved
from .sgl_kernel import SglFunction, package

__all__ = ["SPLIT_QKV_RMSNORM_ROPE"]

_NAME = "sgl_kernel_npu::split_qkv_rmsnorm_rope"

# The first release with is_neox_style, and the first that stays in float32 between norm and rotation.
_NEOX_FLAG_SINCE = "2026.05.01.post3"
_FLOAT32_SINCE = "2026.6.0"


def _invalid(
    input: torch.Tensor,
    sin: torch.Tensor,
    cos: torch.Tensor,
    q_hidden_size: int,
    kv_hidden_size: int,
    head_dim: int,
    eps: float | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    q_bias: torch.Tensor | None,
    k_bias: torch.Tensor | None,
) -> Iterator[str]:
    yield from head_sizes(q_hidden_size, kv_hidden_size, head_dim)
    width = q_hidden_size + 2 * kv_hidden_size
    formula = f"q_hidden_size + 2 * kv_hidden_size = {q_hidden_size} + 2 * {kv_hidden_size}"
    yield from packed_rows("input", input, width, formula)
    yield from token_rows(input.shape[0], head_dim, sin=sin, cos=cos)
    yield from norm_of_heads(head_dim, eps, q_weight, k_weight, q_bias, k_bias)


def _package(target: Target, input: torch.Tensor, eps: float | None) -> Iterator[str]:
    yield from package(target, "is_neox_style", _NEOX_FLAG_SINCE)
    rounds = target.device == "npu" and target.has_older("sgl_kernel_npu", _FLOAT32_SINCE)
    if eps is not None and input.dtype != torch.bfloat16 and rounds:
        yield (
            f"sgl_kernel_npu {target.packages['sgl_kernel_npu']} rounds normed {dtype_name(input.dtype)} heads to"
            f" bfloat16; {_FLOAT32_SINCE} and later do not"
        )


@first_reason
def _refuse(
    target: Target,
    input: torch.Tensor,
    sin: torch.Tensor,
    cos: torch.Tensor,
    q_hidden_size: int,
    kv_hidden_size: int,
    head_dim: int,
    eps: float | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    q_bias: torch.Tensor | None,
    k_bias: torch.Tensor | None,
    is_neox_style: bool,
) -> Iterator[str]:
    yield from _invalid(
        input, sin, cos, q_hidden_size, kv_hidden_size, head_dim, eps, q_weight, k_weight, q_bias, k_bias
    )
    group = q_hidden_size // kv_hidden_size
    yield from unified_buffer(f"{group} q heads of head_dim {head_dim} for one kv head", group * head_dim)
    yield from _package(target, input, eps)


def split_qkv_rmsnorm_rope_reference(
    input: torch.Tensor,
    sin: torch.Tensor,
    cos: torch.Tensor,
    q_hidden_size: int,
    kv_hidden_size: int,
    head_dim: int,
    eps: float | None = None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    q_bias: torch.Tensor | None = None,
    k_bias: torch.Tensor | None = None,
    is_neox_style: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What sgl_kernel_npu's `split_qkv_rmsnorm_rope` computes: all in float32, one rounding at the store; v is copied.

    Args:
        input: [T, q_hidden_size + 2 * kv_hidden_size], rows of q | k | v, head after head; contiguous; float16,
            bfloat16 or float32. T may be 0.
        sin: T rows of rope_dim = sin.shape[-1] in any contiguous shape, one per token; any float dtype. rope_dim is
            even and at most head_dim; the rest of a head is not rotated.
        cos: as sin. Mind the order: sin comes first.
        q_hidden_size: number of q heads * head_dim; a multiple of kv_hidden_size.
        kv_hidden_size: number of kv heads * head_dim.
        head_dim: a power of two.
        eps: added to the mean of squares; None leaves the norm out.
        q_weight: [head_dim], any float dtype, for every q head; with eps only, and then needed.
        k_weight: likewise for k.
        q_bias: [head_dim], added after the weight; with eps only, and for both q and k or neither.
        k_bias: likewise for k.
        is_neox_style: True rotates halves, with all columns of sin and cos. False rotates neighbours, with the first
            half of the columns, each used for one pair; the second half is not read.

    Returns:
        q [T, q_hidden_size], k and v [T, kv_hidden_size], of input's dtype.

    Raises:
        ValueError: the kernel would assert, or read or leave memory that it must not.

    Source: sgl-kernel-npu f425bdf1 (2026-08-21), kernel and wrapper; float32 throughout since 2026.6.0.
    """
    raise_first(
        _NAME,
        _invalid(input, sin, cos, q_hidden_size, kv_hidden_size, head_dim, eps, q_weight, k_weight, q_bias, k_bias),
    )
    tokens, rope_dim = input.shape[0], sin.shape[-1]

    def one_row_per_token(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.reshape(tokens, 1, rope_dim).float()
        return rows if is_neox_style else rows[..., : rope_dim // 2].repeat_interleave(2, dim=-1)

    wide_cos, wide_sin = one_row_per_token(cos), one_row_per_token(sin)
    rotate = rotate_half if is_neox_style else rotate_interleaved

    def normed_and_rotated(
        heads: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if eps is not None and weight is not None:
            heads = normed(heads, eps, weight, bias)
        return packed_heads(rotated(heads, wide_cos, wide_sin, rotate), input.dtype)

    q, k, v = split_rows(input, head_dim, q_hidden_size, kv_hidden_size, kv_hidden_size)
    return (
        normed_and_rotated(q, q_weight, q_bias),
        normed_and_rotated(k, k_weight, k_bias),
        packed_heads(v, input.dtype),
    )


def split_qkv_rmsnorm_rope_fake(
    input: torch.Tensor,
    sin: torch.Tensor,
    cos: torch.Tensor,
    q_hidden_size: int,
    kv_hidden_size: int,
    head_dim: int,
    eps: float | None = None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    q_bias: torch.Tensor | None = None,
    k_bias: torch.Tensor | None = None,
    is_neox_style: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shapes of `split_qkv_rmsnorm_rope_reference`."""
    tokens = input.shape[0]
    return (
        input.new_empty((tokens, q_hidden_size)),
        input.new_empty((tokens, kv_hidden_size)),
        input.new_empty((tokens, kv_hidden_size)),
    )


SPLIT_QKV_RMSNORM_ROPE = OpContract(
    name=_NAME,
    schema=(
        "split_qkv_rmsnorm_rope(Tensor input, Tensor sin, Tensor cos, int q_hidden_size, int kv_hidden_size,"
        " int head_dim, float? eps=None, Tensor? q_weight=None, Tensor? k_weight=None, Tensor? q_bias=None,"
        " Tensor? k_bias=None, bool is_neox_style=True) -> (Tensor, Tensor, Tensor)"
    ),
    reference=split_qkv_rmsnorm_rope_reference,
    fake=split_qkv_rmsnorm_rope_fake,
    refuse=_refuse,
    socs=frozenset({"ascend910b", "ascend910_93", "ascend950"}),
    source="sgl_kernel_npu f425bdf1 (2026-08-21), kernel and wrapper",
    device_kernel=SglFunction(
        module="sgl_kernel_npu.norm.split_qkv_rmsnorm_rope",
        name="split_qkv_rmsnorm_rope",
        like=split_qkv_rmsnorm_rope_reference,
        since=_NEOX_FLAG_SINCE,
    ),
)
