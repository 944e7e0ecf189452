"""One step of data movement: which axis of what is below is which axis of the result, and what is cut out."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...runtime.sizes import Size, known_equal, known_true, static_int
from .. import values
from ..movement import COPIES, PERMUTATIONS, ROW_MAJOR_VIEWS
from .track import Roles

aten = torch.ops.aten

_END = (1 << 63) - 1  # how torch writes the end of an open slice


@dataclass(frozen=True, slots=True)
class Cut:
    """Columns `low` up to `high` along an axis of what is below."""

    axis: int
    low: Size
    high: Size


@dataclass(frozen=True, slots=True)
class Move:
    """A node whose elements are those of `below`, each at most once.

    Args:
        below: what is moved.
        axes: for each axis of `below` the axis of the node that it is; None for one that is gone, of size one or
            selected from.
        cut: what is taken of one axis; None where all is.
    """

    below: fx.Node
    axes: tuple[int | None, ...]
    cut: Cut | None = None


def move(node: fx.Node) -> Move | None:
    """Reads a node as a step of movement, or as a cast between float types; None where it is neither."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    below = node.args[0]
    if values.is_float_cast(node) or (node.target in COPIES | _SAME and values.tensor(below) is not None):
        return Move(below, tuple(range(len(values.shape(below)))))
    rule = _RULES.get(node.target)
    return rule(node, below) if rule is not None and values.tensor(node) is not None else None


def turned(node: fx.Node, roles: Roles) -> tuple[fx.Node, Roles]:
    """The tensor whose axes are turned, added and removed, or that is copied, to give a node; and what they count."""
    while (step := move(node)) is not None and step.cut is None and not values.is_float_cast(node):
        roles = tuple("unit" if axis is None else roles[axis] for axis in step.axes)
        node = step.below
    return node, roles


def size_of(value: Any) -> Size | None:
    """A size that is an argument: a number, or the node of one."""
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
    return value if isinstance(value, (int, torch.SymInt)) else None


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def sliced(node: fx.Node, below: fx.Node, offset: int = 1) -> Cut | None:
    """What a slice takes, its arguments standing from `offset` on; None where that can't be told."""
    shape = values.shape(below)
    axis = argument(node, offset, "dim", 0) % len(shape)
    start, end = (argument(node, offset + i, name) for i, name in ((1, "start"), (2, "end")))
    size = shape[axis]
    low, high = size_of(start if start is not None else 0), size_of(end if end is not None else _END)
    if low is None or high is None or argument(node, offset + 3, "step", 1) != 1:
        return None
    if offset == 1 and (known_equal(high, _END) or known_true(high >= size)) and known_true(low < 0):
        length = values.shape(node)[axis]  # it may have been clamped
        return Cut(axis, size - length, size)
    bounds = [_placed(bound, size) for bound in (low, high)]
    if bounds[0] is None or bounds[1] is None:
        return None
    return Cut(axis, bounds[0], bounds[1]) if known_true(bounds[0] <= bounds[1]) else None


def _placed(bound: Size, size: Size) -> Size | None:
    """A bound of a slice as a number of columns from the front; None where it can't be told whether it is clamped."""
    if known_true(bound < 0):
        bound = bound + size
        return bound if known_true(bound >= 0) else 0 if known_true(bound < 0) else None
    if known_equal(bound, _END) or known_true(bound >= size):
        return size
    return bound if known_true(bound >= 0) and known_true(bound <= size) else None


_SAME = frozenset({aten.alias.default, aten.detach.default})
# Of these none takes a part of what is below.
TURNS = COPIES | _SAME | PERMUTATIONS | ROW_MAJOR_VIEWS | {aten.squeeze.default}


def _slice(node: fx.Node, below: fx.Node) -> Move | None:
    cut = sliced(node, below)
    return _cut(below, cut) if cut is not None else None


def _cut(below: fx.Node, cut: Cut) -> Move:
    shape = values.shape(below)
    is_all = known_equal(cut.low, 0) and known_equal(cut.high, shape[cut.axis])
    return Move(below, tuple(range(len(shape))), None if is_all else cut)


def _select(node: fx.Node, below: fx.Node) -> Move | None:
    shape = values.shape(below)
    axis = argument(node, 1, "dim", 0) % len(shape)
    index = size_of(argument(node, 2, "index"))
    return _column(below, axis, index) if index is not None else None


def _column(below: fx.Node, axis: int, index: Size) -> Move | None:
    shape = values.shape(below)
    if known_true(index < 0):
        index = index + shape[axis]
    if not known_true(index >= 0):
        return None
    axes = tuple(None if i == axis else i - (i > axis) for i in range(len(shape)))
    return Move(below, axes, None if static_int(shape[axis]) == 1 else Cut(axis, index, index + 1))


def _getitem(node: fx.Node, below: fx.Node) -> Move | None:
    """One part of a tensor that is split."""
    if not below.args or not isinstance(below.args[0], fx.Node) or below.target not in _SPLITS:
        return None
    whole, index = below.args[0], node.args[1]
    assert isinstance(index, int)
    shape = values.shape(whole)
    if below.target is aten.unbind.int:
        return _column(whole, argument(below, 1, "dim", 0) % len(shape), index)
    axis = argument(below, 2, "dim", 0) % len(shape)
    lengths = [part.shape[axis] for part in below.meta["val"]]
    low: Size = 0
    for length in lengths[:index]:
        low = low + length
    return _cut(whole, Cut(axis, low, low + lengths[index]))


_SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int})


def _permute(node: fx.Node, below: fx.Node) -> Move | None:
    rank = len(values.shape(below))
    order: list[Any] = list(range(rank))
    if node.target is aten.permute.default:
        order = [dim % rank for dim in argument(node, 1, "dims")]
    elif node.target is aten.transpose.int:
        a, b = (argument(node, i, name) % rank for i, name in ((1, "dim0"), (2, "dim1")))
        order[a], order[b] = b, a
    else:
        order.reverse()
    return Move(below, tuple(order.index(axis) for axis in range(rank)))


def _unsqueeze(node: fx.Node, below: fx.Node) -> Move | None:
    rank = len(values.shape(node))
    axis = argument(node, 1, "dim") % rank
    return Move(below, tuple(i for i in range(rank) if i != axis))


def _view(node: fx.Node, below: fx.Node) -> Move | None:
    """A view that only adds and removes axes of size one."""
    before, after = values.shape(below), values.shape(node)
    return _matched(below, before, after)


def _matched(below: fx.Node, before: Sequence[Size], after: Sequence[Size]) -> Move | None:
    if len(before) == len(after) and values.same_shape(before, after):
        return Move(below, tuple(range(len(before))))
    long = [i for i, size in enumerate(after) if static_int(size) != 1]
    known = [i for i, size in enumerate(before) if static_int(size) != 1]
    if not values.same_shape([before[i] for i in known], [after[i] for i in long]):
        return None
    place = dict(zip(known, long, strict=True))
    return Move(below, tuple(place.get(i) for i in range(len(before))))


_RULES: Mapping[Any, Callable[[fx.Node, fx.Node], Move | None]] = {
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    operator.getitem: _getitem,
    aten.permute.default: _permute,
    aten.transpose.int: _permute,
    aten.t.default: _permute,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dim: _view,
    aten.squeeze.dims: _view,
    aten.squeeze.default: _view,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
}
