"""Patterns over terms: what each combinator binds, and that order and grouping don't matter."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from npu_fuse.patterns.rms_norm import WRITTEN_OUT
from npu_fuse.patterns.rule import Argument, Capture, Function, Number, Optional, Pattern, Rest
from npu_fuse.patterns.term import Term, TermPool

X, Y, W = Capture("x"), Capture("y"), Capture("w")


class Leaves:
    """A pool with named leaves."""

    def __init__(self) -> None:
        self.pool = TermPool()
        graph = fx.Graph()
        self.a, self.b, self.c, self.d = (self.pool.leaf(graph.placeholder(name)) for name in "abcd")

    def find(self, pattern: Pattern, term: Term, **bound: object) -> dict[str, object] | None:
        return pattern.find(term, self.pool, **bound)


@pytest.fixture
def on() -> Leaves:
    return Leaves()


def test_a_capture_is_any_term_and_the_same_each_time(on: Leaves) -> None:
    assert on.find(X, on.a) == {"x": on.a}
    assert on.find(X, on.pool.number(2)) is None
    assert on.find(X, on.a, x=on.b) is None
    squares = on.pool.call("f", on.a, on.a)
    assert on.find(Function("f", X, X), squares) == {"x": on.a}
    assert on.find(Function("f", X, X), on.pool.call("f", on.a, on.b)) is None


def test_a_number_is_given_or_bound(on: Leaves) -> None:
    assert on.find(Number(2), on.pool.number(2)) == {}
    assert on.find(Number(2), on.pool.number(3)) is None
    assert on.find(Number("n"), on.pool.number(3)) == {"n": 3}
    assert on.find(Number("n"), on.a) is None


def test_a_function_matches_its_arguments(on: Leaves) -> None:
    mean = on.pool.call("mean", on.a, (-1,))
    assert on.find(Function("mean", X, (-1,)), mean) == {"x": on.a}
    assert on.find(Function("mean", X, (-2,)), mean) is None
    assert on.find(Function("mean", X, Argument("axes")), mean) == {"x": on.a, "axes": (-1,)}
    assert on.find(Function("mean", X), mean) is None
    assert on.find(Function("sum", X, (-1,)), mean) is None


def test_a_power_is_solved_for_its_base(on: Leaves) -> None:
    assert on.find(X**2, on.pool.power(on.a, 2)) == {"x": on.a}
    product = on.pool.mul(on.a, on.b)
    assert on.find(X**2, on.pool.power(product, 2)) == {"x": product}
    assert on.find(X**2, on.pool.power(on.a, 3)) is None
    assert on.find(X**-0.5, on.pool.power(on.pool.add(on.a, on.b), -0.5)) == {"x": on.pool.add(on.a, on.b)}


def test_a_bound_capture_is_divided_out_whatever_it_is(on: Leaves) -> None:
    """silu(x) * x * y where x is itself a product."""
    x = on.pool.mul(on.a, on.b)
    term = on.pool.mul(on.pool.mul(on.pool.call("f", x), x), on.c)
    assert on.find(Function("f", X) * X * Y, term) == {"x": x, "y": on.c}


def test_the_rest_may_be_nothing(on: Leaves) -> None:
    pattern = Function("f", X) * Rest("rest")
    f = on.pool.call("f", on.a)
    assert on.find(pattern, f)["rest"] is on.pool.number(1)
    assert on.find(pattern, on.pool.mul(f, on.b))["rest"] is on.b
    pattern = Function("f", X) + Rest("rest")
    assert on.find(pattern, f)["rest"] is on.pool.number(0)
    assert on.find(pattern, on.pool.add(f, on.b))["rest"] is on.b


def test_without_the_rest_nothing_may_be_left(on: Leaves) -> None:
    f = on.pool.call("f", on.a)
    assert on.find(Function("f", X) * Number(1), on.pool.mul(f, on.b)) is None
    assert on.find(Function("f", X) + Number(0), on.pool.add(f, on.b)) is None


def test_a_part_may_be_missing(on: Leaves) -> None:
    pattern = Function("f", X) * Optional(W + Number("offset"))
    f = on.pool.call("f", on.a)
    assert on.find(pattern, f) == {"x": on.a}
    assert on.find(pattern, on.pool.mul(f, on.b)) == {"x": on.a, "w": on.b, "offset": 0}
    one_plus = on.pool.add(on.b, on.pool.number(1))
    assert on.find(pattern, on.pool.mul(f, one_plus)) == {"x": on.a, "w": on.b, "offset": 1}


def test_alternatives_are_spread_over_products_and_sums(on: Leaves) -> None:
    pattern = (X**2 | Function("f", X)) * Y
    assert on.find(pattern, on.pool.mul(on.pool.power(on.a, 2), on.b)) == {"x": on.a, "y": on.b}
    assert on.find(pattern, on.pool.mul(on.pool.call("f", on.a), on.b)) == {"x": on.a, "y": on.b}
    difference = X - Function("f", X)
    assert on.find(difference, on.pool.add(on.a, on.pool.call("f", on.a), -1)) == {"x": on.a}
    assert on.find(difference, on.pool.add(on.a, on.pool.call("f", on.a))) is None


def test_a_wrong_first_choice_is_taken_back(on: Leaves) -> None:
    """f(x) may be either of two calls; only one leaves what the rest of the pattern wants."""
    pool = on.pool
    term = pool.mul(pool.call("f", on.a), pool.call("f", pool.call("g", on.b)))
    assert on.find(Function("f", Function("g", Y)) * Function("f", X), term) == {"x": on.a, "y": on.b}
    assert on.find(Function("f", X) * Function("f", Function("g", Y)), term) == {"x": on.a, "y": on.b}


@settings(max_examples=50, deadline=None)
@given(order=st.permutations(range(4)), pattern_order=st.permutations(range(4)), sums=st.booleans())
def test_sums_and_products_are_multisets(order: list[int], pattern_order: list[int], sums: bool) -> None:
    on = Leaves()
    pool = on.pool
    parts = [pool.call("f", on.a), pool.call("g", on.b), pool.number(3), on.c]
    patterns: list[Pattern] = [Function("f", X), Function("g", Y), Number("n"), W]
    combine = pool.add if sums else pool.mul
    term = parts[order[0]]
    for i in order[1:]:
        term = combine(term, parts[i])
    pattern = patterns[pattern_order[0]]
    for i in pattern_order[1:]:
        pattern = pattern + patterns[i] if sums else pattern * patterns[i]
    assert on.find(pattern, term) == {"x": on.a, "y": on.b, "n": 3, "w": on.c}


def test_numbers_stand_for_patterns(on: Leaves) -> None:
    two_x_plus_one = on.pool.add(on.pool.mul(on.a, on.pool.number(2)), on.pool.number(1))
    for pattern in (2 * X + 1, X * 2 + 1, 1 + X * 2):
        assert on.find(pattern, two_x_plus_one) == {"x": on.a}
    assert all(on.find(p, two_x_plus_one) is None for p in (2 * X + 2, 3 * X + 1))


def test_all_ways_are_found(on: Leaves) -> None:
    term = on.pool.mul(on.pool.call("f", on.a), on.pool.call("f", on.b))
    ways = list((Function("f", X) * Function("f", Y)).solutions(term, on.pool, {}))
    assert sorted((way["x"].node.name, way["y"].node.name) for way in ways) == sorted(itertools.permutations("ab"))


def test_a_norm_is_read_off_its_term(on: Leaves) -> None:
    pool = on.pool
    variance = pool.add(pool.call("mean", pool.power(on.a, 2), (-1,)), pool.number(1e-6))
    term = pool.mul(pool.mul(on.b, on.a), pool.power(variance, -0.5))
    assert on.find(WRITTEN_OUT, term) == {"x": on.a, "eps": 1e-6, "weight": on.b, "offset": 0}
