"""Gate and up of a gated unit as one tensor, which is how fused ops take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from ...patterns import values
from ...patterns.match import Match
from ...patterns.movement import Sizes, layout, trace
from ..edit import Edit, Refused
from .packing import packed_projection, projections

Arrangement = Literal["gate first", "up first", "gate and up in turn", "up and gate in turn"]


@dataclass(frozen=True, slots=True)
class GateUp:
    """A tensor whose last axis holds gate and up, and how: as halves, or in turn."""

    node: fx.Node
    arrangement: Arrangement


def gate_up(match: Match, edit: Edit) -> GateUp:
    """The tensor that gate and up of a match are cut from; where they are two projections of one x, both as one.

    Raises:
        Refused: they are neither, or their projections can't be packed.
    """
    gate, up = (edit.current(match.inputs[name]) for name in ("gate", "up"))
    cut = _cut(gate, up)
    if cut is not None:
        return cut
    parts = projections((gate, up))
    if parts is None:
        raise Refused("gate and up are neither halves of one tensor nor projections of one x")
    if any(part.node.users.keys() - {*match.claimed} for part in parts):
        raise Refused("gate or up is used elsewhere too, so that its own matmul would stay")
    return GateUp(packed_projection(parts, edit), "gate first")


def _cut(gate: fx.Node, up: fx.Node) -> GateUp | None:
    base, gate_path = trace(gate)
    other, up_path = trace(up)
    if base is not other or values.tensor(base) is None:
        return None
    if not values.same_shape(values.shape(base)[:-1], values.shape(gate)[:-1]):
        return None
    found = {_arrangement(base, gate_path, up_path, Sizes(index)) for index in range(Sizes.COUNT)}
    arrangement = found.pop()
    return None if found or arrangement is None else GateUp(base, arrangement)


def _arrangement(
    base: fx.Node, gate_path: tuple[fx.Node, ...], up_path: tuple[fx.Node, ...], sizes: Sizes
) -> Arrangement | None:
    gate, up = layout(base, gate_path, sizes), layout(base, up_path, sizes)
    if gate is None or up is None or gate.strides != up.strides or gate.sizes != up.sizes:
        return None
    half = gate.sizes[-1]
    *leading, last = torch.empty(gate.source_sizes, device="meta").stride()
    if gate.source_sizes[-1] != 2 * half:
        return None
    arrangements: dict[tuple[tuple[int, ...], int, int], Arrangement] = {
        ((*leading, last), 0, half): "gate first",
        ((*leading, last), half, 0): "up first",
        ((*leading, 2 * last), 0, 1): "gate and up in turn",
        ((*leading, 2 * last), 1, 0): "up and gate in turn",
    }
    return arrangements.get((gate.strides, gate.offset, up.offset))
