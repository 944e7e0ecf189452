"""The prologue of attention whose norm is over all heads together: split [q | k | v], norm q and k whole, rotate heads.

    q, k, v = split(input)
    y = round(x * (mean(x^2) + eps)^-1/2 * weight)           for x the whole q, and for x the whole k
    h[:rotary_dim] = h[:rotary_dim] * cos + rotate(h[:rotary_dim]) * sin      for each head h of y
"""

from collections.abc import Iterator

import torch

from .. import ranks
from ..sizes import known_equal
from ..target import Target
from .contract import OpContract
from .packed_qkv import (
    head_sizes,
    packed_heads,
    packed_rows,
    rotated,
    token_rows,
    unified_buffer,
    vector,
)
from .reasons import first_reason, raise_first
from .sgl_kernel import SglFunction, package

__all__ = ["SPLIT_QKV_TP_RMSNORM_ROPE"]

_NAME = "sgl_kernel_npu::split_qkv_tp_rmsnorm_rope"
_SINCE = "2026.03.31.rc1"


def _invalid(
    input: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_hidden_size: int,
    kv_hidden_size: int,
    head_dim: int,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    rotary_dim: int,
    tp_world: int,
    tp_group: str | None,
) -> Iterator[str]:
    yield from head_sizes(q_hidden_size, kv_hidden_size, head_dim)
    width = q_hidden_size + 2 * kv_hidden_size
    formula = f"q_hidden_size + 2 * kv_hidden_size = {q_hidden_size} + 2 * {kv_hidden_size}"
    yield from packed_rows("input", input, width, formula)
    yield from token_rows(input.shape[0], head_dim, cos=cos, sin=sin)
    if not known_equal(cos.shape[-1], rotary_dim):
        yield f"cos and sin are {cos.shape[-1]} wide, not rotary_dim {rotary_dim}"
    yield from vector("q_weight", q_weight, q_hidden_size, "q_hidden_size")
    yield from vector("k_weight", k_weight, kv_hidden_size, "kv_hidden_size")
    if tp_world < 1:
        yield f"tp_world is {tp_world}, not positive"
    if tp_world > 1 and tp_group is None:
        yield f"tp_world is {tp_world}, and tp_group doesn't say which ranks these are"
    if tp_world > 1 and tp_group is not None and (found := ranks.size(tp_group)) != tp_world:
        yield f"tp_world is {tp_world}, and the group {tp_group!r} has {'no' if found is None else found} ranks"


@first_reason
def _refuse(
    target: Target,
    input: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_hidden_size: int,
    kv_hidden_size: int,
    head_dim: int,
    eps: float,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    rotary_dim: int,
    tp_world: int,
    tp_group: str | None,
) -> Iterator[str]:
    yield from _invalid(
        input, cos, sin, q_hidden_size, kv_hidden_size, head_dim, q_weight, k_weight, rotary_dim, tp_world, tp_group
    )
    group = q_hidden_size // kv_hidden_size
    yield from unified_buffer(f"{group} q heads of head_dim {head_dim} for one kv head", group * head_dim)
    # The rotation holds half of every head of a token at once, in tiles padded to powers of two.
    heads, half = (1 << (size - 1).bit_length() for size in (q_hidden_size // head_dim, rotary_dim // 2))
    yield from unified_buffer(f"{heads} half heads of {half}", heads * half)
    yield from package(target, "split_qkv_tp_rmsnorm_rope", _SINCE)


def split_qkv_tp_rmsnorm_rope_reference(
    input: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_hidden_size: int,
    kv_hidden_size: int,
    head_dim: int,
    eps: float,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    rotary_dim: int,
    tp_world: int = 1,
    tp_group: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What sgl_kernel_npu's `split_qkv_tp_rmsnorm_rope` computes: in float32, norm and rotation rounded.

    Where several ranks share the heads, each has its own, and the mean squares of all are averaged: every rank has to
    call this, in one order with all other collectives.

    Args:
        input: [T, q_hidden_size + 2 * kv_hidden_size], rows of q | k | v, head after head; contiguous; float16,
            bfloat16 or float32. T may be 0.
        cos: T rows of rotary_dim in any contiguous shape, one per token; any float dtype. Only the first half of the
            columns is read, each for both elements of a pair. Mind the order: cos comes first.
        sin: as cos.
        q_hidden_size: number of q heads * head_dim; a multiple of kv_hidden_size.
        kv_hidden_size: number of kv heads * head_dim.
        head_dim: a power of two.
        eps: added to the mean of squares.
        q_weight: [q_hidden_size], any float dtype.
        k_weight: [kv_hidden_size], likewise.
        rotary_dim: how many of the first columns of a head are rotated, by halves; even, at most head_dim.
        tp_world: how many ranks share the heads.
        tp_group: the name of their process group, as torch's functional collectives have it; not read for one rank.

    Returns:
        q [T, q_hidden_size], k and v [T, kv_hidden_size], of input's dtype. v is copied. Normed values are rounded to
        that dtype before they are rotated.

    Raises:
        ValueError: the kernel would assert or read memory that it must not, or the group has other ranks.

    Source: sgl-kernel-npu f425bdf1 (2026-08-21), kernels and wrapper.
    """
    raise_first(
        _NAME,
        _invalid(
            input, cos, sin, q_hidden_size, kv_hidden_size, head_dim, q_weight, k_weight, rotary_dim, tp_world, tp_group
        ),
    )
    tokens = input.shape[0]
    halves = [rows.reshape(tokens, 1, rotary_dim)[..., : rotary_dim // 2].float() for rows in (cos, sin)]
    wide_cos, wide_sin = (torch.cat((half, half), dim=-1) for half in halves)

    q, k, v = torch.split(input, [q_hidden_size, kv_hidden_size, kv_hidden_size], dim=-1)
    squares = torch.stack([part.float().pow(2).mean(-1) for part in (q, k)], dim=-1)
    if tp_world > 1 and tp_group is not None:
        torch.distributed.all_reduce(squares, group=ranks.process_group(tp_group))
    of_q, of_k = torch.split(squares * (1.0 / tp_world), 1, dim=-1)

    def normed_and_rotated(whole: torch.Tensor, mean: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rounded = (whole.float() * torch.rsqrt(mean + eps) * weight.float()).to(input.dtype)
        heads = rounded.reshape(tokens, whole.shape[-1] // head_dim, head_dim)
        return packed_heads(rotated(heads.float(), wide_cos, wide_sin), input.dtype)

    return (
        normed_and_rotated(q, of_q, q_weight),
        normed_and_rotated(k, of_k, k_weight),
        v.clone(memory_format=torch.contiguous_format),
    )


def split_qkv_tp_rmsnorm_rope_fake(
    input: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_hidden_size: int,
    kv_hidden_size: int,
    head_dim: int,
    eps: float,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    rotary_dim: int,
    tp_world: int = 1,
    tp_group: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shapes of `split_qkv_tp_rmsnorm_rope_reference`."""
    tokens = input.shape[0]
    return (
        input.new_empty((tokens, q_hidden_size)),
        input.new_empty((tokens, kv_hidden_size)),
        input.new_empty((tokens, kv_hidden_size)),
    )


_KERNEL = SglFunction(
    module="sgl_kernel_npu.norm.split_qkv_tp_rmsnorm_rope",
    name="split_qkv_tp_rmsnorm_rope",
    like=split_qkv_tp_rmsnorm_rope_reference,
    since=_SINCE,
)


def _on_device(
    input: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_hidden_size: int,
    kv_hidden_size: int,
    head_dim: int,
    eps: float,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    rotary_dim: int,
    tp_world: int = 1,
    tp_group: str | None = None,
) -> tuple[torch.Tensor, ...]:
    """The package's function, which takes the process group itself."""
    group = None if tp_group is None else ranks.process_group(tp_group)
    given = input, cos, sin, q_hidden_size, kv_hidden_size, head_dim, eps, q_weight, k_weight, rotary_dim, tp_world
    results = _KERNEL(*given, group)
    assert isinstance(results, tuple)
    return results


SPLIT_QKV_TP_RMSNORM_ROPE = OpContract(
    name=_NAME,
    schema=(
        "split_qkv_tp_rmsnorm_rope(Tensor input, Tensor cos, Tensor sin, int q_hidden_size, int kv_hidden_size,"
        " int head_dim, float eps, Tensor q_weight, Tensor k_weight, int rotary_dim, int tp_world=1,"
        " str? tp_group=None) -> (Tensor, Tensor, Tensor)"
    ),
    reference=split_qkv_tp_rmsnorm_rope_reference,
    fake=split_qkv_tp_rmsnorm_rope_fake,
    refuse=_refuse,
    socs=frozenset({"ascend910b", "ascend910_93"}),
    source="sgl_kernel_npu f425bdf1 (2026-08-21), kernels and wrapper",
    device_kernel=_on_device,
    group="tp_group",
)
