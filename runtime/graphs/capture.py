"""How a graph is captured on some machine: one small interface, and three that have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .record import Trace


class Graph(Protocol):
    """One captured run, at fixed addresses.

    Attributes:
        nbytes: memory that it computes in, its outputs included.
    """

    nbytes: int

    def update(self, lists: Mapping[str, Sequence[int]]) -> None:
        """Gives ops new lists on the host, by the names of their arguments, before the next replay."""

    def replay(self) -> None:
        """Runs the ops again on what their memory holds now, without any Python of the callable."""

    def move(self, old: torch.UntypedStorage, new: torch.UntypedStorage) -> None:
        """Says that the memory an output lies in belongs to another storage object now, at the same address."""

    def users(self, storage: torch.UntypedStorage) -> int:
        """How many tensors the graph itself has in an output's memory."""

    def poison(self, fill: Callable[[torch.Tensor], Any]) -> None:
        """Fills the memory that replays compute in beside the outputs, as far as it can be reached."""


@dataclass(frozen=True, slots=True)
class Captured:
    """What a capture gives: the graph, what the callable returned, and what was seen of the run."""

    graph: Graph
    result: Any
    trace: Trace


class CaptureBackend(Protocol):
    """A kind of graphs.

    Attributes:
        sees_all: whether kernels that run past torch's dispatcher are captured too.
    """

    name: str
    sees_all: bool

    def warm_up(self) -> AbstractContextManager[Any]:
        """Where runs before the capture happen."""

    def capture(self, run: Callable[[], Any], host_lists: Mapping[str, Sequence[int]]) -> Captured:
        """Captures `run()`.

        Args:
            run: the callable on its static inputs.
            host_lists: lists that ops take from the host, by the names of their arguments.

        Raises:
            CaptureError: it can't be captured.
        """

    def busy(self) -> bool:
        """Whether somebody else captures on the current stream."""

    def order(self) -> None:
        """Lets what follows on the current stream wait for the replay before, which may have been on another."""
