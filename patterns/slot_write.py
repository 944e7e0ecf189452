"""Rows written at slots of a buffer that lives longer than the graph:

    cache[slots] = tokens,    cache[blocks, places] = tokens

AOTAutograd has made it a function, index_put, index_copy or scatter, whose result is copied back into the buffer at the
end. Where a row is written twice, torch leaves open which one stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..runtime.sizes import known_equal
from . import values
from .movement import ROW_MAJOR_VIEWS, is_movement, source

aten = torch.ops.aten

_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class SlotWrite:
    """One write.

    Args:
        node: the new value of `base`.
        base: what is written, a view of a buffer.
        tokens: [*indices, *row].
        indices: the integer tensors that count along `axis` of `base` and the axes behind it, of one shape.
        axis: the first axis of `base` that is indexed.
        wraps: whether a negative index counts from the end; else torch raises where there is one.
    """

    node: fx.Node
    base: fx.Node
    tokens: fx.Node
    indices: tuple[fx.Node, ...]
    axis: int
    wraps: bool


def slot_write(node: fx.Node) -> SlotWrite | None:
    """The node as a write into a buffer that the caller sees, or None."""
    read = READERS.get(node.target)
    found = read(node) if read is not None else None
    return found if found is not None and _is_buffer(found.base) and _fits(found) else None


def _index_put(node: fx.Node) -> SlotWrite | None:
    arguments: Any = node.args
    base, given, tokens = arguments[:3]
    adds = arguments[3] if len(arguments) > 3 else node.kwargs.get("accumulate", False)
    axis = next((i for i, index in enumerate(given) if index is not None), len(given))
    indices = tuple(given[axis:])
    if adds or not indices or None in indices:
        return None
    return SlotWrite(node, base, tokens, indices, axis, wraps=True)


def _index_copy(node: fx.Node) -> SlotWrite | None:
    arguments: Any = node.args
    base, axis, index, tokens = arguments
    return SlotWrite(node, base, tokens, (index,), axis % len(values.shape(base)), wraps=False)


def _scatter(node: fx.Node) -> SlotWrite | None:
    """With one index for all of a row: `slots[:, None, None].expand(-1, heads, head_dim)`."""
    arguments: Any = node.args
    base, axis, index, tokens = arguments
    if axis != 0 or not values.same_shape(values.shape(index), values.shape(tokens)):
        return None
    row: fx.Node = index
    while row.target is aten.expand.default or row.target in ROW_MAJOR_VIEWS:
        row = source(row)
        if len(values.shape(row)) == 1 and known_equal(values.shape(row)[0], values.shape(index)[0]):
            return SlotWrite(node, base, tokens, (row,), 0, wraps=False)
    return None


READERS: Mapping[Any, Callable[[fx.Node], SlotWrite | None]] = {
    aten.index_put.default: _index_put,
    aten._unsafe_index_put.default: _index_put,
    aten.index_copy.default: _index_copy,
    aten.scatter.src: _scatter,
}
# Functions of (base, …) that give the base with a part of it replaced.
_WRITES = frozenset({*READERS, aten.select_scatter.default, aten.slice_scatter.default})


def _fits(found: SlotWrite) -> bool:
    """Whether integers of one shape pick whole rows, and the tokens are those rows."""
    shapes = [values.shape(index) for index in found.indices]
    if any(values.dtype(index) not in _INTEGERS for index in found.indices):
        return False
    if not all(values.same_shape(shape, shapes[0]) for shape in shapes) or not shapes[0]:
        return False
    base = values.shape(found.base)
    behind = base[found.axis + len(found.indices) :]
    return values.same_shape(values.shape(found.tokens), (*base[: found.axis], *shapes[0], *behind))


def _is_buffer(base: fx.Node) -> bool:
    """Whether a base is a view of an input of the graph that gets a new value in the end, by this write or others."""
    while base.target in _WRITES or is_movement(base):
        base = source(base)
    return base.op == "placeholder" and any(user.target is aten.copy_.default for user in base.users)
