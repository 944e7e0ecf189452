"""Terms: the canonical form of a value, hash-consed, so that equal terms are one object.

A term says what a value *is*, whatever its spelling: `x * rsqrt(v)`, `x / v.sqrt()` and `v ** -0.5 * x` are one term.
Rounding is no part of it (a cast between float types gives the same term); which roundings a spelling crosses is read
off its nodes by the rule that asks.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from torch import fx


@dataclass(frozen=True, eq=False, slots=True)
class Term:
    """Base of all terms. Equality and hash are by identity: a pool makes each term once."""

    serial: int = field(kw_only=True)


@dataclass(frozen=True, eq=False, slots=True)
class Leaf(Term):
    """The value of a node that is not looked into: an input, a random or a mutating op."""

    node: fx.Node


@dataclass(frozen=True, eq=False, slots=True)
class Sum(Term):
    """`constant + sum(coefficient * part)`, its parts in order of creation."""

    parts: tuple[tuple[Term, float], ...]
    constant: float


@dataclass(frozen=True, eq=False, slots=True)
class Product(Term):
    """`coefficient * prod(factor ** exponent)`, its factors in order of creation; without factors, a number.

    `calls` are the names of those factors that are calls.
    """

    factors: tuple[tuple[Term, float], ...]
    coefficient: float
    calls: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        names = frozenset([factor.name for factor, _ in self.factors if isinstance(factor, Call)])
        object.__setattr__(self, "calls", names)


@dataclass(frozen=True, eq=False, slots=True)
class Call(Term):
    """`name(*args)`: a reduction, an activation, a recognised kind such as "rms_norm", or any op without a rule."""

    name: str
    args: tuple[Hashable, ...]


def calls(term: Term) -> Collection[str]:
    """The names of the calls among the factors of a term."""
    if isinstance(term, Product):
        return term.calls
    return (term.name,) if isinstance(term, Call) else ()


AnyTerm = TypeVar("AnyTerm", bound=Term)


class TermPool:
    """Makes terms, each only once, and knows their algebra over the reals."""

    def __init__(self) -> None:
        self._pool: dict[tuple[Hashable, ...], Term] = {}

    def _intern(self, kind: type[AnyTerm], *fields: Hashable) -> AnyTerm:
        key = (kind, *fields)
        term = self._pool.get(key)
        if term is None:
            term = self._pool[key] = kind(*fields, serial=len(self._pool))
        assert isinstance(term, kind)
        return term

    def leaf(self, node: fx.Node) -> Term:
        return self._intern(Leaf, node)

    def call(self, name: str, *args: Hashable) -> Term:
        return self._intern(Call, name, args)

    def number(self, value: float) -> Term:
        return self._intern(Product, (), float(value))

    # Products ----------------------------------------------------------------------------------------------------

    def _product(self, factors: Mapping[Term, float], coefficient: float) -> Term:
        ordered = tuple(sorted(((t, e) for t, e in factors.items()), key=lambda item: item[0].serial))
        if coefficient == 1 and len(ordered) == 1 and ordered[0][1] == 1:
            return ordered[0][0]
        return self._intern(Product, ordered, coefficient)

    @staticmethod
    def factors(term: Term) -> tuple[dict[Term, float], float]:
        """The factors of a term with their exponents, and its coefficient; what is no product is its own factor."""
        return (dict(term.factors), term.coefficient) if isinstance(term, Product) else ({term: 1.0}, 1.0)

    def mul(self, a: Term, b: Term) -> Term:
        if a is b:
            return self.power(a, 2)
        factors, coefficient = self.factors(a)
        others, other_coefficient = self.factors(b)
        for factor, exponent in others.items():
            known = factors.get(factor, 0.0)
            # x ** 2 / x is not x where x is 0, sqrt(x) * sqrt(x) where x is negative: no identities of floating point
            if known * exponent < 0 or _drops_root(known, known + exponent):
                return self.call("mul", *sorted((a, b), key=lambda t: t.serial))
            factors[factor] = known + exponent
        coefficient *= other_coefficient
        for sigmoid in [f for f in factors if isinstance(f, Call) and f.name == "sigmoid" and factors[f] == 1]:
            (gate,) = sigmoid.args
            assert isinstance(gate, Term)
            rest = self._divide(factors, coefficient, gate)
            scale = self.factors(gate)[1]
            if rest is not None and (rest[1] == 1 or abs(scale) == 1):  # x * sigmoid(x), but not x * sigmoid(2 * x)
                factors, coefficient = rest
                del factors[sigmoid]
                silu = self.call("silu", gate)
                factors[silu] = factors.get(silu, 0.0) + 1
        if len(factors) == 1 and coefficient not in (0, 1):
            ((lone, exponent),) = factors.items()
            if isinstance(lone, Sum) and exponent == 1:  # 2 * (x + 1) is 2 * x + 2
                parts = {part: coefficient * of_part for part, of_part in lone.parts}
                return self._sum(parts, coefficient * lone.constant)
        return self._product(factors, coefficient)

    def _divide(
        self, factors: Mapping[Term, float], coefficient: float, divisor: Term
    ) -> tuple[dict[Term, float], float] | None:
        remaining = dict(factors)
        divisors, divisor_coefficient = self.factors(divisor)
        if divisor_coefficient == 0:
            return None
        for factor, exponent in divisors.items():
            left = remaining.get(factor, 0.0) - exponent
            if left < 0 < exponent or (left > 0 > exponent):
                return None
            remaining[factor] = left
        return {t: e for t, e in remaining.items() if e}, coefficient / divisor_coefficient

    def divide(self, term: Term, divisor: Term) -> Term | None:
        """`term / divisor` where every factor of the divisor is a factor of the term; else None.

        A number is left as the factor that it is, not multiplied into a sum.
        """
        rest = self._divide(*self.factors(term), divisor)
        return None if rest is None else self._product(*rest)

    def power(self, base: Term, exponent: float) -> Term:
        """`base ** exponent`. Exponents are multiplied only where that is an identity.

        Neither `(x ** 2) ** 0.5` is `x`, nor `(x ** 0.5) ** 2`, which is no number where x is negative.
        """
        factors, coefficient = self.factors(base)
        if not factors:
            try:
                return self.number(coefficient**exponent)
            except (ZeroDivisionError, OverflowError, TypeError):
                return self.call("pow", base, exponent)
        if exponent == -1 and isinstance(base, Sum) and base.constant == 1 and len(base.parts) == 1:
            (part, scale), = base.parts
            if isinstance(part, Call) and part.name == "exp" and scale == 1:  # 1 / (1 + exp(-x))
                return self.call("sigmoid", self.mul(part.args[0], self.number(-1)))  # type: ignore[arg-type]
        integral = float(exponent).is_integer()
        lone_root = len(factors) == 1 and abs(next(iter(factors.values()))) == 1
        powers = {t: e * exponent for t, e in factors.items()}
        keeps_roots = not any(_drops_root(factors[t], power) for t, power in powers.items())
        if coefficient == 1 and (integral or lone_root) and keeps_roots:
            return self._product(powers, 1.0)
        return self._product({base: float(exponent)}, 1.0)

    def root(self, term: Term, exponent: float) -> Term | None:
        """The term of which this is that power (2 gives `c * x` for `(c * x) ** 2`), or None."""
        factors, coefficient = self.factors(term)
        powers = {t: e / exponent for t, e in factors.items()}
        if coefficient != 1 or not powers or not all(float(e).is_integer() for e in powers.values()):
            return None
        base = self._product(powers, 1.0)
        return base if self.power(base, exponent) is term else None

    # Sums --------------------------------------------------------------------------------------------------------

    def addends(self, term: Term) -> tuple[dict[Term, float], float]:
        """The parts of a term with their coefficients, and its constant."""
        if isinstance(term, Sum):
            return dict(term.parts), term.constant
        if isinstance(term, Product):
            if not term.factors:
                return {}, term.coefficient
            return {self._product(dict(term.factors), 1.0): term.coefficient}, 0.0
        return {term: 1.0}, 0.0

    def _sum(self, parts: Mapping[Term, float], constant: float) -> Term:
        if not parts:
            return self.number(constant)
        if len(parts) == 1 and constant == 0:
            ((part, coefficient),) = parts.items()
            return self.mul(part, self.number(coefficient)) if coefficient != 1 else part
        return self._intern(Sum, tuple(sorted(parts.items(), key=lambda item: item[0].serial)), constant)

    def add(self, a: Term, b: Term, scale: float = 1.0) -> Term:
        """`a + scale * b`."""
        parts, constant = self.addends(a)
        others, other_constant = self.addends(b)
        for part, coefficient in others.items():
            total = parts.get(part, 0.0) + scale * coefficient
            if total == 0:  # x - x is not 0 where x is infinite: no identity of floating point
                return self.call("add", a, b, scale)
            parts[part] = total
        return self._sum(parts, constant + scale * other_constant)

    def ratio(self, term: Term, base: Term) -> float | None:
        """The number by which `base` is multiplied to give `term`, or None."""
        parts, constant = self.addends(term)
        others, other_constant = self.addends(base)
        if parts.keys() != others.keys():
            return None
        pairs = [(coefficient, others[part]) for part, coefficient in parts.items()]
        pairs += [(constant, other_constant)] if constant or other_constant else []
        ratios = {a / b if b else None for a, b in pairs}
        return ratios.pop() if len(ratios) == 1 else None

    def without(self, term: Term, addend: Term) -> Term:
        """What an addend of a term leaves of it."""
        parts, constant = self.addends(term)
        taken, taken_constant = self.addends(addend)
        for part, coefficient in taken.items():
            parts[part] = parts.get(part, 0.0) - coefficient
        return self._sum({part: left for part, left in parts.items() if left}, constant - taken_constant)


def _drops_root(exponent: float, larger: float) -> bool:
    """Whether a root of a negative number, which is none, would be taken for a power, which is one."""
    return not float(exponent).is_integer() and float(larger).is_integer()
