"""A norm of a residual sum whose 16-bit result is wanted in float32 too:  y = rms_norm(x1 + x2);  y.float().

So the router of a mixture of experts reads it, beside the experts that read y.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import values
from .add_rms_norm import KIND as ADD_RMS_NORM
from .canonical import Canonicaliser
from .match import Findings, Match
from .rms_norm import KIND as RMS_NORM
from .rms_norm import RmsNorm
from .spelling import Spelling, spell

KIND = "norm_cast"
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class NormCast:
    """What one spelling of the norm fixes.

    Args:
        norm: the norm.
        spelling: the formula of its float32 value, over x and weight.
    """

    norm: RmsNorm
    spelling: Spelling

    def public(self) -> dict[str, Any]:
        return self.norm.public() | {"spelling": str(self.spelling)}


def match(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | None:
    """Recognises the first cast to float32 of such a norm, but for the cast that a next norm begins with."""
    if not values.is_float_cast(node) or values.dtype(node) != torch.float32:
        return None
    (y,) = node.all_input_nodes
    norm, add = findings.at(RMS_NORM, y), findings.at(ADD_RMS_NORM, y)
    if norm is None or add is None or values.dtype(y).itemsize != 2:
        return None
    if any(findings.at(KIND, user) is not None for user in y.users) or any(map(_is_square, node.users)):
        return None
    spelling = spell(node, norm.inputs, c)
    if spelling is None:
        return None
    assert isinstance(norm.params, RmsNorm)
    inputs = {**norm.inputs, **add.inputs, "y": y}
    return Match(KIND, node, inputs, NormCast(norm.params, spelling), (*norm.claimed, node), (add, norm))


def _is_square(node: fx.Node) -> bool:
    if node.target is aten.pow.Tensor_Scalar:
        return bool(node.args[1] == 2)
    return node.target is aten.square.default or (node.target is aten.mul.Tensor and node.args[0] is node.args[1])
