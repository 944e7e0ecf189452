"""A gated unit with bounds, as GPT-OSS has it:

gate = min(gate, limit);  up = clamp(up, -limit, limit);  y = gate * sigmoid(alpha * gate) * (up + bias)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import fast_gelu, glu, values
from .canonical import Canonicaliser
from .captured import Captured, captured
from .cone import computes
from .match import Findings, Match, Miss
from .rule import Argument, Capture, Function, Number
from .spelling import Spelling

KIND = "clipped_swiglu"
aten = torch.ops.aten


_gate, _up = (
    Function("clamp", Capture(name), Argument(f"{name}_low"), Argument(f"{name}_high")) for name in ("gate", "up")
)
_inner = Number("alpha") * _gate
_activated = _gate * Function("sigmoid", _inner) | Number("inverse") * Function("silu", _inner)
PATTERN = _activated * (_up + Number("bias"))


@dataclass(frozen=True, slots=True)
class ClippedSwiglu:
    """What one spelling of the unit fixes.

    Args:
        alpha: what the gate is scaled by inside the sigmoid.
        limit: the bound of gate (above) and up (on both sides).
        bias: what is added to up.
        dtype: type of the result.
        steps: all types that something is computed in or rounded to.
        spelling: the formula, over gate and up.
    """

    alpha: float
    limit: float
    bias: float
    dtype: torch.dtype
    steps: frozenset[torch.dtype]
    spelling: Spelling

    def public(self) -> dict[str, Any]:
        numbers = {"alpha": self.alpha, "limit": self.limit, "bias": self.bias}
        return {**numbers, "dtype": self.dtype, "spelling": str(self.spelling)}


def match(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | Miss | None:
    """Recognises a product of a bounded gate with its sigmoid, and a bounded value of the same shape with a bias."""
    bound = PATTERN.find(c.terms[node], c.pool) if computes(node) else None
    if bound is None:
        return None
    found = captured(KIND, node, {name: bound[name] for name in ("gate", "up")}, c)  # type: ignore[misc]  # terms
    if not isinstance(found, Captured):
        return found
    if not values.same_shape(*(values.shape(n) for n in found.inputs.values())):
        return None
    gate_bounds, up_bounds = ((bound[f"{name}_low"], bound[f"{name}_high"]) for name in ("gate", "up"))
    limit = gate_bounds[1]
    assert isinstance(limit, float)
    if gate_bounds[0] != -math.inf or up_bounds != (-limit, limit):
        message = "the gate is bounded by {:g} and {:g}, the value it multiplies by {:g} and {:g}: not by one limit"
        return Miss(KIND, node, message, (*gate_bounds, *up_bounds))
    alpha, bias = bound["alpha"], bound["bias"]
    assert isinstance(alpha, float)
    assert isinstance(bias, float)
    inverse = bound.get("inverse", 1 / alpha)
    assert isinstance(inverse, float)
    if not math.isclose(alpha * inverse, 1, rel_tol=1e-12):
        return None
    params = ClippedSwiglu(alpha, limit, bias, values.dtype(node), found.steps, found.spelling)
    inner = [findings.at(kind, n) for kind in (fast_gelu.KIND, glu.KIND) for n in found.cone.nodes]
    return Match(KIND, node, found.inputs, params, found.cone.nodes, tuple(m for m in inner if m is not None))
