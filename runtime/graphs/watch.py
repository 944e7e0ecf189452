"""Notices when memory that a graph reads belongs to another tensor now.

A graph knows addresses, a model knows names. Three things make them differ: a tensor gets other memory (`p.data = new`,
`module.to()`), a name gets another tensor (`load_state_dict(assign=True)`, `module.weight = new`), a container another
module or cache. So on each replay every name and every address on the ways to a graph's memory is compared.

Names are cheap: most are in dicts, and that none of those was written to is one question (`versions.py`). Addresses
are not, about 0.06 us each, as `p.data = new` leaves no mark that could be asked for once: it doesn't bump the version
counter; a weak reference to the old memory tells nothing while somebody keeps it as a backup; and nothing in torch
compares many addresses in one call on every device (torch_npu's own, for its graph trees, takes as long).

Not noticed: other shapes or strides over the very same memory, a number or a branch in the model's Python that changed
(but for train() and eval()), what was added to a dict, and tensors that can't be reached from the callable through
attributes, containers, closures and the globals and class attributes that its code names.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .reach import Reach
from .record import address, storage_key
from .versions import Versions


class Watch:
    """The names and addresses behind the storages that graphs use."""

    def __init__(self) -> None:
        self._keys: set[int] = set()
        self._roots: list[int] = []
        self._forget()

    def _forget(self) -> None:
        self._tables: list[_Table] = []
        self._versions = Versions([])
        self._entries: list[tuple[Any, Any, Any]] = []
        self._lengths: list[tuple[Any, int]] = []
        self._attributes: list[tuple[Any, str, Any]] = []
        self._tensors: list[torch.Tensor] = []
        self._addresses: tuple[int, ...] = ()

    def add(self, roots: Sequence[Any], keys: Collection[int]) -> None:
        """Watches these storages too.

        Args:
            roots: the callable, and what else tensors are looked for in.
            keys: the storages.
        """
        if not self._keys.issuperset(keys) or self._roots != list(map(id, roots)):
            self._keys |= set(keys)
            self.look(roots)

    def look(self, roots: Sequence[Any]) -> None:
        """Looks for the storages anew, and from these objects alone."""
        self._forget()
        self._roots = list(map(id, roots))
        reach = Reach(roots, self._keys)
        self._tensors = reach.tensors
        self._addresses = tuple(map(address, self._tensors))
        tables: dict[int, _Table] = {}
        lists: dict[int, list[Any] | deque[Any]] = {}
        for step in reach.steps():
            if step.kind == "attribute":
                self._attributes.append((step.holder, step.key, step.child))
            elif step.kind == "module":  # one without tensors counts too, such as an activation
                tables[id(step.holder)] = _Table(step.holder, dict(step.holder), len(step.holder))
            elif type(step.holder) is dict:
                tables.setdefault(id(step.holder), _Table(step.holder, {})).entries[step.key] = step.child
            elif step.kind == "entry":
                self._entries.append((step.holder, step.key, step.child))
                if isinstance(step.holder, (list, deque)):
                    lists[id(step.holder)] = step.holder
        for module in reach.modules:
            table = tables.setdefault(id(module.__dict__), _Table(module.__dict__, {}))
            table.entries["training"] = module.training
        self._lengths = [(values, len(values)) for values in lists.values()]
        self._look_at(tables.values())

    def watched(self) -> set[int]:
        """The storages that were found."""
        return set(map(storage_key, self._tensors))

    def clear(self) -> None:
        """Watches nothing."""
        self._keys = set()
        self._roots = []
        self._forget()

    def moved(self) -> bool:
        """Whether anything is not what and where it was."""
        try:
            if not self._versions.hold() and self._replaced():
                return True
            for container, key, value in self._entries:
                if container[key] is not value:
                    return True
            for values, length in self._lengths:
                if len(values) != length:
                    return True
            for holder, name, value in self._attributes:
                if getattr(holder, name) is not value:
                    return True
        except (LookupError, AttributeError, ValueError):  # a name is gone
            return True
        return tuple(map(address, self._tensors)) != self._addresses

    def _replaced(self) -> bool:
        """Whether a write to a dict replaced what leads to a tensor."""
        if not all(table.is_as_it_was() for table in self._tables):
            return True
        kept = []
        for table, written in zip(self._tables, self._versions.written(), strict=True):
            if written:  # it may be on every call: from now on by its entries
                self._entries.extend((table.names, key, value) for key, value in table.entries.items())
            else:
                kept.append(table)
        self._look_at(kept)
        return False

    def _look_at(self, tables: Iterable[_Table]) -> None:
        self._tables = list(tables)
        self._versions = Versions([table.names for table in self._tables])


@dataclass(frozen=True, slots=True)
class _Table:
    """A dict, what has to be in it, and how much if that is all."""

    names: dict[Any, Any]
    entries: dict[Any, Any]
    length: int | None = None

    def is_as_it_was(self) -> bool:
        if self.length is not None and len(self.names) != self.length:
            return False
        return all(self.names[key] is value for key, value in self.entries.items())
