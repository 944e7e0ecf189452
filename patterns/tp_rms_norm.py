"""RMSNorm over an axis that ranks share:  y = x * (all_reduce(mean(x ** 2)) / ranks + eps) ** -0.5 * (offset + weight).

x and weight are a rank's own part of the axis. Whether the sum of squares is added up over the ranks or their mean, and
where it is divided, is one term.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from ..runtime import ranks
from . import rms_norm, values
from .canonical import Canonicaliser
from .match import Findings, Match, Miss
from .movement import source
from .rms_norm import RmsNorm
from .rule import Argument, Capture, Function, Number, Optional
from .term import Product, Sum, Term, calls

KIND = "tp_rms_norm"

_x, _weight = Capture("x"), Capture("weight")
_SUMMED = Number("share") * Function("all_reduce", Function("mean", _x**2, (-1,)), Argument("group"))
PATTERN = _x * (_SUMMED + Number("eps")) ** -0.5 * Optional(_weight + Number("offset"))


@dataclass(frozen=True, slots=True)
class TpRmsNorm:
    """What one spelling fixes.

    Args:
        norm: all that a norm on one rank fixes; its hidden_size is this rank's part.
        group: the name of the process group.
        ranks: how many there are.
    """

    norm: RmsNorm
    group: str
    ranks: int

    def public(self) -> dict[str, Any]:
        return {**self.norm.public(), "process_group": self.group, "ranks": self.ranks}


def match(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | Miss | None:
    """Recognises a node as such a norm, or as the cast of one."""
    if values.is_float_cast(node):
        inner = findings.at(KIND, source(node))
        if inner is None or not values.is_rounding(node) or values.is_float_cast(source(node)):
            return None
        p = inner.params
        assert isinstance(p, TpRmsNorm)
        cast = rms_norm.cast(node, replace(inner, params=p.norm), c)
        return _over_ranks(cast, p.group, p.ranks)
    value = c.terms[node]
    if not isinstance(value, Product) or not any(_is_root_over_ranks(*factor) for factor in value.factors):
        return None
    bound = PATTERN.find(value, c.pool)
    if bound is None:
        return None
    share, group, eps = bound["share"], bound["group"], bound["eps"]
    assert isinstance(share, float)
    assert isinstance(group, str)
    assert isinstance(eps, float)
    count = ranks.size(group)
    if count is None or eps < 0:
        return None
    if not math.isclose(share * count, 1):
        message = "{:g} times the sum over {} ranks of the means of squares is no mean of them"
        return Miss(KIND, node, message, (share, count), matched=2)
    found = rms_norm.read(node, bound, ("x", "weight"), c)
    if found is None or isinstance(found, Miss):
        return found
    return _over_ranks(found, group, count)


def _is_root_over_ranks(factor: Term, exponent: float) -> bool:
    """Whether a factor is the inverse root of what has a sum over ranks in it: most graphs have none."""
    parts = [part for part, _ in factor.parts] if isinstance(factor, Sum) else [factor]
    return exponent == -0.5 and any("all_reduce" in calls(part) for part in parts)


def _over_ranks(norm: Match, group: str, count: int) -> Match:
    assert isinstance(norm.params, RmsNorm)
    return replace(norm, kind=KIND, params=TpRmsNorm(norm.params, group, count))
