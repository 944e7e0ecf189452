"""Whether both elements of each pair that is rotated are turned by one column of a table, or by two that are equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from . import values
from .canonical import Canonicaliser
from .movement import COPIES, ROW_MAJOR_VIEWS, source
from .rope import Rope
from .tables import cut

aten = torch.ops.aten


def share_columns(table: fx.Node, p: Rope, c: Canonicaliser) -> bool:
    """True where it is proven: a column stands for a pair, or those of its elements are computed alike from one.

    Args:
        table: cos or sin of a recognised rotation.
        p: the rotation.
        c: knows which values are the same.
    """
    if p.table_dim != p.rope_dim:
        return True
    node, columns = table, list(range(p.rope_dim))
    while True:
        if _keeps_columns(node):
            node = source(node)
        elif (times := _repeated_in_turn(node)) is not None:
            node, columns = source(node), [column // times for column in columns]
        elif (part := _repeated_as_a_whole(node, c)) is not None:
            width = values.last_dim(part)
            node, columns = part, [column % (width or p.rope_dim) for column in columns]
        elif (found := cut(node, c)) is not None:
            node, columns = found.base, [found.columns[column] for column in columns]
        else:
            break
    half = p.rope_dim // 2
    pairs = [(2 * i, 2 * i + 1) if p.style == "interleave" else (i, i + half) for i in range(half)]
    return all(columns[a] == columns[b] for a, b in pairs)


def _repeated_in_turn(node: fx.Node) -> int | None:
    """How many times each column stands in a row; None where a node repeats none. An NPU's graph keeps it as one op."""
    if node.target is not aten.repeat_interleave.self_int:
        return None
    times = node.args[1]
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
    return times if isinstance(times, int) and dim in (-1, len(values.shape(node)) - 1) else None


def _repeated_as_a_whole(node: fx.Node, c: Canonicaliser) -> fx.Node | None:
    """The tensor whose columns a node has several times, one after the other."""
    if node.target is not aten.cat.default:
        return None
    parts: Any = node.args[0]
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    alike = len({c.numbers[part] for part in parts}) == 1 and dim in (-1, len(values.shape(node)) - 1)
    return parts[0] if alike else None


# Ops that compute each element from the one at its place.
_ELEMENTWISE = frozenset({aten.cos.default, aten.sin.default, aten.neg.default, *values.CASTS, *COPIES})
_WITH_A_NUMBER = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.add.Tensor, aten.add.Scalar})
_AXES: Mapping[object, Callable[[fx.Node], Sequence[object]]] = {
    aten.slice.Tensor: lambda node: node.args[1:2] or (0,),
    aten.select.int: lambda node: node.args[1:2],
    aten.index_select.default: lambda node: node.args[1:2],
    aten.transpose.int: lambda node: node.args[1:3],
}


def _keeps_columns(node: fx.Node) -> bool:
    """Whether a node computes each column from the same column of its first input, and from nothing else."""
    if node.op != "call_function" or values.tensor(node) is None or values.tensor(next(iter(node.args), None)) is None:
        return False
    if node.target in _ELEMENTWISE:
        return True
    if node.target in _WITH_A_NUMBER:
        return not isinstance(node.args[1], fx.Node)
    shape, below = values.shape(node), values.shape(source(node))
    if node.target in ROW_MAJOR_VIEWS or node.target is aten.expand.default:
        return bool(below) and values.same_shape(shape[-1:], below[-1:])
    axes = _AXES[node.target](node) if node.target in _AXES else ()
    return bool(axes) and all(isinstance(axis, int) and axis % len(below) != len(below) - 1 for axis in axes)
