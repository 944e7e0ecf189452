"""Patterns over terms, which read as the maths that they match.

    x, weight, eps = Capture("x"), Capture("weight"), Number("eps")
    normed = x * (mean(x**2) + eps) ** -0.5
    PATTERN = normed * Rest("weight")

Spellings live in the canonical form of terms, so a pattern needs no variants: sums and products are matched as what
they are, multisets. What a capture binds is solved for where it can be: `x**2` against a square binds its root, a bound
factor is divided out of a product. `find` gives the captured values by name.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from .term import Call, Product, Term, TermPool, calls

Bound = Mapping[str, Hashable]
_NOTHING: Bound = {}


class Pattern:
    """Base of all patterns. Operators and numbers build larger ones."""

    def solutions(self, term: Term, pool: TermPool, bound: Bound) -> Iterator[Bound]:
        """All ways in which a term is this, each with what is bound then."""
        raise NotImplementedError

    def find(self, term: Term, pool: TermPool, **bound: Hashable) -> Bound | None:
        """The first way in which a term is this: its captures by name; None where there is none."""
        return next(self.solutions(term, pool, bound), None)

    def __mul__(self, other: Pattern | float) -> Pattern:
        return _joined(_Product, self, other)

    def __rmul__(self, other: float) -> Pattern:
        return Number(other) * self

    def __add__(self, other: Pattern | float) -> Pattern:
        return _joined(_Sum, self, other)

    def __radd__(self, other: float) -> Pattern:
        return self + other

    def __sub__(self, other: Pattern) -> Pattern:
        return self + -1 * other

    def __pow__(self, exponent: float) -> Pattern:
        return _Power(self, exponent)

    def __or__(self, other: Pattern) -> Pattern:
        return _Either(self, other)


def _joined(kind: type[_Product] | type[_Sum], left: Pattern, right: Pattern | float) -> Pattern:
    """One flat sum or product of both; of alternatives, the alternatives of it."""
    if not isinstance(right, Pattern):
        right = Number(right)
    if isinstance(left, _Either):
        return _joined(kind, left.first, right) | _joined(kind, left.second, right)
    if isinstance(right, _Either):
        return _joined(kind, left, right.first) | _joined(kind, left, right.second)
    parts = [part.parts if isinstance(part, kind) else (part,) for part in (left, right)]
    return kind((*parts[0], *parts[1]))


@dataclass(frozen=True)
class Capture(Pattern):
    """Any term but a number, bound to `name`; the same name twice means the same term."""

    name: str

    def solutions(self, term: Term, pool: TermPool, bound: Bound) -> Iterator[Bound]:
        known = bound.get(self.name)
        if known is term or (known is None and not _is_number(term)):
            yield {**bound, self.name: term}


@dataclass(frozen=True)
class Number(Pattern):
    """A number: a given one, or any, bound to a name."""

    value: str | float

    def solutions(self, term: Term, pool: TermPool, bound: Bound) -> Iterator[Bound]:
        if isinstance(term, Product) and not term.factors:
            yield from _bind(self.value, term.coefficient, bound)


@dataclass(frozen=True)
class Rest(Pattern):
    """In a sum or product whatever the other parts leave, bound to `name`: 0 or 1 where that is nothing."""

    name: str

    def solutions(self, term: Term, pool: TermPool, bound: Bound) -> Iterator[Bound]:
        yield {**bound, self.name: term}


@dataclass(frozen=True)
class Function(Pattern):
    """A call by name: a reduction, an activation, a smaller kind. An argument is a pattern, a value, or `Argument`."""

    name: str
    arguments: tuple[Pattern | Argument | Hashable, ...]

    def __init__(self, name: str, *arguments: Pattern | Argument | Hashable) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "arguments", arguments)

    def solutions(self, term: Term, pool: TermPool, bound: Bound) -> Iterator[Bound]:
        if isinstance(term, Call) and term.name == self.name and len(term.args) == len(self.arguments):
            yield from self._matched(term.args, 0, pool, bound)

    def _matched(self, args: Sequence[Hashable], index: int, pool: TermPool, bound: Bound) -> Iterator[Bound]:
        if index == len(args):
            yield bound
            return
        wanted, found = self.arguments[index], args[index]
        if isinstance(wanted, Pattern):
            solutions = wanted.solutions(found, pool, bound) if isinstance(found, Term) else iter(())
        elif isinstance(wanted, Argument):
            solutions = _bind(wanted.name, found, bound)
        else:
            solutions = iter([bound] if wanted == found else [])
        for solution in solutions:
            yield from self._matched(args, index + 1, pool, solution)


@dataclass(frozen=True)
class Argument:
    """An argument of a call that is no term, such as its axes, bound to `name`."""

    name: str


@dataclass(frozen=True)
class Optional(Pattern):
    """A part of a sum or product that may be missing."""

    part: Pattern


@dataclass(frozen=True)
class _Either(Pattern):
    first: Pattern
    second: Pattern

    def solutions(self, term: Term, pool: TermPool, bound: Bound) -> Iterator[Bound]:
        yield from self.first.solutions(term, pool, bound)
        yield from self.second.solutions(term, pool, bound)


@dataclass(frozen=True)
class _Power(Pattern):
    base: Pattern
    exponent: float

    def solutions(self, term: Term, pool: TermPool, bound: Bound) -> Iterator[Bound]:
        base = pool.root(term, self.exponent)
        if base is not None:
            yield from self.base.solutions(base, pool, bound)


@dataclass(frozen=True)
class _Joined(Pattern):
    """A sum or a product: the parts take theirs one by one, and leave nothing."""

    parts: tuple[Pattern, ...]

    def solutions(self, term: Term, pool: TermPool, bound: Bound) -> Iterator[Bound]:
        yield from self._matched(self.parts, term, pool, bound)

    def _matched(self, parts: tuple[Pattern, ...], term: Term, pool: TermPool, bound: Bound) -> Iterator[Bound]:
        if not parts:
            if term is self._nothing(pool):
                yield bound
            return
        part, others = _most_certain(parts, bound)
        if isinstance(part, Optional):
            yield from self._matched((part.part, *others), term, pool, bound)
            yield from self._matched(others, term, pool, bound)
            return
        for candidate in self._candidates(part, bool(others), term, pool, bound):
            for solution in part.solutions(candidate, pool, bound):
                rest = self._rest(term, candidate, pool)
                if rest is not None:
                    yield from self._matched(others, rest, pool, solution)

    def _candidates(
        self, part: Pattern, has_others: bool, term: Term, pool: TermPool, bound: Bound
    ) -> Iterable[Term]:
        """What a part may take: what it is bound to, the number, one of several, or all that is there."""
        known = bound.get(part.name) if isinstance(part, Capture) else None
        if isinstance(known, Term):
            return (known,)
        if isinstance(part, Number):
            return (self._number(term, pool),)
        return self._each(term, pool) if has_others and not isinstance(part, Rest) else (term,)

    def _nothing(self, pool: TermPool) -> Term:
        raise NotImplementedError

    def _rest(self, term: Term, taken: Term, pool: TermPool) -> Term | None:
        raise NotImplementedError

    def _number(self, term: Term, pool: TermPool) -> Term:
        raise NotImplementedError

    def _each(self, term: Term, pool: TermPool) -> Iterable[Term]:
        raise NotImplementedError


class _Product(_Joined):
    @cached_property
    def _functions(self) -> frozenset[str]:
        """The calls without which it is no such product."""
        return frozenset(part.name for part in self.parts if isinstance(part, Function))

    def solutions(self, term: Term, pool: TermPool, bound: Bound) -> Iterator[Bound]:
        if self._functions.issubset(calls(term)):
            yield from super().solutions(term, pool, bound)

    def _nothing(self, pool: TermPool) -> Term:
        return pool.number(1)

    def _rest(self, term: Term, taken: Term, pool: TermPool) -> Term | None:
        return pool.divide(term, taken)

    def _number(self, term: Term, pool: TermPool) -> Term:
        return pool.number(pool.factors(term)[1])

    def _each(self, term: Term, pool: TermPool) -> Iterable[Term]:
        # A factor is no product, so that its first power is itself.
        factors = pool.factors(term)[0].items()
        return [factor if exponent == 1 else pool.power(factor, exponent) for factor, exponent in factors]


class _Sum(_Joined):
    def _nothing(self, pool: TermPool) -> Term:
        return pool.number(0)

    def _rest(self, term: Term, taken: Term, pool: TermPool) -> Term | None:
        return pool.without(term, taken)

    def _number(self, term: Term, pool: TermPool) -> Term:
        return pool.number(pool.addends(term)[1])

    def _each(self, term: Term, pool: TermPool) -> Iterable[Term]:
        addends, _ = pool.addends(term)
        return [pool.mul(addend, pool.number(coefficient)) for addend, coefficient in addends.items()]


def _most_certain(parts: tuple[Pattern, ...], bound: Bound) -> tuple[Pattern, tuple[Pattern, ...]]:
    """The part to match next, and the others: forms first, then what is bound, numbers, captures."""

    chosen, least = 0, 6
    for place, part in enumerate(parts):
        uncertainty = _UNCERTAINTY.get(type(part), 0)
        if uncertainty == _OF_CAPTURES and part.name in bound:  # type: ignore[attr-defined]  # a Capture
            uncertainty = 1
        if uncertainty < least:
            chosen, least = place, uncertainty
    return parts[chosen], (*parts[:chosen], *parts[chosen + 1 :])


_OF_CAPTURES = 3
_UNCERTAINTY: Mapping[type[Pattern], int] = {Number: 2, Capture: _OF_CAPTURES, Optional: 4, Rest: 5}


def _is_number(term: Term) -> bool:
    return isinstance(term, Product) and not term.factors


def _bind(name: str | Hashable, value: Hashable, bound: Bound) -> Iterator[Bound]:
    """Binds a value to a name, or compares it with what is bound, or with the value that stands for the name."""
    if not isinstance(name, str):
        if name == value:
            yield bound
    elif name not in bound or bound[name] == value:
        yield {**bound, name: value}
