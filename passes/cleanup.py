"""Dead code by our own purity rule, and a check that the graph is whole."""

from __future__ import annotations

from torch import fx

from .effects import purity


def cleanup(module: fx.GraphModule) -> None:
    """Erases unused pure nodes, drops attributes that nothing reads, lints and recompiles."""
    erase_dead(module.graph)
    module.graph.lint()
    module.delete_all_unused_submodules()
    module.recompile()


def erase_dead(graph: fx.Graph) -> None:
    """Erases unused pure nodes."""
    is_pure = purity()
    for node in reversed(graph.nodes):
        if not node.users and is_pure(node):
            graph.erase_node(node)
