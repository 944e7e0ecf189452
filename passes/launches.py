"""How many kernels a graph launches, its calls that are no views, and how many bytes these read and write."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass

import torch
from torch import fx
from torch._ops import OpOverload

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
    return not isinstance(node.target, OpOverload) or not _is_view(node.target)


@functools.cache
def _is_view(op: OpOverload) -> bool:
    """Whether an op gives an argument, or a part of one, by its schema."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a graph costs.

    Args:
        launches: its kernels.
        bytes: what these read and write, each tensor once a launch, at the sizes that the graph was compiled for.
    """

    launches: int
    bytes: int


def cost(graph: fx.Graph) -> Cost:
    """Counts the launches of a graph, and their bytes."""
    launches = list(filter(is_launch, graph.nodes))
    sizes = _Sizes()
    return Cost(len(launches), sum(_bytes(node, sizes) for node in launches))


class _Sizes:
    """The bytes of nodes' values, worked out once; 0 of what is no tensor."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, int] = {}

    def __call__(self, node: fx.Node) -> int:
        known = self._known.get(node)
        if known is None:
            value = node.meta.get("val")
            known = self._known[node] = _size(value) if isinstance(value, torch.Tensor) else 0
        return known


def _bytes(node: fx.Node, sizes: _Sizes) -> int:
    given = node.meta.get("val")
    results = given if isinstance(given, (list, tuple)) else ()
    read = node.all_input_nodes
    if node.target in _LOOKUPS:
        read = [node, *read[1:]]
    if node.kwargs.get("sparse_mode") in COMPRESSED:  # a few tiles of the mask are read, however large it is
        mask = node.kwargs.get("atten_mask")
        read = [source for source in read if source is not mask]
    return sum(map(sizes, (node, *read))) + sum(_size(value) for value in results if isinstance(value, torch.Tensor))


def _size(value: torch.Tensor) -> int:
    elements = 1
    for size, stride in zip(value.shape, value.stride(), strict=True):
        elements *= 1 if isinstance(stride, int) and stride == 0 else number_of(size)
    return elements * value.element_size()
