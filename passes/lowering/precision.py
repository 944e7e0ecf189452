"""Where a model computes more finely than an op, or rounds on the way to a finer result, the op is not the model's."""

from __future__ import annotations

import torch
from torch import fx

from ...patterns import values
from ...patterns.values import is_widening
from ..edit import Edit, Refused


def refuse_other_precision(result: torch.dtype, *steps: torch.dtype) -> None:
    """Refuses what an op that computes in float32 and rounds to `result` can't stand for.

    Args:
        result: type of the result.
        *steps: types that the model computes in, or rounds to, before.

    Raises:
        Refused: a step is in float64, or holds fewer values than the result.
    """
    for step in steps:
        if step == torch.float64:
            raise Refused("the model computes in torch.float64, the op in torch.float32")
        if not is_widening(result, step):
            raise Refused(f"the model rounds to {step} on the way to a result of {result}; the op does not")


def widened(node: fx.Node, dtype: torch.dtype, edit: Edit) -> fx.Node:
    """A node in a type that holds all its values.

    Raises:
        Refused: `dtype` does not.
    """
    if not is_widening(values.dtype(node), dtype):
        raise Refused(f"its result is {dtype} for an input of {values.dtype(node)}")
    return edit.cast(node, dtype)
