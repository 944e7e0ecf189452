"""The prologue of gated attention: split a packed projection into q, gate, k and v, norm and rotate q and k per head.

    q_0 | gate_0 | q_1 | gate_1 | … | k | v = input
    h = head * (mean(head^2) + eps)^-1/2 * (1 + weight)      for each head of q and k
    h[:rope_dim] = h[:rope_dim] * cos + rotate(h[:rope_dim]) * sin
"""

from collections.abc import Iterator

import torch

from ..sizes import known_equal, static_int
from ..target import Target
from .contract import OpContract
from .packed_qkv import (
    head_sizes,
    normed,
    packed_heads,
    packed_rows,
    rotated,
    token_rows,
    unified_buffer,
    vector,
)
from .reasons import first_reason, raise_first
from .sgl_kernel import SglFunction, package

__all__ = ["SPLIT_QKVGATE_GEMMA_RMSNORM_ROPE"]

_NAME = "sgl_kernel_npu::split_qkvgate_gemma_rmsnorm_rope"
_SINCE = "2026.04.15.rc1"


def _invalid(
    input: torch.Tensor,
    sin: torch.Tensor,
    cos: torch.Tensor,
    q_hidden_size: int,
    kv_hidden_size: int,
    head_dim: int,
    rope_dim: int,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
) -> Iterator[str]:
    yield from head_sizes(q_hidden_size, kv_hidden_size, head_dim)
    width = 2 * q_hidden_size + 2 * kv_hidden_size
    formula = f"2 * (q_hidden_size + kv_hidden_size) = 2 * ({q_hidden_size} + {kv_hidden_size})"
    yield from packed_rows("input", input, width, formula)
    if static_int(rope_dim) is None:
        yield f"rope_dim {rope_dim} is not static (the kernel is compiled for it)"
    if not 0 < rope_dim < head_dim:
        yield f"rope_dim {rope_dim} is not in 1 to head_dim {head_dim} - 1 (the kernel has no rotation of whole heads)"
    yield from token_rows(input.shape[0], head_dim, sin=sin, cos=cos)
    if not known_equal(sin.shape[-1], rope_dim):
        yield f"sin and cos are {sin.shape[-1]} wide, not rope_dim {rope_dim}"
    yield from vector("q_weight", q_weight, head_dim, "head_dim")
    yield from vector("k_weight", k_weight, head_dim, "head_dim")


@first_reason
def _refuse(
    target: Target,
    input: torch.Tensor,
    sin: torch.Tensor,
    cos: torch.Tensor,
    q_hidden_size: int,
    kv_hidden_size: int,
    head_dim: int,
    rope_dim: int,
    eps: float,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
) -> Iterator[str]:
    yield from _invalid(input, sin, cos, q_hidden_size, kv_hidden_size, head_dim, rope_dim, q_weight, k_weight)
    group = q_hidden_size // kv_hidden_size
    yield from unified_buffer(f"{group} q heads and gates of {head_dim} for one kv head", 2 * group * head_dim)
    yield from package(target, "split_qkvgate_gemma_rmsnorm_rope", _SINCE)


def split_qkvgate_gemma_rmsnorm_rope_reference(
    input: torch.Tensor,
    sin: torch.Tensor,
    cos: torch.Tensor,
    q_hidden_size: int,
    kv_hidden_size: int,
    head_dim: int,
    rope_dim: int,
    eps: float,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What sgl_kernel_npu's `split_qkvgate_gemma_rmsnorm_rope` computes: all in float32, one rounding at the store.

    Args:
        input: [T, 2 * q_hidden_size + 2 * kv_hidden_size]: each head of q with its gate behind it, then k, then v;
            contiguous; float16, bfloat16 or float32. T may be 0.
        sin: T rows of rope_dim in any contiguous shape, one per token; any float dtype.
        cos: as sin. Mind the order: sin comes first.
        q_hidden_size: number of q heads * head_dim; a multiple of kv_hidden_size.
        kv_hidden_size: number of kv heads * head_dim.
        head_dim: a power of two.
        rope_dim: how many of the first columns of a head are rotated, by halves; even, and less than head_dim.
        eps: added to the mean of squares.
        q_weight: [head_dim], any float dtype; 1 is added to it.
        k_weight: likewise for k.

    Returns:
        q [T, q_hidden_size], k and v [T, kv_hidden_size], gate [T, q_hidden_size], of input's dtype. v and gate are
        copied.

    Raises:
        ValueError: the kernel would assert, fail to compile, or read memory that it must not.

    Source: sgl-kernel-npu f425bdf1 (2026-08-21), kernel and wrapper.
    """
    raise_first(
        _NAME, _invalid(input, sin, cos, q_hidden_size, kv_hidden_size, head_dim, rope_dim, q_weight, k_weight)
    )
    tokens = input.shape[0]
    wide_cos, wide_sin = (rows.reshape(tokens, 1, rope_dim).float() for rows in (cos, sin))

    def normed_and_rotated(heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        heads = normed(heads.float(), eps, weight, offset=1.0)
        return packed_heads(rotated(heads, wide_cos, wide_sin), input.dtype)

    q_and_gate, k, v = torch.split(input, [2 * q_hidden_size, kv_hidden_size, kv_hidden_size], dim=-1)
    q, gate = q_and_gate.reshape(tokens, q_hidden_size // head_dim, 2 * head_dim).chunk(2, dim=-1)
    return (
        normed_and_rotated(q, q_weight),
        normed_and_rotated(k.reshape(tokens, kv_hidden_size // head_dim, head_dim), k_weight),
        v.clone(memory_format=torch.contiguous_format),
        packed_heads(gate, input.dtype),
    )


def split_qkvgate_gemma_rmsnorm_rope_fake(
    input: torch.Tensor,
    sin: torch.Tensor,
    cos: torch.Tensor,
    q_hidden_size: int,
    kv_hidden_size: int,
    head_dim: int,
    rope_dim: int,
    eps: float,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shapes of `split_qkvgate_gemma_rmsnorm_rope_reference`."""
    tokens = input.shape[0]
    return (
        input.new_empty((tokens, q_hidden_size)),
        input.new_empty((tokens, kv_hidden_size)),
        input.new_empty((tokens, kv_hidden_size)),
        input.new_empty((tokens, q_hidden_size)),
    )


SPLIT_QKVGATE_GEMMA_RMSNORM_ROPE = OpContract(
    name=_NAME,
    schema=(
        "split_qkvgate_gemma_rmsnorm_rope(Tensor input, Tensor sin, Tensor cos, int q_hidden_size, int kv_hidden_size,"
        " int head_dim, int rope_dim, float eps, Tensor q_weight, Tensor k_weight)"
        " -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    reference=split_qkvgate_gemma_rmsnorm_rope_reference,
    fake=split_qkvgate_gemma_rmsnorm_rope_fake,
    refuse=_refuse,
    socs=frozenset({"ascend910b", "ascend910_93", "ascend950"}),
    source="sgl_kernel_npu f425bdf1 (2026-08-21), kernel and wrapper",
    device_kernel=SglFunction(
        module="sgl_kernel_npu.norm.split_qkv_rmsnorm_rope",
        name="split_qkvgate_gemma_rmsnorm_rope",
        like=split_qkvgate_gemma_rmsnorm_rope_reference,
        since=_SINCE,
    ),
)
