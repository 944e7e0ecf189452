"""Reads the columns of a tensor along time: down through what joins, cuts, pads, rolls and overwrites them.

What is none of these is a source: its columns are taken as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from ...runtime.sizes import known_equal, known_true, static_int
from .. import values
from ..canonical import Canonicaliser
from .move import Cut, argument, move, size_of, sliced
from .track import Piece, Roles, Source, Track, joined, track, zeros

aten = torch.ops.aten

TIME, UNIT = "time", "unit"

# A chain of more ops moves no columns of one convolution.
_LIMIT = 48


class Columns:
    """Reads tensors, and remembers what all that it came by is.

    Args:
        c: knows which values are the same.
    """

    def __init__(self, c: Canonicaliser) -> None:
        self._c = c
        self._read: dict[fx.Node, tuple[Roles, Track]] = {}

    def read(self, node: fx.Node, roles: Roles) -> Track:
        """The columns of a node.

        Args:
            node: a tensor.
            roles: what each of its axes counts; without "time" it is one column.
        """
        rule = _RULES.get(node.target) if node.op == "call_function" else None
        found = None
        if len(self._read) < _LIMIT and values.is_float(node):
            found = rule(self, node, roles) if rule is not None else None
            if found is None:
                found = self._moved(node, roles)
        if found is None:
            found = self._whole(node, roles)
        self._read[node] = (roles, found)
        return found

    def _whole(self, node: fx.Node, roles: Roles) -> Track:
        time = roles.index(TIME) if TIME in roles else None
        length = values.shape(node)[time] if time is not None else 1
        return track(Piece(Source(self._c.numbers[node], time, node, roles), 0, length))

    def _moved(self, node: fx.Node, roles: Roles) -> Track | None:
        step = move(node)
        if step is None or not values.is_float(step.below):
            return None
        below = [UNIT if axis is None else roles[axis] for axis in step.axes]
        if step.cut is None:
            return self.read(step.below, tuple(below))
        if below[step.cut.axis] == UNIT and TIME not in roles:
            below[step.cut.axis] = TIME  # one column is cut out
        if below[step.cut.axis] != TIME:
            return None
        return self.read(step.below, tuple(below)).cut(step.cut.low, step.cut.high)

    def holder(self, *pieces: Piece) -> Source | None:
        """The tensor that is just these pieces: of those read the narrowest, and of these the first."""
        wanted = track(*pieces)
        held = [(node, roles) for node, (roles, found) in self._read.items() if found.is_same(wanted)]
        if not held:
            return None
        width = min(values.dtype(node).itemsize for node, _ in held)
        node, roles = min((n, r) for n, r in held if values.dtype(n).itemsize == width)
        return Source(self._c.numbers[node], roles.index(TIME) if TIME in roles else None, node, roles)


# One function an op: (reader, node, roles) -> its columns, or None where it is a source -----------------------------


def _is_time(node: fx.Node, roles: Roles, axis: int) -> bool:
    return roles[axis % len(values.shape(node))] == TIME


def _cat(columns: Columns, node: fx.Node, roles: Roles) -> Track | None:
    tensors = node.args[0]
    if not _is_time(node, roles, argument(node, 1, "dim", 0)) or not isinstance(tensors, (list, tuple)):
        return None
    parts = [n for n in tensors if isinstance(n, fx.Node) and len(values.shape(n)) == len(roles)]
    return joined([columns.read(n, roles) for n in parts]) if len(parts) == len(tensors) else None


def _pad(columns: Columns, node: fx.Node, roles: Roles) -> Track | None:
    below, pads = node.args[:2]
    if argument(node, 2, "value", 0) != 0 or TIME not in roles:
        return None
    assert isinstance(below, fx.Node)
    assert isinstance(pads, (list, tuple))
    sizes = [size_of(pad) for pad in pads]
    place = 2 * (len(roles) - 1 - roles.index(TIME))
    others = [size for i, size in enumerate(sizes) if i not in (place, place + 1)]
    if None in sizes or not all(static_int(size) == 0 for size in others if size is not None):
        return None
    found: Track | None = columns.read(below, roles)
    for size, is_front in zip(sizes[place : place + 2], (True, False), strict=False):
        assert size is not None
        assert found is not None
        if known_true(size >= 0):
            both = (zeros(size), found) if is_front else (found, zeros(size))
            found = joined(both)
        elif known_true(size < 0):
            found = found.cut(-size, found.length) if is_front else found.cut(0, found.length + size)
        else:
            return None
        if found is None:
            return None
    return found


def _roll(columns: Columns, node: fx.Node, roles: Roles) -> Track | None:
    below, shifts = node.args[:2]
    dims = argument(node, 2, "dims", ())
    assert isinstance(below, fx.Node)
    assert isinstance(shifts, (list, tuple))
    if len(dims) != 1 or not _is_time(node, roles, dims[0]):
        return None
    length, shift = static_int(values.shape(node)[dims[0]]), size_of(shifts[0])
    if not length or not isinstance(shift, int):
        return None
    found = columns.read(below, roles)
    place = -shift % length
    return joined([found.cut(place, length), found.cut(0, place)])


def _slice_scatter(columns: Columns, node: fx.Node, roles: Roles) -> Track | None:
    below, written = node.args[:2]
    assert isinstance(below, fx.Node)
    assert isinstance(written, fx.Node)
    cut = sliced(node, below, offset=2)
    return _overwritten(columns, below, written, roles, roles, cut)


def _select_scatter(columns: Columns, node: fx.Node, roles: Roles) -> Track | None:
    below, written, dim, index = node.args
    assert isinstance(below, fx.Node)
    assert isinstance(written, fx.Node)
    assert isinstance(dim, int)
    axis, place = dim % len(roles), size_of(index)
    if place is None:
        return None
    if known_true(place < 0):
        place = place + values.shape(below)[axis]
    column = (*roles[:axis], *roles[axis + 1 :])
    return _overwritten(columns, below, written, roles, column, Cut(axis, place, place + 1))


def _overwritten(
    columns: Columns, below: fx.Node, written: fx.Node, roles: Roles, written_roles: Roles, cut: Cut | None
) -> Track | None:
    """The columns of what is below, but those that are written over it."""
    if cut is None:
        return None
    size = values.shape(below)[cut.axis]
    if known_equal(cut.low, 0) and known_equal(cut.high, size) and TIME in written_roles:
        return columns.read(written, written_roles)
    if roles[cut.axis] != TIME:
        return None
    found = columns.read(below, roles)
    return joined([found.cut(0, cut.low), columns.read(written, written_roles), found.cut(cut.high, size)])


def _copy(columns: Columns, node: fx.Node, roles: Roles) -> Track | None:
    into, written = node.args[:2]
    assert isinstance(into, fx.Node)
    assert isinstance(written, fx.Node)
    same = values.same_shape(values.shape(into), values.shape(written))
    return columns.read(written, roles) if same and values.is_float(written) else None


def _expand(columns: Columns, node: fx.Node, roles: Roles) -> Track | None:
    """A tensor that is repeated along axes that are not of time."""
    below = node.args[0]
    assert isinstance(below, fx.Node)
    shape, before = values.shape(node), values.shape(below)
    added = len(shape) - len(before)
    if TIME in roles[:added] or not values.is_float(below):
        return None
    roles, shape = roles[added:], shape[added:]
    kept = [known_equal(a, b) for a, b in zip(shape, before, strict=True)]
    if not all(same or role != TIME for same, role in zip(kept, roles, strict=True)):
        return None
    return columns.read(below, tuple(role if same else UNIT for same, role in zip(kept, roles, strict=True)))


def _filled_with_zeros(columns: Columns, node: fx.Node, roles: Roles) -> Track | None:
    return zeros(values.shape(node)[roles.index(TIME)] if TIME in roles else 1) if is_zero(node) else None


def is_zero(value: object) -> bool:
    """True for a zero, and for a tensor that is made of zeros."""
    if not isinstance(value, fx.Node):
        return isinstance(value, (int, float)) and value == 0
    place = _FILLS.get(value.target)
    return value.target in _ZEROS or (place is not None and argument(value, place, "fill_value") == 0)


_ZEROS = frozenset({aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default})
_FILLS: Mapping[Any, int] = {
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.new_full.default: 2,
    aten.scalar_tensor.default: 0,
}

_RULES: Mapping[Any, Callable[[Columns, fx.Node, Roles], Track | None]] = {
    aten.cat.default: _cat,
    aten.constant_pad_nd.default: _pad,
    aten.roll.default: _roll,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.copy.default: _copy,
    aten.expand.default: _expand,
    **dict.fromkeys((*_ZEROS, aten.full.default, aten.full_like.default, aten.new_full.default), _filled_with_zeros),
}
