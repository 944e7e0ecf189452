"""Collectives: calls in which all ranks of a group take part, each rank the same ones in the same order."""

from __future__ import annotations

from torch._ops import OpOverload

# Where torch keeps its collectives: functional ones, and those that write in place.
_NAMESPACES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d", "symm_mem"})


def is_collective(target: object) -> bool:
    """True for an op of torch.distributed, and for the wait behind it.

    One that is left out, called twice or called in another order than on another rank makes all of them wait forever.
    """
    return isinstance(target, OpOverload) and target.namespace in _NAMESPACES
