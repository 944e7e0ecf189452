"""RMSNorm of a residual add:  s = x1 + x2;  y = rms_norm(s).

Both s and y may have other users; between them s may be cast, and its axes cut or joined in row-major order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import values
from .canonical import Canonicaliser
from .match import Findings, Match
from .movement import ROW_MAJOR_VIEWS, trace
from .rms_norm import RmsNorm

KIND = "add_rms_norm"
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class AddRmsNorm:
    """The norm, and nothing more: the add has operands of one shape, and no factor."""

    norm: RmsNorm

    def public(self) -> dict[str, Any]:
        return self.norm.public()


def match(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | None:
    """Recognises a norm whose input is the sum of two tensors of its own shape."""
    norm = findings.at("rms_norm", node)
    if norm is None:
        return None
    add, _ = trace(norm.inputs["x"], lambda n: values.is_float_cast(n) or n.target in ROW_MAJOR_VIEWS)
    if findings.at("rope", add) is not None:
        return None  # the sum inside a rotation is no residual
    if add.target is not aten.add.Tensor or add.kwargs.get("alpha", 1) != 1 or len(add.args) != 2:
        return None
    x1, x2 = add.args
    if not isinstance(x1, fx.Node) or not isinstance(x2, fx.Node):
        return None
    if any(not values.same_shape(values.shape(x), values.shape(add)) for x in (x1, x2)):
        return None
    assert isinstance(norm.params, RmsNorm)
    inputs = {**norm.inputs, "x1": x1, "x2": x2, "sum": add}
    return Match(KIND, node, inputs, AddRmsNorm(norm.params), norm.claimed, (norm,))
