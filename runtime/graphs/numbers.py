"""What a graph counts on the host beside its tensors.

A cache that counts its tokens in Python hands its number in, and gets the next one back. A replay is the same for all
of them, as long as no tensor is computed from it; so such numbers are taken out of what is captured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx


class Apart:
    """A graph whose tensors and whose numbers are computed apart.

    Args:
        module: a graph whose output is a sequence of tensors and numbers.

    Attributes:
        tensors: the graph without the numbers that no tensor is computed from.
        inputs: the positions of its inputs among those of the whole graph.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        counted = _counted(module.graph)
        placeholders = module.graph.find_nodes(op="placeholder")
        results: Any = module.graph.output_node().args[0]
        self._counted = [i for i, result in enumerate(results) if result in counted]
        self.inputs = [i for i, node in enumerate(placeholders) if node not in counted]
        self.tensors = _without(module, counted)
        self._numbers = _only(module, [results[i] for i in self._counted])

    def whole(self, inputs: Sequence[Any], outputs: Any) -> Any:
        """The outputs of the whole graph, from its inputs and the outputs of `tensors`."""
        if not self._counted:
            return outputs
        merged = list(outputs)
        for position, number in zip(self._counted, self._numbers.forward(*inputs), strict=True):
            merged.insert(position, number)
        return merged


def _counted(graph: fx.Graph) -> set[fx.Node]:
    """Numbers, and inputs that are numbers, from which no tensor is computed, be it by way of other numbers."""
    counted: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if (
            _is_number(node)
            and all(_is_number(given) or given.op == "placeholder" for given in node.all_input_nodes)
            and all(user.op == "output" or user in counted for user in node.users)
        ):
            counted.add(node)
    return counted


def _is_number(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def _without(module: fx.GraphModule, left_out: set[fx.Node]) -> fx.GraphModule:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        if node.op == "output":
            graph.output([fx.map_arg(result, copies.__getitem__) for result in node.args[0] if result not in left_out])
        elif node not in left_out:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(module, graph)


def _only(module: fx.GraphModule, results: Sequence[fx.Node]) -> fx.GraphModule:
    """The graph of these results, with all the inputs."""
    wanted = set(_with_what_they_need(results))
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        if node.op == "placeholder" or node in wanted:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[result] for result in results])
    return fx.GraphModule(module, graph)


def _with_what_they_need(nodes: Sequence[fx.Node]) -> Iterator[fx.Node]:
    for node in nodes:
        yield node
        yield from _with_what_they_need(node.all_input_nodes)
