"""What recognition gives: a `Match` (this subgraph is exactly that) or a `Miss` (nearly, and here it differed)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import fx


class RuleError(Exception):
    """A rule has raised; `__cause__` is what.

    Args:
        kind: of the rule.
        node: at which it raised.
    """

    def __init__(self, kind: str, node: fx.Node) -> None:
        super().__init__(f"the rule of {kind} raised at {node.name}")
        self.kind = kind


class Parameters(Protocol):
    """A frozen dataclass of what one kind of site carries; `public()` is what a report shows and counts by."""

    def public(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """One recognised subgraph.

    Args:
        kind: what it is, such as "rms_norm".
        node: its root, the node whose value it computes.
        inputs: the nodes it reads, by the names of the kind's reference.
        params: all that the spelling fixed: eps, rounding, layout.
        claimed: nodes between root (included) and inputs (excluded), in graph order.
        parts: smaller matches that this one is made of.
        replaces: smaller matches that this one shows to be something else than they seemed.
    """

    kind: str
    node: fx.Node
    inputs: Mapping[str, fx.Node]
    params: Parameters
    claimed: tuple[fx.Node, ...]
    parts: tuple[Match, ...] = ()
    replaces: tuple[Match, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Miss:
    """A place that is nearly of a kind.

    Args:
        kind: what it nearly is.
        node: the node at which it differed.
        message: a format string over `details`, filled in only when it is read.
        place: equal for misses that speak of one place; only the one that got furthest is reported.
        matched: how much had matched, to rank misses of one place.
    """

    kind: str
    node: fx.Node
    message: str
    details: tuple[object, ...] = ()
    place: Hashable = None
    matched: int = 0

    @property
    def reason(self) -> str:
        return self.message.format(*self.details)


@dataclass(slots=True)
class Findings:
    """Matches and misses of one graph, in graph order. Of nested matches of one kind only the largest is kept."""

    matches: dict[str, dict[fx.Node, Match]] = field(default_factory=dict)
    misses: dict[Hashable, Miss] = field(default_factory=dict)
    replaced: set[Match] = field(default_factory=set)

    def at(self, kind: str, node: fx.Node) -> Match | None:
        """The match of a kind whose root is `node`."""
        return self.matches.get(kind, {}).get(node)

    def of(self, kind: str) -> list[Match]:
        """All matches of a kind that stand."""
        return [match for match in self.matches.get(kind, {}).values() if match not in self.replaced]

    def stands(self, match: Match) -> bool:
        """Whether a match is one of those of its kind still."""
        return self.at(match.kind, match.node) is match and match not in self.replaced

    def all(self) -> list[Match]:
        """All matches that stand, in graph order."""
        return sorted((match for kind in self.matches for match in self.of(kind)), key=lambda match: match.node)

    def add(self, match: Match) -> None:
        found = self.matches.setdefault(match.kind, {})
        for inner in match.claimed:
            found.pop(inner, None)
        found[match.node] = match
        self.replaced.update(match.replaces)

    def note(self, miss: Miss) -> None:
        key = (miss.kind, miss.place if miss.place is not None else miss.node)
        known = self.misses.get(key)
        if known is None or miss.matched > known.matched:
            self.misses[key] = miss

    def near_misses(self) -> list[Miss]:
        """Misses at places that no match of their kind covers in the end."""
        covered = {
            (match.kind, node) for match in self.all() for node in match.claimed
        }
        return [miss for miss in self.misses.values() if (miss.kind, miss.node) not in covered]
