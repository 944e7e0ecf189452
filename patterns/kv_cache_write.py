"""Keys and values of new tokens written into their caches, both at the same slots:

key_cache[slots] = key
value_cache[slots] = value
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import fx

from ..runtime.sizes import Size, static_int
from . import values
from .canonical import Canonicaliser
from .match import Findings, Match
from .movement import ROW_MAJOR_VIEWS, source
from .slot_write import SlotWrite, slot_write
from .spelling import Spelling, spell

KIND = "kv_cache_write"

Layout = Literal["blocks", "slots", "batch"]


@dataclass(frozen=True, slots=True)
class KvCacheWrite:
    """What a pair of writes fixes.

    Its inputs are key and value, [*slots, heads, head_dim] or without heads; key_cache and value_cache; and slots, or
    blocks and places.

    Args:
        layout: "blocks" for caches [blocks, block_size, …], "slots" for [slots, …], "batch" for [batch, heads, tokens,
            head_dim].
        block_size: tokens of a block.
        wraps: whether a negative index counts from the end.
        key_node: the new value of key_cache; that of value_cache is the node of the match.
        key_spelling: how the former is computed, bit for bit.
        spelling: how the latter is.
    """

    layout: Layout
    block_size: int | None
    wraps: bool
    key_node: fx.Node = field(repr=False)
    key_spelling: Spelling = field(repr=False)
    spelling: Spelling = field(repr=False)

    def public(self) -> dict[str, Any]:
        return {"layout": self.layout, "block_size": self.block_size}


def match(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | None:
    """Recognises the second of two writes at the same slots, of which neither reads what the other has written."""
    value = slot_write(node)
    if value is None:
        return None
    key = _partner(value, c, findings)
    if key is None:
        return None
    layout = _layout(value)
    if layout is None or layout != _layout(key):
        return None
    names = ("slots",) if len(value.indices) == 1 else ("blocks", "places")
    slots = dict(zip(names, value.indices, strict=True))
    of_key = spell(key.node, {"key": key.tokens, "key_cache": key.base, **slots}, c)
    of_value = spell(node, {"value": value.tokens, "value_cache": value.base, **slots}, c)
    if of_key is None or of_value is None:
        return None
    inputs = {"key": key.tokens, "key_cache": key.base, "value": value.tokens, "value_cache": value.base, **slots}
    params = KvCacheWrite(*layout, value.wraps, key.node, of_key, of_value)
    return Match(KIND, node, inputs, params, (key.node, node))


def _partner(value: SlotWrite, c: Canonicaliser, findings: Findings) -> SlotWrite | None:
    """The write before this one, where it is at the same slots, stands alone so far, and is not read for this one."""
    node = value.node.prev
    while node.op != "root" and (key := slot_write(node)) is None:
        node = node.prev
    if node.op == "root" or findings.at(KIND, node) is not None:
        return None
    assert key is not None
    alike = [c.numbers[index] for index in key.indices] == [c.numbers[index] for index in value.indices]
    if not alike or (key.axis, key.wraps) != (value.axis, value.wraps) or len(value.indices) > 2:
        return None
    return None if _depends(value.tokens, on=node) else key


def _depends(tokens: fx.Node, on: fx.Node) -> bool:
    """Whether a node reads what `on` gives, itself or by others."""
    readers = {on}
    node = on
    while node is not tokens and node < tokens:
        node = node.next
        if any(read in readers for read in node.all_input_nodes):
            readers.add(node)
    return tokens in readers


def _layout(write: SlotWrite) -> tuple[Layout, int | None] | None:
    rank = len(values.shape(write.base))
    if write.axis:
        return ("batch", None) if rank == 4 and len(write.indices) == 1 else None
    if rank - len(write.indices) not in (1, 2):
        return None  # what is written isn't heads of vectors
    blocks = in_blocks(write.base, len(write.indices))
    return ("slots", None) if blocks is None else ("blocks", static_int(values.shape(blocks)[1]))


def in_blocks(base: fx.Node, indices: int) -> fx.Node | None:
    """A cache as [blocks, block_size, *row]: what is written by so many indices, or what that is a view of; or None."""
    if indices == 2:
        return base
    row = _without_units(values.shape(base)[1:])
    while base.target in ROW_MAJOR_VIEWS:
        base = source(base)
        shape = values.shape(base)
        if len(shape) in (3, 4) and values.same_shape(_without_units(shape[2:]), row):
            return base
    return None


def _without_units(shape: Sequence[Size]) -> list[Size]:
    return [size for size in shape if static_int(size) != 1]
