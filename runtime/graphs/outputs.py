"""What a replay gives back: views of fixed memory, of which nothing that a caller still holds is overwritten.

The next replay writes to the same memory. What a caller still holds then, be it an output or a view of one, is moved
away before: its content is copied once, and the storage object that the caller's tensors share changes its memory with
a new one's. So the caller's tensors stay as they are, and the graph has its addresses under the new storage object.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from .capture import Captured
from .record import storage_key

OutputMode: TypeAlias = Literal["views", "clone", "static"]
Shape: TypeAlias = tuple[int, ...]


@dataclass(slots=True)
class _Memory:
    """A storage that the graph writes outputs to, and how many users it has when no caller holds anything.

    Those are tensors, and what holds the storage's Python object: both are counted.
    """

    storage: torch.UntypedStorage
    leaves: list[int]
    users: int = 0
    references: int = 0

    def is_held(self) -> bool:
        count: int = torch._C._storage_Use_Count(self.storage._cdata)
        return count > self.users or sys.getrefcount(self.storage) > self.references


class Outputs:
    """The outputs of one graph.

    Args:
        captured: the capture.
        own: keys of the storages that are the graph's own, where each replay writes them anew.
        inputs: keys of the storages of its static inputs.
        mode: "views": as the module says. "clone": copies. "static": views that the next replay overwrites.
    """

    def __init__(self, captured: Captured, own: Collection[int], inputs: Collection[int], mode: OutputMode) -> None:
        self._graph = captured.graph
        self._mode = mode
        leaves, self._structure = tree_flatten(captured.result)
        self.leaves = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._copied = set()
        memories: dict[int, _Memory] = {}
        for i, leaf in enumerate(self.leaves):
            if not isinstance(leaf, torch.Tensor):
                continue
            key = storage_key(leaf)
            if key in own:
                memories.setdefault(key, _Memory(leaf.untyped_storage(), [])).leaves.append(i)
            if mode == "clone" or key in inputs:  # an input's memory belongs to all graphs
                self._copied.add(i)
        self._memories = list(memories.values())
        for memory in self._memories:  # its Python object, its leaves here, and the graph
            memory.users = 1 + len(memory.leaves) + self._graph.users(memory.storage)
            memory.references = sys.getrefcount(memory.storage)

    @property
    def held(self) -> bool:
        """Whether a caller holds something that the next replay would overwrite."""
        return any(memory.is_held() for memory in self._memories)

    def release(self) -> int:
        """Moves what a caller holds; gives the number of storages moved."""
        moved = 0
        if self._mode == "views":
            for memory in self._memories:
                if memory.is_held():
                    self._move(memory)
                    moved += 1
        return moved

    def _move(self, memory: _Memory) -> None:
        first: torch.Tensor = self.leaves[memory.leaves[0]]
        old = memory.storage
        with torch.inference_mode(False), torch.no_grad():
            copy = bytes_of(first).clone()
            new = copy.untyped_storage()
            old._swap_data_ptr_(new)  # type: ignore[attr-defined] # (not in the stub)
            for i in memory.leaves:
                leaf = self.leaves[i]
                self.leaves[i] = _at(leaf, new, leaf.size(), leaf.stride(), leaf.storage_offset())
        self._graph.move(old, new)
        memory.storage = new

    def give(self, shapes: Mapping[int, Shape]) -> Any:
        """The outputs in the structure that the callable gave them.

        Args:
            shapes: for each leaf that is padded, the shape without padding.
        """
        given = []
        for i, leaf in enumerate(self.leaves):
            if isinstance(leaf, torch.Tensor):
                shape = shapes.get(i)
                leaf = leaf.detach() if shape is None else torch.as_strided(leaf, shape, leaf.stride())
                if i in self._copied:
                    leaf = leaf.clone()
            given.append(leaf)
        return given[0] if self._structure.is_leaf() else tree_unflatten(given, self._structure)

    def poison(self, fill: Callable[[torch.Tensor], Any]) -> None:
        """Fills the graph's own outputs."""
        for memory in self._memories:
            for i in memory.leaves:
                fill(self.leaves[i])

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that outputs lie in."""
        return sum(memory.storage.nbytes() for memory in self._memories)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All memory of a tensor's storage."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _at(
    like: torch.Tensor, storage: torch.UntypedStorage, size: Sequence[int], stride: Sequence[int], offset: Any
) -> torch.Tensor:
    tensor = like.new_empty(0).set_(storage, offset, tuple(size), tuple(stride))
    tensor = tensor.conj() if like.is_conj() else tensor
    return torch._neg_view(tensor) if like.is_neg() else tensor
