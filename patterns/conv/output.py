"""Weighted sums over windows of columns, however they are written, and what is done to their columns.

    y[t, c] = activation(bias[c] + sum_j weight[c, j] * columns[t + j, c])

A convolution with a filter for each channel, a product with a window and its sum, a batched matmul (which an einsum
becomes), windows that are unfolded, and one product a tap are all this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ...runtime.sizes import Size, known_equal, static_int
from .. import values
from ..canonical import Canonicaliser
from ..captured import Captured, captured
from ..preserved import original
from ..term import Call
from .columns import TIME, UNIT, Columns
from .move import argument, move
from .track import Piece, Roles, Source, Track, joined

aten = torch.ops.aten

BATCH, CHANNEL = "batch", "channel"
ACTIVATIONS = ("silu",)

# A filter of more taps is not written tap by tap.
_MOST_TAPS = 16


@dataclass(frozen=True, slots=True)
class Output:
    """Columns of a convolution along time.

    Args:
        core: the node that sums.
        reader: knows where the columns come from.
        columns: what is convolved, before the padding that the convolution itself adds.
        weight: the filters, their taps along time, the oldest first.
        bias: one number a channel; None where there is none.
        activation: what is applied at last; None where nothing is.
        last: which of `columns` the last tap of the first result reads.
        count: how many results there are.
        roles: what the axes of the result count.
    """

    core: fx.Node
    reader: Columns
    columns: Track
    weight: Source
    bias: fx.Node | None
    activation: str | None
    last: Size
    count: Size
    roles: Roles

    @property
    def width(self) -> int:
        """The number of taps."""
        size = static_int(values.shape(self.weight.node)[self.weight.time]) if self.weight.time is not None else 1
        assert size is not None
        return size

    @property
    def channels(self) -> Size:
        return values.shape(self.weight.node)[self.weight.roles.index(CHANNEL)]


def output(node: fx.Node, c: Canonicaliser) -> Output | None:
    """Reads a node as columns of a convolution; None where it is something else."""
    if node.op != "call_function" or node in c.no_convolutions or not values.is_float(node):
        return None
    found = _read(node, c)
    if found is None:
        c.no_convolutions.add(node)
    return found


def _read(node: fx.Node, c: Canonicaliser) -> Output | None:
    found = _core(node, c)
    if found is not None:
        c.convolutions.add(node)
        return found
    if not c.convolutions:  # of which this could be the columns: most graphs have none
        return None
    value = c.terms[node]
    if isinstance(value, Call) and value.name in ACTIVATIONS and not _is_moved(node):
        return _activated(node, value, c)
    if node.target is aten.add.Tensor:
        return _biased(node, c)
    return _moved(node, c)


def _is_moved(node: fx.Node) -> bool:
    step = move(node)
    return step is not None and not values.is_float_cast(node)


def _moved(node: fx.Node, c: Canonicaliser) -> Output | None:
    step = move(node)
    below = output(step.below, c) if step is not None else None
    if step is None or below is None:
        return None
    roles = [UNIT] * len(values.shape(node))
    for role, axis in zip(below.roles, step.axes, strict=True):
        if axis is not None:
            roles[axis] = role
    found = replace(below, roles=tuple(roles))
    if step.cut is None:
        return found
    if below.roles[step.cut.axis] != TIME:
        return None
    return replace(found, last=below.last + step.cut.low, count=step.cut.high - step.cut.low)


def _activated(node: fx.Node, value: Call, c: Canonicaliser) -> Output | None:
    (argument,) = value.args
    found = captured("", node, {"y": argument}, c)  # type: ignore[dict-item]  # of an activation it is a term
    below = output(found.inputs["y"], c) if isinstance(found, Captured) else None
    if below is None or below.activation is not None:
        return None
    return replace(below, activation=value.name)


def _biased(node: fx.Node, c: Canonicaliser) -> Output | None:
    """A sum over windows, and one number a channel."""
    if argument(node, 2, "alpha", 1) != 1:
        return None
    for y, bias in (node.args[:2], node.args[1::-1]):
        if not isinstance(y, fx.Node) or not isinstance(bias, fx.Node) or not _is_vector(bias):
            continue
        below = output(y, c)
        if below is None or below.bias is not None or below.activation is not None:
            continue
        if not values.same_shape(values.shape(node), values.shape(y)) or not _is_along(bias, below):
            continue
        return replace(below, bias=_vector(bias))
    return None


def _is_vector(node: fx.Node) -> bool:
    return values.is_float(node) and sum(static_int(size) != 1 for size in values.shape(node)) <= 1


def _is_along(bias: fx.Node, below: Output) -> bool:
    """Whether a vector is broadcast along all axes but that of the channels."""
    shape = values.shape(bias)
    aligned = dict(zip(below.roles[len(below.roles) - len(shape) :], shape, strict=True)) if shape else {}
    return CHANNEL in aligned and known_equal(aligned[CHANNEL], below.channels)


def _vector(bias: fx.Node) -> fx.Node:
    """The narrowest and smallest tensor that holds a vector."""
    while (step := move(bias)) is not None and step.cut is None and not values.is_rounding(bias):
        bias = step.below
    return bias


# The sums -----------------------------------------------------------------------------------------------------------


def may_be_core(node: fx.Node) -> bool:
    """Whether a node may be a sum over windows, by its op."""
    return original(node.target) in _CORES


_CORES = frozenset(
    {
        aten.convolution.default,
        aten.sum.dim_IntList,
        aten.bmm.default,
        aten.matmul.default,
        aten.add.Tensor,
    }
)


def _core(node: fx.Node, c: Canonicaliser) -> Output | None:
    if node.target is aten.convolution.default:
        return _convolution(node, c)
    if node.target is aten.sum.dim_IntList:
        return _summed(node, c)
    if original(node.target) in (aten.bmm.default, aten.matmul.default):
        return _matmul(node, c)
    return _tap_by_tap(node, c) if node.target is aten.add.Tensor else None


def _convolution(node: fx.Node, c: Canonicaliser) -> Output | None:
    """A convolution along one axis, with one filter a channel."""
    if convolution_difference(node) is not None:
        return None
    x, weight, bias = node.args[:3]
    assert isinstance(x, fx.Node)
    assert isinstance(weight, fx.Node)
    padding: Any = node.args[4]
    found = _output(node, (x, (BATCH, CHANNEL, TIME)), (weight, (CHANNEL, UNIT, TIME)), (BATCH, CHANNEL, TIME), c)
    if found is None:
        return None
    last = found.width - 1 - padding[0]
    count = found.columns.length + 2 * padding[0] - found.width + 1
    return replace(found, bias=_vector(bias) if isinstance(bias, fx.Node) else None, last=last, count=count)


def convolution_difference(node: fx.Node) -> str | None:
    """In what a convolution differs from one along time, with steps of one and a filter a channel; None in nothing."""
    x, weight, _, stride, padding, dilation, is_transposed, _, groups = node.args
    assert isinstance(x, fx.Node)
    assert isinstance(weight, fx.Node)
    assert isinstance(stride, (list, tuple))
    assert isinstance(padding, (list, tuple))
    assert isinstance(dilation, (list, tuple))
    if len(stride) != 1 or is_transposed:
        return "it is no convolution along one axis"
    channels, (filters, width) = values.shape(x)[1], values.shape(weight)[::2]
    if not known_equal(channels, groups):  # type: ignore[arg-type]  # groups are a number
        return f"it has {groups} groups for {channels} channels; each channel needs its own"
    if not known_equal(filters, channels):
        return f"it has {filters} filters for {channels} channels; each channel needs one"
    if stride[0] != 1:
        return f"its stride is {stride[0]}; it must be 1"
    if dilation[0] != 1:
        return f"its dilation is {dilation[0]}; it must be 1"
    if static_int(width) is None or not isinstance(padding[0], int):
        return "the width of its filters is no static size"
    return None


def _summed(node: fx.Node, c: Canonicaliser) -> Output | None:
    """The sum along one axis of a product of windows and filters."""
    dims, product = argument(node, 1, "dim"), node.args[0]
    while isinstance(product, fx.Node) and values.is_float_cast(product):
        product = product.args[0]
    if not isinstance(product, fx.Node) or product.target is not aten.mul.Tensor or not dims or len(dims) != 1:
        return None
    shape = values.shape(product)
    taps = dims[0] % len(shape)
    for window, weight in (product.args[:2], product.args[1::-1]):
        if not isinstance(window, fx.Node) or not isinstance(weight, fx.Node):
            continue
        channel = _channel_axis(weight, len(shape), taps)
        if channel is None or not values.same_shape(values.shape(window), shape):
            continue
        roles = [TIME if i == taps else CHANNEL if i == channel else BATCH for i in range(len(shape))]
        found = _windows(node, window, taps, roles, (weight, _aligned_roles(weight, roles)), c)
        if found is not None and known_equal(found.width, shape[taps]):
            gone = (UNIT,) if argument(node, 2, "keepdim", False) else ()
            return replace(found, roles=(*found.roles[:taps], *gone, *found.roles[taps + 1 :]))
    return None


def _windows(
    node: fx.Node, window: fx.Node, taps: int, roles: list[str], filters: tuple[fx.Node, Roles], c: Canonicaliser
) -> Output | None:
    """One window, or all that are unfolded from some columns; the roles of its axes, the taps among them."""
    if window.target is not aten.unfold.default:
        found = _output(node, (window, tuple(roles)), filters, tuple(roles), c)
        whole = found is not None and known_equal(found.columns.length, found.width)
        return replace(found, last=found.width - 1, count=1) if found is not None and whole else None
    below, dim, _, step = window.args
    assert isinstance(below, fx.Node)
    assert isinstance(dim, int)
    time = dim % len(values.shape(below))
    if step != 1 or taps != len(roles) - 1 or roles[time] == CHANNEL:
        return None
    roles = [TIME if i == time else role for i, role in enumerate(roles)]
    found = _output(node, (below, tuple(roles[:-1])), filters, tuple(roles), c)
    if found is None:
        return None
    return replace(found, last=found.width - 1, count=found.columns.length - found.width + 1)


def _channel_axis(weight: fx.Node, rank: int, time: int) -> int | None:
    """The one axis, but for that of the taps, that filters differ along."""
    shape = values.shape(weight)
    first = rank - len(shape)
    if first < 0 or time < first:
        return None
    long = [first + i for i, size in enumerate(shape) if static_int(size) != 1 and first + i != time]
    return long[0] if len(long) == 1 else None


def _aligned_roles(weight: fx.Node, roles: Sequence[str]) -> Roles:
    first = len(roles) - len(values.shape(weight))
    return tuple(role if role in (TIME, CHANNEL) else UNIT for role in roles[first:])


def _matmul(node: fx.Node, c: Canonicaliser) -> Output | None:
    """A matmul of windows and the filter of each channel."""
    a, b = node.args[:2]
    assert isinstance(a, fx.Node)
    assert isinstance(b, fx.Node)
    shape = values.shape(node)
    sides = ((a, (BATCH, TIME), b, (TIME, UNIT), (BATCH, UNIT)), (b, (TIME, BATCH), a, (UNIT, TIME), (UNIT, BATCH)))
    for window, rows, weight, taps, result in sides:
        ranks = {len(values.shape(n)) for n in (node, window)}
        if ranks != {len(shape)} or len(shape) < 3 or static_int(values.shape(weight)[taps.index(UNIT) - 2]) != 1:
            continue
        channel = _channel_axis(weight, len(shape), len(shape) - 2 + taps.index(TIME))
        if channel is None or channel >= len(shape) - 2 or not values.same_shape(values.shape(window)[:-2], shape[:-2]):
            continue
        leading = tuple(CHANNEL if axis == channel else BATCH for axis in range(len(shape) - 2))
        filters = _aligned_roles(weight, (*leading, *taps))
        if static_int(shape[-2 + result.index(BATCH)]) == 1:
            rows, result = (UNIT, TIME) if rows[1] == TIME else (TIME, UNIT), (UNIT, UNIT)
        found = _output(node, (window, (*leading, *rows)), (weight, filters), (*leading, *result), c)
        if found is not None and known_equal(found.columns.length, found.width):
            return replace(found, last=found.width - 1, count=1)
    return None


def _output(
    core: fx.Node, convolved: tuple[fx.Node, Roles], filters: tuple[fx.Node, Roles], roles: Roles, c: Canonicaliser
) -> Output | None:
    """A sum over windows of some columns; None where the filters are not those of one tensor, from its first tap on."""
    reader = Columns(c)
    piece = reader.read(*filters).only
    weight = reader.holder(piece) if piece is not None and piece.source is not None else None
    if weight is None or weight.time is None or static_int(values.shape(weight.node)[weight.time]) is None:
        return None
    if CHANNEL not in weight.roles:
        return None
    return Output(core, reader, reader.read(*convolved), weight, None, None, 0, 0, roles)


# Tap by tap ---------------------------------------------------------------------------------------------------------


def _tap_by_tap(node: fx.Node, c: Canonicaliser) -> Output | None:
    """A sum of products, each of one tap of the filters and some columns."""
    addends = _addends(node)
    if addends is None or not all(any(map(_is_vector, product.args[:2])) for product in addends):  # type: ignore[arg-type]  # of two nodes
        return None
    rank = len(values.shape(node))
    for time in (*reversed(range(rank)), None):
        for channel in range(rank):
            if channel != time:
                found = _taps(node, addends, time, channel, c)
                if found is not None:
                    return found
    return None


def _addends(node: fx.Node) -> list[fx.Node] | None:
    """The products that a node is the sum of; None where it adds up anything else."""
    found: list[fx.Node] = []
    pending = [node]
    while pending:
        current = pending.pop()
        below = current
        while values.is_float_cast(below):
            (below,) = below.all_input_nodes
        if below.target is aten.add.Tensor and argument(below, 2, "alpha", 1) == 1:
            operands = below.args[:2]
            if not all(isinstance(operand, fx.Node) for operand in operands):
                return None
            pending.extend(operands)  # type: ignore[arg-type]  # just checked
        elif below.target is aten.mul.Tensor and len(below.all_input_nodes) == 2:
            found.append(below)
        else:
            return None
        if len(found) + len(pending) > _MOST_TAPS:
            return None
    return found if len(found) > 1 else None


def _taps(
    node: fx.Node, products: Sequence[fx.Node], time: int | None, channel: int, c: Canonicaliser
) -> Output | None:
    shape = values.shape(node)
    roles = tuple(TIME if i == time else CHANNEL if i == channel else BATCH for i in range(len(shape)))
    reader = Columns(c)
    taps: dict[int, Track] = {}
    weights: list[Piece] = []
    for product in products:
        for columns, tap in (product.args[:2], product.args[1::-1]):
            assert isinstance(columns, fx.Node)
            assert isinstance(tap, fx.Node)
            if _is_vector(tap) and values.same_shape(values.shape(columns), shape):
                break
        else:
            return None
        first = len(shape) - len(values.shape(tap))
        if channel < first or not known_equal(values.shape(tap)[channel - first], shape[channel]):
            return None
        filters = tuple(CHANNEL if first + i == channel else UNIT for i in range(len(values.shape(tap))))
        piece = reader.read(tap, filters).only
        place = static_int(piece.start) if piece is not None and piece.source is not None else None
        if piece is None or place is None or place in taps or not known_equal(piece.length, 1):
            return None
        taps[place] = reader.read(columns, roles)
        weights.append(piece)
    source = weights[0].source
    if source is None or source.time is None or any(piece.source != source for piece in weights):
        return None
    size = static_int(values.shape(source.node)[source.time])
    if size is None or sorted(taps) != list(range(size)) or CHANNEL not in source.roles:
        return None
    whole = joined([*(taps[place].cut(0, 1) for place in range(size - 1)), taps[size - 1]])
    count = taps[0].length
    if whole is None or not whole.pieces:
        return None
    sources = [piece.source for piece in whole.pieces if piece.source is not None]
    if len(sources) > 2 or any(source.time is None for source in sources[:-1]):
        return None  # of a state and x they are two, and a state has columns
    if not all(whole.cut(place, place + count).is_same(taps[place]) for place in taps):
        return None
    return Output(node, reader, whole, source, None, None, size - 1, count, roles)
