"""The nodes that compute a value from given inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from . import values
from .movement import is_movement, source


@dataclass(frozen=True, slots=True)
class Cone:
    """Nodes between a root (included) and the inputs at which the walk stopped, both in graph order."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class Operand:
    """Where an operand comes from: the node that computes it, and the casts on the way up that round it."""

    node: fx.Node
    roundings: tuple[fx.Node, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest type that holds it."""
        return values.dtype((*self.roundings, self.node)[0])


def operand(node: fx.Node) -> Operand:
    """Goes down from `node` to what computes it, through casts and movement."""
    roundings = []
    while not computes(node):
        if values.is_rounding(node):
            roundings.append(node)
        node = source(node)
    return Operand(node, tuple(roundings))


def computes(node: fx.Node) -> bool:
    """True for a node that is no cast and no movement of its first input."""
    times_one = node.target is torch.ops.aten.mul.Tensor and node.args[1] == 1  # 1 / x is reciprocal(x) * 1
    return not (values.is_float_cast(node) or is_movement(node) or times_one)


def walk(root: fx.Node, is_input: Callable[[fx.Node], bool], limit: int = 64) -> Cone | None:
    """Walks from `root` (never an input itself) down to the nodes for which `is_input` holds.

    Symbolic sizes on the way are neither nodes nor inputs.

    Returns:
        The cone, or None where it is larger than `limit` nodes.
    """
    nodes: dict[fx.Node, None] = {}
    inputs: dict[fx.Node, None] = {}
    pending = [root]
    while pending:
        node = pending.pop()
        if node in nodes or node in inputs or isinstance(node.meta.get("val"), torch.SymInt):
            continue
        if node is not root and (is_input(node) or node.op != "call_function"):
            inputs[node] = None
            continue
        nodes[node] = None
        if len(nodes) > limit:
            return None
        pending.extend(node.all_input_nodes)
    return Cone(tuple(sorted(nodes)), tuple(sorted(inputs)))
