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


def check_order(graph: fx.Graph) -> None:
    """The part of `graph.lint` that a rewrite of a site can break, in a fraction of its time.

    Raises:
        RuntimeError: a node is computed before what it reads.
    """
    known: set[fx.Node] = set()
    for node in graph.nodes:
        early = [source for source in node.all_input_nodes if source not in known]
        if early:
            raise RuntimeError(f"{node.name} is computed before {early[0].name}, which it reads")
        known.add(node)
