"""Which nodes do more than compute their value, and the order that they must keep.

Judged by the op's schema and by what is registered for it, never by the names of ops. It holds in a graph of Dynamo's
as well, which AOTAutograd has not made functional: what a Python function or a method does there is told by the schema
of the op of torch that it stands for.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from ..patterns.functional import OncePerOp, draws_numbers, may_draw
from ..runtime.collectives import is_collective, is_functional_collective
from ..runtime.effects import declared_writes
from ..runtime.ops import CONTRACTS
from ..runtime.weights import IN_MEMORY

aten = torch.ops.aten

# Modules of functions of Python's own: of numbers, sizes and tuples.
_PYTHON = frozenset({"_operator", "builtins", "math"})
_WRITING_OPERATORS = frozenset(
    getattr(operator, name)
    for name in (
        *("setitem", "delitem", "iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior"),
        *("ipow", "irshift", "isub", "itruediv", "ixor"),
    )
)


# What torch.export asserts beside each cast, of types and layouts: it was settled when the graph was traced.
SETTLED = frozenset({torch.ops.aten._assert_tensor_metadata.default})


def is_pure(node: fx.Node) -> bool:
    """True for a node that may be dropped when unused, and moved past others.

    It writes nothing, draws no number, and no other rank waits for it.
    """
    if node.op == "get_attr" or node.target in IN_MEMORY or node.target in SETTLED:
        return True
    if node.op == "call_method":
        return _is_pure_op(str(node.target))
    # torch knows what a schema writes, which ops draw numbers, and what is registered.
    if node.is_impure(impure_random=draws_numbers(node)) or communicates(node):
        return False
    known = hasattr(node.target, "_schema") or isinstance(node.target, HigherOrderOperator)
    return known or _is_pure_function(node)


def purity() -> OncePerOp:
    """`is_pure`, to be asked about the nodes of one graph."""
    return OncePerOp(is_pure, lambda op: _has_one_purity(op) and op._schema.name not in _GROUPS)


def _is_pure_function(node: fx.Node) -> bool:
    function: Callable[..., Any] = node.target  # type: ignore[assignment]  # of a call_function
    if getattr(function, "__module__", None) in _PYTHON:
        return function not in _WRITING_OPERATORS
    if node.kwargs.get("out") is not None or _is_told_to_write(function, node):
        return False
    name = getattr(function, "__name__", "")
    return name.lstrip("_").startswith("sym_") or _is_pure_op(name)


def _is_told_to_write(function: Callable[..., Any], node: fx.Node) -> bool:
    """Whether an argument `inplace` is given as true."""
    try:
        given = inspect.signature(function).bind(*node.args, **node.kwargs).arguments
    except (TypeError, ValueError):  # a function of C has no signature, and no such argument
        given = node.kwargs
    return bool(given.get("inplace", False))


def _is_pure_op(name: str) -> bool:
    """Whether torch has an op of this name, which writes nothing but what is given as `out`."""
    packet = getattr(aten, name, None)
    if packet is None:
        return False
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    calls = [op for op in overloads if not torch._library.utils.is_out(op)]
    return all(
        not declared_writes(op) and torch.Tag.nondeterministic_seeded not in op.tags for op in calls or overloads
    )


def communicates(node: fx.Node) -> bool:
    """True for a collective, or a fused op that has one in it: each is kept, in the order that the model has them."""
    return is_collective(node.target) or _is_fused_collective(node)


_GROUPS = {contract.name: contract.group for contract in CONTRACTS.values() if contract.group is not None}


def _is_fused_collective(node: fx.Node) -> bool:
    """True for a fused op that is given a group of ranks."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.name not in _GROUPS:
        return False
    given = {**dict(zip((a.name for a in schema.arguments), node.args, strict=False)), **node.kwargs}
    return given.get(_GROUPS[schema.name]) is not None


def _has_one_purity(target: object) -> bool:
    """Whether calls are alike in whether they are borders, whatever the arguments: of a collective none is one."""
    return isinstance(target, OpOverload) and not may_draw(target)


def regions(graph: fx.Graph) -> dict[fx.Node, int]:
    """Numbers the stretches of a graph: even between effects, where pure nodes may be reordered, odd for an effect.

    A collective that writes nothing but its result is no border: pure nodes may pass it.
    """
    region = 0
    numbered = {}
    pure: set[Any] = set()  # ops that are pure however they are called
    for node in graph.nodes:
        effect = False
        if node.op not in ("placeholder", "output") and node.target not in pure:
            effect = not is_pure(node) and not is_functional_collective(node.target) and not _is_fused_collective(node)
            if not effect and _has_one_purity(node.target):
                pure.add(node.target)
        region += effect
        numbered[node] = region
        region += effect
    return numbered
