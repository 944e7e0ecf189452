"""What is known of integers, and what follows from it for all of them: proofs by elimination, never by trying numbers.

A formula is refuted where each way to make it true is a set of inequalities from which a contradiction follows
(Fourier and Motzkin's elimination, every inequality tightened to integers). What can't be refuted may be true or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .formula import And, AtLeastZero, Formula, Holds, Or, Zero, conjunction, negation, tightened
from .integers import Atom, Axis, Entry, Length, Linear, Quotient, form

# Masks need a few dozen steps and inequalities; what needs more is taken for not proven.
_MOST_STEPS = 400
_MOST_INEQUALITIES = 200


# What is at least zero, by what it speaks of.
Ranges = dict[Axis | Entry, tuple[Linear, ...]]


class _TooLongError(Exception):
    """A proof that takes too many steps."""


class Facts:
    """The ranges of axes, and of integers that are read at run time; sizes and quotients carry their own."""

    def __init__(self) -> None:
        self._ranges: Ranges = {}
        self._refuted: dict[Formula, bool] = {}

    def axis(self, name: str, size: Linear) -> Linear:
        """A new index that is at least zero and less than `size`."""
        axis = Axis(name)
        self._ranges[axis] = (form(axis), size - form(axis) - 1)
        return form(axis)

    def assume(self, form: Linear) -> None:
        """Takes for known that a form over integers that are read is at least zero."""
        for atom in form.atoms():
            if isinstance(atom, Entry):
                self._ranges[atom] = (*self._ranges.get(atom, ()), form)

    def refutes(self, formula: Formula) -> bool:
        """Whether the formula is false for all integers."""
        if formula not in self._refuted:
            try:
                self._refuted[formula] = not _Search(self._ranges).possible([formula], [], {})
            except _TooLongError:
                self._refuted[formula] = False
        return self._refuted[formula]

    def proves(self, formula: Formula) -> bool:
        """Whether the formula is true for all integers."""
        return self.refutes(negation(formula))

    def equivalent(self, a: Formula, b: Formula) -> bool:
        """Whether one formula is true exactly where the other is."""
        return self.refutes(conjunction(a, negation(b))) and self.refutes(conjunction(b, negation(a)))

    def settled(self, formula: Formula) -> Formula:
        """True or False where the formula is known to be, else itself."""
        if self.refutes(formula):
            return False
        return True if self.proves(formula) else formula


class _Search:
    """Goes through the ways to make a formula true."""

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = ranges
        self._steps = 0

    def possible(self, pending: list[Formula], inequalities: list[Linear], said: dict[Entry, bool]) -> bool:
        """Whether no contradiction is found in all `pending` formulas with what was taken for true so far."""
        pending, inequalities, said = list(pending), list(inequalities), dict(said)
        choices: list[Or] = []
        while pending:
            match pending.pop():
                case False:
                    return False
                case AtLeastZero(bounded):
                    inequalities.append(bounded)
                case Zero(bounded):
                    inequalities += [bounded, -bounded]
                case Holds(entry, value):
                    if said.setdefault(entry, value) is not value:
                        return False
                case And(parts):
                    pending.extend(parts)
                case Or() as choice:
                    choices.append(choice)
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise _TooLongError
        if _contradictory(self._with_ranges(inequalities)):
            return False
        if not choices:
            return True
        first = min(choices, key=lambda choice: len(choice.parts))
        others = [choice for choice in choices if choice is not first]
        return any(self.possible([part, *others], inequalities, said) for part in first.parts)

    def _with_ranges(self, inequalities: Sequence[Linear]) -> list[Linear]:
        """The inequalities with those that always hold for what they speak of."""
        found, seen = list(inequalities), set[Atom]()
        for inequality in found:  # grows on the way
            for atom, _ in inequality.terms:
                if atom not in seen:
                    seen.add(atom)
                    found.extend(_range(atom, self._ranges))
        return found


def _range(atom: Atom, ranges: Ranges) -> Iterable[Linear]:
    match atom:
        case Axis() | Entry():
            return ranges.get(atom, ())
        case Length(_, low, high):
            below = [form(atom) - low] if low is not None else []
            return [*below, -form(atom) + high] if high is not None else below
        case Quotient(dividend, divisor):
            rest = dividend - form(atom) * divisor
            return [rest, -rest + (divisor - 1)]


def _contradictory(inequalities: Iterable[Linear]) -> bool:
    """Whether no integers make all forms at least zero; False also where that takes too long to say."""
    least: dict[tuple[tuple[Atom, int], ...], int] = {}

    def add(inequality: Linear) -> bool:
        """Keeps the tightest of equal inequalities; whether one alone is a contradiction."""
        if not inequality.terms:
            return inequality.constant < 0
        tight = tightened(inequality)
        least[tight.terms] = min(tight.constant, least.get(tight.terms, tight.constant))
        return False

    for inequality in inequalities:
        if add(inequality):
            return True
    while least:
        atom, above, below = _next(least)
        rest = [Linear(c, terms) for terms, c in least.items() if atom not in dict(terms)]
        if len(rest) + len(above) * len(below) > _MOST_INEQUALITIES:
            return False
        least.clear()
        for inequality in rest:
            add(inequality)
        for up in above:
            for down in below:
                if add(up * -down.coefficient(atom) + down * up.coefficient(atom)):
                    return True
    return False


def _next(least: dict[tuple[tuple[Atom, int], ...], int]) -> tuple[Atom, list[Linear], list[Linear]]:
    """The atom to eliminate next, and the inequalities that bound it from below and from above.

    It is one with which nothing is lost, whose coefficients are one, if there is any; and of these the cheapest.
    """
    bounds: dict[Atom, tuple[list[Linear], list[Linear]]] = {}
    largest: dict[Atom, int] = {}
    for terms, constant in least.items():
        for atom, coefficient in terms:
            bounds.setdefault(atom, ([], []))[coefficient < 0].append(Linear(constant, terms))
            largest[atom] = max(abs(coefficient), largest.get(atom, 0))
    atom = min(bounds, key=lambda atom: (largest[atom] > 1, len(bounds[atom][0]) * len(bounds[atom][1])))
    return atom, *bounds[atom]
