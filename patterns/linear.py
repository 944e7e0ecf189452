"""A linear projection, however it is spelled:  y = x @ weight.T + bias."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from . import values
from .movement import ROW_MAJOR_VIEWS, permutation, source
from .preserved import original

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Linear:
    """A projection of x [..., in_features] by weight [out_features, in_features] and bias [out_features]."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None



def is_matmul(node: fx.Node) -> bool:
    """True for a product of matrices, of any batch."""
    return original(node.target) in (aten.matmul.default, aten.bmm.default)


def linear(node: fx.Node) -> Linear | None:
    """Reads a node as a linear projection, else None."""
    if node.target in ROW_MAJOR_VIEWS:
        return _unflattened(node)
    op = original(node.target)
    if op is aten.linear.default:
        x, weight = node.args[:2]
        bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
        return _linear(node, x, weight, bias)
    if op in (aten.mm.default, aten.matmul.default):
        return _linear(node, node.args[0], _transposed(node.args[1]), None)
    if op is aten.bmm.default:
        return _linear(node, _unexpanded(node.args[0], 3), _transposed(_unexpanded(node.args[1], 2)), None)
    if op is aten.addmm.default and not node.kwargs:
        return _linear(node, node.args[1], _transposed(node.args[2]), node.args[0])
    return None


def projections_of(x: fx.Node) -> Iterator[Linear]:
    """All projections of x, also those that take it with its leading axes in one."""
    pending, seen = [x], set()
    while pending:
        for user in pending.pop().users:
            found = linear(user)
            if found is not None and found.x is x:
                yield found
            elif user not in seen and (user.target in _ON_THE_WAY or found is not None):
                seen.add(user)
                pending.append(user)


def _unflattened(node: fx.Node) -> Linear | None:
    """A projection of rows, given the leading axes back that x had before it was seen as rows."""
    inner = source(node)
    found = linear(inner) if inner.target in _MATMULS else None
    if found is None or values.same_shape(values.shape(node), values.shape(inner)):
        return None
    leading = values.shape(node)[:-1]
    x = found.x
    while not values.same_shape(values.shape(x)[:-1], leading):
        if x.target not in ROW_MAJOR_VIEWS or not _same_rows(x, source(x)):
            return None
        x = source(x)
    x = _below_same_views(x)
    return Linear(node, x, found.weight, found.bias) if _same_rows(node, inner) else None


_MATMULS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default})
_ON_THE_WAY = ROW_MAJOR_VIEWS | {aten.expand.default}


def _same_rows(view: fx.Node, below: fx.Node) -> bool:
    """Whether a row-major view has the rows of what is below it."""
    return bool(values.shape(below)) and values.same_shape(values.shape(view)[-1:], values.shape(below)[-1:])


def _unexpanded(node: object, rank: int) -> fx.Node | None:
    """The matrices, below views that change nothing and an expansion of one matrix to a batch of them."""
    while isinstance(node, fx.Node) and node.target in (aten.expand.default, aten.view.default):
        below = source(node)
        shape, below_shape = values.shape(node), values.shape(below)
        if not rank <= len(below_shape) <= len(shape) or not values.same_shape(shape[-len(below_shape) :], below_shape):
            break
        node = below
    return node if isinstance(node, fx.Node) else None


def _transposed(weight: object) -> fx.Node | None:
    """The matrix of which this node is the transpose."""
    if not isinstance(weight, fx.Node) or len(values.shape(weight)) != 2:
        return None
    return source(weight) if permutation(weight) == (1, 0) else None


def _linear(node: fx.Node, x: object, weight: object, bias: object) -> Linear | None:
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node) or len(values.shape(weight)) != 2:
        return None
    if bias is not None and not (
        isinstance(bias, fx.Node) and values.same_shape(values.shape(bias), values.shape(weight)[:1])
    ):
        return None
    return Linear(node, _below_same_views(x), weight, bias)


def _below_same_views(x: fx.Node) -> fx.Node:
    """The node below views that change no shape, as a DTensor has them between its op and its local tensor."""
    while x.target in ROW_MAJOR_VIEWS and values.same_shape(values.shape(x), values.shape(source(x))):
        x = source(x)
    return x
