"""The algebra of terms: what is one term however it is written, and what only looks like an identity."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from helpers import compiled
from npu_fuse.patterns.canonical import Canonicaliser
from npu_fuse.patterns.term import Call, Product, Sum, Term, TermPool

Function = Callable[..., torch.Tensor]
X, Y = torch.rand(3, 4) + 0.5, torch.rand(3, 4) + 0.5


def terms(*functions: Function) -> list[Term]:
    """The terms of what several functions of one x and y give."""
    found = compiled(lambda x, y: [function(x, y) for function in functions], X, Y)
    canonicaliser = Canonicaliser(TermPool())
    graph = found.before.graph
    for node in graph.nodes:
        if node.op != "output":
            canonicaliser.visit(node)
    return [canonicaliser.terms[output] for output in graph.output_node().args[0]]


ONE_TERM: dict[str, list[Function]] = {
    "product": [lambda x, y: x * y, lambda x, y: y * x, lambda x, y: torch.mul(y, x)],
    "product of three": [lambda x, y: x * y.sin() * y, lambda x, y: y * (y.sin() * x)],
    "sum": [lambda x, y: x + y, lambda x, y: y + x, lambda x, y: torch.add(x, y), lambda x, y: x - -y],
    "sum of three": [lambda x, y: x + (y + x.sin()), lambda x, y: (x.sin() + x) + y],
    "difference": [
        lambda x, y: x - y,
        lambda x, y: x + -1 * y,
        lambda x, y: -y + x,
        lambda x, y: torch.sub(x, y),
        lambda x, y: torch.add(x, y, alpha=-1),
    ],
    "constant": [lambda x, y: x + 1, lambda x, y: 1 + x, lambda x, y: x - -1, lambda x, y: x + 0.5 + 0.5],
    "difference from a constant": [lambda x, y: 1 - x, lambda x, y: -x + 1, lambda x, y: torch.rsub(x, 1)],
    "factor": [lambda x, y: 2 * x, lambda x, y: x + x, lambda x, y: x / 0.5, lambda x, y: -(x * -2)],
    "square": [lambda x, y: x * x, lambda x, y: x**2, lambda x, y: x.square(), lambda x, y: x.pow(2.0)],
    "cube": [lambda x, y: x * x * x, lambda x, y: x**3, lambda x, y: x.square() * x],
    "inverse root": [
        lambda x, y: torch.rsqrt(x),
        lambda x, y: 1 / x.sqrt(),
        lambda x, y: x**-0.5,
        lambda x, y: x.sqrt().reciprocal(),
        lambda x, y: (1 / x) ** 0.5,
        lambda x, y: x.pow(0.5).pow(-1),
    ],
    "quotient": [lambda x, y: x / y, lambda x, y: x * (1 / y), lambda x, y: x * y**-1, lambda x, y: x * y.reciprocal()],
    "mean": [
        lambda x, y: x.mean(-1, keepdim=True),
        lambda x, y: x.sum(-1, keepdim=True) / 4,
        lambda x, y: x.mean(1, keepdim=True),
        lambda x, y: x.sum((1,), keepdim=True) * 0.25,
        lambda x, y: x.mean(-1).unsqueeze(-1),
        lambda x, y: x.mean(-1)[:, None],
    ],
    "a multiple of a sum": [
        lambda x, y: 2 * (x + 3 * y + 1),
        lambda x, y: 2 * x + 6 * y + 2,
        lambda x, y: (x + 3 * y + 1) / 0.5,
    ],
    "expanded and viewed": [
        lambda x, y: x * y.mean(-1, keepdim=True),
        lambda x, y: x * y.mean(-1, keepdim=True).expand_as(x),
        lambda x, y: x * y.mean(-1).view(-1, 1),
        lambda x, y: x * y.mean(-1).view(-1, 1)[None],
    ],
    "sum with a product": [lambda x, y: x + 2 * x * y, lambda x, y: torch.addcmul(x, x, y, value=2)],
    "sigmoid": [
        lambda x, y: torch.sigmoid(x),
        lambda x, y: 1 / (1 + torch.exp(-x)),
        lambda x, y: (1 + (-x).exp()) ** -1,
    ],
    "silu": [
        lambda x, y: functional.silu(x),
        lambda x, y: x / (1 + torch.exp(-x)),
        lambda x, y: x * torch.sigmoid(x),
        lambda x, y: torch.sigmoid(x) * x,
    ],
    "silu in a product": [lambda x, y: functional.silu(x) * y, lambda x, y: (y * x) * torch.sigmoid(x)],
    "silu of a product": [lambda x, y: functional.silu(x * y), lambda x, y: torch.sigmoid(x * y) * y * x],
    "gelu": [lambda x, y: functional.gelu(x), lambda x, y: functional.gelu(x, approximate="none")],
    "casts": [
        lambda x, y: x.double() * y.bfloat16(),
        lambda x, y: (x * y).half(),
        lambda x, y: x.clone() * y.detach().contiguous(),
    ],
    "an op that is not known": [lambda x, y: torch.cumsum(x, 1), lambda x, y: x.cumsum(dim=1)],
}


@pytest.mark.parametrize("name", ONE_TERM)
def test_what_is_one_value_is_one_term(name: str) -> None:
    assert len(set(terms(*ONE_TERM[name]))) == 1


SEVERAL_TERMS: dict[str, list[Function]] = {
    "the root of a square is no x": [lambda x, y: (x**2) ** 0.5, lambda x, y: x.clone(), lambda x, y: -x],
    "the square of a root is no x where it is negative": [lambda x, y: (x * y) ** 0.5, lambda x, y: x**0.5 * y**0.5],
    "the square of a root is no number there": [
        lambda x, y: x.sqrt() ** 2,
        lambda x, y: x.clone(),
        lambda x, y: (x.sqrt() * y) ** 2,
        lambda x, y: x * y**2,
    ],
    "nor is a root times itself": [lambda x, y: x.sqrt() * y * x.sqrt(), lambda x, y: x * y],
    "x / x is no 1": [lambda x, y: x / x, lambda x, y: torch.ones_like(x)],
    "x - x is no 0": [lambda x, y: x - x, lambda x, y: torch.zeros_like(x)],
    "x ** 2 / x is no x": [lambda x, y: x**2 / x, lambda x, y: x.clone()],
    "x * sigmoid(y) is no silu": [
        lambda x, y: x * torch.sigmoid(y),
        lambda x, y: functional.silu(x),
        lambda x, y: functional.silu(y),
    ],
    "-x * sigmoid(x), x * sigmoid(-x)": [
        lambda x, y: -x * torch.sigmoid(x),
        lambda x, y: x * torch.sigmoid(-x),
        lambda x, y: functional.silu(x),
        lambda x, y: functional.silu(-x),
    ],
    "gelus": [lambda x, y: functional.gelu(x), lambda x, y: functional.gelu(x, approximate="tanh")],
    "means": [
        lambda x, y: x.mean(-1),
        lambda x, y: x.mean(-1, keepdim=True),
        lambda x, y: x.mean(0, keepdim=True),
        lambda x, y: x.mean((0, 1), keepdim=True),
        lambda x, y: x.mean(),
        lambda x, y: x.sum(-1, keepdim=True),
    ],
    "views": [lambda x, y: x.transpose(0, 1), lambda x, y: x.view(4, 3), lambda x, y: x.flatten(), torch.add],
    "rounded division": [lambda x, y: x / y, lambda x, y: torch.div(x, y, rounding_mode="floor")],
    "integers": [lambda x, y: x.int(), lambda x, y: x.clone(), lambda x, y: x.int() + 1, lambda x, y: x.int() * 2],
    "an op that is not known": [lambda x, y: torch.cumsum(x, 1), lambda x, y: torch.cumsum(x, 0)],
    "a quotient and its reverse": [lambda x, y: x / y, lambda x, y: y / x],
    "a difference and its reverse": [lambda x, y: x - y, lambda x, y: y - x],
    "constants": [lambda x, y: x + 1, lambda x, y: x + 2, lambda x, y: x * 2, lambda x, y: x**1.5],
    "another axis": [
        lambda x, y: x.sum(-1).unsqueeze(-1),
        lambda x, y: x.sum(-1).unsqueeze(0),
        lambda x, y: x.sum(-1).unsqueeze(1) + 1,
    ],
}


@pytest.mark.parametrize("name", SEVERAL_TERMS)
def test_what_are_several_values_are_several_terms(name: str) -> None:
    functions = SEVERAL_TERMS[name]
    assert len(set(terms(*functions))) == len(functions)


def test_random_values_are_all_of_their_own() -> None:
    found = terms(lambda x, y: torch.rand_like(x), lambda x, y: torch.rand_like(x), lambda x, y: torch.rand_like(x) + 1)
    assert len(set(found)) == 3


def test_a_term_is_made_once() -> None:
    pool = TermPool()
    x, y = pool.call("x"), pool.call("y")
    assert pool.call("x") is x
    assert pool.add(x, y) is pool.add(y, x)
    assert pool.mul(x, pool.number(2)) is pool.add(x, x)
    assert pool.number(1) is pool.number(1.0)
    assert pool.call("f", x, ("int", 1)) is not pool.call("f", x, ("bool", True))
    assert TermPool().call("x") is not x


def test_a_term_is_its_only_factor_and_its_only_part() -> None:
    pool = TermPool()
    x = pool.call("x")
    assert pool.mul(x, pool.number(1)) is pool.add(x, pool.number(0)) is pool.power(x, 1) is x


def test_exponents_multiply_only_where_that_is_an_identity() -> None:
    pool = TermPool()
    x, y = pool.call("x"), pool.call("y")
    assert pool.power(pool.power(x, 2), 3) is pool.power(x, 6)
    assert pool.power(pool.power(x, -1), 0.5) is pool.power(x, -0.5)
    assert pool.power(pool.power(x, 2), 0.5) is not x
    assert pool.power(pool.power(x, 0.5), 2) is not pool.power(pool.power(x, 2), 0.5)
    assert pool.power(pool.mul(x, y), 2) is pool.mul(pool.power(x, 2), pool.power(y, 2))
    assert pool.power(pool.mul(x, y), 0.5) is not pool.mul(pool.power(x, 0.5), pool.power(y, 0.5))


def test_numbers_that_have_no_power_stay_calls() -> None:
    pool = TermPool()
    for base, exponent in ((0.0, -1.0), (-1.0, 0.5), (1e300, 2.0)):
        assert isinstance(pool.power(pool.number(base), exponent), Call)
    assert pool.power(pool.number(4), 0.5) is pool.number(2)


def test_only_an_even_square_has_a_root() -> None:
    pool = TermPool()
    x, y = pool.call("x"), pool.call("y")
    assert pool.root(pool.power(x, 2), 2) is x
    assert pool.root(pool.power(pool.mul(x, y), 2), 2) is pool.mul(x, y)
    assert pool.root(pool.power(pool.add(x, y), 2), 2) is pool.add(x, y)
    for other in (x, pool.power(x, 3), pool.mul(pool.power(x, 2), y), pool.add(pool.power(x, 2), y), pool.number(4)):
        assert pool.root(other, 2) is None


def test_a_term_is_divided_only_by_what_is_in_it() -> None:
    pool = TermPool()
    x, y = pool.call("x"), pool.call("y")
    product = pool.mul(pool.mul(x, pool.number(6)), pool.power(y, -0.5))
    assert pool.divide(product, x) is pool.mul(pool.power(y, -0.5), pool.number(6))
    assert pool.divide(product, pool.mul(x, pool.number(2))) is pool.mul(pool.power(y, -0.5), pool.number(3))
    assert pool.divide(product, pool.power(y, -0.5)) is pool.mul(x, pool.number(6))
    for other in (y, pool.power(y, -1), pool.power(x, 2), pool.power(x, -1), pool.call("z")):
        assert pool.divide(product, other) is None


# Any formula has the value of its term ------------------------------------------------------------------------------


def value(term: Term, leaves: dict[Term, float]) -> float:
    """The number that a term of numbers is."""
    if term in leaves:
        return leaves[term]
    if isinstance(term, Sum):
        return term.constant + sum(coefficient * value(part, leaves) for part, coefficient in term.parts)
    if isinstance(term, Product):
        result = term.coefficient
        for factor, exponent in term.factors:
            result *= value(factor, leaves) ** exponent
        return result
    assert isinstance(term, Call)
    arguments = [value(a, leaves) if isinstance(a, Term) else a for a in term.args]
    functions: dict[str, Callable[..., float]] = {
        "mul": lambda a, b: a * b,
        "add": lambda a, b, scale: a + scale * b,
        "pow": lambda a, exponent: a**exponent,
    }
    return functions[term.name](*arguments)


formulas = st.recursive(
    st.sampled_from(["x", "y", 0.5, 2.0, 3.0]),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["mul", "add", "sub"]), inner, inner),
        st.tuples(st.just("pow"), inner, st.sampled_from([-2.0, -1.0, -0.5, 0.5, 2.0])),
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(formula=formulas)
def test_a_term_has_the_value_of_its_formula(formula: object) -> None:
    pool = TermPool()
    numbers = {"x": 1.25, "y": -0.75}
    leaves = {pool.call(name): number for name, number in numbers.items()}

    def build(formula: object) -> tuple[Term, complex]:
        if isinstance(formula, str):
            return pool.call(formula), numbers[formula]
        if isinstance(formula, float):
            return pool.number(formula), formula
        operation, a, b = formula
        term, number = build(a)
        if operation == "pow":
            return pool.power(term, b), number**b
        other, other_number = build(b)
        if operation == "mul":
            return pool.mul(term, other), number * other_number
        scale = 1.0 if operation == "add" else -1.0
        return pool.add(term, other, scale), number + scale * other_number

    try:
        term, expected = build(formula)
        actual = value(term, leaves)
    except (ZeroDivisionError, OverflowError):
        return
    if isinstance(expected, complex):  # no number over the reals
        return
    assert actual == pytest.approx(expected, rel=1e-9, abs=1e-9)
