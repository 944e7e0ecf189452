"""Makes the floats that a model holds constants again.

Under `dynamic=True` Dynamo turns every float into an input of the graph, even a module's `eps`, a default or a global.
To a kernel it is an attribute, so each is bound to the value it has, under a guard: a model whose float changes is
compiled again. Floats that the caller passes stay inputs.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._dynamo.source import DictGetItemSource, FloatTensorSource, GetItemSource, LocalSource
from torch._guards import Source


def specialise_floats(graph: fx.Graph) -> None:
    """Replaces `item()` of a float that Dynamo lifted from the model by its value, in place."""
    for node in graph.find_nodes(op="call_method", target="item"):
        (wrapped,) = node.args
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymFloat) and isinstance(wrapped, fx.Node) and not _is_passed_in(wrapped):
            node.replace_all_uses_with(float(value))  # float() installs the guard
            graph.erase_node(node)


def _is_passed_in(placeholder: fx.Node) -> bool:
    """Whether a float is an argument of the compiled call, on its own or in a list or dict."""
    source: Source | None = getattr(placeholder.meta.get("grapharg"), "source", None)
    while isinstance(source, (FloatTensorSource, GetItemSource, DictGetItemSource)):
        source = source.base
    return source is None or (isinstance(source, LocalSource) and not source.is_derefed_cell_contents)
