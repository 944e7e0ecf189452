"""Which nodes do more than compute their value, and the order that they must keep.

Judged by the op's schema and by what is registered for it, never by names.
"""

from __future__ import annotations

import torch
from torch import fx

from ..runtime.weights import pack


def is_pure(node: fx.Node) -> bool:
    """True for a node that may be dropped when unused, and moved past others: it writes nothing and draws no number."""
    if node.op in ("placeholder", "output"):
        return False
    if node.op == "get_attr" or node.target is pack:
        return True
    if node.op != "call_function" or node.is_impure():
        return False
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.is_mutable:
        return False
    return torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ())


def regions(graph: fx.Graph) -> dict[fx.Node, int]:
    """Numbers the stretches of a graph: even between effects, where pure nodes may be reordered, odd for an effect."""
    region = 0
    numbered = {}
    for node in graph.nodes:
        effect = node.op == "call_function" and not is_pure(node)
        region += effect
        numbered[node] = region
        region += effect
    return numbered
