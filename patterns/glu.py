"""Gated linear unit:  y = activation(gate) * up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import values
from .canonical import Canonicaliser
from .captured import captured, narrowest
from .cone import computes
from .match import Findings, Match, Miss
from .rms_norm import RmsNorm
from .rule import Capture, Function
from .spelling import Spelling
from .term import Product, Term

KIND = "glu"
ACTIVATIONS = ("silu", "sigmoid", "gelu", "gelu_tanh", "relu")

PATTERNS = {name: Function(name, Capture("gate")) * Capture("up") for name in ACTIVATIONS}


@dataclass(frozen=True, slots=True)
class Glu:
    """What one spelling of a gated unit fixes.

    Args:
        activation: "silu", "sigmoid", "gelu", "gelu_tanh" or "relu".
        activated_dtype: the narrowest type that the activation takes before the product; the type of the product where
            it is multiplied in step by step.
        dtype: type of the product.
        steps: all types that something is computed in or rounded to.
        spelling: the formula, over gate and up.
    """

    activation: str
    activated_dtype: torch.dtype
    dtype: torch.dtype
    steps: frozenset[torch.dtype]
    spelling: Spelling

    def public(self) -> dict[str, Any]:
        return {"activation": self.activation, "dtype": self.dtype, "spelling": str(self.spelling)}


def match(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | Miss | None:
    """Recognises a product of an activation and another value of the same shape."""
    value = c.terms[node]
    if not isinstance(value, Product) or not computes(node) or _is_gated_norm(node, findings):
        return None
    for activation, pattern in PATTERNS.items():
        bound = pattern.find(value, c.pool)
        terms = {name: term for name, term in (bound or {}).items() if isinstance(term, Term)}
        found = captured(KIND, node, terms, c) if terms else None
        if isinstance(found, Miss):
            return found
        if found is None or not values.same_shape(*map(values.shape, found.inputs.values())):
            continue
        activated = c.pool.call(activation, terms["gate"])
        dtype = values.dtype(node)
        activated_dtype = narrowest([n for n in found.active if c.terms[n] is activated], dtype)
        params = Glu(activation, activated_dtype, dtype, found.steps, found.spelling)
        return Match(KIND, node, found.inputs, params, found.cone.nodes)
    return None


def _is_gated_norm(node: fx.Node, findings: Findings) -> bool:
    norm = findings.at("rms_norm", node)
    return norm is not None and isinstance(norm.params, RmsNorm) and norm.params.gate is not None
