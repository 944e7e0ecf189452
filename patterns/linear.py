"""A linear projection, however it is spelled:  y = x @ weight.T + bias."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from . import values
from .movement import source

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Linear:
    """A projection of x [..., in_features] by weight [out_features, in_features] and bias [out_features]."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None


PRESERVED = "npu_fuse.linear.default"  # what passes/preserve makes of F.linear


def linear(node: fx.Node) -> Linear | None:
    """Reads a node as a linear projection, else None."""
    if str(node.target) == PRESERVED or node.target is aten.linear.default:
        x, weight = node.args[:2]
        bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
        return _linear(node, x, weight, bias)
    if node.target in (aten.mm.default, aten.matmul.default):
        return _linear(node, node.args[0], _transposed(node.args[1]), None)
    if node.target is aten.addmm.default and not node.kwargs:
        return _linear(node, node.args[1], _transposed(node.args[2]), node.args[0])
    return None


def _transposed(weight: object) -> fx.Node | None:
    """The matrix of which this node is the transpose."""
    if not isinstance(weight, fx.Node) or len(values.shape(weight)) != 2:
        return None
    swaps = ((0, 1), (1, 0), (-1, -2), (-2, -1), (0, -1), (-1, 0), (1, -2), (-2, 1))
    swapped = {
        aten.t.default: lambda: True,
        aten.transpose.int: lambda: weight.args[1:] in swaps,
        aten.permute.default: lambda: tuple(weight.args[1]) in ((1, 0), (-1, -2)),  # type: ignore[arg-type]  # a list
    }.get(weight.target, lambda: False)  # type: ignore[call-overload]  # any target may be asked for
    return source(weight) if swapped() else None


def _linear(node: fx.Node, x: object, weight: object, bias: object) -> Linear | None:
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node) or len(values.shape(weight)) != 2:
        return None
    if bias is not None and not (
        isinstance(bias, fx.Node) and values.same_shape(values.shape(bias), values.shape(weight)[:1])
    ):
        return None
    return Linear(node, x, weight, bias)
