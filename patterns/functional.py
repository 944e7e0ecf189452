"""Which nodes are functions of their arguments."""

from __future__ import annotations

import operator

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
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]  # an OpOverload
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    dropout = given.get("dropout_p", 0.0)
    return "dropout_p" not in names or not isinstance(dropout, (int, float)) or dropout != 0
