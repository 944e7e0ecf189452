"""What the gating of experts is made of: a choice of the k highest, and weights divided by their sum."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from ..runtime.sizes import static_int
from . import values
from .canonical import Canonicaliser

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class TopK:
    """A choice of the k highest.

    Args:
        node: it, of two results.
        scores: what is chosen from.
        k: how many.
        is_sorted: whether they come by falling score; otherwise in no order that one may rely on.
        highest: whether they are the highest along the last axis.
        values: the first result, where it is used.
        indices: the second, likewise.
    """

    node: fx.Node
    scores: fx.Node
    k: int
    is_sorted: bool
    highest: bool
    values: fx.Node | None
    indices: fx.Node | None


def top_k(result: fx.Node) -> TopK | None:
    """Reads the choice of which `result` is one of the two results."""
    node = result.args[0] if result.target is operator.getitem else None
    if not isinstance(node, fx.Node) or node.target is not aten.topk.default:
        return None
    given = dict(zip(("self", "k", "dim", "largest", "sorted"), node.args, strict=False)) | node.kwargs
    scores, k, dim = given["self"], given["k"], given.get("dim", -1)
    if not isinstance(scores, fx.Node) or not isinstance(k, int):
        return None
    results = {user.args[1]: user for user in reversed(node.users)}
    if len(results) < len(node.users):
        return None  # a result taken twice has no one node to stand for it
    highest = dim in (-1, len(values.shape(scores)) - 1) and given.get("largest", True) is True
    return TopK(node, scores, k, given.get("sorted", True) is True, highest, results.get(0), results.get(1))


@dataclass(frozen=True, slots=True)
class Renormalised:
    """Weights divided by their sum along the last axis: `weights / (weights.sum(-1, keepdim=True) + eps)`."""

    weights: fx.Node
    eps: float


def renormalised(node: fx.Node, c: Canonicaliser) -> Renormalised | None:
    """Reads a quotient as renormalised weights, else None."""
    if node.target is not aten.div.Tensor or node.kwargs:
        return None
    weights, divisor = node.args
    if not isinstance(weights, fx.Node) or not isinstance(divisor, fx.Node) or not values.is_float(weights):
        return None
    mean = c.pool.call("mean", c.terms[weights], (-1,))
    addends, eps = c.pool.addends(c.terms[divisor])
    if addends != {mean: values.last_dim(weights)} or static_int(values.shape(divisor)[-1]) != 1:
        return None
    return Renormalised(weights, eps)
