"""A cache of keys or values in blocks: a table says in which block the next tokens of a sequence are.

It has one of two layouts: [blocks, block_size, heads * head_dim] or [blocks, heads, block_size, head_dim].
"""

import math
from collections.abc import Iterator, Sequence

import torch

from ..sizes import Size, known_equal
from .reasons import contiguity, dtype_among, rank_between, shape_text

__all__ = ["block_table_reasons", "cache_head_dim", "cache_reasons", "max_tokens", "missing_blocks", "tokens_of"]

# What the kernel's instructions can address as one row of a block.
_MAX_ROW = 65535


def max_tokens(block_table: torch.Tensor, block_size: int) -> Size:
    """How many tokens the longest sequence may have."""
    return block_table.shape[1] * block_size


def block_table_reasons(block_table: torch.Tensor, batch: Size) -> Iterator[str]:
    """The table is int32 [batch, blocks of a sequence], contiguous."""
    yield from dtype_among("block_table", block_table, (torch.int32,))
    yield from rank_between("block_table", block_table, 2, 2)
    yield from contiguity("block_table", block_table)
    if not known_equal(block_table.shape[0], batch):
        yield f"block_table {shape_text(block_table.shape)} has no row for each of {batch} sequences"


def cache_reasons(name: str, cache: torch.Tensor, block_size: int, heads: int, head_dim: int) -> Iterator[str]:
    """The cache has one of the two layouts."""
    yield from rank_between(name, cache, 3, 4)
    if cache.dim() == 3:
        expected: tuple[int, ...] = (block_size, heads * head_dim)
        if heads * head_dim > _MAX_ROW:
            yield (
                f"a token of {name} takes {heads * head_dim} elements (the kernel takes {_MAX_ROW} of"
                " [blocks, block_size, heads * head_dim]; use [blocks, heads, block_size, head_dim])"
            )
    else:
        expected = (heads, block_size, head_dim)
    if not all(map(known_equal, cache.shape[1:], expected)):
        yield (
            f"{name} {shape_text(cache.shape)} does not hold blocks of {block_size} tokens with {heads} heads of"
            f" head_dim {head_dim}, which take {shape_text(expected)}"
        )


def cache_head_dim(cache: torch.Tensor, heads: int) -> Size:
    """The head_dim of a cache of either layout."""
    return cache.shape[2] // heads if cache.dim() == 3 else cache.shape[3]


def missing_blocks(block_table: torch.Tensor, lengths: Sequence[int], block_size: int, num_blocks: int) -> list[int]:
    """The blocks that the table names for tokens of its sequences, and that a cache of `num_blocks` doesn't have."""
    used = [row[: math.ceil(length / block_size)] for row, length in zip(block_table, lengths, strict=True)]
    named = torch.cat(used) if used else block_table.flatten()
    return named[(named < 0) | (named >= num_blocks)].tolist()


def tokens_of(cache: torch.Tensor, blocks: torch.Tensor, length: int, heads: int) -> torch.Tensor:
    """The first `length` tokens that stand in `blocks`, as [heads, length, head_dim]."""
    block_size = cache.shape[1] if cache.dim() == 3 else cache.shape[2]
    found = cache[blocks[: math.ceil(length / block_size)].long()]
    if cache.dim() == 3:
        found = found.reshape(len(found), block_size, heads, cache.shape[2] // heads).transpose(1, 2)
    return found.transpose(0, 1).flatten(1, 2)[:, :length]
