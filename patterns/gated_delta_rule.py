"""One token of the gated delta rule: a state that decays, is corrected by the token, and is asked.

    S = decay * S
    S = S + k (beta * (v - k S))^T
    o = q S

S is [batch, heads, key_dim, value_dim]: keys before values, as torch code keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..runtime.sizes import known_equal, static_int
from . import values
from .canonical import Canonicaliser
from .cone import walk
from .conv.move import argument, move
from .match import Findings, Match, Miss
from .spelling import Spelling, spell

KIND = "gated_delta_rule"

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class GatedDeltaRule:
    """What one spelling fixes.

    Args:
        heads: how many there are, and the sizes of their keys and values; None where that is a symbol.
        decay: whether the state decays.
        state_dtype: type of the state.
        spelling: the formula, over state, query, key, value, beta and decay, broadcast along the state as they are.
    """

    heads: int | None
    key_dim: int | None
    value_dim: int | None
    decay: bool
    state_dtype: torch.dtype
    spelling: Spelling

    def public(self) -> dict[str, Any]:
        return {
            "heads": self.heads,
            "key_dim": self.key_dim,
            "value_dim": self.value_dim,
            "decay": self.decay,
            "state_dtype": self.state_dtype,
            "spelling": str(self.spelling),
        }


def match(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | Miss | None:
    """Recognises what a state gives for a query, once a token has corrected it."""
    asked = _asked(node)
    inputs = next(_corrected(*asked, c), None) if asked is not None else None
    if inputs is None:
        return None
    spelling = spell(node, inputs, c)
    numbers = {c.numbers[n] for n in inputs.values()}
    cone = walk(node, lambda n: c.numbers[n] in numbers)
    if spelling is None or cone is None:
        return None
    _, heads, key_dim, value_dim = map(static_int, values.shape(inputs["state"]))
    params = GatedDeltaRule(heads, key_dim, value_dim, "decay" in inputs, values.dtype(inputs["state"]), spelling)
    return Match(KIND, node, inputs, params, cone.nodes)


def _asked(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """A state [batch, heads, key_dim, value_dim] and what it is asked for, where a node is the product of both."""
    if node.target is not aten.sum.dim_IntList or node.kwargs or argument(node, 2, "keepdim", False):
        return None
    dims: Any = node.args[1]
    product = node.args[0]
    if not isinstance(product, fx.Node) or len(values.shape(product)) != 4 or list(dims) not in ([-2], [2]):
        return None
    return next(_factors(product, (True, True, True, False)), None)


def _factors(product: fx.Node, along: tuple[bool, ...]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The factors of a product, the first of its shape, the other of size one along all axes but those of `along`."""
    if product.target is not aten.mul.Tensor:
        return
    shape = values.shape(product)
    for wide, narrow in (product.args, product.args[::-1]):
        if not isinstance(wide, fx.Node) or not isinstance(narrow, fx.Node):
            continue
        if values.same_shape(values.shape(wide), shape) and _is_along(narrow, shape, along):
            yield wide, narrow


def _is_along(node: fx.Node, shape: tuple[Any, ...], along: tuple[bool, ...]) -> bool:
    sizes = values.shape(node)
    if len(sizes) != len(shape):
        return False
    return all(known_equal(a, b if kept else 1) for a, b, kept in zip(sizes, shape, along, strict=True))


def _corrected(state: fx.Node, query: fx.Node, c: Canonicaliser) -> Iterator[dict[str, fx.Node]]:
    """The inputs of a state that a token has corrected."""
    if state.target is not aten.add.Tensor or argument(state, 2, "alpha", 1) != 1:
        return
    for before, outer in (state.args[:2], state.args[1::-1]):
        if not isinstance(before, fx.Node) or not isinstance(outer, fx.Node) or outer.target is not aten.mul.Tensor:
            continue
        for key, row in (outer.args, outer.args[::-1]):
            shape = values.shape(state)
            if not isinstance(key, fx.Node) or not isinstance(row, fx.Node):
                continue
            if not _is_along(key, shape, (True, True, True, False)) or not _is_along(
                row, shape, (True, True, False, True)
            ):
                continue
            for value, beta in _correction(_unsqueezed(row), before, key, c):
                decayed = next(_factors(before, (True, True, False, False)), None)
                kept = {"state": before} if decayed is None else dict(zip(("state", "decay"), decayed, strict=True))
                yield {**kept, "query": query, "key": key, "value": value, "beta": beta}


def _unsqueezed(node: fx.Node) -> fx.Node:
    """What a node is with further axes of size one."""
    while (step := move(node)) is not None and step.cut is None and not values.is_float_cast(node):
        axes = [axis for axis in step.axes if axis is not None]
        if len(axes) < len(step.axes) or axes != sorted(axes):
            break
        node = step.below
    return node


def _correction(node: fx.Node, state: fx.Node, key: fx.Node, c: Canonicaliser) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Value and beta, where a node is `beta * (value - key state)`."""
    if len(values.shape(node)) != 3:
        return
    for difference, beta in _factors(node, (True, True, False)):
        if difference.target is not aten.sub.Tensor or argument(difference, 2, "alpha", 1) != 1:
            continue
        value, known = difference.args[:2]
        asked = _asked(known) if isinstance(known, fx.Node) else None
        if asked is None or not isinstance(value, fx.Node):
            continue
        if [c.numbers[n] for n in asked] == [c.numbers[n] for n in (state, key)]:
            yield value, beta
