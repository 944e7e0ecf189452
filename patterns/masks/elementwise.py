"""Entries of elementwise ops: arithmetic of positions and of constants, comparisons, logic, choice and casts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from .. import values
from .entries import POSITIONS, Cases, Entries, Index, Number, OpRule, Value, constant, integer, known, number, typed
from .formula import Formula, at_most, conjunction, disjunction, either, equal, less, negation
from .integers import Linear, quotient

aten = torch.ops.aten

# A factor that would bring a position near the end of its type.
_LARGEST_FACTOR = 1 << 15


# Numbers ---------------------------------------------------------------------------------------------------------


def _by_torch(node: fx.Node, numbers: tuple[Number, ...]) -> Number:
    """An elementwise op on constants, computed by the op itself in the types it has; None where one is no constant."""
    arguments = []
    for argument, value in zip(node.args, numbers, strict=True):
        number = value.number if isinstance(value, Linear) else value
        if number is None:
            return None
        source = values.tensor(argument)
        arguments.append(number if source is None else torch.full([1] * source.dim(), number, dtype=source.dtype))
    target: Any = node.target
    return constant(target(*arguments, **node.kwargs).item())


def _arithmetic(operands: int, of: Callable[..., Number | Cases]) -> OpRule:
    """An elementwise op that `of` computes on positions, and torch on constants of any type."""

    def rule(e: Entries, node: fx.Node, index: Index) -> Value | None:
        if node.kwargs.get("alpha", 1) != 1 or len(node.args) != operands or values.dtype(node) is torch.bool:
            return None
        on_positions = values.dtype(node) in POSITIONS and all(map(_in_range, node.args))

        def result(*numbers: Number) -> Number | Cases:
            return of(*numbers) if on_positions and _are_linear(*numbers) else _by_torch(node, numbers)

        return known(node, e.combined([e.operand(argument, node, index) for argument in node.args], result))

    return rule


def _are_linear(*numbers: Number) -> bool:
    return all(isinstance(number, Linear) for number in numbers)


def product(a: Linear, b: Linear) -> Number:
    """A product with a constant; None where both vary."""
    if a.number is None:
        a, b = b, a
    return None if a.number is None or abs(a.number) > _LARGEST_FACTOR else b * a.number


def _floor(a: Linear, b: Linear) -> Number:
    return quotient(a, b.number) if b.number is not None and b.number > 0 else None


def _remainder(a: Linear, b: Linear) -> Number:
    floor = _floor(a, b)
    return a - floor * (b.number or 0) if isinstance(floor, Linear) else None


def _least(a: Linear, b: Linear) -> Cases:
    return (at_most(a, b), a), (less(b, a), b)


def _greatest(a: Linear, b: Linear) -> Cases:
    return (at_most(a, b), b), (less(b, a), a)


def _clamp(e: Entries, node: fx.Node, index: Index) -> Value | None:
    """Positions between two bounds, each of which may be None."""
    if values.dtype(node) not in POSITIONS:
        return None
    low, high = ((*node.args[1:], None, None)[:2] if len(node.args) > 1 else map(node.kwargs.get, ("min", "max")))
    cases = e.operand(node.args[0], node, index)
    for bound, of in ((low, _greatest), (high, _least)):
        if bound is not None:
            cases = e.combined([cases, number(bound)], lambda a, b, of=of: of(a, b) if _are_linear(a, b) else None)
    return known(node, cases)


def _division(e: Entries, node: fx.Node, index: Index) -> Value | None:
    """`div` that rounds down; any other gives a float, or rounds towards zero."""
    return _floor_divide(e, node, index) if node.kwargs.get("rounding_mode") == "floor" else None


def _cast(e: Entries, node: fx.Node, index: Index) -> Value | None:
    source, dtype = node.args[0], values.dtype(node)
    if not isinstance(source, fx.Node):
        return None
    if dtype is torch.bool:
        return e.truth(source, index)
    return known(node, typed(e, e.cases(source, index), dtype))


def _in_range(argument: object) -> bool:
    """Whether an operand is the integer that it says: a number that a tensor's type can't hold wraps around in it."""
    if isinstance(argument, int):
        return abs(argument) < 1 << 31
    return values.tensor(argument) is None or values.dtype(argument) in {*POSITIONS, torch.bool}  # type: ignore[arg-type]


# Truth -----------------------------------------------------------------------------------------------------------


def _comparison(of: Callable[..., Formula]) -> OpRule:
    def rule(e: Entries, node: fx.Node, index: Index) -> Value | None:
        unbounded = all(map(_in_range, node.args))

        def holds(*numbers: Number) -> Formula | None:
            if unbounded and _are_linear(*numbers):
                return of(*numbers)
            result = _by_torch(node, numbers)
            return None if result is None else result != Linear(0)

        return e.condition([e.operand(argument, node, index) for argument in node.args], holds)

    return rule


def _logic(of: Callable[..., Formula], only_bool: bool) -> OpRule:
    """A connective; the bitwise ones only between bool tensors."""

    def rule(e: Entries, node: fx.Node, index: Index) -> Value | None:
        if only_bool and values.dtype(node) is not torch.bool:
            return None
        flags = [e.flag(argument, node, index) for argument in node.args]
        return None if any(flag is None for flag in flags) else of(*flags)

    return rule


def _exclusive(a: Formula, b: Formula) -> Formula:
    return either(a, negation(b), b)


def _or_else(logic: OpRule, arithmetic: OpRule) -> OpRule:
    """An op that is a connective between bool tensors, and arithmetic between others."""
    return lambda e, node, index: (logic if values.dtype(node) is torch.bool else arithmetic)(e, node, index)


def choice(
    e: Entries, node: fx.Node, index: Index, condition: Formula | None, then: Any, otherwise: Any
) -> Value | None:
    """`then` where the condition holds, else `otherwise`, both operands of `node`."""
    dtype = values.dtype(node)
    if condition is None:
        return None
    if dtype is torch.bool:
        flags = e.flag(then, node, index), e.flag(otherwise, node, index)
        return None if flags[0] is None or flags[1] is None else either(condition, flags[0], flags[1])
    operands = [typed(e, e.operand(argument, node, index), dtype) for argument in (then, otherwise)]
    if operands[0] is None or operands[1] is None:
        return None
    return known(node, e.chosen([(condition, operands[0]), (negation(condition), operands[1])]))


def _where(e: Entries, node: fx.Node, index: Index) -> Value | None:
    condition, then, otherwise = node.args
    return choice(e, node, index, e.flag(condition, node, index), then, otherwise)


def _masked_fill(e: Entries, node: fx.Node, index: Index) -> Value | None:
    source, condition, filling = node.args
    return choice(e, node, index, e.flag(condition, node, index), filling, source)


def _triangle(lower: bool) -> OpRule:
    """`tril` and `triu`: zero above, or below, a diagonal of the last two axes."""

    def rule(e: Entries, node: fx.Node, index: Index) -> Value | None:
        diagonal = integer(node.args[1] if len(node.args) > 1 else node.kwargs.get("diagonal", 0))
        if diagonal is None:
            return None
        row, column = index[-2:]
        kept = at_most(column, row + diagonal) if lower else at_most(row + diagonal, column)
        nothing = False if values.dtype(node) is torch.bool else 0
        return choice(e, node, index, kept, node.args[0], nothing)

    return rule


_and, _or = _logic(conjunction, only_bool=True), _logic(disjunction, only_bool=True)
_add = _or_else(_or, _arithmetic(2, lambda a, b: a + b))
_mul = _or_else(_and, _arithmetic(2, product))
_sub = _arithmetic(2, lambda a, b: a - b)
_rsub = _arithmetic(2, lambda a, b: b - a)
_floor_divide = _arithmetic(2, _floor)
_equal, _unequal = _comparison(equal), _comparison(lambda a, b: negation(equal(a, b)))

RULES: Mapping[Any, OpRule] = {
    aten._to_copy.default: _cast,
    torch.ops.prims.convert_element_type.default: _cast,
    aten.add.Tensor: _add,
    aten.add.Scalar: _add,
    aten.sub.Tensor: _sub,
    aten.sub.Scalar: _sub,
    aten.rsub.Tensor: _rsub,
    aten.rsub.Scalar: _rsub,
    aten.mul.Tensor: _mul,
    aten.mul.Scalar: _mul,
    aten.neg.default: _arithmetic(1, lambda a: -a),
    aten.abs.default: _arithmetic(1, lambda a: _greatest(a, -a)),
    aten.minimum.default: _or_else(_and, _arithmetic(2, _least)),
    aten.maximum.default: _or_else(_or, _arithmetic(2, _greatest)),
    aten.clamp_min.default: _arithmetic(2, _greatest),
    aten.clamp_max.default: _arithmetic(2, _least),
    aten.clamp.default: _clamp,
    aten.floor_divide.default: _floor_divide,
    aten.floor_divide.Scalar: _floor_divide,
    aten.div.Tensor_mode: _division,
    aten.remainder.Tensor: _arithmetic(2, _remainder),
    aten.remainder.Scalar: _arithmetic(2, _remainder),
    aten.eq.Tensor: _equal,
    aten.eq.Scalar: _equal,
    aten.ne.Tensor: _unequal,
    aten.ne.Scalar: _unequal,
    aten.le.Tensor: _comparison(at_most),
    aten.le.Scalar: _comparison(at_most),
    aten.lt.Tensor: _comparison(less),
    aten.lt.Scalar: _comparison(less),
    aten.ge.Tensor: _comparison(lambda a, b: at_most(b, a)),
    aten.ge.Scalar: _comparison(lambda a, b: at_most(b, a)),
    aten.gt.Tensor: _comparison(lambda a, b: less(b, a)),
    aten.gt.Scalar: _comparison(lambda a, b: less(b, a)),
    aten.logical_and.default: _logic(conjunction, only_bool=False),
    aten.logical_or.default: _logic(disjunction, only_bool=False),
    aten.logical_xor.default: _logic(_exclusive, only_bool=False),
    aten.logical_not.default: _logic(negation, only_bool=False),
    aten.bitwise_and.Tensor: _and,
    aten.bitwise_and.Scalar: _and,
    aten.bitwise_or.Tensor: _or,
    aten.bitwise_or.Scalar: _or,
    aten.bitwise_xor.Tensor: _logic(_exclusive, only_bool=True),
    aten.bitwise_not.default: _logic(negation, only_bool=True),
    aten.where.self: _where,
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
    aten.tril.default: _triangle(lower=True),
    aten.triu.default: _triangle(lower=False),
}
