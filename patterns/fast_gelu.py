"""The fast GELU, also known as QuickGELU:  y = x * sigmoid(1.702 x)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import values
from .canonical import Canonicaliser
from .cone import computes, walk
from .match import Findings, Match, Miss
from .spelling import Spelling, spell
from .term import Call, Term, TermPool

KIND = "fast_gelu"
ALPHA = 1.702

# By how much another factor may differ for a spelling to be a near miss.
_NEARLY = 0.02


@dataclass(frozen=True, slots=True)
class FastGelu:
    """What one spelling of a fast GELU fixes.

    Args:
        dtype: type of the result.
        steps: all types that something is computed in or rounded to.
        spelling: the formula, over x.
    """

    dtype: torch.dtype
    steps: frozenset[torch.dtype]
    spelling: Spelling

    def public(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "spelling": str(self.spelling)}


def match(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | Miss | None:
    """Recognises a value that is multiplied by the sigmoid of 1.702 times itself."""
    if not values.is_float(node) or not computes(node):
        return None
    gated = _gated_by_itself(c.terms[node], c.pool)
    if gated is None:
        return None
    x_term, alpha = gated
    cone = walk(node, lambda n: c.terms[n] is x_term)
    if cone is None or not cone.inputs or any(c.terms[n] is not x_term for n in cone.inputs):
        return None
    x = min(values.strip_widening(n) for n in cone.inputs)
    if not values.same_shape(values.shape(x), values.shape(node)):
        return None
    if alpha != ALPHA:
        return Miss(KIND, node, "x is multiplied by the sigmoid of {:g} x; a fast GELU takes {:g} x", (alpha, ALPHA))
    spelling = spell(node, {"x": x}, c)
    if spelling is None:
        return Miss(KIND, node, "x is computed twice, and not alike")
    steps = frozenset(values.dtype(n) for n in cone.nodes if computes(n) or values.is_rounding(n))
    return Match(KIND, node, {"x": x}, FastGelu(values.dtype(node), steps, spelling), cone.nodes)


def _gated_by_itself(term: Term, pool: TermPool) -> tuple[Term, float] | None:
    """The x and the alpha of a term `x * sigmoid(alpha * x)`, with an alpha that is nearly that of the fast GELU."""
    factors, coefficient = pool.factors(term)
    for factor, exponent in factors.items():
        if not isinstance(factor, Call) or exponent != 1:
            continue
        inner = factor.args[0] if factor.args else None
        if not isinstance(inner, Term):
            continue
        if factor.name == "sigmoid":
            x = pool.divide(term, factor)
            if x is not None and pool.mul(x, pool.number(ALPHA)) is inner:
                return x, ALPHA
        elif factor.name == "silu" and len(factors) == 1:
            _, scale = pool.factors(inner)
            alpha = ALPHA if math.isclose(coefficient * ALPHA, 1, rel_tol=1e-12) else scale
            if abs(alpha - ALPHA) < _NEARLY and math.isclose(coefficient * alpha, 1, rel_tol=1e-12):
                x = pool.divide(inner, pool.number(alpha))
                return None if x is None else (x, alpha)
    return None
