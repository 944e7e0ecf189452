"""A causal convolution as models that are written for NPUs have it: a call of the op itself.

The op writes its states without saying so; in a functional graph it gives their new value as a second result.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops import auto_functionalize
from torch._ops import OpOverload

from ...runtime.effects import told_by
from ...runtime.ops import CONTRACTS
from ...runtime.ops.causal_conv1d import CAUSAL_CONV1D, NPU_CAUSAL_CONV1D, UPDATE
from ...runtime.ops.contract import OpContract
from ...runtime.sizes import static_int
from .. import values
from .move import turned
from .track import Roles

_OPS = frozenset({CAUSAL_CONV1D.name, NPU_CAUSAL_CONV1D.name})


@dataclass(frozen=True, slots=True)
class Called:
    """What one call fixes.

    Args:
        op: name of the op.
        mode: "update" where every sequence goes on behind its state; else "prefill".
        width: the number of taps.
        channels: how many there are.
        bias: whether there is one.
        activation: "silu", or None.
        state_len: how many rows a slot has; None where that is a symbol.
        dtype: type of the result.
    """

    op: str
    mode: str
    width: int
    channels: int
    bias: bool
    activation: str | None
    state_len: int | None
    dtype: torch.dtype

    def public(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "width": self.width,
            "channels": self.channels,
            "bias": self.bias,
            "activation": self.activation,
            "state": True,
            "state_len": self.state_len,
            "updates_state": True,
            "dtype": self.dtype,
            "spelling": self.op,
        }


@dataclass(frozen=True, slots=True)
class Call:
    """A call in a functional graph.

    Args:
        node: it.
        contract: of the op that it calls.
        given: the arguments that the op only reads, by name.
        base: the tensor whose new value is the second result.
        view: what the op gets of it.
        is_whole: whether that is all of it.
    """

    node: fx.Node
    contract: OpContract
    given: Mapping[str, Any]
    base: fx.Node
    view: torch.Tensor
    is_whole: bool

    def tensor(self, name: str) -> torch.Tensor | None:
        return values.tensor(self.given[name])


def call(node: fx.Node) -> Call | None:
    """Reads the first result of a call that is used; None where a node is something else."""
    of = node.args[0] if node.target is operator.getitem else None
    if not isinstance(of, fx.Node) or of.target is not torch.ops.higher_order.auto_functionalized_v2:
        return None
    if node is not min(of.users):
        return None
    told = of.args[0]
    if not isinstance(told, OpOverload):  # a branch or a loop that writes
        return None
    effect = told_by(told)
    name = (told if effect is None else effect.op)._schema.name
    if name not in _OPS:
        return None
    given = dict(of.kwargs)
    bases: Any = given.pop("_all_bases")
    names, types = auto_functionalize.get_mutable_args(told)
    (view,) = auto_functionalize.read_view_information_from_args(names, types, given, bases).values()
    fakes = [base.meta["val"] for base in bases]
    is_whole = isinstance(view, auto_functionalize.NotView)
    laid = fakes[view.base_index] if is_whole else view.regenerate_view(fakes)
    return Call(of, CONTRACTS[name], given, bases[view.base_index], laid, is_whole)


def called(found: Call) -> Called | None:
    """What a call fixes; None where the sizes of its weight are symbols."""
    weight = found.tensor("weight")
    assert weight is not None
    width, channels = map(static_int, weight.shape)
    if width is None or channels is None:
        return None
    return Called(
        op=found.contract.name,
        mode="update" if found.given["run_mode"] == UPDATE else "prefill",
        width=width,
        channels=channels,
        bias=found.given["bias"] is not None,
        activation="silu" if found.given["activation_mode"] else None,
        state_len=static_int(found.view.shape[1]),
        dtype=weight.dtype,
    )


def filters(weight: fx.Node) -> fx.Node | None:
    """The tensor [channels, width] or [channels, 1, width] that a weight [width, channels] is turned from, or None."""
    node, roles = turned(weight, _TAPS_FIRST)
    return node if roles in _TAPS_LAST else None


_TAPS_FIRST: Roles = ("time", "channel")
_TAPS_LAST: tuple[Roles, ...] = (("channel", "time"), ("channel", "unit", "time"))
