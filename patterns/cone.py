"""The nodes that compute a value from given inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True, slots=True)
class Cone:
    """Nodes between a root (included) and the inputs at which the walk stopped, both in graph order."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]


def walk(root: fx.Node, is_input: Callable[[fx.Node], bool], limit: int = 64) -> Cone | None:
    """Walks from `root` (never an input itself) down to the nodes for which `is_input` holds.

    Returns:
        The cone, or None where it is larger than `limit` nodes.
    """
    nodes: dict[fx.Node, None] = {}
    inputs: dict[fx.Node, None] = {}
    pending = [root]
    while pending:
        node = pending.pop()
        if node in nodes or node in inputs:
            continue
        if node is not root and (is_input(node) or node.op != "call_function"):
            inputs[node] = None
            continue
        nodes[node] = None
        if len(nodes) > limit:
            return None
        pending.extend(node.all_input_nodes)
    return Cone(tuple(sorted(nodes)), tuple(sorted(inputs)))
