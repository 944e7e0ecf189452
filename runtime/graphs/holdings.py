"""What a runner has on its device: graphs, the plans that lead to them, and the memory of inputs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .buffers import Buffers
from .capture import CaptureBackend, Graph
from .copies import Copies
from .keys import identified
from .outputs import Outputs, Shape
from .padding import Trims
from .record import storage_key
from .watch import Watch


@dataclass(slots=True)
class Entry:
    """One captured graph.

    Attributes:
        statics: what the function was called with, by name.
        written: names of inputs that it writes to.
        writes: storages that it writes to, those of inputs included.
        kept: memory that it reads and nobody watches, which has to stay where it is.
        used: when it was last replayed.
        dropped: no longer to be replayed.
    """

    graph: Graph
    outputs: Outputs
    statics: dict[str, Any]
    written: frozenset[str]
    writes: set[int]
    kept: list[torch.UntypedStorage]
    used: int = 0
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """How calls of one set of shapes are served: by which graph, and what is copied where. Without one: eagerly."""

    entry: Entry | None = None
    copies: Copies | None = None
    written: tuple[tuple[str, torch.Tensor], ...] = ()
    shapes: Mapping[int, Shape] = field(default_factory=dict)
    rows: int = 0
    padded_rows: int = 0
    unpadded: bool = False

    def shares_what_is_written(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the graph writes memory of an argument that another one or state shares: copies wouldn't."""
        if self.entry is None or self.copies is None or not self.entry.writes:
            return False
        keys = [storage_key(value) for value in arguments.values() if isinstance(value, torch.Tensor)]
        if self.written and len(keys) != len(set(keys)):
            return True
        return any(storage_key(arguments[name]) in self.entry.writes for name in self.copies.names)


class Holdings:
    """All of it, for one function and device."""

    def __init__(self, function: Callable[..., Any], device: torch.device, backend: CaptureBackend) -> None:
        self.device = device
        self.backend = backend
        self.buffers = Buffers(device)
        self.watch = Watch()
        self.plans: dict[Hashable, Plan] = {}
        self.entries: dict[tuple[Hashable, Hashable], Entry] = {}
        self.trims: dict[tuple[Hashable, ...], Trims] = {}
        self.unpadded: set[Hashable] = set()
        self.moved: set[Hashable] = set()
        self._function = function
        self._objects: dict[Hashable, list[Any]] = {}

    def add_objects(self, variant: Hashable, arguments: Mapping[str, Any]) -> None:
        """Keeps objects that graphs know by their identity alive, as long as there is such a graph."""
        self._objects[variant] = [thing for value in arguments.values() for thing in identified(value)]

    @property
    def roots(self) -> list[Any]:
        """Where tensors are looked for: the function, and objects passed to it."""
        objects = {id(thing): thing for things in self._objects.values() for thing in things}
        return [self._function, *objects.values()]

    def drop(self, key: tuple[Hashable, Hashable]) -> None:
        """Drops a graph whose memory moved."""
        self.entries.pop(key).dropped = True
        self.moved.add(key)

    def drop_all(self) -> None:
        """Drops all graphs, and what was found of the function."""
        for key in list(self.entries):
            self.drop(key)
        self.plans.clear()
        self.trims.clear()
        self.unpadded.clear()
        self.watch.clear()

    def prune(self) -> None:
        """Forgets what only leads to graphs that were dropped."""
        variants = {variant for variant, _ in self.entries}
        self.plans = {calls: plan for calls, plan in self.plans.items() if plan.entry is None or not plan.entry.dropped}
        self.trims = {key: trims for key, trims in self.trims.items() if key[0] in variants}
        self.unpadded &= variants
        if not self._objects.keys() <= variants:
            self._objects = {variant: objects for variant, objects in self._objects.items() if variant in variants}
            self.watch.look(self.roots)
