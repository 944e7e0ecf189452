"""The scores of attention, however they are spelled:  scale * q k^T, with what is added to them and done to them."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..runtime.sizes import Size
from . import values
from .linear import is_matmul
from .mask import lowest
from .masks.constant_mask import constant
from .masks.creation import lifted
from .movement import COPIES, ROW_MAJOR_VIEWS, changes_nothing, permutation, source
from .repeated_heads import repeated_heads

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand of a matmul of attention, below all that is no part of its value.

    Args:
        node: the tensor: [batch, heads, tokens, head_dim], or [batch, tokens, head_dim].
        transposed: whether its last two axes are the other way round.
        scale: a number that it is multiplied by on the way.
        repeats: how many query heads in a row share each of its heads, by repeating them on the way.
        merged: whether batch and heads are made one axis on the way.
    """

    node: fx.Node
    transposed: bool = False
    scale: float = 1.0
    repeats: int = 1
    merged: bool = False


@dataclass(frozen=True, slots=True)
class Addition:
    """What hides keys, or is added to the scores.

    Args:
        node: a bool tensor, or a float one that is added.
        hides: whether True hides a key, in a bool tensor.
        fill: the score that a hidden key gets, by a bool tensor.
        lowest: a score that is as low as a hidden key's has to be, in their type.
        shape: the shape of the scores to which it is added, which it broadcasts to.
    """

    node: fx.Node
    hides: bool = False
    fill: float = -math.inf
    lowest: float = -math.inf
    shape: tuple[Size, ...] = ()


@dataclass(frozen=True, slots=True)
class Scores:
    """scale * q k^T + additions.

    Args:
        q: the left operand.
        k: the right one, with its last two axes swapped.
        scale: what the product is multiplied by, without the scales of the operands.
        additions: in order.
        traits: what else is done, which makes them other scores: "soft-capping", "a scaled mask".
    """

    q: Operand
    k: Operand
    scale: float = 1.0
    additions: tuple[Addition, ...] = ()
    traits: tuple[str, ...] = ()

    def scaled(self, by: float) -> Scores:
        """All of it times a number. A key that -inf hides stays hidden."""
        stays = by > 0 and all(a.fill == -math.inf and values.dtype(a.node) == torch.bool for a in self.additions)
        traits = self.traits if stays or by == 1 or not self.additions else (*self.traits, "a mask that is scaled")
        return replace(self, scale=self.scale * by, traits=traits)

    def plus(self, addition: Addition) -> Scores:
        return replace(self, additions=(*self.additions, addition))

    def having(self, trait: str) -> Scores:
        return replace(self, traits=(*self.traits, trait))


def scores(node: fx.Node) -> Scores | None:
    """Reads a node as scores, else None."""
    op: Any = node.target
    if is_matmul(node):
        return _product(*node.args[:2])
    if changes_no_value(node):
        return scores(source(node))
    if (factor := _factor(node)) is not None:
        below, by = factor
        if (capped := _soft_capped(below)) is not None:
            return capped.having("soft-capping")
        inner = scores(below)
        return inner.scaled(by) if inner is not None else None
    if op is aten.baddbmm.default:
        return _baddbmm(node)
    if op is aten.add.Tensor and node.kwargs.get("alpha", 1) == 1:
        return _sum(node)
    if op is aten.sub.Tensor and _is_row_maximum(node.args[1], node.args[0]):
        return scores(source(node))  # softmax doesn't see it
    if op in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        return _filled(node, node.args[0], node.args[1], True, _number(node.args[2]))
    if op is aten.where.self:
        seen, chosen, other = node.args
        for inside, fill, hides in ((chosen, other, False), (other, chosen, True)):
            number = _number(_of_one_number(fill))
            if not math.isnan(number):
                return _filled(node, inside, seen, hides, number)
    return None


def changes_no_value(node: fx.Node) -> bool:
    """True for casts, copies, and views that keep the last two axes."""
    if values.is_float_cast(node) or node.target in COPIES or changes_nothing(node):
        return True
    if node.target in ROW_MAJOR_VIEWS:
        before, after = values.shape(source(node)), values.shape(node)
        return min(len(before), len(after)) >= 2 and values.same_shape(before[-2:], after[-2:])
    return False


def _factor(node: fx.Node) -> tuple[fx.Node, float] | None:
    """What a node multiplies by a number, and the number."""
    if node.target not in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
        return None
    divides = node.target in (aten.div.Tensor, aten.div.Scalar)
    for below, by in (node.args,) if divides else (node.args, node.args[::-1]):
        number = _number(by)
        if isinstance(below, fx.Node) and values.is_float(below) and not math.isnan(number):
            if divides:
                return (below, 1 / number) if number else None
            return below, number
    return None


def _number(value: object) -> float:
    """A number, or a tensor of no axes that is one; NaN for anything else."""
    if isinstance(value, fx.Node) and values.tensor(value) is not None and not values.shape(value):
        found = lifted(value)
        if found is None:
            found = constant(value, rounds=True)
        return math.nan if found is None else float(found)
    return float(value) if isinstance(value, (int, float)) else math.nan


def _of_one_number(value: object) -> object:
    """The number that a tensor is filled with, where its type holds that; else the value as it is."""
    if not isinstance(value, fx.Node) or value.target not in (aten.full.default, aten.full_like.default):
        return value
    number: Any = value.args[1]
    exact = isinstance(number, (int, float)) and torch.tensor(number, dtype=values.dtype(value)).item() == number
    return number if exact else value


def _soft_capped(node: fx.Node) -> Scores | None:
    """tanh(scores / cap), which a factor brings back to the size of scores."""
    while changes_no_value(node):
        node = source(node)
    return scores(source(node)) if node.target is aten.tanh.default else None


def _sum(node: fx.Node) -> Scores | None:
    for below, added in (node.args[:2], node.args[1::-1]):
        if not isinstance(below, fx.Node) or not isinstance(added, fx.Node) or not _has_shape_of(below, node):
            continue
        inner = scores(below)
        if inner is not None and values.is_float(added):
            return inner.plus(Addition(values.strip_widening(added), shape=values.shape(node)))
    return None


def _filled(node: fx.Node, below: object, mask: object, hides: bool, fill: float) -> Scores | None:
    """Scores in which a number stands at hidden keys."""
    inner = scores(below) if isinstance(below, fx.Node) and _has_shape_of(below, node) else None
    if inner is None or not isinstance(mask, fx.Node) or math.isnan(fill):
        return None
    return inner.plus(Addition(mask, hides, fill, lowest(values.dtype(node)), values.shape(node)))


def _has_shape_of(below: fx.Node, node: fx.Node) -> bool:
    """Whether a term or a choice is as large as the result: a mask is never larger than the scores."""
    return values.tensor(below) is not None and values.same_shape(values.shape(below), values.shape(node))


def _is_row_maximum(node: object, of: object) -> bool:
    """Whether a node is the maximum of each row of x, as amax or max give it, with its last axis kept."""
    if not isinstance(node, fx.Node) or not isinstance(of, fx.Node):
        return False
    if node.target in COPIES:
        node = source(node)
    if node.target is operator.getitem and node.args[1] == 0:
        node = source(node)
    if node.target not in (aten.amax.default, aten.max.dim) or node.args[0] is not of:
        return False
    given: Any = {**dict(zip(("dim", "keepdim"), node.args[1:], strict=False)), **node.kwargs}
    return is_last(given.get("dim"), of) and given.get("keepdim") is True


def is_last(dim: Any, node: fx.Node) -> bool:
    """Whether a dim, or a list of one, is the last axis of a node."""
    if isinstance(dim, (list, tuple)):
        (dim,) = dim if len(dim) == 1 else (None,)
    return isinstance(dim, int) and dim in (-1, len(values.shape(node)) - 1)


def _product(left: object, right: object) -> Scores | None:
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return None
    return Scores(operand(left), operand(right, transposed=True))


def _baddbmm(node: fx.Node) -> Scores | None:
    added, left, right = node.args
    beta, alpha = (node.kwargs.get(name, 1) for name in ("beta", "alpha"))
    product = _product(left, right)
    if product is None or not isinstance(alpha, (int, float)) or not isinstance(added, fx.Node):
        return None
    product = product.scaled(float(alpha))
    if beta == 0:
        return product
    if beta != 1:
        product = product.having(f"a bias times {beta}")
    return product.plus(Addition(values.strip_widening(added), shape=values.shape(node)))


def operand(node: fx.Node, *, transposed: bool = False, takes_factors: bool = True) -> Operand:
    """Goes down from an operand of a matmul to the tensor that it is.

    Args:
        node: the operand.
        transposed: whether its tokens are its last axis.
        takes_factors: whether a number that it is multiplied by is taken off.
    """
    found = Operand(node, transposed)
    while True:
        node, rank = found.node, len(values.shape(found.node))
        repeated = repeated_heads(node) if rank == 4 else None
        if (values.is_float_cast(node) and not values.is_rounding(node)) or node.target in _AS_IT_IS:
            found = replace(found, node=source(node))
        elif takes_factors and (factor := _factor(node)) is not None:
            found = replace(found, node=factor[0], scale=found.scale * factor[1])
        elif found.transposed and _swaps_last_two(node):
            found = replace(found, node=source(node), transposed=False)
        elif node.target in _VIEWS and values.same_shape(values.shape(source(node)), values.shape(node)):
            found = replace(found, node=source(node))
        elif rank == 3 and not found.merged and _merges_batch_and_heads(node):
            found = replace(found, node=source(node), merged=True)
        elif repeated is not None and found.repeats == 1 and not found.transposed:
            found = replace(found, node=repeated[0], repeats=repeated[1])
        else:
            return found


_VIEWS = ROW_MAJOR_VIEWS | {aten.expand.default, aten.slice.Tensor}
_AS_IT_IS = COPIES | {aten.alias.default, aten.detach.default}


def _swaps_last_two(node: fx.Node) -> bool:
    rank = len(values.shape(node))
    return permutation(node) == (*range(rank - 2), rank - 1, rank - 2)


def _merges_batch_and_heads(node: fx.Node) -> bool:
    if node.target not in ROW_MAJOR_VIEWS:
        return False
    before = values.shape(source(node))
    return len(before) == 4 and values.same_shape(before[-2:], values.shape(node)[-2:])
