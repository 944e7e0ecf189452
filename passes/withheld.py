"""What is left out of an optimisation: parts that raised, and sites that were found wrong.

Whatever raises, nothing of its work is left: the graph is optimised anew from the model's own, without that part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .rewrites import SiteKey


@dataclass(frozen=True, slots=True)
class Part:
    """What can fail by itself.

    Args:
        name: of the pass.
        kind: of a rule or a lowering within the pass; None for the pass as a whole.
    """

    name: str
    kind: str | None = None

    def __str__(self) -> str:
        return f"the pass {self.name}" if self.kind is None else f"{self.name} of {self.kind}"


class PartFailed(Exception):  # noqa: N818  # it says what failed, and by what is its cause
    """A part has raised; `__cause__` is what."""

    def __init__(self, part: Part) -> None:
        super().__init__(f"{part} raised")
        self.part = part


@dataclass(frozen=True, slots=True)
class Withheld:
    """What is left out, and why.

    Args:
        parts: with the traceback of what they raised.
        sites: with the reasons that the report gives.
        groups: of ranks, with the reasons why no site is rewritten that holds a collective over one.
    """

    parts: Mapping[Part, str] = field(default_factory=dict)
    sites: Mapping[SiteKey, str] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)

    def allows(self, name: str) -> bool:
        """Whether a pass is to be run."""
        return Part(name) not in self.parts

    def with_part(self, part: Part, traceback: str) -> Withheld:
        return replace(self, parts={**self.parts, part: traceback})

    def with_sites(self, sites: Mapping[SiteKey, str]) -> Withheld:
        return replace(self, sites={**self.sites, **sites})

    def with_groups(self, groups: Mapping[str, str]) -> Withheld:
        return replace(self, groups={**self.groups, **groups})


NOTHING = Withheld()
