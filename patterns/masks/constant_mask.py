"""Masks of a fixed shape that are computed from nothing: their value is known, and is looked at as it is."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx

from ...runtime.sizes import static_int
from .. import values
from ..cone import walk
from ..functional import is_functional
from ..movement import is_movement
from .band import Band
from .creation import lifted
from .integers import Linear

aten = torch.ops.aten

# 2048 queries by as many keys, for a batch of one.
_MOST_ELEMENTS = 1 << 22
_MOST_NODES = 128
# What an entry of theirs is depends on nothing that a program says.
_UNINITIALISED = frozenset({aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default})
_UNINITIALISED |= {aten.empty_strided.default, aten.new_empty_strided.default, aten.empty_permuted.default}
# Ops on floats that round nothing, on any device.
_EXACT = frozenset(
    {
        aten.full.default,
        aten.full_like.default,
        aten.new_full.default,
        aten.zeros.default,
        aten.zeros_like.default,
        aten.new_zeros.default,
        aten.ones.default,
        aten.ones_like.default,
        aten.new_ones.default,
        aten.scalar_tensor.default,
        aten.fill.Tensor,
        aten.fill.Scalar,
        aten.where.self,
        aten.masked_fill.Scalar,
        aten.masked_fill.Tensor,
        aten.tril.default,
        aten.triu.default,
        aten.cat.default,
        aten.stack.default,
        aten.slice_scatter.default,
        aten.select_scatter.default,
        aten.index.Tensor,
        aten.flip.default,
        aten.roll.default,
        aten.repeat.default,
        aten._to_copy.default,
    }
)


def constant(root: fx.Node, *, rounds: bool = False) -> torch.Tensor | None:
    """The value, on the CPU, of a tensor that depends on no input; None where it does, is large or may be another.

    Args:
        root: the tensor.
        rounds: whether floats may be rounded on the way, which another device may do otherwise in the last bit.
    """
    cone = walk(root, lambda node: node.target is aten.lift_fresh_copy.default, _MOST_NODES)
    if cone is None or not all(_is_known(node, rounds) for node in cone.nodes):
        return None
    known: dict[fx.Node, Any] = {}
    for node in cone.inputs:
        value = lifted(node)
        if value is None:
            return None
        known[node] = value.cpu()
    for node in cone.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
        on_cpu = {"device": "cpu"} if "device" in kwargs else {}
        try:
            known[node] = node.target(*args, **{**kwargs, **on_cpu})  # type: ignore[operator]  # an op
        except RuntimeError:
            return None  # an op that has no kernel for the CPU
    result: torch.Tensor = known[root]
    return result


def _is_known(node: fx.Node, rounds: bool) -> bool:
    value = values.tensor(node)
    if not is_functional(node) or node.target in _UNINITIALISED:
        return False
    if value is None:
        return True  # several tensors, each of which is looked at
    sizes = [static_int(size) for size in value.shape]
    if any(size is None for size in sizes) or prod(size or 0 for size in sizes) > _MOST_ELEMENTS:
        return False
    return rounds or not values.is_float(node) or node.target in _EXACT or is_movement(node)


def band_of(visible: torch.Tensor) -> Band | None:
    """The band that a table [queries, keys] of what is seen is, with as few bounds as can be."""
    if not visible.any():
        return None
    q_len, kv_len = visible.shape
    offsets = torch.arange(kv_len) - torch.arange(q_len)[:, None]
    low, high = int(offsets[visible].min()), int(offsets[visible].max())
    for lower, upper in ((None, None), (None, high), (low, high), (low, None)):
        above = torch.ones_like(visible) if lower is None else offsets >= lower
        below = torch.ones_like(visible) if upper is None else offsets <= upper
        if torch.equal(visible, above & below):
            return Band(*(None if bound is None else Linear(bound) for bound in (lower, upper)))
    return None
