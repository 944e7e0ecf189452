"""Bands and chunks of positions: which of them a formula over query and key is equivalent to, by proof."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .facts import Facts
from .formula import AtLeastZero, Formula, Zero, at_least_zero, at_most, conjunction, equal, literals
from .integers import Axis, Linear, Quotient, quotient


@dataclass(frozen=True, slots=True)
class Band:
    """A query sees the keys with `query + lower <= key <= query + upper`; None is no bound.

    The bounds are numbers, or forms over sizes and over what is read at run time, such as the length of a cache.
    """

    lower: Linear | None = None
    upper: Linear | None = None

    def __str__(self) -> str:
        lower = "" if self.lower is None else f"query + {self.lower} <= "
        upper = "" if self.upper is None else f" <= query + {self.upper}"
        return f"{lower}key{upper}".replace("+ -", "- ")


EVERYTHING = Band()


@dataclass(frozen=True, slots=True)
class Axes:
    """The index of a mask's entry: free to take any place, and the number 0 along an axis of one.

    Args:
        batch, head, query, key: the index.
        sizes: of the four axes.
    """

    batch: Linear
    head: Linear
    query: Linear
    key: Linear
    sizes: tuple[Linear, Linear, Linear, Linear]

    @staticmethod
    def of(sizes: tuple[Linear, Linear, Linear, Linear], facts: Facts) -> Axes:
        """The index of a mask of these sizes."""
        names = ("batch", "head", "query", "key")
        batch, head, query, key = (
            Linear(0) if size.number == 1 else facts.axis(name, size) for name, size in zip(names, sizes, strict=True)
        )
        return Axes(batch, head, query, key, sizes)

    @property
    def q_len(self) -> Linear:
        return self.sizes[2]

    @property
    def kv_len(self) -> Linear:
        return self.sizes[3]

    def within(self, band: Band) -> Formula:
        """Whether the query sees the key in a band."""
        lower = True if band.lower is None else at_most(self.query + band.lower, self.key)
        upper = True if band.upper is None else at_most(self.key, self.query + band.upper)
        return conjunction(lower, upper)


def banded(visible: Formula, axes: Axes, facts: Facts) -> Band | None:
    """The band that a formula is, with as few bounds as can be."""
    return next((band for band in _candidates(visible, axes) if facts.equivalent(visible, axes.within(band))), None)


def _candidates(visible: Formula, axes: Axes) -> Iterator[Band]:
    """The bands whose bounds a formula speaks of."""
    uppers: dict[Linear, None] = {}
    lowers: dict[Linear, None] = {}
    for literal in literals(visible):
        if not isinstance(literal, (AtLeastZero, Zero)):
            continue
        for bounded in (literal.form, -literal.form) if isinstance(literal, Zero) else (literal.form,):
            sign = _coefficient(bounded, axes.key)
            # The key is at most the rest of the form, or at least its negation.
            bound = (bounded - axes.key * sign) * -sign - axes.query
            if abs(sign) == 1 and not any(isinstance(atom, Axis) for atom in bound.atoms()):
                (uppers if sign < 0 else lowers)[bound] = None
    yield EVERYTHING
    yield from (Band(None, upper) for upper in uppers)
    yield from (Band(lower, upper) for lower in lowers for upper in uppers)
    yield from (Band(lower, None) for lower in lowers)


def _coefficient(bounded: Linear, axis: Linear) -> int:
    return sum(bounded.coefficient(atom) for atom, _ in axis.terms)


def chunked(visible: Formula, axes: Axes, facts: Facts) -> tuple[Band, int] | tuple[None, None]:
    """The band and the size of chunks that a formula is; `None, None` where it is none.

    Query and key are in one chunk where `(query + upper) // size == key // size`, upper 0 if None.
    """
    sizes = {
        atom.divisor
        for literal in literals(visible)
        if isinstance(literal, (AtLeastZero, Zero))
        for atom in literal.form.atoms()
        if isinstance(atom, Quotient)
    }
    for size in sorted(sizes):
        for band in _candidates(visible, axes):
            if band.lower is not None:
                continue
            query = axes.query + (band.upper if band.upper is not None else 0)
            in_chunk = equal(quotient(query, size), quotient(axes.key, size))
            if facts.equivalent(visible, conjunction(axes.within(band), in_chunk)):
                return band, size
    return None, None


def never_empty(band: Band, axes: Axes, facts: Facts) -> bool:
    """Whether every query is proven to see a key."""
    first = axes.query + band.lower if band.lower is not None else Linear(0)
    last = axes.query + band.upper if band.upper is not None else axes.kv_len - 1
    holds = (at_most(first, last), at_least_zero(last), at_most(first, axes.kv_len - 1), at_least_zero(axes.kv_len - 1))
    return all(map(facts.proves, holds))
