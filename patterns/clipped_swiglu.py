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
from .cone import computes, walk
from .match import Findings, Match, Miss
from .spelling import Spelling, spell
from .term import Call, Product, Sum, Term, TermPool

KIND = "clipped_swiglu"
aten = torch.ops.aten


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
    value = c.terms[node]
    if not isinstance(value, Product) or not computes(node):
        return None
    parts = _parts(value, c.pool)
    if parts is None:
        return None
    gate_term, alpha, up_term, bias = parts
    cone = walk(node, lambda n: c.terms[n] in (gate_term, up_term) and _clamp(_uncast(n)) is not None)
    if cone is None or {c.terms[n] for n in cone.inputs} != {gate_term, up_term}:
        return None
    clamps = {term: [_uncast(n) for n in cone.inputs if c.terms[n] is term] for term in (gate_term, up_term)}
    (gate, *gate_bounds), (up, *up_bounds) = (_bounds(min(clamps[term])) for term in (gate_term, up_term))
    if gate_bounds == [-math.inf, math.inf] or up_bounds == [-math.inf, math.inf]:
        return None
    if not values.same_shape(values.shape(gate), values.shape(up)):
        return None
    limit = gate_bounds[1]
    if gate_bounds[0] != -math.inf or up_bounds != [-limit, limit]:
        message = "the gate is bounded by {:g} and {:g}, the value it multiplies by {:g} and {:g}: not by one limit"
        return Miss(KIND, node, message, (*gate_bounds, *up_bounds))
    inputs = {"gate": values.strip_widening(gate), "up": values.strip_widening(up)}
    spelling = spell(node, inputs, c)
    whole = walk(node, lambda n: n in inputs.values())
    if spelling is None or whole is None:
        return Miss(KIND, node, "the gate or the value it multiplies is computed twice, and not alike")
    steps = frozenset(values.dtype(n) for n in whole.nodes if computes(n) or values.is_rounding(n))
    params = ClippedSwiglu(alpha, limit, bias, values.dtype(node), steps, spelling)
    inner = [findings.at(kind, n) for kind in (fast_gelu.KIND, glu.KIND) for n in whole.nodes]
    return Match(KIND, node, inputs, params, whole.nodes, tuple(m for m in inner if m is not None))


def _parts(value: Product, pool: TermPool) -> tuple[Term, float, Term, float] | None:
    """Gate, alpha, up and bias of a product `gate * sigmoid(alpha * gate) * (up + bias)`."""
    factors = dict(value.factors)
    if len(factors) != 2 or any(exponent != 1 for exponent in factors.values()):
        return None
    for silu, other in (factors, reversed(factors)):
        if not isinstance(silu, Call) or silu.name != "silu":
            continue
        (scaled,) = silu.args
        assert isinstance(scaled, Term)
        gates, alpha = pool.factors(scaled)
        if list(gates.values()) != [1] or not math.isclose(alpha * value.coefficient, 1, rel_tol=1e-12):
            continue
        (gate,) = gates
        if isinstance(other, Sum):
            ((up, scale), *others) = other.parts
            return None if others or scale != 1 else (gate, alpha, up, other.constant)
        return gate, alpha, other, 0.0
    return None


def _uncast(node: fx.Node) -> fx.Node:
    while values.is_float_cast(node):
        (node,) = node.all_input_nodes
    return node


def _bounds(node: fx.Node) -> tuple[Any, ...]:
    """What is bounded, and by what below and above; infinite where it is not."""
    low, high = -math.inf, math.inf
    while True:
        given = _clamp(node)
        if given is None:
            return node, low, high
        # The outer bounds hold; of an inner one what lies between them.
        low, high = max(low, min(given[0], high)), min(high, max(given[1], low))
        (node,) = node.all_input_nodes


def _clamp(node: fx.Node) -> tuple[float, float] | None:
    """The bounds of a clamp by numbers."""
    given = [*node.args[1:], None, None][:2]
    if node.target is aten.clamp.default:
        low, high = (node.kwargs.get(name, value) for name, value in zip(("min", "max"), given, strict=True))
    elif node.target is aten.clamp_max.default:
        low, high = None, given[0]
    elif node.target is aten.clamp_min.default:
        low, high = given[0], None
    else:
        return None
    bounds = (-math.inf if low is None else low, math.inf if high is None else high)
    return bounds if all(isinstance(b, (int, float)) for b in bounds) and len(node.all_input_nodes) == 1 else None  # type: ignore[return-value]  # just checked
