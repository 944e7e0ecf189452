"""Rotary position embedding of q and k at once, of the first rotary_dim columns of each head, the others copied.

    neox    out[i] = x[i] * cos[i] - x[i + half] * sin[i],   out[i + half] = x[i] * sin[i] + x[i + half] * cos[i]
    else    likewise for the pairs x[2 * i], x[2 * i + 1]
"""

from collections.abc import Iterator

import torch

from ..sizes import known_equal, static_int
from ..target import Target
from .contract import OpContract
from .reasons import dtype_among, dtype_name, emptiness, first_reason, raise_first, rank_between, shape_text
from .sgl_kernel import SglFunction, package

__all__ = ["FUSED_ROPE_QK_MQA"]

_NAME = "sgl_kernel_npu::fused_rope_qk_mqa"
_SINCE = "2026.03.01"

# One launch has one program for each token, in earlier releases for each token and head, and never more than this.
_PROGRAM_LIMIT = 65535


def _invalid(query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor, rotary_dim: int) -> Iterator[str]:
    for name, tensor, rank in (("query", query, 3), ("key", key, 3), ("cos_sin", cos_sin, 2)):
        yield from dtype_among(name, tensor)
        yield from rank_between(name, tensor, rank, rank)
        yield from emptiness(name, tensor)
    if query.dtype != key.dtype:
        yield f"query is {dtype_name(query.dtype)} but key is {dtype_name(key.dtype)}"
    if not (known_equal(query.shape[0], key.shape[0]) and known_equal(query.shape[2], key.shape[2])):
        yield f"query {shape_text(query.shape)} and key {shape_text(key.shape)} differ in tokens or head_dim"
    if static_int(rotary_dim) is None:
        yield f"rotary_dim {rotary_dim} is not static (the kernel is compiled for it)"
    if not (known_equal(cos_sin.shape[0], query.shape[0]) and known_equal(cos_sin.shape[1], rotary_dim)):
        wanted = shape_text((query.shape[0], rotary_dim))
        yield f"cos_sin is {shape_text(cos_sin.shape)}, not [tokens, rotary_dim] = {wanted}"
    head_dim = static_int(query.shape[2])
    if head_dim is None:
        yield f"head_dim {query.shape[2]} is not static (the kernel is compiled for it)"
    elif rotary_dim > head_dim or rotary_dim % 2:
        yield f"rotary_dim {rotary_dim} is no even number in 2 to head_dim {head_dim}"


@first_reason
def _refuse(
    target: Target, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor, rotary_dim: int, is_neox_style: bool
) -> Iterator[str]:
    yield from _invalid(query, key, cos_sin, rotary_dim)
    tiled = {
        "half of rotary_dim": rotary_dim // 2,
        "the number of q heads": query.shape[1],
        "the number of k heads": key.shape[1],
        "head_dim - rotary_dim": query.shape[2] - rotary_dim,
    }
    for what, size in tiled.items():
        if (static := static_int(size)) is None:
            yield f"{what}, {size}, is not static (the kernel is compiled for it)"
        elif static & (static - 1):
            yield f"{what} is {static}, no power of two (the kernel tiles by it)"
    yield from package(target, "fused_rope_qk_mqa", _SINCE)


def fused_rope_qk_mqa_reference(
    query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor, rotary_dim: int, is_neox_style: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What sgl_kernel_npu's `fused_rope_qk_mqa` computes, in the type that query and cos_sin are promoted to.

    Args:
        query: [T, num_heads, head_dim], float16, bfloat16 or float32, any strides; not empty.
        key: [T, num_kv_heads, head_dim], of query's dtype, any strides; not empty.
        cos_sin: [T, rotary_dim], one row of cos | sin per token, a column for each pair; any float dtype and strides.
        rotary_dim: how many of the first columns of a head are rotated; even, at most head_dim.
        is_neox_style: True rotates halves, False neighbours.

    Returns:
        Both rotated, of their shapes and dtype, with the strides that `torch.empty_like` gives. Each product and each
        sum is rounded to the promoted type, where that is a narrow one.

    Raises:
        ValueError: dtypes or shapes don't fit.

    Source: sgl-kernel-npu f425bdf1 (2026-08-21), kernel and wrapper; tiles by powers of two as its tests have them.
    """
    raise_first(_NAME, _invalid(query, key, cos_sin, rotary_dim))
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)

    def turned(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        rotary, out_rotary = x[..., :rotary_dim], out[..., :rotary_dim]
        halves = (slice(rotary_dim // 2), slice(rotary_dim // 2, None))
        first, second = halves if is_neox_style else (slice(0, None, 2), slice(1, None, 2))
        a, b = rotary[..., first], rotary[..., second]
        out_rotary[..., first] = (a * cos - b * sin).to(x.dtype)
        out_rotary[..., second] = (a * sin + b * cos).to(x.dtype)
        out[..., rotary_dim:] = x[..., rotary_dim:]
        return out

    return turned(query), turned(key)


def fused_rope_qk_mqa_fake(
    query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor, rotary_dim: int, is_neox_style: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes and strides of `fused_rope_qk_mqa_reference`."""
    return torch.empty_like(query), torch.empty_like(key)


_FUNCTION = SglFunction(
    module="sgl_kernel_npu.norm.fused_rope_qk_mqa",
    name="fused_rope_qk_mqa",
    like=fused_rope_qk_mqa_reference,
    since=_SINCE,
)


def _in_pieces(
    query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor, rotary_dim: int, is_neox_style: bool
) -> tuple[torch.Tensor, ...] | torch.Tensor:
    """The kernel, on as many tokens at once as one launch may have programs."""
    step = max(1, _PROGRAM_LIMIT // query.shape[1])
    if query.shape[0] <= step:
        return _FUNCTION(query, key, cos_sin, rotary_dim, is_neox_style)
    outputs = torch.empty_like(query), torch.empty_like(key)
    pieces = zip(*(torch.split(tensor, step) for tensor in (query, key, cos_sin)), strict=True)
    for index, piece in enumerate(pieces):
        results = _FUNCTION(*piece, rotary_dim, is_neox_style)
        for output, result in zip(outputs, results, strict=True):
            output[index * step : (index + 1) * step] = result
    return outputs


FUSED_ROPE_QK_MQA = OpContract(
    name=_NAME,
    schema=(
        "fused_rope_qk_mqa(Tensor query, Tensor key, Tensor cos_sin, int rotary_dim, bool is_neox_style)"
        " -> (Tensor, Tensor)"
    ),
    reference=fused_rope_qk_mqa_reference,
    fake=fused_rope_qk_mqa_fake,
    refuse=_refuse,
    socs=frozenset({"ascend910b", "ascend910_93"}),
    source="sgl_kernel_npu f425bdf1 (2026-08-21), kernel and wrapper; limit of programs as sglang keeps it",
    device_kernel=_in_pieces,
)
