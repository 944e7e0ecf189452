"""How many kernels a graph launches, its calls that are no views, and how many bytes these read and write."""

from __future__ import annotations

import operator

import torch
from torch import fx

from ..runtime.ops.attention_mask import COMPRESSED
from ..runtime.sizes import number_of
from ..runtime.weights import IN_MEMORY
from .effects import SETTLED

aten = torch.ops.aten

# What they read of their first argument, or write of it, is no more than what they give, or are given.
_LOOKUPS = frozenset({aten.embedding.default, aten.index.Tensor, aten.index_select.default, aten.gather.default})

# Views that say nothing of it in their schema, memory that is only taken, and calls that run on the host.
_NO_LAUNCH = frozenset(
    {operator.getitem, aten._unsafe_view.default, aten.new_empty.default, aten.sym_size.int, *IN_MEMORY, *SETTLED}
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


def count_bytes(graph: fx.Graph) -> int:
    """What the launches of a graph read and write, each tensor once a launch, at the sizes it was compiled for."""
    return sum(_bytes(node) for node in graph.nodes if is_launch(node))


def _bytes(node: fx.Node) -> int:
    given = node.meta.get("val")
    results = [value for value in (given if isinstance(given, (list, tuple)) else [given]) if value is not None]
    read = [source.meta.get("val") for source in node.all_input_nodes]
    if node.target in _LOOKUPS:
        read[0] = given
    if node.kwargs.get("sparse_mode") in COMPRESSED:  # a few tiles of the mask are read, however large it is
        mask = node.kwargs.get("atten_mask")
        read = [value for source, value in zip(node.all_input_nodes, read, strict=True) if source is not mask]
    return sum(_size(value) for value in (*results, *read) if isinstance(value, torch.Tensor))


def _size(value: torch.Tensor) -> int:
    elements = 1
    for size, stride in zip(value.shape, value.stride(), strict=True):
        elements *= 1 if isinstance(stride, int) and stride == 0 else number_of(size)
    return elements * value.element_size()
