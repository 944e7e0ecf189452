"""Entries of ops that move, repeat or join elements: each entry is one of a source, at an index that they work out."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ...runtime.sizes import Size, known_equal, known_true, static_int
from .. import values
from .entries import POSITIONS, Entries, Index, OpRule, Value, broadcast, integer
from .formula import at_least_zero, conjunction, less
from .integers import Linear, of_size, quotient

aten = torch.ops.aten


def source_of(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def given(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def replaced(index: Index, axis: int, value: Linear) -> Index:
    return (*index[:axis], value, *index[axis + 1 :])


# Views -----------------------------------------------------------------------------------------------------------


def _same(e: Entries, node: fx.Node, index: Index) -> Value | None:
    return e.at(source_of(node), index)


def _expand(e: Entries, node: fx.Node, index: Index) -> Value | None:
    place = broadcast(source_of(node), node, index)
    return None if place is None else e.at(source_of(node), place)


def _transpose(e: Entries, node: fx.Node, index: Index) -> Value | None:
    axes = list(range(len(index)))
    first, second = node.args[1:] if node.target is aten.transpose.int else (0, -1)
    if axes:
        axes[first], axes[second] = axes[second], axes[first]  # type: ignore[index]  # ints, by the schema
    return e.at(source_of(node), tuple(index[axis] for axis in axes))


def _permute(e: Entries, node: fx.Node, index: Index) -> Value | None:
    place = list(index)
    axes: Any = node.args[1]
    for at, axis in zip(index, axes, strict=True):
        place[axis] = at
    return e.at(source_of(node), tuple(place))


def _view(e: Entries, node: fx.Node, index: Index) -> Value | None:
    """Any view in row-major order: axes of one come and go, others are split and merged."""
    before, after = values.shape(source_of(node)), values.shape(node)
    place = _unravelled(e, [s for s in before if static_int(s) != 1], _wide(after, index))
    if place is None:
        return None
    left = iter(place)
    return e.at(source_of(node), tuple(Linear(0) if static_int(s) == 1 else next(left) for s in before))


def _wide(shape: Sequence[Size], index: Index) -> list[tuple[Size, Linear]]:
    """The axes that aren't of size one."""
    return [(size, at) for size, at in zip(shape, index, strict=True) if static_int(size) != 1]


def _unravelled(e: Entries, before: Sequence[Size], after: Sequence[tuple[Size, Linear]]) -> list[Linear] | None:
    """The index of a shape that stands for the same element as the index of another."""
    left, waiting = list(before), list(after)
    first: list[Linear] = []
    last: list[Linear] = []
    while left and waiting and known_equal(left[-1], waiting[-1][0]):
        left.pop()
        last.insert(0, waiting.pop()[1])
    while left and waiting and known_equal(left[0], waiting[0][0]):
        left.pop(0)
        first.append(waiting.pop(0)[1])
    between = _mixed(e, left, waiting) if left else []
    return None if between is None else [*first, *between, *last]


def _mixed(e: Entries, before: Sequence[Size], after: Sequence[tuple[Size, Linear]]) -> list[Linear] | None:
    """As `_unravelled`, through the number of the element; only the first axes may be of any size."""
    flat, stride = Linear(0), 1
    for at, (size, place) in reversed(list(enumerate(after))):
        flat, known = flat + place * stride, static_int(size)
        if known is None and at > 0:
            return None
        stride *= known or 0
    rest: list[Linear] = []
    for size in reversed(before[1:]):
        known = static_int(size)
        if not known:
            return None
        whole = _divided(e, flat, known)
        rest.insert(0, flat - whole * known)
        flat = whole
    return [flat, *rest]


def _divided(e: Entries, dividend: Linear, divisor: int) -> Linear:
    """The floor of a division, without what is known to be less than the divisor."""
    terms = [(atom, c) for atom, c in dividend.terms if c % divisor]
    rest = Linear(dividend.constant % divisor, tuple(terms))
    small = conjunction(at_least_zero(rest), less(rest, Linear(divisor)))
    return quotient(dividend - rest if e.facts.proves(small) else dividend, divisor)


def _squeeze(e: Entries, node: fx.Node, index: Index) -> Value | None:
    """Only axes that are known to be of size one are taken out."""
    before, after = values.shape(source_of(node)), values.shape(node)
    if len(_wide(before, (Linear(0),) * len(before))) != len(_wide(after, index)):
        return None
    return _view(e, node, index)


# Parts -----------------------------------------------------------------------------------------------------------


def from_start(e: Entries, start: Any, size: Linear) -> Linear | None:
    """A start of a slice as a number that is at least zero; it is no more than the size where there is an entry."""
    value = start.meta.get("val") if isinstance(start, fx.Node) else start
    found = Linear(0) if value is None else integer(value)
    if found is None:
        return None
    guarded = isinstance(value, torch.SymInt) and known_true(value >= 0)
    if guarded or e.facts.proves(at_least_zero(found)):
        return found
    from_end = conjunction(less(found, Linear(0)), at_least_zero(size + found))
    return size + found if e.facts.proves(from_end) else None


def _slice(e: Entries, node: fx.Node, index: Index) -> Value | None:
    source, step = source_of(node), given(node, 4, "step", 1)
    axis = given(node, 1, "dim", 0) % len(index)
    start = from_start(e, given(node, 2, "start"), of_size(values.shape(source)[axis]))
    if start is None or not isinstance(step, int):
        return None
    return e.at(source, replaced(index, axis, start + index[axis] * step))


def _select(e: Entries, node: fx.Node, index: Index) -> Value | None:
    source, dim, place = source_of(node), node.args[1], node.args[2]
    shape = values.shape(source)
    assert isinstance(dim, int)
    axis = dim % len(shape)
    at = from_start(e, place, of_size(shape[axis]))
    return None if at is None else e.at(source, (*index[:axis], at, *index[axis:]))


def _part(e: Entries, node: fx.Node, index: Index) -> Value | None:
    """One result of a split."""
    split, place = node.args
    if not isinstance(split, fx.Node) or not isinstance(place, int):
        return None
    source = split.args[0]
    if not isinstance(source, fx.Node) or split.target not in _SPLITS:
        return None
    rank = len(values.shape(source))
    dim = given(split, *_SPLITS[split.target], 0) % rank
    if split.target is aten.unbind.int:
        return e.at(source, (*index[:dim], Linear(place), *index[dim:]))
    start = sum((of_size(part.shape[dim]) for part in split.meta["val"][:place]), Linear(0))
    return e.at(source, replaced(index, dim, start + index[dim]))


_SPLITS = {
    aten.split.Tensor: (2, "dim"),
    aten.split_with_sizes.default: (2, "dim"),
    aten.chunk.default: (2, "dim"),
    aten.unbind.int: (1, "dim"),
}


def _flip(e: Entries, node: fx.Node, index: Index) -> Value | None:
    shape, dims = values.shape(node), node.args[1]
    place = list(index)
    for dim in dims:  # type: ignore[union-attr]  # a list, by the schema
        place[dim] = of_size(shape[dim]) - 1 - index[dim]  # type: ignore[index]  # likewise, of ints
    return e.at(source_of(node), tuple(place))


def _repeat(e: Entries, node: fx.Node, index: Index) -> Value | None:
    shape = values.shape(source_of(node))
    place = []
    for size, whole, at in zip(shape, values.shape(node)[-len(shape) :], index[-len(shape) :], strict=False):
        length = static_int(size)
        if known_equal(size, whole):
            place.append(at)
        elif length:
            place.append(at - quotient(at, length) * length)
        else:
            return None
    return e.at(source_of(node), tuple(place)) if len(place) == len(shape) else None


def _index(e: Entries, node: fx.Node, index: Index) -> Value | None:
    """Indexing by tensors of integers: their axes stand where theirs stood, or in front if others are between."""
    source, indices = source_of(node), node.args[1]
    assert isinstance(indices, (list, tuple))
    shape = values.shape(source)
    by = {axis: at for axis, at in enumerate(indices) if at is not None}
    if not by or not all(isinstance(at, fx.Node) and values.dtype(at) in POSITIONS for at in by.values()):
        return None
    rank = max(len(values.shape(at)) for at in by.values())
    first, last = min(by), max(by)
    front = first if last - first + 1 == len(by) else 0
    shared, others = index[front : front + rank], iter((*index[:front], *index[front + rank :]))
    place = []
    for axis, size in enumerate(shape):
        at = _looked_up(e, by[axis], shared, of_size(size)) if axis in by else next(others)
        if at is None:
            return None
        place.append(at)
    return e.at(source, tuple(place))


def _index_select(e: Entries, node: fx.Node, index: Index) -> Value | None:
    source, dim, by = node.args
    assert isinstance(source, fx.Node)
    assert isinstance(by, fx.Node)
    assert isinstance(dim, int)
    shape = values.shape(source)
    if not shape or not values.shape(by):
        return None
    axis = dim % len(shape)
    at = _looked_up(e, by, (index[axis],), of_size(shape[axis]))
    return None if at is None else e.at(source, replaced(index, axis, at))


def _looked_up(e: Entries, by: fx.Node, index: Index, size: Linear) -> Linear | None:
    """An entry of a tensor of indices, if it is one number, as one that counts from the start."""
    rank = len(values.shape(by))
    cases = e.cases(by, index[len(index) - rank :])
    at = cases[0][1] if len(cases) == 1 else None
    if not isinstance(at, Linear):
        return None
    if e.facts.proves(at_least_zero(at)):
        return at
    return at + size if e.facts.proves(less(at, Linear(0))) else None


RULES: Mapping[Any, OpRule] = {
    aten.clone.default: _same,
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.contiguous.default: _same,
    aten.expand.default: _expand,
    aten.transpose.int: _transpose,
    aten.t.default: _transpose,
    aten.permute.default: _permute,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten.unsqueeze.default: _view,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    operator.getitem: _part,
    aten.flip.default: _flip,
    aten.repeat.default: _repeat,
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
}
