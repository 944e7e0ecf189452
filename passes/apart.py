"""Tells apart inputs that lie side by side in one storage, as the caches of layers do that are allocated as one.

What shares memory is told by the storages of fake values. Of the inputs in one storage AOTAutograd leaves several in a
graph that writes one of them only where no two share an element; all others it makes one input, of which they are
views. So each gets a fake storage of its own.
"""

from __future__ import annotations

import torch
from torch import fx

from ..patterns import values
from .rewriter import Rewriter


def part_inputs(rewriter: Rewriter, written: frozenset[fx.Node]) -> None:
    """Lets fake values share a storage only where they may share an element.

    Args:
        rewriter: of AOTAutograd's graph; only what its nodes say of their values is changed.
        written: the inputs that it writes.
    """
    groups: dict[int, list[fx.Node]] = {}
    for node in rewriter.graph.find_nodes(op="placeholder"):
        for storage in values.storages(node):
            groups.setdefault(storage, []).append(node)
    shared = {storage for storage, nodes in groups.items() if len(nodes) > 1 and written.intersection(nodes)}
    parted: set[fx.Node] = set()
    for node in rewriter.graph.nodes if shared else ():
        if not shared & values.storages(node):
            continue
        if node.op == "placeholder":
            node.meta["val"] = _alone(node.meta["val"], rewriter)
        elif parted.intersection(node.all_input_nodes):
            node.meta["val"] = rewriter.fake(node.target, node.args, node.kwargs)
        parted.add(node)


def _alone(value: torch.Tensor, rewriter: Rewriter) -> torch.Tensor:
    """A fake tensor in the same place of a storage of its own."""

    def place() -> torch.Tensor:
        last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        whole = value.new_empty(value.storage_offset() + last + 1)
        return whole.as_strided(value.shape, value.stride(), value.storage_offset())

    alone: torch.Tensor = rewriter.fake(place, (), {})
    return alone
