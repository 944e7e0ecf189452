"""Calls of the op of a causal convolution → the same calls, on the model's own weight, states and x.

    states = pool.transpose(1, 2).contiguous()
    weight = conv.weight.squeeze(1).t().contiguous()          y = causal_conv1d(x, transposed(conv.weight), …,
    y = causal_conv1d(x.clone(), weight, states, …)      →                      pool.transpose(1, 2), …)
    pool.copy_(states.transpose(1, 2))

What is written is put in place by `in_place`, as every write is; here only the copies that the op doesn't need go.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...patterns import values
from ...patterns.conv.call import Call, call, filters
from ...patterns.conv.move import move
from ...patterns.match import Match
from ...patterns.movement import COPIES
from ...runtime.ops.contract import OpContract
from ...runtime.sizes import is_contiguous
from ..edit import Edit, Refused
from .packing import taps_first


def lower_call(match: Match, edit: Edit) -> OpContract:
    """The call without the copies of what it is given; activation, slots and all else are the call's.

    Raises:
        Refused: the contract doesn't allow the call, or its states must be copied.
    """
    found = call(match.node)
    assert found is not None
    given = dict(found.given)
    base = _own_states(found) if found.is_whole else found.base
    given["x"] = _uncopied(given["x"])
    given["weight"] = _weight(given["weight"], edit)
    reason = found.contract.refusal(edit.rewriter.target, **_arguments(given, base, found))
    if reason is not None:
        raise Refused(reason)
    if (given["x"], given["weight"], base) != (found.given["x"], found.given["weight"], found.base):
        _call_again(found, given, base, edit)
    return found.contract


def _own_states(found: Call) -> fx.Node:
    """The states that a call gets a copy of, in the memory that they are kept in."""
    base = found.base
    if base.target not in COPIES:
        return base
    own = _uncopied(base)
    if own.target not in COPIES:
        return own if _is_written_in_the_end(own) else base
    kept = values.tensor(own.args[0])
    assert kept is not None
    raise Refused(
        f"its states {tuple(kept.shape)} have strides {tuple(kept.stride())}, so that each call copies them; the op"
        " writes in place what is contiguous: whole slots, channels side by side, as"
        " npu_fuse.runtime.conv_state.in_pool_memory lays them out"
    )


def _is_written_in_the_end(node: fx.Node) -> bool:
    """Whether a tensor is of an input that gets another value."""
    while (step := move(node)) is not None:
        node = step.below
    return node.op == "placeholder" and any(
        user.target is torch.ops.aten.copy_.default and user.args[0] is node for user in node.users
    )


def _uncopied(node: fx.Node) -> fx.Node:
    """What a node is a contiguous copy of, where that is contiguous itself."""
    while node.target in COPIES:
        below = node.args[0]
        value = values.tensor(below)
        if not isinstance(below, fx.Node) or value is None or not is_contiguous(value):
            break
        node = below
    return node


def _weight(weight: fx.Node, edit: Edit) -> fx.Node:
    """A weight as the op takes it: a parameter in its own memory, or what the model gives."""
    kept = filters(weight)
    if kept is None:
        return weight
    try:
        with edit.attempt():
            return taps_first(kept, edit)
    except Refused:  # the model's copy of a few taps is no reason to leave the states copied
        return weight


def _arguments(given: dict[str, Any], base: fx.Node, found: Call) -> dict[str, Any]:
    """The arguments of the op, as their fake values."""
    plain = {name: value for name, value in given.items() if not name.startswith("_")}
    fakes: dict[str, Any] = fx.map_arg(plain, lambda node: node.meta["val"])
    return {**fakes, "conv_states": base.meta["val"] if found.is_whole else found.view}


def _call_again(found: Call, given: dict[str, Any], base: fx.Node, edit: Edit) -> None:
    bases: Any = found.node.kwargs["_all_bases"]
    views = {name: value for name, value in found.node.kwargs.items() if name.startswith("_")}
    views["_all_bases"] = [base if other is found.base else other for other in bases]
    old = found.node.meta["val"]

    def shapes(*_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
        return tuple(value.new_empty_strided(value.shape, value.stride()) for value in old)

    function: Any = found.node.target
    new = edit.call(function, *found.node.args, shaped_as=shapes, at_site=True, **{**given, **views})
    for item in list(found.node.users):
        edit.replace(item, edit.item(new, item.args[1]))  # type: ignore[arg-type]  # of a getitem
