"""What a runner did, what it holds, and what it would."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Stats:
    """Counters of a `GraphRunner`.

    Attributes:
        captures: graphs captured, again or for the first time.
        recaptures: those whose graph was dropped before because memory that it used had moved.
        evictions: graphs dropped for `max_graphs`.
        replays: calls served by a replay.
        eager: calls run as they are: without rows or larger than the largest bucket, inside another capture, or with
            arguments that share memory which the function writes.
        unpadded: calls served at their own size, because padding would have changed their result.
        rows, padded_rows: rows of padded axes in all replays, and how many of them were padding.
        moved_outputs: outputs that a caller still held when the next replay needed their memory.
        bytes: all memory that the runner holds; `GraphRunner.memory` has its parts.
    """

    captures: int = 0
    recaptures: int = 0
    evictions: int = 0
    replays: int = 0
    eager: int = 0
    unpadded: int = 0
    rows: int = 0
    padded_rows: int = 0
    moved_outputs: int = 0
    bytes: int = 0

    @property
    def padded_share(self) -> float:
        """The share of padding in all rows replayed."""
        return self.padded_rows / self.rows if self.rows else 0.0


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a runner holds: static inputs, static outputs, and what else its graphs compute in."""

    graphs: int
    inputs: int
    outputs: int
    workspace: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.inputs + self.outputs + self.workspace


@dataclass(frozen=True, slots=True)
class Forecast:
    """What capturing ahead of time would make.

    Attributes:
        graphs: how many graphs, all of which share `pools` memory pools.
        pools: how many pools.
        inputs: bytes of the static inputs, which all graphs share.
        limit: `max_graphs`.
    """

    graphs: int
    pools: int
    inputs: int
    limit: int
