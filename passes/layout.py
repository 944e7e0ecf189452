"""How tensors lie in memory: which layouts are alike, and in which order axes lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..patterns import values
from ..patterns.movement import Sizes
from ..runtime.sizes import known_equal, static_int

aten = torch.ops.aten


def same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True where two tensors of one shape have the same strides; those of axes of size one don't count."""
    return all(
        known_equal(x, y) or static_int(size) == 1 for size, x, y in zip(a.shape, a.stride(), b.stride(), strict=True)
    )


def laid_alike(a: Any, b: Any) -> bool:
    """The same of all tensors in two values of one structure."""
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(laid_alike, a, b))
    return not isinstance(a, torch.Tensor) or same_layout(a, b)


def physical_order(value: torch.Tensor) -> list[int]:
    """The axes of a tensor from the one with the largest stride to the one with the smallest.

    Permuted by it, a dense tensor is contiguous: an op that works row by row can be given that view, without a copy.
    """
    strides = Sizes(0)(list(value.stride()))
    return sorted(range(value.dim()), key=lambda axis: -strides[axis])


def row_order(node: fx.Node) -> list[int]:
    """The physical order of a node's axes where its rows lie along the last axis; else the order that it has."""
    value = values.tensor(node)
    assert value is not None
    order = physical_order(value)
    return order if order[-1] == value.dim() - 1 else list(range(value.dim()))


def inverse(order: Sequence[int]) -> list[int]:
    """The permutation that undoes `order`."""
    return [order.index(axis) for axis in range(len(order))]


def is_laid_by_convolution(node: fx.Node) -> bool:
    """Whether a value has the strides of a convolution's result.

    Of these a fake kernel may say something else than the kernel itself: in float16 a CPU gives a contiguous result
    where the fake one has channels last.
    """
    seen, stack = {node}, [node]
    while stack:
        current = stack.pop()
        if current.target is aten.convolution.default:
            return True
        sources = current.all_input_nodes if _keeps_strides(current) else []
        stack += [source for source in sources if source not in seen]
        seen.update(sources)
    return False


def _keeps_strides(node: fx.Node) -> bool:
    """Whether strides of a result follow from those of what it is computed from."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target in (aten._to_copy.default, aten.clone.default):
        return node.kwargs.get("memory_format") is not torch.contiguous_format
    is_view = any(argument.alias_info is not None for argument in node.target._schema.arguments)
    return is_view or torch.Tag.pointwise in node.target.tags
