"""Gated linear unit:  y = activation(gate) * up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import values
from .canonical import Canonicaliser
from .cone import computes, walk
from .match import Findings, Match, Miss
from .rms_norm import RmsNorm
from .rule import Capture, Function
from .spelling import Spelling, spell
from .term import Product

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
    if not isinstance(value, Product) or values.is_float_cast(node) or not computes(node):
        return None
    for activation, pattern in PATTERNS.items():
        bound = pattern.find(value, c.pool)
        if bound is None or _is_gated_norm(node, findings):
            continue
        gate, up = bound["gate"], bound["up"]
        cone = walk(node, lambda n, taken=(gate, up): c.terms[n] in taken)  # type: ignore[misc]  # bound per turn
        if cone is None or any(c.terms[n] not in (gate, up) for n in cone.inputs):
            continue
        inputs = {
            name: min(values.strip_widening(n) for n in cone.inputs if c.terms[n] is term)
            for name, term in (("gate", gate), ("up", up))
            if any(c.terms[n] is term for n in cone.inputs)
        }
        if len(inputs) < 2 or not values.same_shape(*map(values.shape, inputs.values())):
            continue
        spelling = spell(node, inputs, c)
        numbers = {c.numbers[n] for n in inputs.values()}
        cone = walk(node, lambda n, taken=numbers: c.numbers[n] in taken)  # type: ignore[misc]  # likewise
        if spelling is None or cone is None:
            return Miss(KIND, node, "the gate or the value it multiplies is computed twice, and not alike")
        active = [n for n in cone.nodes if computes(n) or values.is_rounding(n)]
        activated = c.pool.call(activation, gate)
        dtype = values.dtype(node)
        params = Glu(
            activation,
            min((values.dtype(n) for n in active if c.terms[n] is activated), key=_itemsize, default=dtype),
            dtype,
            frozenset(values.dtype(n) for n in active),
            spelling,
        )
        return Match(KIND, node, inputs, params, cone.nodes)
    return None


def _itemsize(dtype: torch.dtype) -> int:
    return dtype.itemsize


def _is_gated_norm(node: fx.Node, findings: Findings) -> bool:
    norm = findings.at("rms_norm", node)
    return norm is not None and isinstance(norm.params, RmsNorm) and norm.params.gate is not None
