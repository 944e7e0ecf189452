"""Entries of tensors that are joined of others, or written over by another in part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from .. import values
from .entries import Entries, Index, OpRule, Value
from .formula import Formula, at_most, conjunction, equal, less, negation
from .indexing import from_start, given, replaced, source_of
from .integers import Linear, of_size

aten = torch.ops.aten


def _cat(e: Entries, node: fx.Node, index: Index) -> Value | None:
    parts = node.args[0]
    axis = given(node, 1, "dim", 0) % len(index)
    assert isinstance(parts, (list, tuple))
    pieces: list[tuple[Formula, fx.Node, Index]] = []
    start = Linear(0)
    for part in parts:
        if not isinstance(part, fx.Node) or len(values.shape(part)) != len(index) or not _of_type(part, node):
            return None
        end = start + of_size(values.shape(part)[axis])
        inside = conjunction(at_most(start, index[axis]), less(index[axis], end))
        pieces.append((inside, part, replaced(index, axis, index[axis] - start)))
        start = end
    return e.joined(node, pieces)


def _stack(e: Entries, node: fx.Node, index: Index) -> Value | None:
    parts = node.args[0]
    axis = given(node, 1, "dim", 0) % len(index)
    assert isinstance(parts, (list, tuple))
    inner = (*index[:axis], *index[axis + 1 :])
    pieces = [(equal(index[axis], Linear(i)), part, inner) for i, part in enumerate(parts) if isinstance(part, fx.Node)]
    return e.joined(node, pieces) if all(_of_type(part, node) for _, part, _ in pieces) else None


def _of_type(part: fx.Node, node: fx.Node) -> bool:
    return values.dtype(part) is values.dtype(node)


def _slice_scatter(e: Entries, node: fx.Node, index: Index) -> Value | None:
    """A tensor with a slice written over."""
    source, written = source_of(node), node.args[1]
    axis = given(node, 2, "dim", 0) % len(index)
    start = from_start(e, given(node, 3, "start"), of_size(values.shape(source)[axis]))
    if start is None or not isinstance(written, fx.Node) or given(node, 5, "step", 1) != 1:
        return None
    end = start + of_size(values.shape(written)[axis])
    inside = conjunction(at_most(start, index[axis]), less(index[axis], end))
    place = replaced(index, axis, index[axis] - start)
    return e.joined(node, [(inside, written, place), (negation(inside), source, index)])


def _select_scatter(e: Entries, node: fx.Node, index: Index) -> Value | None:
    """A tensor with one place of an axis written over."""
    source, written = source_of(node), node.args[1]
    axis = given(node, 2, "dim", 0) % len(index)
    at = from_start(e, given(node, 3, "index"), of_size(values.shape(source)[axis]))
    if at is None or not isinstance(written, fx.Node):
        return None
    here = equal(index[axis], at)
    return e.joined(node, [(here, written, (*index[:axis], *index[axis + 1 :])), (negation(here), source, index)])


RULES: Mapping[Any, OpRule] = {
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
}
