"""A kind that is one formula: a pattern is all that its rule needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import values
from .canonical import Canonicaliser
from .captured import Captured, captured
from .cone import computes
from .match import Findings, Match, Miss
from .rule import Pattern
from .spelling import Spelling
from .term import Term


@dataclass(frozen=True, slots=True)
class Formula:
    """What one spelling of a formula fixes.

    Args:
        numbers: what the pattern binds that is no tensor, by name.
        dtype: of the result.
        steps: all types that something is computed in or rounded to.
        spelling: how it is written, over the names of the pattern; called with the inputs it gives the model's bits.
    """

    numbers: Mapping[str, Any]
    dtype: torch.dtype
    steps: frozenset[torch.dtype]
    spelling: Spelling

    def public(self) -> dict[str, Any]:
        return {**self.numbers, "dtype": self.dtype, "spelling": str(self.spelling)}


def formula(
    kind: str, pattern: Pattern, check: Callable[[Mapping[str, Any]], str | None] = lambda numbers: None
) -> Callable[[fx.Node, Canonicaliser, Findings], Match | Miss | None]:
    """The `match` of a rule, from a pattern.

    Args:
        kind: its name in reports.
        pattern: what a value of the kind is, over terms: see `rule.py`.
        check: is given the numbers that the pattern has bound, and says why it is not the kind after all; None if it
            is, and "" where it is so far from it that nobody would ask.
    """

    def match(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | Miss | None:
        bound = pattern.find(c.terms[node], c.pool) if computes(node) else None
        if bound is None:
            return None
        terms = {name: value for name, value in bound.items() if isinstance(value, Term)}
        numbers = {name: value for name, value in bound.items() if name not in terms}
        reason = check(numbers)
        if reason is not None:
            return Miss(kind, node, "{}", (reason,)) if reason else None
        found = captured(kind, node, terms, c)
        if not isinstance(found, Captured):
            return found
        params = Formula(numbers, values.dtype(node), found.steps, found.spelling)
        return Match(kind, node, found.inputs, params, found.cone.nodes)

    return match
