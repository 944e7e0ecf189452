"""Group normalisation and the silu behind it:  y = silu(group_norm(x))."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import values
from .canonical import Canonicaliser
from .cone import computes, operand, walk
from .match import Findings, Match, Miss
from .spelling import Spelling, spell
from .term import Call

KIND = "group_norm_silu"
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class GroupNormSilu:
    """What one spelling fixes.

    Args:
        group: into how many groups the channels are cut.
        eps: added to the variance.
        weight: whether there is one.
        bias: likewise.
        normed_dtype: the narrowest type that the norm takes before silu.
        dtype: type of the result.
        steps: all types that something is computed in or rounded to.
        spelling: the formula, over x, weight and bias.
    """

    group: int
    eps: float
    weight: bool
    bias: bool
    normed_dtype: torch.dtype
    dtype: torch.dtype
    steps: frozenset[torch.dtype]
    spelling: Spelling

    def public(self) -> dict[str, Any]:
        numbers = {"group": self.group, "eps": self.eps, "weight": self.weight, "bias": self.bias}
        return {**numbers, "dtype": self.dtype, "spelling": str(self.spelling)}


def match(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | Miss | None:
    """Recognises silu, however it is spelled, of a group norm."""
    value = c.terms[node]
    if not isinstance(value, Call) or value.name != "silu" or not computes(node):
        return None
    (normed,) = value.args
    cone = walk(node, lambda n: c.terms[n] is normed)
    if cone is None or len({operand(n).node for n in cone.inputs}) != 1:
        return None
    result = operand(cone.inputs[0]).node
    norm = result.args[0] if result.target is operator.getitem and result.args[1] == 0 else None
    if (
        c.terms[result] is not normed
        or not isinstance(norm, fx.Node)
        or norm.target is not aten.native_group_norm.default
    ):
        return None
    x, weight, bias, batch, channels, _, group, eps = norm.args
    assert isinstance(x, fx.Node)
    assert isinstance(group, int)
    sizes: list[Any] = [size.meta["val"] if isinstance(size, fx.Node) else size for size in (batch, channels)]
    if not values.same_shape(sizes, values.shape(x)[:2]):
        return None
    if not isinstance(eps, float):
        return Miss(KIND, node, "eps is no number known at compile time")
    given = {"x": values.strip_widening(x), "weight": weight, "bias": bias}
    inputs = {name: n for name, n in given.items() if isinstance(n, fx.Node)}
    spelling = spell(node, inputs, c)
    whole = walk(node, lambda n: n in inputs.values())
    if spelling is None or whole is None:
        return Miss(KIND, node, "the norm is computed twice, and not alike")
    rounded = (values.dtype(n) for n in whole.nodes if values.is_rounding(n))
    steps = frozenset({values.dtype(result), *rounded, *(values.dtype(n) for n in cone.nodes if computes(n))})
    normed_dtype = min((operand(n).dtype for n in cone.inputs), key=lambda dtype: dtype.itemsize)
    params = GroupNormSilu(
        group, eps, weight is not None, bias is not None, normed_dtype, values.dtype(node), steps, spelling
    )
    return Match(KIND, node, inputs, params, whole.nodes)
