"""The fast GELU, also known as QuickGELU:  y = x * sigmoid(1.702 x)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import glu, values
from .canonical import Canonicaliser
from .captured import Captured, captured
from .cone import computes
from .match import Findings, Match, Miss
from .rule import Bound, Capture, Function, Number
from .spelling import Spelling
from .term import Term, TermPool

KIND = "fast_gelu"
ALPHA = 1.702

PATTERN = Capture("x") * Function("sigmoid", Capture("inner")) | Number("inverse") * Function("silu", Capture("inner"))

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
    bound = PATTERN.find(c.terms[node], c.pool) if computes(node) else None
    if bound is None:
        return None
    x, alpha = _scaled(bound, c.pool)
    if x is None or alpha is None or not math.isclose(alpha, ALPHA, rel_tol=_NEARLY):
        return None
    if alpha != ALPHA:
        return Miss(KIND, node, "x is multiplied by the sigmoid of {:g} x; a fast GELU takes {:g} x", (alpha, ALPHA))
    found = captured(KIND, node, {"x": x}, c)
    if not isinstance(found, Captured):
        return found
    if not values.same_shape(values.shape(found.inputs["x"]), values.shape(node)):
        return None
    params = FastGelu(values.dtype(node), found.steps, found.spelling)
    unit = findings.at(glu.KIND, node)  # what it is too: x, gated by itself
    return Match(KIND, node, found.inputs, params, found.cone.nodes, () if unit is None else (unit,))


def _scaled(bound: Bound, pool: TermPool) -> tuple[Term | None, float | None]:
    """x, and what it is multiplied by inside the activation."""
    x, inner, inverse = bound.get("x"), bound["inner"], bound.get("inverse")
    assert isinstance(inner, Term)
    if isinstance(x, Term):
        return x, pool.ratio(inner, x)
    assert isinstance(inverse, float)
    alpha = ALPHA if math.isclose(inverse * ALPHA, 1, rel_tol=1e-12) else 1 / inverse if inverse else 0.0
    return (pool.divide(inner, pool.number(alpha)), alpha) if alpha else (None, None)
