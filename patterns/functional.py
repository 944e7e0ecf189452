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
    tags = getattr(node.target, "tags", ())
    return not schema.is_mutable and torch.Tag.nondeterministic_seeded not in tags
