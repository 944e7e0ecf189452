"""Entries of tensors that are made of numbers alone, and of running counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from .. import values
from .elementwise import choice, product
from .entries import POSITIONS, Entries, Index, OpRule, Value, constant, integer, known, number, typed
from .integers import Linear

aten = torch.ops.aten


def _filled(place: int | bool) -> OpRule:
    """A tensor of one number: the argument at `place`, or zeros and ones."""

    def rule(e: Entries, node: fx.Node, index: Index) -> Value | None:
        given = int(place) if isinstance(place, bool) else node.args[place] if len(node.args) > place else None
        if values.dtype(node) is torch.bool:
            return bool(given) if isinstance(given, (bool, int, float)) else None
        return known(node, typed(e, number(given), values.dtype(node)))

    return rule


def _fill(e: Entries, node: fx.Node, index: Index) -> Value | None:
    """`fill`: a tensor's shape with one number, that may be an entry."""
    return choice(e, node, index, True, node.args[1], node.args[0])


def lifted(node: fx.Node) -> torch.Tensor | None:
    """A tensor that tracing has made of a number in the model's code: nobody else can reach it."""
    source = node.args[0] if node.target is aten.lift_fresh_copy.default else None
    if not isinstance(source, fx.Node) or source.op != "get_attr":
        return None
    value = getattr(source.graph.owning_module, str(source.target), None)
    return value if type(value) is torch.Tensor else None


def _lifted(e: Entries, node: fx.Node, index: Index) -> Value | None:
    value = lifted(node)
    if value is None or value.numel() != 1:
        return None
    found = constant(value.item())
    if values.dtype(node) is torch.bool:
        return isinstance(found, Linear) and found.constant != 0
    return known(node, ((True, found),))


def _arange(e: Entries, node: fx.Node, index: Index) -> Value | None:
    """`start + step * index`."""
    if node.target is torch.ops.prims.iota.default:
        given: tuple[Any, ...] = (node.kwargs["start"], node.kwargs["step"])
    else:
        given = ((node.args[0] if len(node.args) > 1 else 0), (node.args[2] if len(node.args) > 2 else 1))
    start, step = map(integer, given)
    if start is None or step is None or values.dtype(node) not in POSITIONS:
        return None
    walked = product(step, index[0])
    return ((True, start + walked),) if isinstance(walked, Linear) else None


def _cumsum(e: Entries, node: fx.Node, index: Index) -> Value | None:
    """The sum of entries up to an index, known where they are all one number."""
    source, dim = node.args
    if not isinstance(source, fx.Node) or not isinstance(dim, int) or values.dtype(node) not in POSITIONS or not index:
        return None
    dim %= len(index)
    each = e.facts.axis(f"{node.name}_{len(e.known)}", index[dim] + 1)
    cases = e.cases(source, (*index[:dim], each, *index[dim + 1 :]))
    cases = e.chosen([(True, cases)]) or cases
    only = cases[0][1] if len(cases) == 1 else None
    steps = product(only, index[dim] + 1) if isinstance(only, Linear) and only.number is not None else None
    return ((True, steps),) if isinstance(steps, Linear) else None


RULES: Mapping[Any, OpRule] = {
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    torch.ops.prims.iota.default: _arange,
    aten.zeros.default: _filled(False),
    aten.zeros_like.default: _filled(False),
    aten.new_zeros.default: _filled(False),
    aten.ones.default: _filled(True),
    aten.ones_like.default: _filled(True),
    aten.new_ones.default: _filled(True),
    aten.full.default: _filled(1),
    aten.full_like.default: _filled(1),
    aten.new_full.default: _filled(2),
    aten.scalar_tensor.default: _filled(0),
    aten.fill.Scalar: _fill,
    aten.fill.Tensor: _fill,
    aten.lift_fresh_copy.default: _lifted,
    aten.cumsum.default: _cumsum,
}
