"""Causal depthwise convolution:

    y[t, c] = activation(bias[c] + sum_j weight[c, j] * x[t - width + 1 + j, c])

What stands before the first column of x is a state, or zeros; the last columns of both may be kept as the new state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx

from ..runtime.sizes import known_equal, known_true, static_int
from . import values
from .canonical import Canonicaliser
from .cone import computes, walk
from .conv.call import call, called
from .conv.move import TURNS, move
from .conv.output import Output, convolution_difference, may_be_core, output
from .conv.state import Write, columns_of, kept, tail, write, writes_near
from .conv.track import Piece, Roles, Source
from .match import Findings, Match, Miss
from .spelling import Spelling, spell

KIND = "causal_conv1d"

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class State:
    """What is before x.

    Args:
        roles: what the axes of the tensor count: "batch" (of a pool its slots), "channel", "time" or "unit".
        length: how many columns it has; None where that is a symbol.
        start: the first of the `width - 1` columns that are read.
    """

    roles: Roles
    length: int | None
    start: int


@dataclass(frozen=True, slots=True)
class Update:
    """What is kept of state and x.

    Args:
        roles: what the axes of the new state count.
        length: how many of the last columns it has.
        spelling: the formula of the new state, over x, state, indices and has_initial, as far as it reads them.
    """

    roles: Roles
    length: int
    spelling: Spelling


@dataclass(frozen=True, slots=True)
class CausalConv1d:
    """What one spelling of a causal convolution fixes.

    Args:
        mode: "update" where one column follows a state; else "prefill".
        width: the number of taps.
        channels: how many there are.
        bias: whether there is one.
        activation: "silu", or None.
        lead: for how many columns before x there is a result too.
        roles: what the axes of the result count: "batch", "channel", "time", or "unit" for one of size one.
        x_roles, weight_roles: likewise of x and weight, whose "time" are its taps.
        state: what is before x; None where that is zeros.
        update: what is kept; None where nothing is.
        dtype: type of the result.
        steps: all types that something is computed in or rounded to.
        spelling: the formula, over x, weight, bias, and state with the `indices` of its slots and `has_initial`.
    """

    mode: Literal["prefill", "update"]
    width: int
    channels: int
    bias: bool
    activation: str | None
    lead: int
    roles: Roles
    x_roles: Roles
    weight_roles: Roles
    state: State | None
    update: Update | None
    dtype: torch.dtype
    steps: frozenset[torch.dtype]
    spelling: Spelling

    def public(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "width": self.width,
            "channels": self.channels,
            "bias": self.bias,
            "activation": self.activation,
            "state": self.state is not None,
            "state_len": self.state.length if self.state is not None else None,
            "updates_state": self.update is not None,
            "dtype": self.dtype,
            "spelling": str(self.spelling),
        }


def match(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | Miss | None:
    """Recognises the result of a convolution, or what is kept behind one that is known."""
    if (calls := _match_call(node)) is not None:
        return calls
    if not (c.convolutions or may_be_core(node)) or not values.is_float(node):
        return None  # there is none yet that it could be the result of, or be kept behind
    found = _match_output(node, c) if _is_root(node) else None
    return found if found is not None else _match_write(node, c, findings)


def _match_call(node: fx.Node) -> Match | None:
    """A call of the op, with the states that it writes."""
    found = call(node)
    params = called(found) if found is not None else None
    if found is None or params is None:
        return None
    inputs = {name: value for name, value in found.given.items() if isinstance(value, fx.Node)}
    return Match(KIND, node, {**inputs, "state": found.base}, params, (found.node, *found.node.users))


def _is_root(node: fx.Node) -> bool:
    """Whether a node computes, rounds or cuts: what only turns axes and copies behind that is no part of it."""
    if node.target in TURNS:
        return False
    step = move(node)
    return step is None or step.cut is not None or values.is_rounding(node)


@dataclass(frozen=True, slots=True)
class _Parts:
    """The columns that a convolution reads: of a state, where there is one, and of x; and those of x as one tensor."""

    state: Piece | None
    x: Piece
    tensor: Source
    lead: int


def _match_output(node: fx.Node, c: Canonicaliser) -> Match | Miss | None:
    found = output(node, c)
    if found is None:
        return _difference(node) if node.target is aten.convolution.default else None
    parts = _parts(found)
    if isinstance(parts, str):
        is_core = node.target is aten.convolution.default
        return Miss(KIND, node, "{}", (parts,), matched=1) if is_core else None
    inputs: dict[str, fx.Node] = {"x": parts.tensor.node, "weight": found.weight.node}
    if found.bias is not None:
        inputs["bias"] = found.bias
    state = None
    if parts.state is not None:
        assert parts.state.source is not None
        read = kept(parts.state.source, c)
        others = {"state": read.node, "indices": read.indices, "has_initial": read.has_initial}
        inputs |= {name: other for name, other in others.items() if other is not None}
        start = static_int(parts.state.start + parts.state.length - (found.width - 1))
        if start is None:
            return None
        state = State(read.roles, static_int(columns_of(parts.state.source)), start)
    channels = static_int(found.channels)
    spelling = spell(node, inputs, c)
    numbers = {c.numbers[n] for n in inputs.values()}
    cone = walk(node, lambda n: c.numbers[n] in numbers)
    if spelling is None or cone is None or channels is None:
        return Miss(KIND, node, "the number of channels is no static size", matched=2) if channels is None else None
    active = [n for n in cone.nodes if values.is_float(n) and (computes(n) or values.is_rounding(n))]
    params = CausalConv1d(
        mode="update" if state is not None and static_int(found.count) == 1 else "prefill",
        width=found.width,
        channels=channels,
        bias=found.bias is not None,
        activation=found.activation,
        lead=parts.lead,
        roles=found.roles,
        x_roles=parts.tensor.roles,
        weight_roles=found.weight.roles,
        state=state,
        update=None,
        dtype=values.dtype(node),
        steps=frozenset(map(values.dtype, active)),
        spelling=spelling,
    )
    matched = Match(KIND, node, inputs, params, cone.nodes)
    for written in writes_near(iter((*cone.nodes, *cone.inputs)), c):
        matched = _with_update(matched, parts, written, c) or matched
    return matched


def _difference(node: fx.Node) -> Miss | None:
    """Of a convolution in groups along one axis: in what it differs."""
    difference = convolution_difference(node)
    stride, is_transposed, groups = node.args[3], node.args[6], node.args[8]
    is_grouped = groups != 1 and len(stride) == 1 and not is_transposed  # type: ignore[arg-type]  # a list
    return Miss(KIND, node, "{}", (difference,)) if difference is not None and is_grouped else None


def _parts(found: Output) -> _Parts | str:
    """Tells state and x apart; or says why the convolution is not causal in them."""
    pieces = list(found.columns.pieces)
    if not found.columns.is_whole:
        return "where its columns come from depends on sizes that are symbols"
    if pieces and pieces[-1].source is None:
        pieces.pop()
    zeros = pieces.pop(0).length if pieces and pieces[0].source is None else 0
    if not pieces or any(piece.source is None for piece in pieces):
        return "zeros stand between the columns that it reads"
    before, end = zeros, zeros
    for piece in pieces:
        before, end = end, end + piece.length
    if known_true(found.last <= zeros):  # there is a result for every column that is not zeros: they are all x
        state, before = None, zeros
        tensor = found.reader.holder(*pieces)
    elif len(pieces) == 1:
        ahead = found.last - zeros
        return f"its first result reads {ahead} columns ahead of the first of x: it is not causal"
    elif len(pieces) == 2:
        state, tensor = pieces[0], found.reader.holder(pieces[1])
        if not known_true(state.length >= found.width - 1):
            return f"{state.length} columns stand before x; a filter of {found.width} reads {found.width - 1}"
    else:
        return f"it reads columns of {len(pieces)} tensors; of a state and x they are two"
    lead = static_int(before - found.last)
    if lead is None or lead < 0:
        return "its first result is not that of the first column of x"
    if not known_equal(found.last + found.count, end):
        return f"it gives {found.count} columns, {lead} of them before x, whose columns are {end - before}"
    if tensor is None:
        return "the columns of x are no tensor of their own"
    return _Parts(state, pieces[-1], tensor, lead)


def _match_write(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | None:
    """A convolution that is known, with the state that is kept behind it."""
    written = write(node)
    if written is None:
        return None
    for known in findings.of(KIND):
        found = output(known.node, c)
        parts = _parts(found) if found is not None else None
        if isinstance(parts, _Parts) and (both := _with_update(known, parts, written, c)) is not None:
            return both
    return None


def _with_update(known: Match, parts: _Parts, written: Write, c: Canonicaliser) -> Match | None:
    """A convolution and what is kept behind it; None where that is something else, or less than what is known."""
    p = known.params
    assert isinstance(p, CausalConv1d)
    if p.update is not None and ("buffer" in known.inputs or written.buffer is None):
        return None
    found = tail(written.value, parts.x, parts.state, c)
    if found is None or (written.buffer is None and known_equal(found.length, parts.x.length)):
        return None  # x itself is no state
    read = {name: n for name in ("x", "state", "indices", "has_initial") if (n := known.inputs.get(name)) is not None}
    numbers = {c.numbers[n] for n in read.values()}
    cone = walk(written.value, lambda n: c.numbers[n] in numbers)
    if cone is None:
        return None
    used = {c.numbers[n] for n in cone.inputs}
    spelling = spell(written.value, {name: n for name, n in read.items() if c.numbers[n] in used}, c)
    if spelling is None:
        return None
    others = {"new_state": written.value, "buffer": written.buffer, "written": written.result}
    if written.buffer is None:
        del others["buffer"], others["written"]
    inputs = {**known.inputs, **{name: n for name, n in others.items() if n is not None}}
    if written.indices is not None:
        inputs["written_indices"] = written.indices
    claimed = tuple(sorted({*known.claimed, *cone.nodes}))
    update = Update(found.roles, found.length, spelling)
    return replace(known, inputs=inputs, params=replace(p, update=update), claimed=claimed)
