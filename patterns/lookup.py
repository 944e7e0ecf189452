"""cos and sin that are the halves of one row of a cache, looked up by position.

    cos, sin = cache[positions].chunk(2, -1)

The halves may be repeated to the full width, cast, and viewed for broadcasting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import values
from .canonical import Canonicaliser
from .heads import Heads, heads
from .movement import is_movement, trace

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Lookup:
    """How rows are looked up.

    Args:
        wraps: whether a negative position counts from the end of the cache.
        dtype: the narrowest type that the values take between cache and rotation.
    """

    wraps: bool
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class LookedUp:
    """Tables that are looked up.

    Args:
        params: how.
        inputs: "cache" [max_positions, 2 * columns]; "positions", whose axes are those of the tables; and "rows", the
            rows of the cache [*positions, 2 * columns].
    """

    params: Lookup
    inputs: Mapping[str, fx.Node]


def looked_up(cos: fx.Node, sin: fx.Node, rope_dim: int, c: Canonicaliser) -> LookedUp | None:
    """Reads two tables of a rotation of `rope_dim` elements as the halves of the rows of one cache.

    Returns:
        None where they are none, or rows are not `rope_dim` wide: a column of cos and one of sin for each pair.
    """
    if not values.is_float(cos) or not values.is_float(sin):
        return None
    first, second = _half(cos, c), _half(sin, c)
    if first is None or second is None or c.numbers[first.rows] != c.numbers[second.rows]:
        return None
    gathered = _gathered(first.rows)
    width = values.last_dim(first.rows)
    halves = [(half.layout.starts, 2 * half.layout.head_dim) for half in (first, second)]
    if gathered is None or width != rope_dim or halves != [((0,), width), ((width // 2,), width)]:
        return None
    if first.layout.roles != second.layout.roles or not _in_order(first.layout):
        return None
    dtype = min((first.dtype, second.dtype), key=lambda dtype: dtype.itemsize)
    cache, positions, wraps = gathered
    return LookedUp(Lookup(wraps, dtype), {"cache": cache, "positions": positions, "rows": first.rows})


@dataclass(frozen=True, slots=True)
class _Half:
    """Some columns of rows: where they lie, and the narrowest type on the way."""

    rows: fx.Node
    layout: Heads
    dtype: torch.dtype


def _half(table: fx.Node, c: Canonicaliser) -> _Half | None:
    rows, path = trace(table, _moves)
    while rows.target is aten.cat.default:  # both elements of a pair have their column
        parts: Any = rows.args[0]
        dim = rows.args[1] if len(rows.args) > 1 else 0
        if dim not in (-1, len(values.shape(rows)) - 1) or len({c.numbers[part] for part in parts}) != 1:
            return None
        repeated = heads(rows, [node for node in path if is_movement(node)])
        if repeated is None or repeated.starts != (0,) or repeated.head_dim != values.last_dim(rows):
            return None  # of the repeated columns it has only some
        rows, below = trace(parts[0], _moves)
        path = (*below, *path)
    layout = heads(rows, [node for node in path if is_movement(node)])
    dtype = min((values.dtype(node) for node in (rows, *path) if values.is_float(node)), key=lambda d: d.itemsize)
    return _Half(rows, layout, dtype) if layout is not None else None


def _moves(node: fx.Node) -> bool:
    return is_movement(node) or values.is_float_cast(node)


def _in_order(layout: Heads) -> bool:
    """Whether the axes of the table are those of the rows, in their order."""
    axes = [role for role in layout.roles[:-1] if role != "unit"]
    return axes == ["tokens"] or axes == sorted(axes, key=str)


def _gathered(rows: fx.Node) -> tuple[fx.Node, fx.Node, bool] | None:
    """(cache, positions, whether negative positions wrap) of rows that are gathered from a cache."""
    arguments: Any = rows.args
    wraps = rows.target is aten.index.Tensor
    if wraps and len(arguments[1]) == 1:
        cache, (positions,) = arguments
    elif rows.target is aten.index_select.default and arguments[1] in (0, -2):
        cache, _, positions = arguments
    elif rows.target is aten.embedding.default:
        cache, positions = arguments[:2]
    else:
        return None
    whole = values.tensor(positions)
    if len(values.shape(cache)) != 2 or whole is None or whole.dtype not in (torch.int32, torch.int64):
        return None
    return cache, positions, wraps
