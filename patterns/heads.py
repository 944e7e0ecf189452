"""Which columns of a tensor the heads are that are cut from it, found by running the cut on tensors without storage.

Heads may lie side by side, or with columns of something else between: a gate behind each head of q, or k and v behind
each head of q. What counts is where each head starts, the same for every binding of the symbolic sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import fx

from . import values
from .movement import COPIES, ROW_MAJOR_VIEWS, Role, Sizes

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Heads:
    """Some columns of a source [*leading, width], seen as heads.

    Args:
        starts: the first column of each head; its others follow it.
        head_dim: how many columns a head has.
        roles: what each axis of the result is: "head", "dim" (the last), "unit" (of size one), the number of a leading
            axis of the source, "tokens" for all leading axes in one, or "rows" for these and the heads in one. Without
            an axis of their own, heads lie side by side in the last one.
    """

    starts: tuple[int, ...]
    head_dim: int
    roles: tuple[Role, ...]

    @property
    def num_heads(self) -> int:
        return len(self.starts)

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    def every(self, stride: int) -> bool:
        """Whether a head starts `stride` columns behind the one before it."""
        return self.starts == tuple(self.starts[0] + i * stride for i in range(self.num_heads))

    @property
    def side_by_side(self) -> bool:
        return self.every(self.head_dim)


def heads(
    base: fx.Node, path: Sequence[fx.Node], *, in_rows: bool = False, head_dim: int | None = None
) -> Heads | None:
    """Reads a path of movement from `base` as a view of heads.

    Args:
        base: the source.
        path: from it up.
        in_rows: whether tokens and heads may share an axis, a row for each head of each token.
        head_dim: the length of heads that lie side by side in the last axis; None where that is one head.

    Returns:
        None where it is none, or not for all sizes the same.
    """
    found = set()
    for i in range(Sizes.COUNT):
        sizes = Sizes(i)
        steps = tuple(
            (node.target, tuple(_fixed(sizes(argument)) for argument in node.args[1:]), tuple(node.kwargs.items()))
            for node in path
        )
        found.add(_heads(tuple(sizes(values.shape(base))), steps, in_rows, head_dim))
    return found.pop() if len(found) == 1 else None


def _fixed(argument: Any) -> Any:
    return tuple(map(_fixed, argument)) if isinstance(argument, (list, tuple)) else argument


# An op, its arguments but the source, and its keyword arguments; all of them numbers.
_Step = tuple[Any, tuple[Any, ...], tuple[tuple[str, Any], ...]]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of numbered columns, and a strided view of them."""

    leading: tuple[int, ...]
    columns: tuple[int, ...]
    view: torch.Tensor

    def copied(self) -> _Rows | None:
        """The view as rows of their own; None where it has not the leading axes in front, as they are."""
        rank = len(self.leading)
        strides = tuple(len(self.columns) * prod(self.leading[i + 1 :]) for i in range(rank))
        if tuple(self.view.shape[:rank]) != self.leading or self.view.stride()[:rank] != strides:
            return None
        sizes, steps = self.view.shape[rank:], self.view.stride()[rank:]
        places = torch.arange(len(self.columns)).as_strided(sizes, steps, self.view.storage_offset()).flatten()
        columns = tuple(self.columns[place] for place in places.tolist())
        return _Rows(self.leading, columns, _fresh(self.leading, len(columns)).view(self.view.shape))


def _fresh(leading: tuple[int, ...], width: int) -> torch.Tensor:
    return torch.empty((*leading, width), device="meta", dtype=torch.int8)


def _rows(shape: tuple[int, ...], path: Sequence[_Step]) -> _Rows | None:
    """Runs a path of movement on a contiguous tensor of a shape; None where it moves more than columns."""
    if not shape or 0 in shape:
        return None
    rows = _Rows(shape[:-1], tuple(range(shape[-1])), _fresh(shape[:-1], shape[-1]))
    for step in path:
        if step[0] in COPIES:
            continue
        # A view of a copy merges axes that a view of the source can't: then the copy is run too.
        for source in (rows, rows.copied() if step[0] in ROW_MAJOR_VIEWS else None):
            view = _run(step, source.view) if source is not None else None
            if source is not None and view is not None:
                break
        else:
            return None
        rows = _Rows(source.leading, source.columns, view)
    return rows if isinstance(rows.view, torch.Tensor) else None


def _run(step: _Step, value: torch.Tensor) -> Any:
    op, arguments, keywords = step
    target: Any = aten.view.default if op in (aten._unsafe_view.default, aten.reshape.default) else op
    try:
        return target(value, *arguments, **dict(keywords))
    except (RuntimeError, IndexError, ValueError):
        return None  # not to be strided over the source, or not with these sizes


@lru_cache(maxsize=1024)  # the layers of a model cut their heads alike
def _heads(shape: tuple[int, ...], path: tuple[_Step, ...], in_rows: bool, side_by_side: int | None) -> Heads | None:
    rows = _rows(shape, path)
    if rows is None or not rows.view.dim():
        return None
    view = rows.view
    if side_by_side is not None:
        if view.shape[-1] % side_by_side:
            return None
        view = view.view(*view.shape[:-1], -1, side_by_side)
    *sizes, head_dim = view.shape
    *strides, step = view.stride()
    roles: list[Role] = []
    starts = [view.storage_offset()]
    axes = _token_axes(rows.leading, len(rows.columns))
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            roles.append("unit")
        elif (size, stride) in axes:
            roles.append(axes[size, stride])
        elif "head" not in roles and "rows" not in roles:
            joined = in_rows and stride * size == len(rows.columns) * prod(rows.leading)
            roles.append("rows" if joined else "head")
            starts = [starts[0] + i * stride for i in range(len(rows.columns) // stride if joined else size)]
        else:
            return None
    ends = [start + (head_dim - 1) * step for start in starts]
    if not _complete(roles, rows.leading) or not 0 <= max(*starts, *ends) < len(rows.columns):
        return None
    found = [[rows.columns[start + i * step] for i in range(head_dim)] for start in starts]
    if side_by_side is not None and roles.pop() not in ("head", "unit"):  # they have no axis of their own
        return None
    in_order = all(columns == list(range(columns[0], columns[0] + head_dim)) for columns in found)
    once = len(set().union(*found)) == len(found) * head_dim
    return Heads(tuple(columns[0] for columns in found), head_dim, (*roles, "dim")) if in_order and once else None


def _token_axes(leading: tuple[int, ...], width: int) -> dict[tuple[int, int], Role]:
    """The leading axes by size and stride, and all of them in one."""
    axes: dict[tuple[int, int], Role] = {
        (size, width * prod(leading[i + 1 :])): i for i, size in enumerate(leading) if size > 1
    }
    if len(axes) != 1:
        axes.setdefault((prod(leading), width), "tokens")
    return axes


def _complete(roles: Sequence[Role], leading: tuple[int, ...]) -> bool:
    """Whether every token is there, once."""
    tokens = [role for role in roles if role not in ("head", "unit")]
    if tokens in (["tokens"], ["rows"]):
        return True
    return sorted(map(str, tokens)) == [str(i) for i, size in enumerate(leading) if size > 1]
