"""Gated linear unit:  y = activation(gate) * up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import values
from .canonical import Canonicaliser
from .cone import computes, operand, walk
from .match import Findings, Match, Miss
from .term import Call, Term

KIND = "glu"
aten = torch.ops.aten
ACTIVATIONS = frozenset({"silu", "sigmoid", "gelu", "gelu_tanh", "relu"})


@dataclass(frozen=True, slots=True)
class Glu:
    """What one spelling of a gated unit fixes.

    Args:
        activation: "silu", "sigmoid", "gelu", "gelu_tanh" or "relu".
        activation_dtype: type in which the activation is computed.
        activated_dtype: type to which it is rounded before the product.
        dtype: type of the product.
        spelled_out: whether silu is written as gate * sigmoid(gate).
    """

    activation: str
    activation_dtype: torch.dtype
    activated_dtype: torch.dtype
    dtype: torch.dtype
    spelled_out: bool

    def public(self) -> dict[str, Any]:
        return {"activation": self.activation, "dtype": self.dtype}


_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "sigmoid": torch.sigmoid,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
}


def reference(gate: torch.Tensor, up: torch.Tensor, p: Glu) -> torch.Tensor:
    """The spelling that `p` was read from, in plain torch: equal to it bit for bit in eager execution.

    Args:
        gate: [..., n].
        up: likewise.
        p: a recognised spelling.
    """
    gate = gate.to(p.activation_dtype)
    activated = gate * torch.sigmoid(gate) if p.spelled_out else _FUNCTIONS[p.activation](gate)
    return activated.to(p.activated_dtype).to(p.dtype) * up.to(p.dtype)


def match(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | Miss | None:
    """Recognises a product of an activation and another value of the same shape."""
    if node.target is not aten.mul.Tensor or not values.is_float(node):
        return None
    for gate_side, up in (node.args[:2], node.args[1::-1]):
        if not isinstance(gate_side, fx.Node) or not isinstance(up, fx.Node):
            return None
        activation = c.terms[gate_side]
        if not isinstance(activation, Call) or activation.name not in ACTIVATIONS:
            continue
        (gate_term,) = activation.args
        assert isinstance(gate_term, Term)
        if c.terms[up] is gate_term:
            return None  # x * sigmoid(x) is silu itself
        cone = walk(gate_side, lambda n, gate=gate_term: c.terms[n] is gate)  # type: ignore[misc]  # bound per turn
        if cone is None or any(c.terms[n] is not gate_term for n in cone.inputs):
            continue
        gates = {values.strip_widening(n) for n in cone.inputs}
        if len(gates) != 1:
            return Miss(KIND, node, "the gate is rounded on one of two ways into the activation")
        (gate,) = gates
        if not values.same_shape(values.shape(gate), values.shape(up)):
            continue
        activated = operand(gate_side)
        computing = [n for n in cone.nodes if computes(n)]
        spelled_out = [n.target for n in computing] == [aten.sigmoid.default, aten.mul.Tensor]
        known = {*activated.roundings, *(computing if spelled_out else computing[-1:])}
        rounded = any(computes(n) or values.is_rounding(n) for n in cone.nodes if n not in known)
        dtypes = {values.dtype(n) for n in computing}
        if rounded or len(activated.roundings) > 1 or len(dtypes) > 1:
            return Miss(KIND, node, "the activation is rounded on the way, or more than once behind it")
        params = Glu(activation.name, dtypes.pop(), activated.dtype, values.dtype(node), spelled_out)
        inputs = {"gate": gate, "up": values.strip_widening(up)}
        return Match(KIND, node, inputs, params, (*cone.nodes, node))
    return None
