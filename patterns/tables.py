"""What a table of cosines or sines was cut or repeated from, column by column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import values
from .bilinear import Formula, Read, Readings, tensor_inputs
from .canonical import Canonicaliser
from .movement import Sizes, concrete, is_movement, source

aten = torch.ops.aten
_JOINS = frozenset({aten.cat.default, aten.stack.default})

# The columns are found by running the movement on numbers, one for each element of the table.
_MOST_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class Cut:
    """A table whose columns are columns of `base`, row by row.

    Args:
        base: the tensor they come from; its leading axes are the table's.
        columns: which column of `base` each column of the table is.
        path: the nodes between, the table included.
    """

    base: fx.Node
    columns: tuple[int, ...]
    path: tuple[fx.Node, ...]


def cut(table: fx.Node, c: Canonicaliser) -> Cut | None:
    """Follows a table down to the furthest tensor with its leading axes of which it has the columns."""
    number = c.numbers[table]
    if number not in c.cuts:  # all layers use the same tables
        c.cuts[number] = _cut(table, c)
    found = c.cuts[number]
    assert found is None or isinstance(found, Cut)
    return found


def _cut(table: fx.Node, c: Canonicaliser) -> Cut | None:
    leading = values.shape(table)[:-1]
    node, path, found = table, [], None
    while (below := _moved_from(node, c)) is not None:
        path.append(node)
        node = below
        if values.tensor(node) is not None and values.same_shape(values.shape(node)[:-1], leading):
            found = (node, tuple(reversed(path)))
    columns = _columns(*found) if found is not None else None
    return Cut(found[0], columns, found[1]) if found is not None and columns is not None else None


def _moved_from(node: fx.Node, c: Canonicaliser) -> fx.Node | None:
    """The one tensor whose elements a node moves or repeats."""
    if is_movement(node):
        return source(node)
    parts = node.args[0] if node.target in _JOINS else ()
    assert isinstance(parts, (list, tuple))
    return parts[0] if parts and len({c.numbers[part] for part in parts}) == 1 else None


def _columns(base: fx.Node, path: tuple[fx.Node, ...]) -> tuple[int, ...] | None:
    sizes = Sizes(0)
    shape = sizes(values.shape(base))
    if not 0 < torch.Size(shape).numel() <= _MOST_ELEMENTS:
        return None
    codes = torch.arange(torch.Size(shape).numel()).view(shape)
    value: Any = codes
    for node in path:
        try:
            value = concrete(node, sizes, dict.fromkeys(tensor_inputs(node), value))
        except (RuntimeError, IndexError, ValueError, TypeError):
            return None
    moved: torch.Tensor = value
    columns = moved.reshape(-1, moved.shape[-1])[0] % shape[-1]
    if moved.shape[:-1] != codes.shape[:-1] or not torch.equal(moved, codes[..., columns]):
        return None
    found: list[int] = columns.tolist()
    return tuple(found)


def merged(
    f: Formula, readings: Readings, c: Canonicaliser
) -> tuple[tuple[fx.Node, ...], Readings, tuple[fx.Node, ...]]:
    """The tensors that the tables of a formula are cut from, what is read through each, and the nodes between."""
    cuts = [cut(table, c) for table in f.tables]
    bases: dict[int, tuple[fx.Node, list[Read | None]]] = {}
    path: list[fx.Node] = []
    for table, reads, of in zip(f.tables, readings.tables, cuts, strict=True):
        base = of.base if of is not None else table
        columns = of.columns if of is not None else tuple(range(values.last_dim(table) or 0))
        _, known = bases.setdefault(c.numbers[base], (base, [None] * len(reads)))
        for place, read in enumerate(reads):
            if read is not None and known[place] is not None:
                return f.tables, readings, ()  # cos and sin are cut from one
            if read is not None:
                known[place] = Read(read.place, read.sign, columns[read.column])
        path.extend(of.path if of is not None else ())
    through = tuple(tuple(reads) for _, reads in bases.values())
    return tuple(base for base, _ in bases.values()), Readings(through, readings.plain), tuple(path)
