"""Several projections of one x as one matmul."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from ...patterns import values
from ...patterns.linear import Linear, linear
from ...runtime.sizes import is_contiguous
from ...runtime.weights import pack
from ..rewriter import Edit, Refused

aten = torch.ops.aten


def projections(nodes: Sequence[fx.Node]) -> list[Linear] | None:
    """The nodes as projections of one x, or None."""
    found = [linear(node) for node in nodes]
    whole = [projection for projection in found if projection is not None]
    return whole if len(whole) == len(found) and len({p.x for p in whole}) == 1 else None


def packed_projection(parts: Sequence[Linear], edit: Edit) -> fx.Node:
    """One projection whose columns are those of `parts` in order.

    Raises:
        Refused: the weights are no parameters, differ in type, or only some have a bias.
    """
    if not edit.rewriter.pack_weights:
        raise Refused("its projections are separate and Options.pack_weights is off")
    weights = [_parameter(p.weight, edit) for p in parts]
    biases = [p.bias for p in parts]
    arguments = [edit.current(parts[0].x), edit.call(pack, weights, shaped_as=torch.cat)]
    present = [bias for bias in biases if bias is not None]
    if present:
        if len(present) != len(biases):
            raise Refused("some of its projections have a bias and some have none")
        arguments.append(edit.call(pack, [_parameter(bias, edit) for bias in present], shaped_as=torch.cat))
    return edit.call(aten.linear.default, *arguments)


def _parameter(weight: fx.Node, edit: Edit) -> fx.Node:
    weight = edit.current(weight)
    value = values.tensor(weight)
    assert value is not None
    if weight.op != "placeholder" or weight not in edit.rewriter.parameters:
        raise Refused("a weight of its projections is computed or passed in, not a parameter of the model")
    if not is_contiguous(value):
        raise Refused(f"a weight of its projections is not contiguous: strides {tuple(value.stride())}")
    return weight
