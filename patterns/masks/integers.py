"""Integers as linear forms, exact: `constant + sum(coefficient * atom)` over sizes, indices and entries of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import sympy
import torch
from torch import fx

from ...runtime.sizes import Size


@dataclass(frozen=True, slots=True)
class Axis:
    """An index along an axis of a tensor, free to take any value of its range."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Length:
    """A size that is fixed when the program runs, or what isn't linear in such sizes.

    Args:
        expression: over the symbols of the program.
        low: its least value; None if there is none.
        high: its greatest, likewise.
    """

    expression: sympy.Expr
    low: int | None = field(compare=False, default=None)
    high: int | None = field(compare=False, default=None)

    def __str__(self) -> str:
        return str(self.expression)


@dataclass(frozen=True, slots=True)
class Entry:
    """One element of a tensor that is not looked into, any integer."""

    node: fx.Node
    index: tuple[Linear, ...]

    def __str__(self) -> str:
        return f"{self.node.name}[{', '.join(map(str, self.index))}]"


@dataclass(frozen=True, slots=True)
class Quotient:
    """`floor(dividend / divisor)`, the divisor positive."""

    dividend: Linear
    divisor: int

    def __str__(self) -> str:
        return f"({self.dividend} // {self.divisor})"


Atom = Axis | Length | Entry | Quotient


@dataclass(frozen=True, slots=True)
class Linear:
    """`constant + sum(coefficient * atom)`. Equal forms are equal values of this class."""

    constant: int
    terms: tuple[tuple[Atom, int], ...] = ()

    def __add__(self, other: Linear | int) -> Linear:
        if isinstance(other, int):
            return Linear(self.constant + other, self.terms)
        coefficients = dict(self.terms)
        for atom, coefficient in other.terms:
            coefficients[atom] = coefficients.get(atom, 0) + coefficient
        return linear(self.constant + other.constant, coefficients)

    def __neg__(self) -> Linear:
        return self * -1

    def __sub__(self, other: Linear | int) -> Linear:
        return self + -other

    def __mul__(self, factor: int) -> Linear:
        if factor == 0:
            return Linear(0)
        return Linear(self.constant * factor, tuple((atom, c * factor) for atom, c in self.terms))

    def coefficient(self, atom: Atom) -> int:
        return dict(self.terms).get(atom, 0)

    @property
    def number(self) -> int | None:
        """Its value where it is one number."""
        return None if self.terms else self.constant

    def atoms(self) -> Iterator[Atom]:
        """All atoms in it, those inside of others too."""
        for atom, _ in self.terms:
            yield atom
            if isinstance(atom, Entry):
                for index in atom.index:
                    yield from index.atoms()
            elif isinstance(atom, Quotient):
                yield from atom.dividend.atoms()

    def at(self, values: Mapping[Atom, Linear]) -> Linear:
        """The form with atoms replaced, those inside of others too."""
        total = Linear(self.constant)
        for atom, coefficient in self.terms:
            total += _replaced(atom, values) * coefficient
        return total

    def __str__(self) -> str:
        parts = [str(atom) if c == 1 else f"{c} * {atom}" for atom, c in self.terms]
        parts += [str(self.constant)] if self.constant or not parts else []
        return " + ".join(parts).replace("+ -1 * ", "- ").replace("+ -", "- ")


def _replaced(atom: Atom, values: Mapping[Atom, Linear]) -> Linear:
    if atom in values:
        return values[atom]
    if isinstance(atom, Entry):
        return form(Entry(atom.node, tuple(index.at(values) for index in atom.index)))
    if isinstance(atom, Quotient):
        return quotient(atom.dividend.at(values), atom.divisor)
    return form(atom)


def linear(constant: int, coefficients: Mapping[Atom, int]) -> Linear:
    """The form with these coefficients."""
    terms = ((atom, c) for atom, c in coefficients.items() if c)
    return Linear(constant, tuple(sorted(terms, key=lambda term: str(term[0]))))


def form(atom: Atom) -> Linear:
    """An atom as a form."""
    return Linear(0, ((atom, 1),))


def quotient(dividend: Linear, divisor: int) -> Linear:
    """`floor(dividend / divisor)`, multiples of the divisor taken out."""
    whole = {atom: c // divisor for atom, c in dividend.terms}
    rest = linear(dividend.constant % divisor, {atom: c % divisor for atom, c in dividend.terms})
    result = linear(dividend.constant // divisor, whole)
    return result + form(Quotient(rest, divisor)) if rest.terms else result


def of_size(size: Size) -> Linear:
    """A size as a form. No guard is installed."""
    if not isinstance(size, torch.SymInt):
        return Linear(int(size))
    known = size.node.maybe_as_int()
    if known is not None:
        return Linear(known)
    constant = 0
    coefficients: dict[Atom, int] = {}
    for term, coefficient in sympy.expand(size.node.expr).as_coefficients_dict().items():
        if not coefficient.is_Integer:  # floor(n / 2) is an atom; n / 2 alone is no integer
            return form(_length(size, size.node.expr))
        if term.is_Integer:
            constant += int(term * coefficient)
        else:
            coefficients[_length(size, term)] = int(coefficient)
    return linear(constant, coefficients)


def _length(size: torch.SymInt, expression: sympy.Expr) -> Length:
    bounds = size.node.shape_env.bound_sympy(expression)
    low, high = (int(bound) if bound.is_Integer else None for bound in (bounds.lower, bounds.upper))
    return Length(expression, low, high)
