"""A batched matmul whose batch changes places with its rows:  y = bmm(x, weight).transpose(0, 1).

So does multi-head latent attention absorb a projection a head: x is [tokens, heads, k] before it, transposed as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import values
from .canonical import Canonicaliser
from .linear import is_matmul
from .match import Findings, Match, Miss
from .movement import Sizes, is_movement, layout, source, trace
from .spelling import Spelling, spell

KIND = "transpose_batchmatmul"
aten = torch.ops.aten

_BATCH_FIRST, _BATCH_SECOND = (0, 1, 2), (1, 0, 2)


@dataclass(frozen=True, slots=True)
class TransposeBatchmatmul:
    """What one spelling fixes.

    Args:
        batch_second: whether x is [M, B, K]; it is [B, M, K] otherwise. weight is [B, K, N], the result [M, B, N].
        dtype: type of all three.
        spelling: the formula, over x and weight.
    """

    batch_second: bool
    dtype: torch.dtype
    spelling: Spelling

    def public(self) -> dict[str, Any]:
        return {"batch_second": self.batch_second, "dtype": self.dtype, "spelling": str(self.spelling)}


def match(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | Miss | None:
    """Recognises the first view of a batched matmul in which batch and rows have changed places."""
    if not is_movement(node) or values.tensor(node) is None:
        return None
    product, path = trace(node)
    if not _is_batched_matmul(product):
        return None
    if _order(product, path) != _BATCH_SECOND or _order(product, path[:-1]) == _BATCH_SECOND:
        return None
    batched, stacked = product.args
    assert isinstance(batched, fx.Node)
    assert isinstance(stacked, fx.Node)
    x, batch_second = _unmoved(batched)
    weight, transposed = _unmoved(stacked)
    if transposed:
        weight = stacked  # its batch comes second: a view for the op to read
    inputs = {"x": x, "weight": weight}
    spelling = spell(node, inputs, c)
    if spelling is None:
        return None
    moved = [n for operand, under in ((batched, x), (stacked, weight)) for n in _between(operand, under)]
    params = TransposeBatchmatmul(batch_second, values.dtype(product), spelling)
    return Match(KIND, node, inputs, params, tuple(sorted({*moved, product, *path})))


def _is_batched_matmul(node: fx.Node) -> bool:
    """True for [B, M, K] times [B, K, N]."""
    if not is_matmul(node) or not values.is_float(node):
        return False
    shapes = [values.shape(operand) for operand in node.args if isinstance(operand, fx.Node)]
    return len(shapes) == 2 and all(len(s) == 3 for s in shapes) and values.same_shape(shapes[0][:1], shapes[1][:1])


def _order(base: fx.Node, path: Sequence[fx.Node]) -> tuple[int, ...] | None:
    """The permutation of three axes that a path of movement is, for every binding of the symbolic sizes; else None."""
    found = {_permutation(base, path, Sizes(index)) for index in range(Sizes.COUNT)}
    return found.pop() if len(found) == 1 else None


def _permutation(base: fx.Node, path: Sequence[fx.Node], sizes: Sizes) -> tuple[int, ...] | None:
    moved = layout(base, path, sizes)
    if moved is None or moved.offset or len(moved.source_sizes) != 3:
        return None
    strides = torch.empty(moved.source_sizes, device="meta").stride()
    for order in (_BATCH_FIRST, _BATCH_SECOND):
        if moved.sizes != tuple(moved.source_sizes[axis] for axis in order):
            continue
        wanted = (strides[axis] for axis in order)
        if all(a == b or size == 1 for a, b, size in zip(moved.strides, wanted, moved.sizes, strict=True)):
            return order
    return None


def _unmoved(node: fx.Node) -> tuple[fx.Node, bool]:
    """The tensor that a node is, moved nowhere or with its first two axes swapped; and whether they are."""
    below, path = node, list[fx.Node]()
    same = node
    while is_movement(below):
        path.insert(0, below)
        below = source(below)
        order = _order(below, path) if values.tensor(below) is not None else None
        if order == _BATCH_SECOND:
            return below, True
        if order == _BATCH_FIRST:
            same = below
    return same, False


def _between(node: fx.Node, below: fx.Node) -> list[fx.Node]:
    """The nodes from one down to another, without the latter."""
    path = []
    while node is not below:
        path.append(node)
        node = source(node)
    return path
