"""In which steps a model computes what an op computes in its own: each rounds, so that a last bit may differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...patterns.movement import COPIES, VIEWS
from ...patterns.spelling import Slot, Spelling, Step
from ...patterns.values import CASTS
from ..edit import Edit

aten = torch.ops.aten

_SAME = VIEWS | COPIES | CASTS
_PRODUCTS = frozenset({aten.mul.Tensor, aten.mul.Scalar})


def note_order_of_norm(spelling: Spelling, edit: Edit) -> None:
    """Notes in what a norm differs from `x * rsqrt(mean(x ** 2) + eps) * weight`, taken from left to right.

    A norm that is one op already has the op's order.

    Args:
        spelling: of a norm over x.
        edit: of its site.
    """
    below = _below(spelling)
    steps = dict(enumerate(spelling.steps, len(spelling.inputs)))
    sums = {place for place, step in steps.items() if step.op is aten.sum.dim_IntList}
    if not sums and all(step.op is not aten.mean.dim for step in spelling.steps):
        return
    products = [{below[slot] for slot in _operands(step)} for step in spelling.steps if step.op in _PRODUCTS]
    roots = {place for place, step in steps.items() if _is_inverse_root(step)}
    x = spelling.inputs.index("x")
    if any(product <= sums for product in products):
        edit.note("the model multiplies the sum of squares by 1 / size, which is rounded; the op divides by size")
    elif not roots:
        edit.note("the model takes the inverse root in steps that each round, the op in one")
    elif not any(product == {x, root} for product in products for root in roots):
        edit.note("the model multiplies x, the root and the weight in another order than the op")


def note_written_out(spelling: Spelling, op: Any, edit: Edit) -> None:
    """Notes that an activation is no call of its op."""
    if all(step.op is not op for step in spelling.steps):
        edit.note(f"the model computes {op._opname} in steps that each round, the op in one")


def note_order_of_gate(spelling: Spelling, edit: Edit) -> None:
    """Notes where it isn't `x * sigmoid(alpha * x)` that a model computes first, of any x."""
    below, first = _below(spelling), len(spelling.inputs)

    def operands(place: int, *ops: Any) -> set[int]:
        """What a step of one of these ops reads."""
        step = spelling.steps[place - first] if place >= first else None
        return {below[slot] for slot in _operands(step)} if step is not None and step.op in ops else set()

    for place in range(first, first + len(spelling.steps)):
        product = operands(place, *_PRODUCTS)
        for sigmoid in product:
            inner = operands(sigmoid, aten.sigmoid.default)
            if len(product) == 2 and any(operands(scaled, *_PRODUCTS) == product - {sigmoid} for scaled in inner):
                return
    edit.note("the model multiplies in another order than the op, or computes the sigmoid in steps that each round")


def _below(spelling: Spelling) -> list[int]:
    """For each value of a spelling the one that it is a cast or a movement of, or itself."""
    below = list(range(len(spelling.inputs)))
    for place, step in enumerate(spelling.steps, len(below)):
        moved = next(_operands(step), None) if step.op in _SAME else None
        below.append(place if moved is None else below[moved])
    return below


def _operands(step: Step) -> Iterator[int]:
    return (value.index for value in step.args if isinstance(value, Slot))


def _is_inverse_root(step: Step) -> bool:
    return step.op is aten.rsqrt.default or (step.op is aten.pow.Tensor_Scalar and step.args[1] == -0.5)
