"""The prologue of attention with positions in time, height and width: split [q | k | v], norm and rotate q and k.

    q, k, v = split(qkv)                                     or q_0 | gate_0 | q_1 | gate_1 | … for q
    h = head * (mean(head^2) + eps)^-1/2 * weight + bias     for each head of q and k
    h[:rope_dim] = h[:rope_dim] * cos + rotate(h[:rope_dim]) * sin

Each column of cos and sin is that of one of the three positions; mrope_section says of which.
"""

from collections.abc import Iterator, Sequence

import torch

from ..sizes import known_same_shape, static_int
from ..target import Target
from .contract import OpContract
from .packed_qkv import (
    norm_of_heads,
    normed,
    packed_heads,
    packed_rows,
    positive_sizes,
    rotated,
    unified_buffer,
)
from .reasons import contiguity, dtype_among, first_reason, raise_first, rank_between, shape_text
from .sgl_kernel import SglFunction, package

__all__ = ["TRITON_SPLIT_QKV_RMSNORM_MROPE"]

_NAME = "sgl_kernel_npu::triton_split_qkv_rmsnorm_mrope"
_SINCE = "2026.08.21"


def _tables(
    qkv: torch.Tensor, cos_sin: torch.Tensor, mrope_section: Sequence[int], rope_dim: int, head_size: int
) -> Iterator[str]:
    if static_int(rope_dim) is None:
        yield f"rope_dim {rope_dim} is not static (the kernel is compiled for it)"
    if not 0 < rope_dim <= head_size:
        yield f"rope_dim {rope_dim} is not in 1 to head_size {head_size}"
    if rope_dim % 2:
        yield f"rope_dim {rope_dim} is odd (the kernel rotates pairs)"
    yield from dtype_among("cos_sin", cos_sin)
    yield from rank_between("cos_sin", cos_sin, 3, 3)
    wanted = (3, qkv.shape[0], rope_dim)
    if not known_same_shape(cos_sin.shape, wanted):
        yield f"cos_sin is {shape_text(cos_sin.shape)}, not [3, tokens, rope_dim] = {shape_text(wanted)}"
    yield from contiguity("cos_sin", cos_sin)
    if len(mrope_section) != 3 or any(section < 0 for section in mrope_section):
        yield f"mrope_section {list(mrope_section)} is no three numbers of columns: of time, height and width"


def _invalid(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    head_size: int,
    eps: float,
    mrope_section: Sequence[int],
    rope_dim: int | None,
    q_bias: torch.Tensor | None,
    k_bias: torch.Tensor | None,
    has_gate: bool,
) -> Iterator[str]:
    yield from positive_sizes(num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_size=head_size)
    width = ((2 if has_gate else 1) * num_q_heads + 2 * num_kv_heads) * head_size
    formula = f"({'2 * ' * has_gate}num_q_heads + 2 * num_kv_heads) * head_size"
    yield from packed_rows("qkv", qkv, width, formula)
    yield from _tables(qkv, cos_sin, mrope_section, head_size if rope_dim is None else rope_dim, head_size)
    yield from norm_of_heads(head_size, eps, q_weight, k_weight, q_bias, k_bias)


@first_reason
def _refuse(
    target: Target,
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    head_size: int,
    eps: float,
    mrope_section: Sequence[int],
    is_interleaved: bool,
    rope_dim: int | None,
    q_bias: torch.Tensor | None,
    k_bias: torch.Tensor | None,
    has_gate: bool,
) -> Iterator[str]:
    yield from _invalid(
        qkv,
        q_weight,
        k_weight,
        cos_sin,
        num_q_heads,
        num_kv_heads,
        head_size,
        eps,
        mrope_section,
        rope_dim,
        q_bias,
        k_bias,
        has_gate,
    )
    heads = (2 if has_gate else 1) * num_q_heads
    yield from unified_buffer(f"{heads} q heads{' and gates' * has_gate} of head_size {head_size}", heads * head_size)
    yield from unified_buffer(f"{num_kv_heads} k heads of head_size {head_size}", num_kv_heads * head_size)
    yield from package(target, "triton_split_qkv_rmsnorm_mrope", _SINCE)


def _chosen(table: torch.Tensor, mrope_section: Sequence[int], is_interleaved: bool) -> torch.Tensor:
    """[3, T, columns] → [T, 1, columns]: each column of the position that it belongs to, 0 where of none."""
    time, height, width = mrope_section
    column = torch.arange(table.shape[-1], device=table.device)
    if is_interleaved:
        is_height = (column % 3 == 1) & (column <= 3 * height)
        is_width = (column % 3 == 2) & (column <= 3 * width)
        is_time = ~(is_height | is_width)
    else:
        is_time = column < time
        is_height = (column >= time) & (column < time + height)
        is_width = (column >= time + height) & (column < time + height + width)
    parts = [torch.where(mask, rows, 0.0) for mask, rows in zip((is_time, is_height, is_width), table, strict=True)]
    return (parts[0] + parts[1] + parts[2]).unsqueeze(1)


def triton_split_qkv_rmsnorm_mrope_reference(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    head_size: int,
    eps: float,
    mrope_section: Sequence[int],
    is_interleaved: bool,
    rope_dim: int | None = None,
    q_bias: torch.Tensor | None = None,
    k_bias: torch.Tensor | None = None,
    has_gate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What sgl_kernel_npu's `triton_split_qkv_rmsnorm_mrope` computes: all in float32, one rounding at the store.

    Args:
        qkv: rows of q | k | v, head after head; with has_gate each head of q has its gate behind it; contiguous;
            float16, bfloat16 or float32. T, the number of rows, may be 0.
        q_weight: [head_size], any float dtype, for every q head.
        k_weight: likewise for k.
        cos_sin: [3, T, rope_dim], rows of cos | sin, a column for each pair: those of the positions in time, in height
            and in width; contiguous; any float dtype.
        num_q_heads: heads of q.
        num_kv_heads: heads of k, and of v.
        head_size: length of a head.
        eps: added to the mean of squares.
        mrope_section: how many columns are of time, of height and of width. In a row: columns beyond the three are 0,
            in cos too. Interleaved: columns 1, 4, … are of height and 2, 5, … of width, as many as said; all others of
            time.
        is_interleaved: which of both.
        rope_dim: how many of the first columns of a head are rotated, by halves; even, at most head_size, which None
            stands for.
        q_bias: [head_size], added after the weight, for both q and k or neither.
        k_bias: likewise for k.
        has_gate: whether there are gates.

    Returns:
        q [T, num_q_heads * head_size], k and v [T, num_kv_heads * head_size], and the gates as q, or [T, 0] without
        them, of qkv's dtype. v and gates are copied.

    Raises:
        ValueError: the kernel would read memory that it must not, or fail to compile.

    Source: sgl-kernel-npu f425bdf1 (2026-08-21), kernel and wrapper.
    """
    raise_first(
        _NAME,
        _invalid(
            qkv,
            q_weight,
            k_weight,
            cos_sin,
            num_q_heads,
            num_kv_heads,
            head_size,
            eps,
            mrope_section,
            rope_dim,
            q_bias,
            k_bias,
            has_gate,
        ),
    )
    cos, sin = (_chosen(table, mrope_section, is_interleaved) for table in cos_sin.float().chunk(2, dim=-1))
    wide_cos, wide_sin = (torch.cat((table, table), dim=-1) for table in (cos, sin))

    def normed_and_rotated(heads: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return packed_heads(rotated(normed(heads.float(), eps, weight, bias), wide_cos, wide_sin), qkv.dtype)

    parts = 2 if has_gate else 1
    heads = qkv.reshape(qkv.shape[0], parts * num_q_heads + 2 * num_kv_heads, head_size)
    q_and_gate, k, v = torch.split(heads, [parts * num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    return (
        normed_and_rotated(q_and_gate[:, ::parts], q_weight, q_bias),
        normed_and_rotated(k, k_weight, k_bias),
        packed_heads(v, qkv.dtype),
        packed_heads(q_and_gate[:, 1::2] if has_gate else q_and_gate[:, :0], qkv.dtype),
    )


def triton_split_qkv_rmsnorm_mrope_fake(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    head_size: int,
    eps: float,
    mrope_section: Sequence[int],
    is_interleaved: bool,
    rope_dim: int | None = None,
    q_bias: torch.Tensor | None = None,
    k_bias: torch.Tensor | None = None,
    has_gate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shapes of `triton_split_qkv_rmsnorm_mrope_reference`."""
    tokens, q_size, kv_size = qkv.shape[0], num_q_heads * head_size, num_kv_heads * head_size
    return (
        qkv.new_empty((tokens, q_size)),
        qkv.new_empty((tokens, kv_size)),
        qkv.new_empty((tokens, kv_size)),
        qkv.new_empty((tokens, q_size if has_gate else 0)),
    )


TRITON_SPLIT_QKV_RMSNORM_MROPE = OpContract(
    name=_NAME,
    schema=(
        "triton_split_qkv_rmsnorm_mrope(Tensor qkv, Tensor q_weight, Tensor k_weight, Tensor cos_sin, int num_q_heads,"
        " int num_kv_heads, int head_size, float eps, int[] mrope_section, bool is_interleaved, int? rope_dim=None,"
        " Tensor? q_bias=None, Tensor? k_bias=None, bool has_gate=False) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    reference=triton_split_qkv_rmsnorm_mrope_reference,
    fake=triton_split_qkv_rmsnorm_mrope_fake,
    refuse=_refuse,
    socs=frozenset({"ascend910b", "ascend910_93"}),
    source="sgl_kernel_npu f425bdf1 (2026-08-21), kernel and wrapper",
    device_kernel=SglFunction(
        module="sgl_kernel_npu.norm.split_qkv_rmsnorm_mrope",
        name="triton_split_qkv_rmsnorm_mrope",
        like=triton_split_qkv_rmsnorm_mrope_reference,
        since=_SINCE,
    ),
)
