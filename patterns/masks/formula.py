"""Formulas: what is true of integers and of entries of bool tensors, by `and` and `or` of comparisons with zero."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd

from .integers import Atom, Entry, Linear


@dataclass(frozen=True, slots=True)
class AtLeastZero:
    """`form >= 0`."""

    form: Linear


@dataclass(frozen=True, slots=True)
class Zero:
    """`form == 0`."""

    form: Linear


@dataclass(frozen=True, slots=True)
class Holds:
    """An entry of a bool tensor is what is said."""

    entry: Entry
    value: bool = True


@dataclass(frozen=True, slots=True)
class And:
    parts: tuple[Formula, ...]


@dataclass(frozen=True, slots=True)
class Or:
    parts: tuple[Formula, ...]


Formula = bool | AtLeastZero | Zero | Holds | And | Or


def at_least_zero(form: Linear) -> Formula:
    """`form >= 0`, in its tightest form for integers."""
    if not form.terms:
        return form.constant >= 0
    return AtLeastZero(tightened(form))


def tightened(form: Linear) -> Linear:
    """The form that is at least zero for the same integers, its coefficients divided by what they share."""
    shared = gcd(*(c for _, c in form.terms))
    if shared <= 1:
        return form
    return Linear(form.constant // shared, tuple((atom, c // shared) for atom, c in form.terms))


def zero(form: Linear) -> Formula:
    """`form == 0`, with a positive first coefficient."""
    if not form.terms:
        return form.constant == 0
    shared = gcd(*(c for _, c in form.terms))
    if form.constant % shared:
        return False
    if form.terms[0][1] < 0:
        shared = -shared
    return Zero(Linear(form.constant // shared, tuple((atom, c // shared) for atom, c in form.terms)))


def at_most(a: Linear, b: Linear) -> Formula:
    """`a <= b`."""
    return at_least_zero(b - a)


def less(a: Linear, b: Linear) -> Formula:
    """`a < b`."""
    return at_least_zero(b - a - 1)


def equal(a: Linear, b: Linear) -> Formula:
    """`a == b`."""
    return zero(a - b)


def negation(formula: Formula) -> Formula:
    """What is true where a formula is not."""
    match formula:
        case bool():
            return not formula
        case AtLeastZero(form):
            return at_least_zero(-form - 1)
        case Zero(form):
            return disjunction(at_least_zero(form - 1), at_least_zero(-form - 1))
        case Holds(entry, value):
            return Holds(entry, not value)
        case And(parts):
            return disjunction(*map(negation, parts))
        case Or(parts):
            return conjunction(*map(negation, parts))


def conjunction(*formulas: Formula) -> Formula:
    """True where all formulas are. Both bounds of a form make it zero."""
    parts: dict[Formula, None] = {}
    for formula in formulas:
        if formula is False:
            return False
        for part in conjuncts(formula):
            opposite = AtLeastZero(-part.form) if isinstance(part, AtLeastZero) else None
            if opposite in parts and isinstance(part, AtLeastZero):
                del parts[opposite]
                part = zero(part.form)
            parts[part] = None
    return And(tuple(parts)) if len(parts) > 1 else next(iter(parts), True)


def disjunction(*formulas: Formula) -> Formula:
    """True where one of the formulas is."""
    parts: dict[Formula, None] = {}
    for formula in formulas:
        if formula is True:
            return True
        if formula is not False:
            parts.update(dict.fromkeys(formula.parts if isinstance(formula, Or) else (formula,)))
    return Or(tuple(parts)) if len(parts) > 1 else next(iter(parts), False)


def either(condition: Formula, then: Formula, otherwise: Formula) -> Formula:
    """`then` where the condition holds, else `otherwise`."""
    return disjunction(conjunction(condition, then), conjunction(negation(condition), otherwise))


def conjuncts(formula: Formula) -> tuple[Formula, ...]:
    """The formulas that must all be true for it to be."""
    if formula is True:
        return ()
    return formula.parts if isinstance(formula, And) else (formula,)


def literals(formula: Formula) -> Iterator[AtLeastZero | Zero | Holds]:
    """The comparisons and entries that a formula is built of."""
    match formula:
        case AtLeastZero() | Zero() | Holds():
            yield formula
        case And(parts) | Or(parts):
            for part in parts:
                yield from literals(part)


def atoms(formula: Formula) -> Iterator[Atom]:
    """All atoms that a formula speaks of."""
    for literal in literals(formula):
        if isinstance(literal, Holds):
            yield literal.entry
            for index in literal.entry.index:
                yield from index.atoms()
        else:
            yield from literal.form.atoms()


def substituted(formula: Formula, values: Mapping[Atom, Linear]) -> Formula:
    """A formula with atoms replaced."""
    match formula:
        case bool():
            return formula
        case AtLeastZero(form):
            return at_least_zero(form.at(values))
        case Zero(form):
            return zero(form.at(values))
        case Holds(entry, value):
            return Holds(Entry(entry.node, tuple(index.at(values) for index in entry.index)), value)
        case And(parts):
            return conjunction(*(substituted(part, values) for part in parts))
        case Or(parts):
            return disjunction(*(substituted(part, values) for part in parts))
