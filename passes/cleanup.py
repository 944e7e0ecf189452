"""Dead code by our own purity rule, and a check that the graph is whole."""

from __future__ import annotations

from torch import fx

from .effects import is_pure


def cleanup(module: fx.GraphModule) -> None:
    """Erases unused pure nodes, drops attributes that nothing reads, lints and recompiles."""
    for node in reversed(module.graph.nodes):
        if not node.users and is_pure(node):
            module.graph.erase_node(node)
    module.graph.lint()
    module.delete_all_unused_submodules()
    module.recompile()
