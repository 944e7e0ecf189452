"""Guard-free questions about sizes that may be symbolic.

A plain `==` on a `torch.SymInt` used as a condition evaluates it and installs a guard: the compiled program is then
bound to the example's sizes. Nothing here does: each answer is "known for every size the program may see", or no.
"""

from collections.abc import Sequence

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

__all__ = [
    *("Size", "is_contiguous", "known_equal", "known_same_shape", "known_true", "lies_in_order", "number_of"),
    "static_int",
]

Size = int | torch.SymInt


def known_true(condition: bool | torch.SymBool) -> bool:
    """Whether `condition` holds for every size the program may see. No guard is installed."""
    return condition if isinstance(condition, bool) else statically_known_true(condition)


def known_equal(left: Size, right: Size) -> bool:
    """Whether both sizes are equal for every size the program may see. No guard is installed."""
    return known_true(left == right)


def known_same_shape(left: Sequence[Size], right: Sequence[Size]) -> bool:
    """Whether both shapes have the same rank and `known_equal` sizes."""
    return len(left) == len(right) and all(map(known_equal, left, right))


def static_int(size: Size) -> int | None:
    """The value of a size that is no symbol (any more), else None. No guard is installed."""
    return size.node.maybe_as_int() if isinstance(size, torch.SymInt) else size


def number_of(size: Size) -> int:
    """A size as it was in the call that was compiled; 1 where that isn't known. No guard is installed."""
    if not isinstance(size, torch.SymInt):
        return size
    return int(size.node.hint) if size.node.has_hint() else 1


def is_contiguous(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is row-major without gaps for every size the program may see. No guard is installed.

    As in `torch.Tensor.is_contiguous`, the stride of a dim of size 1 doesn't matter, and an empty tensor is contiguous.
    """
    return lies_in_order(tensor, range(tensor.dim()))


def lies_in_order(tensor: torch.Tensor, order: Sequence[int]) -> bool:
    """Whether `tensor.permute(order)` is contiguous, as above."""
    sizes, strides = tensor.shape, tensor.stride()
    if any(known_equal(size, 0) for size in sizes):
        return True
    expected: Size = 1
    for axis in reversed(order):
        size, stride = sizes[axis], strides[axis]
        if known_equal(size, 1):
            continue
        if not known_equal(stride, expected):
            return False
        expected = expected * size
    return True
