"""How many kernels a graph launches: its calls that are no views."""

from __future__ import annotations

import operator

import torch
from torch import fx

from ..runtime.weights import IN_MEMORY

aten = torch.ops.aten

# Views that say nothing of it in their schema, memory that is only taken, and calls that run on the host.
_NO_LAUNCH = frozenset(
    {operator.getitem, aten._unsafe_view.default, aten.new_empty.default, aten.sym_size.int, *IN_MEMORY}
)


def is_launch(node: fx.Node) -> bool:
    """True for a call that computes a tensor on the device."""
    if node.op != "call_function" or node.target in _NO_LAUNCH:
        return False
    if isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return False
    schema = getattr(node.target, "_schema", None)
    return schema is None or not any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def count_launches(graph: fx.Graph) -> int:
    """The launches of a graph."""
    return sum(map(is_launch, graph.nodes))
