"""Which nodes are functions of their arguments."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..runtime.effects import effect_of

_PYTHON_FUNCTIONS = frozenset(
    {operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg}
)


def is_functional(node: fx.Node) -> bool:
    """True where equal arguments mean equal results and nothing else happens: judged by schema and registration."""
    if effect_of(node.target) is not None:
        return False
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.target in (getattr, *_PYTHON_FUNCTIONS)
    return not schema.is_mutable and not draws_numbers(node)


def draws_numbers(node: fx.Node) -> bool:
    """True for calls of ops that draw random numbers: not where all that is random in them is dropout, of nothing."""
    if not may_draw(node.target):
        return False
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]  # an OpOverload
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    dropout = given.get("dropout_p", 0.0)
    return "dropout_p" not in names or not isinstance(dropout, (int, float)) or dropout != 0


class OncePerOp:
    """A question about nodes of one graph: an op for whose calls the answer is always yes is asked about once.

    Args:
        holds: the question.
        is_alike: whether it is the op alone that answers it.
    """

    def __init__(self, holds: Callable[[fx.Node], bool], is_alike: Callable[[Any], bool]) -> None:
        self._holds = holds
        self._is_alike = is_alike
        self._known: set[Any] = set()

    def __call__(self, node: fx.Node) -> bool:
        if node.target in self._known:
            return True
        found = self._holds(node)
        if found and self._is_alike(node.target):
            self._known.add(node.target)
        return found


def may_draw(target: Any) -> bool:
    """Whether some calls of an op draw random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
