"""What is proven of integers is so for every one of them."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from npu_fuse.patterns.masks.facts import Facts
from npu_fuse.patterns.masks.formula import (
    And,
    AtLeastZero,
    Formula,
    Or,
    Zero,
    at_least_zero,
    at_most,
    conjunction,
    disjunction,
    equal,
    negation,
    zero,
)
from npu_fuse.patterns.masks.integers import Axis, Linear, Quotient, form, quotient

SIZES = {"i": 4, "j": 5}
QUERY, KEY = form(Axis("i")), form(Axis("j"))


def facts() -> Facts:
    known = Facts()
    for name, size in SIZES.items():
        known.axis(name, Linear(size))
    return known


def number(of: Linear, at: dict[str, int]) -> int:
    total = of.constant
    for atom, coefficient in of.terms:
        if isinstance(atom, Quotient):
            total += coefficient * (number(atom.dividend, at) // atom.divisor)
        else:
            total += coefficient * at[atom.name]
    return total


def holds(formula: Formula, at: dict[str, int]) -> bool:
    match formula:
        case bool():
            return formula
        case AtLeastZero(of):
            return number(of, at) >= 0
        case Zero(of):
            return number(of, at) == 0
        case And(parts):
            return all(holds(part, at) for part in parts)
        case Or(parts):
            return any(holds(part, at) for part in parts)


PLACES = [dict(zip(SIZES, place, strict=True)) for place in itertools.product(*map(range, SIZES.values()))]


@st.composite
def forms(draw: st.DrawFn) -> Linear:
    small = st.integers(-3, 3)
    found = QUERY * draw(small) + KEY * draw(small) + draw(small)
    if draw(st.booleans()):
        return found
    return quotient(found, draw(st.integers(2, 4))) * draw(small) + QUERY * draw(small)


@st.composite
def formulas(draw: st.DrawFn, depth: int = 2) -> Formula:
    kind = draw(st.sampled_from(("at least", "zero", "and", "or", "not") if depth else ("at least", "zero")))
    if kind == "at least":
        return at_least_zero(draw(forms()))
    if kind == "zero":
        return zero(draw(forms()))
    if kind == "not":
        return negation(draw(formulas(depth - 1)))
    both = conjunction if kind == "and" else disjunction
    return both(draw(formulas(depth - 1)), draw(formulas(depth - 1)))


@settings(max_examples=300, deadline=None)
@given(formulas(), formulas())
def test_proofs_agree_with_all_numbers(a, b):
    known = facts()
    true = [[holds(formula, at) for at in PLACES] for formula in (a, b)]
    assert not known.refutes(a) or not any(true[0])
    assert not known.proves(a) or all(true[0])
    assert not known.equivalent(a, b) or true[0] == true[1]
    assert [not value for value in true[0]] == [holds(negation(a), at) for at in PLACES]


@settings(max_examples=100, deadline=None)
@given(st.integers(-6, 6), st.integers(-6, 6), st.integers(-2, 2), st.integers(-2, 2))
def test_bounds_of_differences_are_decided(a, b, i, j):
    """What masks are made of: whatever is true of two bounds is proven."""
    known = facts()
    first, second = at_most(KEY, QUERY + a), at_most(KEY, QUERY + b)
    assert known.equivalent(first, second) is all(holds(first, at) is holds(second, at) for at in PLACES)
    bound = at_least_zero(QUERY * i + KEY * j + a)
    assert known.proves(bound) is all(holds(bound, at) for at in PLACES)


def test_what_needs_integers():
    known = facts()
    assert known.refutes(equal(QUERY * 2, KEY * 2 + 1))
    assert known.refutes(conjunction(at_least_zero(QUERY * 2 - 1), at_least_zero(-QUERY * 2 + 1)))
    assert known.proves(equal(quotient(QUERY, 8), Linear(0)))
    assert not known.proves(equal(quotient(KEY, 4), Linear(0)))  # 4 // 4 is 1


def test_sizes_without_end():
    """An axis as long as what is read at run time."""
    known = Facts()
    length = form(Axis("n"))
    place = known.axis("place", length)
    assert known.proves(at_most(place, length - 1))
    assert known.proves(at_most(place, length + 3))
    assert not known.proves(at_most(place, length - 2))
    assert not known.refutes(at_most(place, length - 2))
