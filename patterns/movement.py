"""Data movement, found by running it: views on meta tensors give the map from an output axis to the source, exactly.

A chain of views (view, split, slice, transpose, unsqueeze, …) of a contiguous source is an offset and one stride an
axis: what torch itself computes for a tensor without storage. Symbolic sizes are replaced by two sets of small distinct
primes, and a layout counts only if both give the same one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import sympy
import torch
from torch import fx

from ..runtime.sizes import static_int
from . import values

aten = torch.ops.aten

VIEWS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.squeeze.default,
        aten.transpose.int,
        aten.permute.default,
        aten.t.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.chunk.default,
        aten.unbind.int,
        aten.expand.default,
        aten.alias.default,
        aten.detach.default,
    }
)
PERMUTATIONS = frozenset({aten.transpose.int, aten.permute.default, aten.t.default})
_RESHAPES = frozenset({aten._unsafe_view.default, aten.reshape.default})
# Views that keep the elements in row-major order.
ROW_MAJOR_VIEWS = _RESHAPES | {aten.view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims}
COPIES = frozenset({aten.clone.default, aten.contiguous.default, aten.lift_fresh_copy.default})

_MOVES = VIEWS | COPIES

_PRIMES = ((5, 7, 11, 13, 17, 19, 23), (29, 31, 37, 41, 43, 47, 53))


def is_movement(node: fx.Node) -> bool:
    """True for an op that only moves elements of its one tensor input."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and source.target in VIEWS
    return node.target in _MOVES


def source(node: fx.Node) -> fx.Node:
    """The tensor that a movement op moves."""
    first = node.args[0]
    assert isinstance(first, fx.Node)
    return first


def changes_nothing(node: fx.Node) -> bool:
    """True for a slice of all there is, as dynamic sizes leave it in a graph, and an expansion to the same shape."""
    if node.target not in (aten.slice.Tensor, aten.expand.default):
        return False
    return values.same_shape(values.shape(source(node)), values.shape(node))


def permutation(node: fx.Node) -> tuple[int, ...] | None:
    """The axes of its input, in the order of its own, of a node that permutes axes; else None."""
    if values.tensor(node) is None or node.target not in PERMUTATIONS:
        return None
    rank = len(values.shape(node))
    axes: Any = node.args[1:]
    if node.target is aten.permute.default:
        return tuple(axis % rank for axis in axes[0])
    order = list(range(rank))
    a, b = (axis % rank for axis in axes) if axes else (0, rank - 1)
    order[a], order[b] = order[b], order[a]
    return tuple(order)


def trace(node: fx.Node, through: Callable[[fx.Node], bool] = is_movement) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """Follows movement down from `node`: the first node that is none, and the moving nodes from it up to `node`."""
    path: list[fx.Node] = []
    while through(node):
        path.append(node)
        node = source(node)
    return node, tuple(reversed(path))


class Sizes:
    """Stands in concrete numbers for the symbols of sizes: one of several assignments, chosen by `index`."""

    COUNT = len(_PRIMES)

    def __init__(self, index: int) -> None:
        self._primes = _PRIMES[index]
        self._symbols: dict[sympy.Symbol, int] = {}

    def __call__(self, value: Any) -> Any:
        """The value with every symbolic size in it (SymInt, or node of one) replaced by its number."""
        if isinstance(value, fx.Node):
            return self(value.meta["val"])
        if isinstance(value, torch.SymInt):
            expression = value.node.expr
            for symbol in sorted(expression.free_symbols, key=str):
                self._symbols.setdefault(symbol, self._primes[len(self._symbols) % len(self._primes)])
            return int(expression.subs(self._symbols))
        if isinstance(value, (list, tuple)):
            return [self(v) for v in value]
        return value


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the elements of a tensor lie in a contiguous source: `offset + sum(index * stride)`."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    source_sizes: tuple[int, ...]


def layout(base: fx.Node, path: Sequence[fx.Node], sizes: Sizes) -> Layout | None:
    """Runs a path of movement on a contiguous meta tensor shaped as `base`; None where it can't be strided."""
    source_sizes = tuple(sizes(values.shape(base)))
    value: Any = torch.empty(source_sizes, device="meta", dtype=torch.int8)
    for node in path:
        if node.target in COPIES:
            continue
        target = aten.view.default if node.target in _RESHAPES else node.target  # one that copies is no view
        try:
            value = target(value, *(sizes(a) for a in node.args[1:]), **node.kwargs)  # type: ignore[operator]
        except (RuntimeError, IndexError, ValueError):
            return None  # not to be strided over the source, or not with these sizes
    if not isinstance(value, torch.Tensor) or value.untyped_storage().nbytes() != prod(source_sizes):
        return None
    return Layout(tuple(value.shape), tuple(value.stride()), int(value.storage_offset()), source_sizes)


Role = Literal["head", "dim", "unit", "tokens", "rows"] | int


def strip_unit_axes(node: fx.Node) -> fx.Node:
    """The node below all views that only add or remove axes of size one."""
    while node.target in VIEWS and node.target not in PERMUTATIONS:
        below = source(node)
        if values.tensor(below) is None or values.tensor(node) is None:
            break
        before = [s for s in values.shape(below) if static_int(s) != 1]
        after = [s for s in values.shape(node) if static_int(s) != 1]
        if not values.same_shape(before, after):
            break
        node = below
    return node


def concrete(node: fx.Node, sizes: Sizes, constants: Mapping[fx.Node, Any]) -> Any:
    """Runs one op on concrete values, with symbolic sizes replaced."""

    def value(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return constants[argument] if argument in constants else sizes(argument)
        if isinstance(argument, (list, tuple)):
            return [value(a) for a in argument]
        return sizes(argument)

    target: Any = node.target
    return target(*(value(a) for a in node.args), **{k: value(v) for k, v in node.kwargs.items()})
