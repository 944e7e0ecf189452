"""Collectives: calls in which all ranks of a group take part, each rank the same ones in the same order."""

from __future__ import annotations

from torch._ops import OpOverload

from .effects import declared_writes

# Where torch keeps its collectives: functional ones, and those that write in place.
_NAMESPACES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d", "symm_mem"})
# Messages between two ranks: what receives writes its argument, and doesn't say so.
_MESSAGES = frozenset({"isend", "irecv", "batch_p2p_ops"})


def is_collective(target: object) -> bool:
    """True for an op of torch.distributed, and for the wait behind it.

    One that is left out, called twice or called in another order than on another rank makes all of them wait forever.
    """
    return isinstance(target, OpOverload) and target.namespace in _NAMESPACES


def is_functional_collective(target: object) -> bool:
    """True for a collective that writes nothing but its result."""
    if not isinstance(target, OpOverload) or not is_collective(target):
        return False
    return not declared_writes(target) and target._opname not in _MESSAGES
