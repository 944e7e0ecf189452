"""Experts of a token by softmax:  weights, experts = top_k(softmax(x)), over the last axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import values
from .canonical import Canonicaliser
from .cone import walk
from .match import Findings, Match, Miss
from .spelling import Spelling, spell
from .top_k import renormalised, top_k

KIND = "moe_gating"
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class MoeGating:
    """What one spelling fixes.

    Args:
        k: how many experts.
        is_sorted: whether they come by falling score; otherwise in no order that one may rely on.
        renormalised: whether the weights are divided by their sum.
        dtype: type of the weights.
        spelling: the formula of the weights, over x.
        experts: that of the experts.
    """

    k: int
    is_sorted: bool
    renormalised: bool
    dtype: torch.dtype
    spelling: Spelling
    experts: Spelling

    def public(self) -> dict[str, Any]:
        given = {"k": self.k, "renormalised": self.renormalised, "dtype": self.dtype}
        return {**given, "spelling": str(self.spelling)}


def match(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | Miss | None:
    """Recognises the k highest of a softmax, and where they are divided by their sum, the quotient in their place."""
    quotient = renormalised(node, c)
    top = top_k(node if quotient is None else quotient.weights)
    if top is None or top.values is None or top.indices is None or top.scores.target is not aten._softmax.default:
        return None
    if quotient is None and node is not max(top.values, top.indices):
        return None  # both have to be known
    root = top.values if quotient is None else node
    if quotient is not None and quotient.weights is not top.values:
        return None
    if not top.highest:
        return Miss(KIND, node, "the experts are not the highest along the last axis")
    if top.scores.args[1] not in (-1, len(values.shape(top.scores)) - 1):
        return Miss(KIND, node, "the softmax is taken along another axis than the choice")
    x = values.strip_widening(top.scores.all_input_nodes[0])
    weights, experts = (spell(n, {"x": x}, c) for n in (root, top.indices))
    cones = [walk(n, lambda n: n is x) for n in (root, top.indices)]
    if weights is None or experts is None:
        return None
    claimed = {n for cone in cones if cone is not None for n in cone.nodes}
    params = MoeGating(top.k, top.is_sorted, quotient is not None, values.dtype(root), weights, experts)
    return Match(KIND, root, {"x": x, "scores": top.scores, "experts": top.indices}, params, tuple(sorted(claimed)))
