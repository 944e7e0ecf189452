"""Causal convolutions → causal_conv1d_columns, on the state that the model keeps where it may be written in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from ...patterns import values
from ...patterns.causal_conv1d import CausalConv1d
from ...patterns.conv.call import Called
from ...patterns.conv.move import turned
from ...patterns.match import Match
from ...runtime.ops import CONTRACTS
from ...runtime.ops.causal_conv1d import SILU
from ...runtime.ops.contract import OpContract
from ..edit import Edit, Refused
from ..launches import is_launch
from .causal_conv1d_call import lower_call
from .packing import taps_first
from .precision import refuse_other_precision

aten = torch.ops.aten

_ROWS = ("batch", "time", "channel")
_COLUMNS = ("batch", "channel", "time")


def lower(match: Match, edit: Edit) -> OpContract:
    """One op for the result and, where the model keeps it as a whole, the new state."""
    p = match.params
    if isinstance(p, Called):
        return lower_call(match, edit)
    assert isinstance(p, CausalConv1d)
    contract = CONTRACTS["npu_fuse::causal_conv1d_columns"]
    if p.lead:
        raise Refused(f"it gives results for {p.lead} columns before x too; the op begins with x")
    refuse_other_precision(p.dtype, *p.steps)
    x = edit.contiguous(_arranged(edit.current(match.inputs["x"]), p.x_roles, _ROWS, edit))
    if values.dtype(x) != p.dtype:
        raise Refused(f"its result is {p.dtype} for an x of {values.dtype(x)}")
    if tuple(role for role in p.weight_roles if role != "unit") != ("channel", "time"):
        raise Refused(f"the axes of its weight are {', '.join(p.weight_roles)}; they must be channels and taps")
    if p.activation is not None and p.dtype.itemsize < 4:
        edit.note(f"the op rounds once; the model rounds the sum to {p.dtype} before its {p.activation}")
    is_kept = _is_kept(match, p)
    results, written = edit.functional(
        contract,
        x=x,
        weight=taps_first(match.inputs["weight"], edit),
        states=_whole_state(match, p, edit) if is_kept else _scratch(match, p, x, edit),
        bias=edit.current(match.inputs["bias"]) if p.bias else None,
        has_initial_state=_flags(match, edit),
        reads_states=p.state is not None,
        activation_mode=SILU if p.activation == "silu" else 0,
    )
    edit.replace(match.node, _restored(results[0], match.node, p.roles, edit), any_layout=True)
    olds = [match.node]
    if is_kept:
        assert p.update is not None
        whole = edit.permuted(written["states"], [_COLUMNS.index(role) for role in p.update.roles])
        for old in dict.fromkeys((match.inputs["written"], match.inputs["new_state"])):
            if values.dtype(old) == p.dtype:
                edit.replace(old, whole, any_layout=True)
                olds.append(old)
        _refuse_more_launches(match, olds, edit, extra=p.update.length > p.width - 1)
    elif p.update is not None and p.update.length == p.width - 1:
        state = match.inputs["new_state"]
        rows = edit.permuted(written["states"], [0, 2, 1])
        edit.replace(state, _restored(rows, state, p.update.roles, edit), any_layout=True)
        _refuse_more_launches(match, [*olds, state], edit)
    else:
        _refuse_more_launches(match, olds, edit)
    return contract


def _flags(match: Match, edit: Edit) -> fx.Node | None:
    """For each sequence whether its state counts; the flag of the only one may have no axis."""
    if "has_initial" not in match.inputs:
        return None
    flags = edit.current(match.inputs["has_initial"])
    return flags if values.shape(flags) else edit.view(flags, [1])


def _is_kept(match: Match, p: CausalConv1d) -> bool:
    """Whether the state that is read, if one is, is the whole of the buffer that the new state is written into."""
    if p.update is None or "buffer" not in match.inputs or "written_indices" in match.inputs:
        return False
    if p.state is None:
        return True
    if "indices" in match.inputs or p.state.length != p.update.length:
        return False
    return turned(match.inputs["buffer"], p.update.roles) == turned(match.inputs["state"], p.state.roles)


def _whole_state(match: Match, p: CausalConv1d, edit: Edit) -> fx.Node:
    """The buffer as [batch, dim, state_len]."""
    assert p.update is not None
    if sorted(p.update.roles) != sorted(_COLUMNS):
        raise Refused(f"the axes of its state are {', '.join(p.update.roles)}; they must be {', '.join(_COLUMNS)}")
    if p.state is not None and p.state.start != p.update.length - (p.width - 1):
        raise Refused(
            f"it reads the columns from {p.state.start} on of a state of {p.update.length}; the op reads the last"
        )
    return edit.permuted(edit.current(match.inputs["buffer"]), [p.update.roles.index(role) for role in _COLUMNS])


def _scratch(match: Match, p: CausalConv1d, x: fx.Node, edit: Edit) -> fx.Node:
    """A state [batch, dim, width - 1] for this call alone: a copy of what is read, or memory that is written only."""
    before = p.width - 1
    if p.state is None:
        rows = edit.call(aten.new_empty.default, x, [edit.sizes(x)[0], before, p.channels])
        return edit.permuted(rows, [0, 2, 1])
    state = edit.current(match.inputs["state"])
    if "indices" in match.inputs:
        state = edit.call(aten.index.Tensor, state, [edit.current(match.inputs["indices"])])
    rows = _arranged(state, p.state.roles, _ROWS, edit)
    if p.state.length != before:
        rows = edit.call(aten.slice.Tensor, rows, 1, p.state.start, p.state.start + before)
    rows = edit.call(aten.clone.default, rows, memory_format=torch.contiguous_format)
    return edit.permuted(rows, [0, 2, 1])


def _arranged(node: fx.Node, roles: Sequence[str], wanted: Sequence[str], edit: Edit) -> fx.Node:
    """A tensor with its axes as wanted; one that it has not is of size one."""
    if any(roles.count(role) > 1 for role in wanted):
        raise Refused(f"the axes of a tensor of {tuple(values.shape(node))} are {', '.join(roles)}: too many")
    if sorted(roles) == sorted(wanted):
        return edit.permuted(node, [roles.index(role) for role in wanted])
    order = [roles.index(role) for role in wanted if role in roles]
    order += [axis for axis in range(len(roles)) if axis not in order]
    sizes = edit.sizes(node)
    shape = [sizes[roles.index(role)] if role in roles else 1 for role in wanted]
    return edit.view(edit.contiguous(edit.permuted(node, order)), shape)


def _restored(rows: fx.Node, like: fx.Node, roles: Sequence[str], edit: Edit) -> fx.Node:
    """Rows [batch, time, channel] with the axes of the model's result."""
    if any(roles.count(role) > 1 for role in _ROWS):
        raise Refused(f"the axes of its result are {', '.join(roles)}: too many")
    there = [role for role in roles if role in _ROWS]
    order = [_ROWS.index(role) for role in (*there, *(role for role in _ROWS if role not in there))]
    permuted = edit.permuted(rows, order)
    if list(roles) == there and len(there) == len(_ROWS):
        return permuted
    return edit.view(permuted, edit.known_sizes(like))


def _refuse_more_launches(match: Match, olds: Sequence[fx.Node], edit: Edit, *, extra: bool = False) -> None:
    """Refuses a rewrite that launches more than the model does."""
    dead: set[fx.Node] = set(olds)
    for node in sorted(match.claimed, reverse=True):
        if node.users.keys() <= dead | edit.created:
            dead.add(node)
    before = sum(map(is_launch, dead))
    after = sum(map(is_launch, edit.created)) + extra
    if after > before:
        raise Refused(f"the op and the copies around it are {after} launches, the model's are {before}")
