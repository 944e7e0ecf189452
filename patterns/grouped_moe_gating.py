"""Experts of a token by sigmoid, out of the best groups, as DeepSeek-V3 chooses them:

scores = sigmoid(x);  choice = scores + bias
experts = top_k(choice of those whose group is one of the k_group best)
weights = scores[experts] / (their sum + eps) * scale
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import values
from .canonical import Canonicaliser
from .cone import walk
from .expert_groups import Groups, read_groups
from .match import Findings, Match, Miss
from .spelling import Spelling, spell
from .top_k import renormalised, top_k

KIND = "grouped_moe_gating"
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class GroupedMoeGating:
    """What one spelling fixes.

    Args:
        k: how many experts.
        groups: how groups of experts are chosen from.
        is_sorted: whether experts come by falling choice; otherwise in no order that one may rely on.
        renormalised: whether the weights are divided by their sum.
        eps: added to the sum.
        scale: what the weights are multiplied by.
        dtype: type of the weights.
        steps: all types that something is computed in or rounded to.
        spelling: the formula of the weights, over x and bias.
        experts: that of the experts.
    """

    k: int
    groups: Groups
    is_sorted: bool
    renormalised: bool
    eps: float
    scale: float
    dtype: torch.dtype
    steps: frozenset[torch.dtype]
    spelling: Spelling
    experts: Spelling

    def public(self) -> dict[str, Any]:
        given = {"k": self.k, "num_groups": self.groups.num_groups, "k_group": self.groups.k_group}
        names = ("renormalised", "scale", "dtype")
        return {**given, **{name: getattr(self, name) for name in names}}


def match(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | Miss | None:
    """Recognises the weights as they are gathered, divided by their sum, scaled; of these the last is kept."""
    scaled, scale = _scaled(node)
    quotient = renormalised(scaled, c)
    weights = scaled if quotient is None else quotient.weights
    if weights.target is not aten.gather.default or weights.kwargs or len(weights.args) != 3:
        return None
    scores, dim, experts = weights.args
    if not isinstance(scores, fx.Node) or scores.target is not aten.sigmoid.default or not isinstance(experts, fx.Node):
        return None
    top = top_k(experts)
    if top is None or top.indices is not experts or dim not in (-1, 1) or len(values.shape(scores)) != 2:
        return None
    if not values.same_shape(values.shape(top.scores), values.shape(scores)):
        return None
    if not top.highest:
        return Miss(KIND, node, "the experts are not the highest along the last axis", place=weights)
    found = read_groups(top.scores, c)
    if isinstance(found, str):
        return Miss(KIND, node, found, place=weights)
    groups, choice = found
    bias = _bias(choice, scores, c)
    if bias is None and c.numbers[choice] != c.numbers[scores]:
        return Miss(KIND, node, "the experts are chosen by something else than their scores and a bias", place=weights)
    inputs = {"x": values.strip_widening(scores.all_input_nodes[0])} | ({} if bias is None else {"bias": bias})
    spelling, chosen = (spell(n, inputs, c) for n in (node, experts))
    if spelling is None or chosen is None:
        return None
    cones = [walk(n, lambda n: n in inputs.values()) for n in (node, experts)]
    nodes = sorted({n for cone in cones if cone is not None for n in cone.nodes})
    floats = [n for n in nodes if values.is_float(n) and n not in inputs.values()]
    params = GroupedMoeGating(
        top.k,
        groups,
        top.is_sorted,
        quotient is not None,
        0.0 if quotient is None else quotient.eps,
        scale,
        values.dtype(node),
        frozenset(values.dtype(n) for n in floats if not values.is_float_cast(n) or values.is_rounding(n)),
        spelling,
        chosen,
    )
    return Match(KIND, node, {**inputs, "scores": scores, "experts": experts}, params, tuple(nodes))


def _scaled(node: fx.Node) -> tuple[fx.Node, float]:
    """What a node multiplies by a number, and the number; the node itself and 1 where it does not."""
    if node.target is not aten.mul.Tensor:
        return node, 1.0
    weights, scale = node.args
    if not isinstance(weights, fx.Node) or not isinstance(scale, (int, float)):
        return node, 1.0
    return weights, float(scale)


def _bias(choice: fx.Node, scores: fx.Node, c: Canonicaliser) -> fx.Node | None:
    """The vector that is added to the scores to choose by; None where nothing is, or something else."""
    if choice.target is not aten.add.Tensor or choice.kwargs:
        return None
    num_experts = values.last_dim(scores)
    for given, bias in (choice.args, choice.args[::-1]):
        if (
            isinstance(given, fx.Node)
            and isinstance(bias, fx.Node)
            and num_experts is not None
            and c.numbers[given] == c.numbers[scores]
            and values.is_vector(bias, num_experts)
        ):
            return bias
    return None
