"""Groups of experts of which only the best are chosen from: what a mask over the choice of experts means."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..runtime.sizes import static_int
from . import values
from .canonical import Canonicaliser
from .movement import ROW_MAJOR_VIEWS, Sizes, concrete, is_movement
from .top_k import top_k

aten = torch.ops.aten

_NOT = frozenset({aten.bitwise_not.default, aten.logical_not.default})
_CONSTANTS: Mapping[Any, int] = {
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), 0),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), 1),
}


@dataclass(frozen=True, slots=True)
class Groups:
    """How groups of experts are chosen from.

    Args:
        num_groups: into how many the experts are cut, in order.
        k_group: how many of them are kept.
        best: a group counts by the sum of so many of its highest choices.
        fill: what an expert of a group that is not kept counts.
    """

    num_groups: int = 1
    k_group: int = 1
    best: int = 1
    fill: float = -math.inf


def read_groups(masked: fx.Node, c: Canonicaliser) -> tuple[Groups, fx.Node] | str:
    """The groups that a choice [tokens, experts] is masked by, and the choice without the mask; or what is amiss."""
    filled = _flat(masked)
    if filled.target is not aten.masked_fill.Scalar:
        return Groups(), masked
    choice, mask, fill = filled.args
    assert isinstance(choice, fx.Node)
    assert isinstance(mask, fx.Node)
    kept = _kept_groups(mask)
    top = None if kept is None else top_k(kept)
    if kept is None or top is None or top.indices is not kept or not top.highest:
        return "what masks the choice is not whether a group is one of the highest"
    scored = _scored_by(top.scores)
    if scored is None:
        return "a group counts neither by its highest choice nor by the sum of its highest"
    grouped, best = scored
    if c.numbers[_flat(grouped)] != c.numbers[_flat(choice)]:
        return "groups and experts are chosen by different scores"
    shape = [static_int(size) for size in values.shape(grouped)]
    num_experts = values.last_dim(_flat(choice))
    if len(shape) != 3 or shape[1] is None or shape[2] is None or shape[1] * shape[2] != num_experts:
        return "the experts are not cut into groups of one size"
    if not _covers_groups(mask, filled, shape[1], shape[2]):
        return "the mask of a group does not cover its experts"
    assert isinstance(fill, (int, float))
    return Groups(shape[1], top.k, best, float(fill)), _flat(choice)


def _flat(node: fx.Node) -> fx.Node:
    """The node below all views that keep the elements in row-major order."""
    while node.target in ROW_MAJOR_VIEWS:
        (node,) = [n for n in node.all_input_nodes if values.tensor(n) is not None]
    return node


def _scored_by(scores: fx.Node) -> tuple[fx.Node, int] | None:
    """What groups are scored by along the last axis, and by how many of its highest."""
    if scores.target is aten.sum.dim_IntList and _is_last(scores.args[1], 3) and len(scores.args) == 2:
        top = top_k(scores.all_input_nodes[0])
        return (top.scores, top.k) if top is not None and top.values is scores.args[0] and top.highest else None
    if scores.target is aten.amax.default and _is_last(scores.args[1], 3) and len(scores.args) == 2:
        return scores.all_input_nodes[0], 1
    if scores.target is operator.getitem and scores.args[1] == 0:
        (highest,) = scores.all_input_nodes
        if highest.target is aten.max.dim and _is_last([highest.args[1]], 3) and len(highest.args) == 2:
            return highest.all_input_nodes[0], 1
    return None


def _is_last(dims: Any, rank: int) -> bool:
    return list(dims) in ([-1], [rank - 1])


def _kept_groups(mask: fx.Node) -> fx.Node | None:
    """The indices [tokens, k_group] of the groups that a mask, true where a choice is filled, leaves alone."""
    marks, negated = _marks(mask)
    if marks.target is not aten.scatter.value or marks.args[1] not in (-1, 1) or len(values.shape(marks)) != 2:
        return None
    base, _, indices, value = marks.args
    assert isinstance(base, fx.Node)
    others = base.args[1] if base.target is aten.full.default else _CONSTANTS.get(base.target)
    if others is None or bool(others) == bool(value) or bool(value) != negated:
        return None
    return indices if isinstance(indices, fx.Node) else None


def _marks(mask: fx.Node) -> tuple[fx.Node, bool]:
    """The node below what only moves and negates marks, and whether they are negated."""
    negated = False
    while _is_moved_or_negated(mask):
        negated ^= mask.target in _NOT
        mask = mask.all_input_nodes[0]
    return mask, negated


def _is_moved_or_negated(node: fx.Node) -> bool:
    value = values.tensor(node)
    is_bool = value is not None and value.dtype == torch.bool
    negates = node.target is aten.logical_not.default or (
        node.target is aten.bitwise_not.default and values.dtype(node.all_input_nodes[0]) == torch.bool
    )
    return is_movement(node) or (is_bool and (negates or node.target in values.CASTS))


def _covers_groups(mask: fx.Node, filled: fx.Node, num_groups: int, group_size: int) -> bool:
    """Whether each mark of a group comes to lie on its experts: found by moving numbers in place of the marks."""
    marks, _ = _marks(mask)
    for index in range(Sizes.COUNT):
        sizes = Sizes(index)
        tokens, groups = sizes(values.shape(marks))
        numbers = torch.arange(tokens * groups).view(tokens, groups)
        covered = _moved(mask, marks, numbers, sizes).expand(sizes(values.shape(filled)))
        if groups != num_groups or not torch.equal(covered.flatten(), numbers.flatten().repeat_interleave(group_size)):
            return False
    return True


def _moved(node: fx.Node, marks: fx.Node, numbers: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    if node is marks:
        return numbers
    below = node.all_input_nodes[0]
    moved = _moved(below, marks, numbers, sizes)
    result = concrete(node, sizes, {below: moved}) if is_movement(node) else moved
    assert isinstance(result, torch.Tensor)
    return result
