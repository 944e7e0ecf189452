"""A graph as it was before passes changed it, for when it is needed again: they fail, or a site is found wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule


@dataclass(frozen=True, slots=True)
class _Record:
    """A node as it was."""

    node: fx.Node
    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    type: Any
    meta: dict[str, Any]


class Snapshot:
    """What makes a graph again. To note it takes a fraction of the time of a copy, which is seldom needed.

    Args:
        module: the graph, which is to be changed by whoever `take`s it.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._is_taken = False
        self._records = [
            _Record(n, n.op, n.target, n.args, n.kwargs, n.name, n.type, n.meta.copy()) for n in module.graph.nodes
        ]

    def take(self) -> fx.GraphModule:
        """The graph as it was, to be changed, in a module whose code is made once, when nothing changes any more."""
        if self._is_taken:
            return self.restored()
        self._is_taken = True
        return _LazyGraphModule(self._module, self._module.graph)

    def restored(self) -> fx.GraphModule:
        """A graph of its own, alike in all nodes, their names and what is noted on them."""
        graph = fx.Graph()
        new: dict[fx.Node, fx.Node] = {}
        for record in self._records:
            args, kwargs = fx.map_arg((record.args, record.kwargs), new.__getitem__)
            node = graph.create_node(record.op, record.target, args, kwargs, record.name, record.type)
            node.meta = record.meta.copy()
            new[record.node] = node
        return _LazyGraphModule(self._module, graph)
