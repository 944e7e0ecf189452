"""What one entry of a tensor is, as a function of its index: exact, for every size the program may see.

An entry of a bool tensor is a formula. An entry of any other is a number by cases: in each case a linear form, a float,
or nothing that is known. An op without a rule gives entries that are not looked into, never an error.

Positions are taken for integers without end: no int32 or int64 of them is near the end of its type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ...runtime.sizes import known_equal, static_int
from .. import values
from .facts import Facts
from .formula import Formula, Holds, conjunction, disjunction, negation, zero
from .integers import Entry, Linear, form, of_size

Index = tuple[Linear, ...]
Number = Linear | float | None
Cases = tuple[tuple[Formula, Number], ...]
Value = Formula | Cases
OpRule = Callable[["Entries", fx.Node, Index], Value | None]

POSITIONS = frozenset({torch.int64, torch.int32})
# No mask has as many cases, or is made of as many ops in a row; what is beyond is not looked into.
_MOST_CASES = 12
_DEEPEST = 64


@dataclass(slots=True)
class Entries:
    """The entries of the tensors of one graph.

    Args:
        rules: one function an op, that gives None where the op's arguments are beyond it.
        facts: what is known of the axes that indices speak of; grows on the way.
    """

    rules: Mapping[Any, OpRule]
    facts: Facts
    known: dict[tuple[fx.Node, Index], Value] = field(default_factory=dict)
    _depth: int = 0

    def at(self, node: fx.Node, index: Index) -> Value:
        """The entry of a tensor at an index: one integer for each of its axes."""
        index = tuple(Linear(0) if static_int(s) == 1 else i for i, s in zip(index, values.shape(node), strict=True))
        if (node, index) not in self.known:
            rule = self.rules.get(node.target) if self._depth < _DEEPEST else None
            self._depth += 1
            value = rule(self, node, index) if rule is not None else None
            self._depth -= 1
            self.known[node, index] = _not_looked_into(node, index) if value is None else value
        return self.known[node, index]

    def truth(self, node: fx.Node, index: Index) -> Formula:
        """Whether an entry is not zero."""
        value = self.at(node, index)
        if not isinstance(value, tuple):
            return value
        holds = self.condition([value], _is_true)
        return Holds(Entry(node, index)) if holds is None else holds

    def cases(self, node: fx.Node, index: Index) -> Cases:
        """An entry as a number: True is 1."""
        value = self.at(node, index)
        return value if isinstance(value, tuple) else ((value, Linear(1)), (negation(value), Linear(0)))

    def operand(self, argument: Any, node: fx.Node, index: Index) -> Cases | None:
        """What an elementwise op reads of an operand, tensor or number, for its entry at `index`."""
        if not _is_tensor(argument):
            return number(argument)
        place = broadcast(argument, node, index)
        return None if place is None else self.cases(argument, place)

    def flag(self, argument: Any, node: fx.Node, index: Index) -> Formula | None:
        """As `operand`: whether that is not zero."""
        if not _is_tensor(argument):
            return argument if isinstance(argument, bool) else None
        place = broadcast(argument, node, index)
        return None if place is None else self.truth(argument, place)

    def combined(self, operands: Sequence[Cases | None], of: Callable[..., Number | Cases]) -> Cases | None:
        """A function of numbers, case by case."""
        combinations = _combinations(operands)
        if combinations is None:
            return None
        results = ((case, of(*numbers)) for case, numbers in combinations)
        return self.chosen((case, r if isinstance(r, tuple) else ((True, r),)) for case, r in results)

    def condition(self, operands: Sequence[Cases | None], of: Callable[..., Formula | None]) -> Formula | None:
        """What is true of numbers, case by case; None where that isn't known of one."""
        combinations = _combinations(operands)
        if combinations is None:
            return None
        met = [(case, of(*numbers)) for case, numbers in combinations]
        if any(holds is None for _, holds in met):
            return None
        return self.facts.settled(disjunction(*(conjunction(case, holds or False) for case, holds in met)))

    def chosen(self, pieces: Iterable[tuple[Formula, Cases]]) -> Cases | None:
        """The number of the piece whose condition holds; of the conditions one always does, and only one."""
        numbers: dict[Number, Formula] = {}
        for condition, cases in pieces:
            for case, result in cases:
                numbers[result] = disjunction(numbers.get(result, False), conjunction(condition, case))
        if len(numbers) > 1:
            numbers = {result: case for result, case in numbers.items() if not self.facts.refutes(case)}
        if len(numbers) == 1:
            return ((True, next(iter(numbers))),)
        return tuple((case, result) for result, case in numbers.items()) if len(numbers) <= _MOST_CASES else None

    def joined(self, node: fx.Node, pieces: Sequence[tuple[Formula, fx.Node, Index]]) -> Value | None:
        """The entry of the tensor whose condition holds, where `node` is made of several of its type."""
        possible = [piece for piece in pieces if not self.facts.refutes(piece[0])]
        if len(possible) == 1:
            return self.at(*possible[0][1:])
        if values.dtype(node) is torch.bool:
            return disjunction(*(conjunction(case, self.truth(source, at)) for case, source, at in possible))
        return self.chosen((case, self.cases(source, at)) for case, source, at in possible)


def _combinations(operands: Sequence[Cases | None]) -> list[tuple[Formula, tuple[Number, ...]]] | None:
    cases: list[tuple[Formula, tuple[Number, ...]]] = [(True, ())]
    for operand in operands:
        if operand is None or len(cases) * len(operand) > _MOST_CASES:
            return None
        cases = [(conjunction(a, b), (*numbers, number)) for a, numbers in cases for b, number in operand]
    return [(case, numbers) for case, numbers in cases if case is not False]


def _is_true(value: Number) -> Formula | None:
    if value is None:
        return None
    return negation(zero(value)) if isinstance(value, Linear) else value != 0


def _is_tensor(argument: object) -> bool:
    return values.tensor(argument) is not None


def _not_looked_into(node: fx.Node, index: Index) -> Value:
    if values.dtype(node) is torch.bool:
        return Holds(Entry(node, index))
    return ((True, None if values.is_float(node) else form(Entry(node, index))),)


def number(argument: Any) -> Cases | None:
    """A number among an op's arguments, a symbolic size too."""
    if isinstance(argument, float):
        return ((True, argument),)
    found = integer(argument)
    return None if found is None else ((True, found),)


def integer(argument: Any) -> Linear | None:
    """An integer among an op's arguments, or the node of one."""
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else argument
    return of_size(value) if isinstance(value, (int, torch.SymInt)) else None


def broadcast(source: fx.Node, node: fx.Node, index: Index) -> Index | None:
    """Where `source`, expanded to the shape of `node`, is read for its entry at `index`."""
    sizes, whole = values.shape(source), values.shape(node)
    added = len(whole) - len(sizes)
    if not all(static_int(a) == 1 or known_equal(a, b) for a, b in zip(sizes, whole[added:], strict=True)):
        return None
    return index[added:]  # along an axis of one, `at` reads its only place


def constant(value: bool | int | float) -> Number:
    """What torch has computed; None for NaN."""
    if isinstance(value, int):
        return Linear(int(value))
    return None if math.isnan(value) else value


def typed(e: Entries, cases: Cases | None, dtype: torch.dtype) -> Cases | None:
    """The numbers in another type."""
    return e.combined([cases], lambda value: _converted(value, dtype))


def _converted(value: Number, dtype: torch.dtype) -> Number:
    if isinstance(value, Linear) and dtype in POSITIONS:
        return value
    number = value.number if isinstance(value, Linear) else value
    if number is None:
        return None
    widest = torch.int64 if isinstance(number, int) else torch.float64
    return constant(torch.tensor(number, dtype=widest).to(dtype).item())


def known(node: fx.Node, cases: Cases | None) -> Cases | None:
    """The cases, unless it is integers of which one is not known."""
    unknown = cases is not None and any(value is None for _, value in cases) and not values.is_float(node)
    return None if unknown else cases
