"""A norm whose result is quantised to int8:  q = quantise(rms_norm(x)), where x may be a residual sum.

The scale of the quantiser is given, or it is each row's own; that of the row is a second result then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from . import values
from .add_rms_norm import KIND as ADD_RMS_NORM
from .canonical import Canonicaliser
from .match import Findings, Match, Miss
from .movement import COPIES, ROW_MAJOR_VIEWS
from .norm_cast import KIND as NORM_CAST
from .quantiser import Dynamic, Static, Unlike, read
from .rms_norm import KIND as RMS_NORM
from .rms_norm import RmsNorm
from .spelling import Spelling, spell

KIND = "norm_quant"


@dataclass(frozen=True, slots=True)
class NormQuant:
    """What one spelling of a quantised norm fixes.

    Args:
        norm: the norm.
        quantiser: how its result is quantised.
        residual: whether x is a residual sum.
        spelling: the formula of the int8 value, over x, weight, and the tensors that the quantiser is given.
    """

    norm: RmsNorm
    quantiser: Static | Dynamic
    residual: bool
    spelling: Spelling

    def public(self) -> dict[str, Any]:
        return {
            "mode": "static" if isinstance(self.quantiser, Static) else "dynamic",
            "residual": self.residual,
            "eps": self.norm.eps,
            "hidden_size": self.norm.hidden_size,
            "spelling": str(self.spelling),
        }


def match(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | Miss | None:
    """Recognises an int8 value as a quantised norm.

    The inputs of a match are those of the norm and of its add, those given to the quantiser, and besides: "y", the
    norm's result; "rows", what of it is quantised, a view perhaps; "row_scale", the scales that are a second result.
    """
    reading = read(node, lambda below: _norm(below, findings) is not None, c)
    if reading is None:
        return None
    norm = _norm(reading.y, findings)
    assert norm is not None
    assert isinstance(norm.params, RmsNorm)
    if isinstance(reading, Unlike):
        return Miss(KIND, node, reading.message, reading.details, place=reading.y)
    add = findings.at(ADD_RMS_NORM, norm.node)
    spelled_from = {**norm.inputs, **reading.given}
    spelling = spell(node, spelled_from, c)
    if spelling is None:
        return Miss(KIND, node, "the norm, or what it is quantised by, is computed twice, and not alike")
    inputs = {**spelled_from, **(add.inputs if add is not None else {}), "y": norm.node, "rows": reading.y}
    if reading.row_scale is not None:
        inputs["row_scale"] = reading.row_scale
    claimed = {*norm.claimed, *_views(reading.y), *reading.claimed}
    casts = [findings.at(NORM_CAST, step) for step in reading.claimed]
    parts = tuple(part for part in (add, norm, *casts) if part is not None)
    params = NormQuant(norm.params, reading.quantiser, add is not None, spelling)
    return Match(KIND, node, inputs, params, tuple(sorted(claimed)), parts)


def _norm(node: fx.Node, findings: Findings) -> Match | None:
    """The norm that a node is the result of, seen through views that keep its rows."""
    views = _views(node)
    return findings.at(RMS_NORM, views[-1].all_input_nodes[0] if views else node)


def _views(node: fx.Node) -> list[fx.Node]:
    """The views and copies from `node` down that keep rows as they are."""
    found: list[fx.Node] = []
    while node.target in ROW_MAJOR_VIEWS | COPIES and _keeps_rows(node):
        found.append(node)
        node = node.all_input_nodes[0]
    return found


def _keeps_rows(node: fx.Node) -> bool:
    if values.tensor(node) is None or values.tensor(node.args[0]) is None:
        return False
    size = values.last_dim(node)
    return size is not None and size == values.last_dim(node.all_input_nodes[0])
