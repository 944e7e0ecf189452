"""Rotary position embedding of q and k with the table's rows looked up inside, by one position a token or by several.

    cos, sin = halves of cos_sin_cache[position]
    h[:rotary_dim] = h[:rotary_dim] * cos + rotate(h[:rotary_dim]) * sin      for each head h of query and key
"""

from collections.abc import Iterator, Sequence

import torch

from ..sizes import known_equal, known_same_shape, known_true, static_int
from ..target import Target
from .contract import OpContract
from .packed_qkv import packed_heads, rotated
from .reasons import contiguity, dtype_among, dtype_name, emptiness, first_reason, raise_first, rank_between, shape_text
from .rotary import rotate_half, rotate_interleaved

__all__ = ["NPU_MROPE"]

_NAME = "npu::npu_mrope"
_ROTATE = {"half": rotate_half, "interleave": rotate_interleaved}

# The sections that are documented, for positions of [3, T] and, the last one, of [4, T].
_SECTIONS = ([16, 24, 24], [24, 20, 20], [8, 12, 12], [16, 16, 16, 16])

# sglang gives the kernel no wider rows.
_WIDTH_LIMIT = 4096


def _sections(mrope_section: Sequence[int] | None) -> list[int]:
    """The sections in use; none where there is one position a token."""
    return list(mrope_section) if mrope_section is not None and any(mrope_section) else []


def _modes(mrope_section: Sequence[int] | None, rotary_mode: str | None, cache_mode: str | None) -> Iterator[str]:
    if rotary_mode not in _ROTATE:
        yield f"rotary_mode {rotary_mode!r} is unknown; known: {', '.join(_ROTATE)}"
    if cache_mode != "default":
        yield f"cache_mode {cache_mode!r} is not supported; known: default"
    sections = _sections(mrope_section)
    if sections and sections not in _SECTIONS:
        yield f"mrope_section {sections} is not documented; known: {', '.join(map(str, _SECTIONS))}"


def _invalid(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    head_size: int,
    mrope_section: Sequence[int] | None,
    rotary_mode: str | None,
    cache_mode: str | None,
) -> Iterator[str]:
    yield from _modes(mrope_section, rotary_mode, cache_mode)
    for name, tensor in (("query", query), ("key", key), ("cos_sin_cache", cos_sin_cache)):
        yield from dtype_among(name, tensor)
        if tensor.dtype != query.dtype:
            yield f"{name} is {dtype_name(tensor.dtype)} but query is {dtype_name(query.dtype)}"
        yield from rank_between(name, tensor, 2, 2)
    for name, tensor in (("positions", positions), ("query", query), ("key", key), ("cos_sin_cache", cos_sin_cache)):
        yield from emptiness(name, tensor)
        yield from contiguity(name, tensor)
    if positions.dtype != torch.int64:
        yield f"positions is {dtype_name(positions.dtype)} (the kernel reads int64)"
    tokens, sections = query.shape[0], _sections(mrope_section)
    wanted = (len(sections), tokens) if sections else (tokens,)
    if not known_same_shape(positions.shape, wanted):
        yield f"positions is {shape_text(positions.shape)}, not {shape_text(wanted)}"
    if not known_equal(key.shape[0], tokens):
        yield f"query has {tokens} rows but key has {key.shape[0]}"
    rotary_dim = static_int(cos_sin_cache.shape[1])
    if static_int(head_size) is None or rotary_dim is None:
        yield f"head_size {head_size} or rotary_dim {cos_sin_cache.shape[1]} is not static"
        return
    if rotary_dim > head_size:
        yield f"rotary_dim {rotary_dim}, the width of cos_sin_cache, is not in 1 to head_size {head_size}"
    unit = 64 // query.dtype.itemsize
    for name, size in (("head_size", head_size), ("rotary_dim", rotary_dim)):
        if size % unit:
            yield f"{name} {size} is no multiple of {unit} (the kernel moves {dtype_name(query.dtype)} in such blocks)"
    for name, tensor in (("query", query), ("key", key)):
        if not known_true(tensor.shape[1] % head_size == 0):
            yield f"{name} is {tensor.shape[1]} wide, not known to be a multiple of head_size {head_size}"
    if sections and 2 * sum(sections) != rotary_dim:
        yield f"mrope_section {sections} adds up to {sum(sections)}, not to half of rotary_dim {rotary_dim}"


@first_reason
def _refuse(
    target: Target,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    head_size: int,
    mrope_section: Sequence[int] | None,
    rotary_mode: str | None,
    cache_mode: str | None,
) -> Iterator[str]:
    yield from _invalid(positions, query, key, cos_sin_cache, head_size, mrope_section, rotary_mode, cache_mode)
    for name, tensor in (("query", query), ("key", key)):
        if not known_true(tensor.shape[1] <= _WIDTH_LIMIT):
            yield f"{name} is {tensor.shape[1]} wide (the kernel is known to work up to {_WIDTH_LIMIT})"


def mrope_reference(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    head_size: int,
    *,
    mrope_section: Sequence[int] | None = None,
    rotary_mode: str | None = "half",
    cache_mode: str | None = "default",
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `npu::npu_mrope` computes: float32 inside, one rounding.

    Args:
        positions: row numbers of cos_sin_cache, int64: [T], or [3, T] or [4, T] with as many sections. They must be in
            the cache: the kernel doesn't ask.
        query: [T, num_heads * head_size], float16, bfloat16 or float32; contiguous, not empty.
        key: [T, num_kv_heads * head_size], likewise.
        cos_sin_cache: [max_positions, rotary_dim], rows of cos | sin, a column for each pair; of query's dtype.
        head_size: a multiple of 32 in 16 bits, of 16 in float32; rotary_dim, which is at most head_size, likewise.
        mrope_section: how many columns each row of positions looks up, in order; None or zeros for one position.
        rotary_mode: "half" or "interleave" (not "interleaved", as the documentation has it).
        cache_mode: "default".

    Returns:
        Both rotated, out of place; columns of a head beyond rotary_dim pass.

    Raises:
        ValueError: dtypes, shapes or modes don't fit.
        IndexError: a position is not in the cache.

    Source: op-plugin 517f2e7d; CANN's open kernel of RopeWithSinCosCache (float32 inside, 64-bit positions).
    """
    raise_first(
        _NAME, _invalid(positions, query, key, cos_sin_cache, head_size, mrope_section, rotary_mode, cache_mode)
    )
    tables = cos_sin_cache[positions].float().chunk(2, dim=-1)
    if sections := _sections(mrope_section):
        tables = tuple(
            torch.cat([part[row] for row, part in enumerate(torch.split(table, sections, dim=-1))], dim=-1)
            for table in tables
        )
    if rotary_mode == "half":
        cos, sin = (torch.cat((table, table), dim=-1).unsqueeze(1) for table in tables)
    else:
        cos, sin = (table.repeat_interleave(2, dim=-1).unsqueeze(1) for table in tables)

    def turned(x: torch.Tensor) -> torch.Tensor:
        heads = x.reshape(x.shape[0], x.shape[1] // head_size, head_size).float()
        return packed_heads(rotated(heads, cos, sin, _ROTATE[rotary_mode or ""]), x.dtype)

    return turned(query), turned(key)


def mrope_fake(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    head_size: int,
    *,
    mrope_section: Sequence[int] | None = None,
    rotary_mode: str | None = "half",
    cache_mode: str | None = "default",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes of `mrope_reference`."""
    return query.new_empty(query.shape), key.new_empty(key.shape)


NPU_MROPE = OpContract(
    name=_NAME,
    schema=(
        "npu_mrope(Tensor positions, Tensor query, Tensor key, Tensor cos_sin_cache, int head_size, *,"
        " int[]? mrope_section=None, str? rotary_mode='half', str? cache_mode='default') -> (Tensor, Tensor)"
    ),
    reference=mrope_reference,
    fake=mrope_fake,
    refuse=_refuse,
    socs=frozenset({"ascend910b", "ascend910_93"}),
    source="torch_npu 2.13.0 (schema), op-plugin 517f2e7d (modes, shapes), CANN's kernel of RopeWithSinCosCache",
)
