"""The scale of each row of a value, as a symmetric quantiser takes it:  max|value| / 127."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..runtime.ops.quantize import INT8_MAX
from . import values
from .canonical import Canonicaliser
from .movement import COPIES

aten = torch.ops.aten

FLOORS = frozenset({aten.clamp.default, aten.clamp_min.default})


@dataclass(frozen=True, slots=True)
class RowScale:
    """Where a graph computes it.

    Args:
        node: what gives it, without casts and views on top.
        floor: what it, or the magnitude, is kept above; None for nothing.
        claimed: the nodes from `node` down to the value, which is excluded.
    """

    node: fx.Node
    floor: float | None
    claimed: tuple[fx.Node, ...]


def row_scale(node: fx.Node, value: fx.Node, c: Canonicaliser) -> RowScale | None:
    """Reads `node` as the scale of the rows of `value`; None where it is something else."""
    claimed: list[fx.Node] = []
    node = top = _peeled(node, [])
    floors: list[float] = []
    quotients = 0
    while True:
        if node.target in FLOORS and len(node.all_input_nodes) == 1 and bounds(node)[1] == math.inf:
            floors.append(bounds(node)[0])
        elif _is_127th(node):
            quotients += 1
        else:
            break
        claimed.append(node)
        node = _peeled(node.all_input_nodes[0], claimed)
    reduced = _row_maximum(node, claimed)
    if quotients != 1 or len(floors) > 1 or reduced is None:
        return None
    magnitude = _peeled(reduced, claimed)
    if magnitude.target is not aten.abs.default:
        return None
    claimed.append(magnitude)
    below = magnitude.all_input_nodes[0]
    while values.is_float_cast(below) and not values.is_rounding(below):
        claimed.append(below)
        below = below.all_input_nodes[0]
    if c.numbers[below] != c.numbers[values.strip_widening(value)]:
        return None
    return RowScale(top, floors[0] if floors else None, tuple(claimed))


def inverted(node: fx.Node) -> tuple[fx.Node | None, list[fx.Node]]:
    """What `node` is the inverse of, if it is one, and the nodes that invert it."""
    nodes = []
    if node.target is aten.mul.Tensor and node.args[1] == 1:  # 1 / x is reciprocal(x) * 1
        nodes.append(node)
        (node,) = node.all_input_nodes
    return (node.all_input_nodes[0], [*nodes, node]) if node.target is aten.reciprocal.default else (None, [])


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an op by name, defaults filled in."""
    assert isinstance(node.target, torch._ops.OpOverload)
    parameters = node.target._schema.arguments
    given = dict(zip((parameter.name for parameter in parameters), node.args, strict=False))
    return {parameter.name: parameter.default_value for parameter in parameters} | given | dict(node.kwargs)


def bounds(clamp: fx.Node) -> tuple[float, float]:
    """Between which numbers a clamp keeps its value."""
    given = arguments(clamp)
    low, high = given.get("min"), given.get("max")
    return -math.inf if low is None else float(low), math.inf if high is None else float(high)


def _is_127th(node: fx.Node) -> bool:
    if node.target in (aten.div.Tensor, aten.div.Scalar):
        return bool(node.args[1] == INT8_MAX) and not node.kwargs
    return node.target in (aten.mul.Tensor, aten.mul.Scalar) and bool(node.args[1] == 1 / INT8_MAX)


def _row_maximum(node: fx.Node, nodes: list[fx.Node]) -> fx.Node | None:
    """What `node` is the maximum of along the last axis; None where it is none. The nodes of it go to `nodes`."""
    nodes.append(node)
    if node.target is operator.getitem and node.args[1] == 0 and node.all_input_nodes[0].target is aten.max.dim:
        (node,) = node.all_input_nodes
        nodes.append(node)
    elif node.target is not aten.amax.default:
        return None
    given = arguments(node)
    below, dims = given["self"], given["dim"]
    assert isinstance(below, fx.Node)
    last = len(values.shape(below)) - 1
    return below if dims in (-1, last, [-1], [last]) else None


def _peeled(node: fx.Node, nodes: list[fx.Node]) -> fx.Node:
    """The value below casts, copies, and views that add a last axis of one; these go to `nodes`."""
    while values.is_float_cast(node) or node.target in COPIES or _adds_last_axis(node):
        nodes.append(node)
        node = node.all_input_nodes[0]
    return node


def _adds_last_axis(node: fx.Node) -> bool:
    if node.target not in (aten.unsqueeze.default, aten.view.default, aten.reshape.default):
        return False
    before = values.tensor(node.args[0])
    return before is not None and values.same_shape(values.shape(node), (*before.shape, 1))
