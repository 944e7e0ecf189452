"""A projection that ranks share by the rows of x:  y = all_reduce(x @ weight.T + bias), the end of a sharded layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..runtime import ranks
from . import values
from .canonical import ALL_REDUCE, WAIT, Canonicaliser
from .cone import walk
from .linear import linear
from .match import Findings, Match
from .spelling import Spelling, spell

KIND = "mm_all_reduce"



@dataclass(frozen=True, slots=True)
class MmAllReduce:
    """What one spelling fixes.

    Args:
        group: the name of the process group.
        ranks: how many there are.
        bias: whether each rank adds one.
        dtype: type of the result.
        spelling: the formula, over x, weight and bias.
    """

    group: str
    ranks: int
    bias: bool
    dtype: torch.dtype
    spelling: Spelling

    def public(self) -> dict[str, Any]:
        return {
            "process_group": self.group,
            "ranks": self.ranks,
            "bias": self.bias,
            "dtype": self.dtype,
            "spelling": str(self.spelling),
        }


def match(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | None:
    """Recognises the wait for a sum over ranks of a projection."""
    reduced = node.args[0] if values.name_of(node.target) == WAIT else None
    if not isinstance(reduced, fx.Node) or values.name_of(reduced.target) != ALL_REDUCE or reduced.kwargs:
        return None
    summed, how, group = reduced.args
    count = ranks.size(group)
    if how != "sum" or count is None or not isinstance(group, str) or not isinstance(summed, fx.Node):
        return None
    product = linear(summed)
    if product is None:
        return None
    inputs = {"x": product.x, "weight": product.weight}
    if product.bias is not None:
        inputs["bias"] = product.bias
    spelling = spell(node, inputs, c)
    cone = walk(node, lambda n: n in inputs.values())
    if spelling is None or cone is None:
        return None
    params = MmAllReduce(group, count, product.bias is not None, values.dtype(node), spelling)
    return Match(KIND, node, inputs, params, cone.nodes)
