"""Where the columns before x come from, and where the last ones of them all are kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from ...runtime.sizes import Size, known_equal, static_int
from .. import values
from ..canonical import Canonicaliser
from .columns import TIME, UNIT, Columns, is_zero
from .move import argument, move
from .output import BATCH
from .track import Piece, Roles, Source, Track, total

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Kept:
    """What a state is read from.

    Args:
        node: the tensor, for each of `indices` one row of its first axis, or as it is where there are none.
        roles: what its axes count.
        indices: the rows; None where they are taken as they are.
        has_initial: says of each sequence whether its state counts; where not it is zeros. None where all do.
    """

    node: fx.Node
    roles: Roles
    indices: fx.Node | None
    has_initial: fx.Node | None


def kept(source: Source, c: Canonicaliser) -> Kept:
    """Goes down from the state that is read to the one that is kept, through the choice of rows and of zeros."""
    node, roles = source.node, source.roles
    has_initial = None
    if (chosen := _chosen(node, roles)) is not None:
        below, flags = chosen
        piece = Columns(c).read(below, roles).only
        if piece is not None and piece.source is not None and _is_all(piece):
            node, roles, has_initial = piece.source.node, piece.source.roles, flags
    picked = _picked(node)
    if picked is None or roles[0] != BATCH:
        return Kept(node, roles, None, has_initial)
    return Kept(picked[0], roles, picked[1], has_initial)


def _is_all(piece: Piece) -> bool:
    source = piece.source
    if source is None or not known_equal(piece.start, 0):
        return False
    return known_equal(piece.length, columns_of(source))


def columns_of(source: Source) -> Size:
    """How many columns a source has."""
    return values.shape(source.node)[source.time] if source.time is not None else 1


def _chosen(node: fx.Node, roles: Roles) -> tuple[fx.Node, fx.Node] | None:
    """A tensor, and for each sequence whether it is that or zeros."""
    if node.target in (aten.where.self, aten.where.ScalarOther):
        flags, below, other = node.args
        if not is_zero(other):
            return None
    else:
        return None
    if not isinstance(flags, fx.Node) or not isinstance(below, fx.Node) or not values.is_float(below):
        return None
    if not values.same_shape(values.shape(below), values.shape(node)) or values.dtype(flags) != torch.bool:
        return None
    shape = values.shape(flags)
    aligned = zip(roles[len(roles) - len(shape) :], shape, strict=True)
    if not all(role == BATCH or static_int(size) == 1 for role, size in aligned):
        return None
    return below, _vector(flags)


def _vector(flags: fx.Node) -> fx.Node:
    while (step := move(flags)) is not None and step.cut is None and None not in step.axes:
        flags = step.below
    return flags


def _picked(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """A pool, and the rows of it that are read."""
    if node.target is aten.index.Tensor:
        pool, indices = node.args
        assert isinstance(indices, (list, tuple))
        rows = indices[0] if len(indices) == 1 else None
    elif node.target is aten.index_select.default and node.args[1] == 0:
        pool, _, rows = node.args
    else:
        return None
    return _rows_of(pool, rows)


def _rows_of(pool: object, rows: object) -> tuple[fx.Node, fx.Node] | None:
    if not isinstance(pool, fx.Node) or not isinstance(rows, fx.Node):
        return None
    value = values.tensor(rows)
    is_numbers = value is not None and value.dim() == 1 and value.dtype in (torch.int32, torch.int64)
    return (pool, rows) if is_numbers else None


# Writes -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Write:
    """A tensor that is kept.

    Args:
        value: its columns.
        buffer: what they are written into; None where they are a result of the graph.
        indices: the rows of the buffer; None where it is overwritten as a whole.
        result: what the whole of the buffer is after it.
    """

    value: fx.Node
    buffer: fx.Node | None
    indices: fx.Node | None
    result: fx.Node


def write(node: fx.Node) -> Write | None:
    """Reads a node as one that keeps a tensor."""
    if node.op != "call_function" or not values.is_float(node):
        return None
    if node.target in (aten.copy.default, aten.copy_.default):
        buffer, value = node.args[:2]
        return _write(value if node.target is aten.copy_.default else node, value, buffer, None)
    if node.target is aten.index_put.default and not argument(node, 3, "accumulate", False):
        buffer, rows, value = node.args[:3]
        return _write(node, value, buffer, rows[0]) if isinstance(rows, (list, tuple)) and len(rows) == 1 else None
    if node.target is aten.index_copy.default and node.args[1] == 0:
        buffer, _, indices, value = node.args
        return _write(node, value, buffer, indices)
    return Write(node, None, None, node) if any(user.op == "output" for user in node.users) else None


def _write(result: object, value: object, buffer: object, indices: object) -> Write | None:
    if not isinstance(result, fx.Node) or not isinstance(value, fx.Node) or not isinstance(buffer, fx.Node):
        return None
    if not values.is_float(value):
        return None
    shape = values.shape(buffer)
    if indices is not None:
        found = _rows_of(buffer, indices)
        if found is None:
            return None
        shape = (*values.shape(found[1]), *shape[1:])
    if not values.same_shape(shape, values.shape(value)):
        return None
    return Write(value, buffer, indices if isinstance(indices, fx.Node) else None, result)


def writes_near(nodes: Iterator[fx.Node], c: Canonicaliser) -> Iterator[Write]:
    """What is kept of some nodes, and of what is moved from them, among the nodes that `c` knows."""
    pending = list(nodes)
    seen = set(pending)
    while pending:
        node = pending.pop()
        found = write(node)
        if found is not None:
            yield found
        if len(seen) > _LIMIT:
            return
        for user in node.users:
            if user in c.terms and user not in seen and (user.target in _JOINS or move(user) is not None):
                seen.add(user)
                pending.append(user)


_LIMIT = 64
_JOINS = frozenset(
    {
        aten.cat.default,
        aten.constant_pad_nd.default,
        aten.roll.default,
        aten.slice_scatter.default,
        aten.select_scatter.default,
        aten.copy.default,
        aten.copy_.default,
        aten.index_put.default,
        aten.index_copy.default,
    }
)


@dataclass(frozen=True, slots=True)
class Tail:
    """The last `length` columns of a state and x.

    Args:
        length: how many.
        roles: what the axes of the tensor count.
    """

    length: int
    roles: Roles


def tail(value: fx.Node, x: Piece, state: Piece | None, c: Canonicaliser) -> Tail | None:
    """Reads a tensor as the last columns of a state, or of zeros where there is none, and x."""
    rank = len(values.shape(value))
    for time in (*reversed(range(rank)), None):
        labels = tuple(TIME if axis == time else str(axis) for axis in range(rank))
        found = Columns(c).read(value, labels)
        length = static_int(found.length)
        roles = _roles(found, x) if length is not None and _is_tail(found, x, state) else None
        if roles is not None and length is not None:
            return Tail(length, tuple(TIME if axis == time else roles.get(str(axis), UNIT) for axis in range(rank)))
    return None


def _is_tail(found: Track, x: Piece, state: Piece | None) -> bool:
    if not found.pieces or not known_equal(found.high, total(found.pieces)):
        return False
    *before, last = found.pieces
    if last.source != x.source or not _end_alike(last, x):
        return False
    zeros = [i for i, piece in enumerate(before) if piece.source is None]
    states = [piece for piece in before if piece.source is not None]
    if zeros not in ([], [0]) or len(states) > 1:
        return False
    if state is None:
        return not states
    if not states:
        return not zeros
    return states[0].source == state.source and _end_alike(states[0], state)


def _end_alike(a: Piece, b: Piece) -> bool:
    return known_equal(a.start + a.length, b.start + b.length)


def _roles(found: Track, x: Piece) -> Mapping[str, str] | None:
    """What the axes of a tensor count, by what those of x do that they are."""
    there, here = x.source, found.pieces[-1].source
    assert there is not None
    assert here is not None
    return dict(zip(here.roles, there.roles, strict=True))
