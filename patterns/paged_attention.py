"""Attention over keys and values that are gathered, block by block, from caches:

    keys = key_cache[block_table], joined to [batch, heads, tokens, head_dim]; values likewise
    out = attention(query, keys, values)

The caches are [blocks, block_size, heads, head_dim], with both last axes joined or not, or [blocks, heads, block_size,
head_dim]. Of the tokens that the blocks have, all may be attended to or the first ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..runtime.sizes import Size, known_equal, static_int
from . import values
from .attention import KIND as ATTENTION
from .attention import Attention
from .canonical import Canonicaliser
from .match import Findings, Match
from .movement import COPIES, ROW_MAJOR_VIEWS, Sizes, layout, permutation, source, trace
from .spelling import Spelling, spell

aten = torch.ops.aten

KIND = "paged_attention"


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """What a site fixes.

    Its inputs are those of the attention with key_cache, value_cache and block_table, [batch, blocks of a sequence] or
    [blocks of the sequence], in place of key and value.

    Args:
        attention: what the attention fixes.
        heads_first: whether the caches are [blocks, heads, block_size, head_dim].
        block_size: tokens of a block.
        tokens: how many of a sequence are attended to.
        wraps: whether a negative block counts from the end of the cache.
        spelling: how the result is computed, bit for bit.
    """

    attention: Attention
    heads_first: bool
    block_size: int
    tokens: Size = field(compare=False)
    wraps: bool
    spelling: Spelling = field(repr=False)

    def public(self) -> dict[str, Any]:
        return {**self.attention.public(), "block_size": self.block_size, "spelling": str(self.spelling)}


def match(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | None:
    """Recognises attention whose keys and values are gathered by one table."""
    attention = findings.at(ATTENTION, node)
    if attention is None:
        return None
    p = attention.params
    assert isinstance(p, Attention)
    if p.key_transposed:
        return None
    keys, of_values = (_gathered(attention.inputs[name]) for name in ("key", "value"))
    if keys is None or of_values is None or c.numbers[keys.table] != c.numbers[of_values.table]:
        return None
    if (keys.heads_first, keys.block_size, keys.wraps) != (
        of_values.heads_first,
        of_values.block_size,
        of_values.wraps,
    ):
        return None
    others = {name: read for name, read in attention.inputs.items() if name not in ("key", "value")}
    inputs = {**others, "key_cache": keys.cache, "value_cache": of_values.cache, "block_table": keys.table}
    spelling = spell(node, inputs, c)
    if spelling is None:
        return None
    tokens = values.shape(attention.inputs["key"])[2]
    params = PagedAttention(p, keys.heads_first, keys.block_size, tokens, keys.wraps, spelling)
    claimed = {*attention.claimed, *keys.nodes, *of_values.nodes}
    return Match(KIND, node, inputs, params, tuple(sorted(claimed)), (attention,))


@dataclass(frozen=True, slots=True)
class _Gathered:
    """The blocks of sequences, one after the other."""

    cache: fx.Node
    table: fx.Node
    heads_first: bool
    block_size: int
    wraps: bool
    nodes: tuple[fx.Node, ...]


def _gathered(node: fx.Node) -> _Gathered | None:
    """Reads a node [batch, heads, tokens, head_dim] as tokens gathered from a cache."""
    blocks, path = trace(node)
    found = _looked_up(blocks)
    if found is None or len(values.shape(node)) != 4:
        return None
    cache, table, wraps = found
    rank, sequences = len(values.shape(cache)), values.shape(table)[0] if len(values.shape(table)) == 2 else 1
    if rank not in (3, 4) or not known_equal(values.shape(node)[0], sequences):
        return None
    _, heads, _, head_dim = values.shape(node)
    if known_equal(math.prod(values.shape(cache)[2:]), heads * head_dim) and _joins_tokens(blocks, path):
        heads_first = False
    elif rank == 4 and _joins_tokens_of_heads(node, blocks):
        heads_first = True
    else:
        return None
    block_size = static_int(values.shape(cache)[2 if heads_first else 1])
    return None if block_size is None else _Gathered(cache, table, heads_first, block_size, wraps, (blocks, *path))


def _looked_up(blocks: fx.Node) -> tuple[fx.Node, fx.Node, bool] | None:
    """(cache, table, whether negative blocks wrap) of whole blocks that are gathered."""
    arguments: Any = blocks.args
    wraps = blocks.target is aten.index.Tensor
    if wraps and len(arguments[1]) == 1:
        cache, (table,) = arguments
    elif blocks.target is aten.index_select.default and arguments[1] == 0:
        cache, _, table = arguments
        while table.target in ROW_MAJOR_VIEWS and len(values.shape(table)) == 1:
            table = source(table)
    else:
        return None
    while table.target in values.CASTS and values.dtype(table) == torch.int64:
        table = source(table)
    is_table = values.dtype(table) in (torch.int32, torch.int64) and len(values.shape(table)) in (1, 2)
    return (cache, table, wraps) if is_table else None


def _joins_tokens(blocks: fx.Node, path: tuple[fx.Node, ...]) -> bool:
    """Whether a node is a view [batch, heads, tokens, head_dim] of the first tokens of gathered blocks of tokens."""
    for index in range(Sizes.COUNT):
        sizes = Sizes(index)
        found = layout(blocks, path, sizes)
        if found is None or found.offset:
            return False
        batch, heads, tokens, head_dim = found.sizes
        row = heads * head_dim
        whole = torch.Size(found.source_sizes).numel() // batch
        wanted = (whole, head_dim, row, 1)
        pairs = zip(found.sizes, found.strides, wanted, strict=True)
        if whole % row or tokens * row > whole or any(size != 1 and stride != want for size, stride, want in pairs):
            return False
    return True


def _joins_tokens_of_heads(node: fx.Node, blocks: fx.Node) -> bool:
    """The same for gathered [batch, blocks, heads, block_size, head_dim], whose blocks and heads are swapped first."""
    while _takes_the_first(node):
        node = source(node)
    batch, heads, tokens, head_dim = values.shape(node)
    while node.target in COPIES or node.target in ROW_MAJOR_VIEWS:
        node = source(node)
    shape = values.shape(node)
    if permutation(node) != (0, 2, 1, 3, 4) or source(node) is not blocks:
        return False
    joined = (shape[0], shape[1], shape[2] * shape[3], shape[4])
    return values.same_shape((batch, heads, tokens, head_dim), joined)


def _takes_the_first(node: fx.Node) -> bool:
    """Whether a node is x[:, :, :n]."""
    given: Any = dict(zip(("dim", "start", "end", "step"), node.args[1:], strict=False))
    return (
        node.target is aten.slice.Tensor
        and given.get("dim", 0) in (2, -2)
        and given.get("start") in (0, None)
        and given.get("step", 1) == 1
    )
