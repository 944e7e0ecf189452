"""Heads of keys and values that are repeated, so that each query head has one of its own: grouped-query attention."""

from __future__ import annotations

import torch
from torch import fx

from ..runtime.sizes import static_int
from . import values
from .movement import COPIES, ROW_MAJOR_VIEWS, changes_nothing, source

aten = torch.ops.aten


def repeated_heads(node: fx.Node) -> tuple[fx.Node, int] | None:
    """Undoes the repetition of heads.

    Args:
        node: [batch, heads, tokens, head_dim].

    Returns:
        The tensor [batch, kv heads, tokens, head_dim] of which each head stands there so often in a row, and how often;
        None where there is no such tensor.
    """
    shape = values.shape(node)
    heads = static_int(shape[1])
    if heads is None:
        return None
    if node.target is aten.repeat_interleave.self_int:
        return _interleaved(node)
    if node.target is aten.expand.default:  # one head for all
        below = source(node)
        before = values.shape(below)
        one = len(before) == 4 and static_int(before[1]) == 1
        alike = one and values.same_shape((before[0], *before[2:]), (shape[0], *shape[2:]))
        return (below, heads) if alike and heads > 1 else None
    return _expanded(node, heads)


def _interleaved(node: fx.Node) -> tuple[fx.Node, int] | None:
    times = node.args[1] if len(node.args) > 1 else node.kwargs.get("repeats")
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
    along_heads = isinstance(dim, int) and dim % 4 == 1 and len(values.shape(source(node))) == 4
    return (source(node), times) if along_heads and isinstance(times, int) else None


def _expanded(node: fx.Node, heads: int) -> tuple[fx.Node, int] | None:
    """view(expand(unsqueeze(x, 2))), with copies and slices of all there is between."""
    if node.target not in ROW_MAJOR_VIEWS:
        return None
    below = source(node)
    while below.target in COPIES:
        below = source(below)
    if below.target is not aten.expand.default or len(values.shape(below)) != 5:
        return None
    batch, *repeated, tokens, head_dim = values.shape(below)
    kv_heads, times = map(static_int, repeated)
    if kv_heads is None or times is None or kv_heads * times != heads:
        return None
    inner = source(below)
    while changes_nothing(inner):
        inner = source(inner)
    rest = (tokens, head_dim)
    once = values.same_shape(values.shape(inner), (batch, kv_heads, 1, *rest)) and inner.target in ROW_MAJOR_VIEWS
    if not once or not values.same_shape(values.shape(node), (batch, heads, *rest)):
        return None
    base = source(inner)
    return (base, times) if values.same_shape(values.shape(base), (batch, kv_heads, *rest)) else None
