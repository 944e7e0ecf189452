"""Makes the floats of modules constants again.

Under `dynamic=True` Dynamo turns even a module's `eps` into an input of the graph. To a kernel it is an attribute, so
each is bound to the value it has, under a guard: a module whose float changes is compiled again. Floats that the caller
passes stay inputs.
"""

from __future__ import annotations

import torch
from torch import fx


def specialise_module_floats(graph: fx.Graph) -> None:
    """Replaces `item()` of a float that Dynamo lifted from a module by its value, in place."""
    for node in graph.find_nodes(op="call_method", target="item"):
        (wrapped,) = node.args
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymFloat) and isinstance(wrapped, fx.Node) and _is_of_module(wrapped):
            node.replace_all_uses_with(float(value))  # float() installs the guard
            graph.erase_node(node)


def _is_of_module(placeholder: fx.Node) -> bool:
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    guard_source = getattr(source, "guard_source", None)
    if guard_source is None:
        return False
    return bool(
        guard_source.is_unspecialized_nn_module()
        or guard_source.is_unspecialized_builtin_nn_module()
        or guard_source.is_specialized_nn_module()
    )
