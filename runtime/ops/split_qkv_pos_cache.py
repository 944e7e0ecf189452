"""The prologue of attention that looks up the rows of its table: split [q | k | v], norm and rotate q and k per head.

    q, k, v = split(input)
    h = head * (mean(head^2) + eps)^-1/2 * weight + bias      for each head of q and k; h = head without eps
    cos, sin = halves of cos_sin_cache[position]
    h[:rope_dim] = h[:rope_dim] * cos + rotate(h[:rope_dim]) * sin
"""

from collections.abc import Iterator

import torch

from ..sizes import known_equal, known_true, static_int
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
    unified_buffer,
)
from .reasons import dtype_among, dtype_name, first_reason, raise_first, rank_between, shape_text
from .sgl_kernel import SglFunction, package

__all__ = ["SPLIT_QKV_RMSNORM_ROPE_POS_CACHE_HALF"]

_NAME = "sgl_kernel_npu::split_qkv_rmsnorm_rope_pos_cache_half_npu"
_SINCE = "2026.03.01.post1"


def _lookup(
    input_tensor: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, rope_dim: int, head_dim: int
) -> Iterator[str]:
    tokens = input_tensor.shape[0]
    if positions.dtype not in (torch.int32, torch.int64):
        yield f"positions is {dtype_name(positions.dtype)} (the kernel takes int32, int64)"
    if not known_equal(positions.numel(), tokens):
        yield f"positions {shape_text(positions.shape)} has {positions.numel()} elements, not one for each of {tokens}"
    if static_int(rope_dim) is None:
        yield f"rope_dim {rope_dim} is not static (the kernel is compiled for it)"
    if not 0 < rope_dim <= head_dim:
        yield f"rope_dim {rope_dim} is not in 1 to head_dim {head_dim}"
    if rope_dim % 2:
        yield f"rope_dim {rope_dim} is odd (the kernel rotates pairs)"
    yield from dtype_among("cos_sin_cache", cos_sin_cache)
    yield from rank_between("cos_sin_cache", cos_sin_cache, 2, 2)
    if not known_equal(cos_sin_cache.shape[1], rope_dim):
        yield f"cos_sin_cache is {cos_sin_cache.shape[1]} wide, not rope_dim {rope_dim}"
    if not known_true(cos_sin_cache.shape[0] > 0):
        yield f"cos_sin_cache {shape_text(cos_sin_cache.shape)} may have no row to look up"


def _invalid(
    input_tensor: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    q_hidden_size: int,
    kv_hidden_size: int,
    head_dim: int,
    eps: float | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    q_bias: torch.Tensor | None,
    k_bias: torch.Tensor | None,
    rope_dim: int | None,
) -> Iterator[str]:
    yield from head_sizes(q_hidden_size, kv_hidden_size, head_dim)
    width = q_hidden_size + 2 * kv_hidden_size
    formula = f"q_hidden_size + 2 * kv_hidden_size = {q_hidden_size} + 2 * {kv_hidden_size}"
    yield from packed_rows("input_tensor", input_tensor, width, formula)
    yield from _lookup(input_tensor, positions, cos_sin_cache, head_dim if rope_dim is None else rope_dim, head_dim)
    yield from norm_of_heads(head_dim, eps, q_weight, k_weight, q_bias, k_bias)


@first_reason
def _refuse(
    target: Target,
    input_tensor: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    q_hidden_size: int,
    kv_hidden_size: int,
    head_dim: int,
    eps: float | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    q_bias: torch.Tensor | None,
    k_bias: torch.Tensor | None,
    rope_dim: int | None,
    cast_norm_to_bf16: bool,
) -> Iterator[str]:
    yield from _invalid(
        input_tensor,
        positions,
        cos_sin_cache,
        q_hidden_size,
        kv_hidden_size,
        head_dim,
        eps,
        q_weight,
        k_weight,
        q_bias,
        k_bias,
        rope_dim,
    )
    if input_tensor.dtype != torch.bfloat16:
        yield f"input_tensor is {dtype_name(input_tensor.dtype)}, and the kernel rounds its results to bfloat16"
    group = q_hidden_size // kv_hidden_size
    yield from unified_buffer(f"{group} q heads of head_dim {head_dim} for one kv head", group * head_dim)
    yield from package(target, "split_qkv_rmsnorm_rope_pos_cache_half_npu", _SINCE)


def split_qkv_rmsnorm_rope_pos_cache_half_reference(
    input_tensor: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    q_hidden_size: int,
    kv_hidden_size: int,
    head_dim: int,
    eps: float | None = None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    q_bias: torch.Tensor | None = None,
    k_bias: torch.Tensor | None = None,
    rope_dim: int | None = None,
    cast_norm_to_bf16: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What sgl_kernel_npu's `split_qkv_rmsnorm_rope_pos_cache_half_npu` computes: float32 inside, rounded to bfloat16.

    Args:
        input_tensor: [T, q_hidden_size + 2 * kv_hidden_size], rows of q | k | v, head after head; contiguous; float16,
            bfloat16 or float32. q and k pass through bfloat16 whatever it is. T may be 0.
        positions: T row numbers of cos_sin_cache in any shape, one per token; int32 or int64. Those outside of the
            cache read its first or last row.
        cos_sin_cache: [positions, rope_dim], rows of cos | sin, a column for each pair; any float dtype, any strides.
        q_hidden_size: number of q heads * head_dim; a multiple of kv_hidden_size.
        kv_hidden_size: number of kv heads * head_dim.
        head_dim: a power of two.
        eps: added to the mean of squares; None leaves the norm out.
        q_weight: [head_dim], any float dtype, for every q head; with eps only, and then needed.
        k_weight: likewise for k.
        q_bias: [head_dim], added after the weight; with eps only, and for both q and k or neither.
        k_bias: likewise for k.
        rope_dim: how many of the first columns of a head are rotated, by halves; even, at most head_dim, which None
            stands for.
        cast_norm_to_bf16: whether normed values are rounded to bfloat16 before they are rotated.

    Returns:
        q [T, q_hidden_size], k and v [T, kv_hidden_size], of input_tensor's dtype. v is copied.

    Raises:
        ValueError: the kernel would assert or raise, or read memory that it must not.

    Source: sgl-kernel-npu f425bdf1 (2026-08-21), kernel and wrapper. Earlier releases look at the positions from the
    host and raise for one outside of the cache.
    """
    raise_first(
        _NAME,
        _invalid(
            input_tensor,
            positions,
            cos_sin_cache,
            q_hidden_size,
            kv_hidden_size,
            head_dim,
            eps,
            q_weight,
            k_weight,
            q_bias,
            k_bias,
            rope_dim,
        ),
    )
    rows = cos_sin_cache[positions.reshape(-1).long().clamp(0, cos_sin_cache.shape[0] - 1)].float().unsqueeze(1)
    cos, sin = (torch.cat((half, half), dim=-1) for half in rows.chunk(2, dim=-1))

    def normed_and_rotated(
        heads: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if eps is not None and weight is not None:
            heads = normed(heads, eps, weight, bias)
        if cast_norm_to_bf16:
            heads = heads.bfloat16().float()
        return packed_heads(rotated(heads, cos, sin).bfloat16(), input_tensor.dtype)

    q, k, v = split_rows(input_tensor, head_dim, q_hidden_size, kv_hidden_size, kv_hidden_size)
    return (
        normed_and_rotated(q, q_weight, q_bias),
        normed_and_rotated(k, k_weight, k_bias),
        packed_heads(v, input_tensor.dtype),
    )


def split_qkv_rmsnorm_rope_pos_cache_half_fake(
    input_tensor: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    q_hidden_size: int,
    kv_hidden_size: int,
    head_dim: int,
    eps: float | None = None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    q_bias: torch.Tensor | None = None,
    k_bias: torch.Tensor | None = None,
    rope_dim: int | None = None,
    cast_norm_to_bf16: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shapes of `split_qkv_rmsnorm_rope_pos_cache_half_reference`."""
    tokens = input_tensor.shape[0]
    return (
        input_tensor.new_empty((tokens, q_hidden_size)),
        input_tensor.new_empty((tokens, kv_hidden_size)),
        input_tensor.new_empty((tokens, kv_hidden_size)),
    )


SPLIT_QKV_RMSNORM_ROPE_POS_CACHE_HALF = OpContract(
    name=_NAME,
    schema=(
        "split_qkv_rmsnorm_rope_pos_cache_half_npu(Tensor input_tensor, Tensor positions, Tensor cos_sin_cache,"
        " int q_hidden_size, int kv_hidden_size, int head_dim, float? eps=None, Tensor? q_weight=None,"
        " Tensor? k_weight=None, Tensor? q_bias=None, Tensor? k_bias=None, int? rope_dim=None,"
        " bool cast_norm_to_bf16=True) -> (Tensor, Tensor, Tensor)"
    ),
    reference=split_qkv_rmsnorm_rope_pos_cache_half_reference,
    fake=split_qkv_rmsnorm_rope_pos_cache_half_fake,
    refuse=_refuse,
    socs=frozenset({"ascend910b", "ascend910_93"}),
    source="sgl_kernel_npu f425bdf1 (2026-08-21), kernel and wrapper",
    device_kernel=SglFunction(
        module="sgl_kernel_npu.norm.split_qkv_rmsnorm_rope_pos_cache_half_npu",
        name="split_qkv_rmsnorm_rope_pos_cache_half_npu",
        like=split_qkv_rmsnorm_rope_pos_cache_half_reference,
        since=_SINCE,
    ),
)
