"""Calls of fused attention that a graph already holds, without the causal part of what they hide.

atten_mask, sparse_mode 2 or 3                →  none, mode 0
sparse_mode 4, next_tokens 0 (a window)       →  next_tokens = pre_tokens
a whole mask, causal, with padding or without →  the padding, or none
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2

from ..patterns import values
from ..patterns.mask import Mask, classify
from ..patterns.masks.integers import of_size
from ..runtime.ops import CONTRACTS
from ..runtime.ops.attention_layout import sizes
from ..runtime.ops.attention_mask import BAND, COMPRESSED, DEFAULT_MASK, UNLIMITED
from ..runtime.ops.contract import OpContract
from ..runtime.sizes import known_equal
from .edit import Edit, Refused

aten = torch.ops.aten

_TO_THE_END = 2**63 - 1


@dataclass(frozen=True, slots=True)
class _Names:
    """What an op calls its arguments."""

    num_heads: str = "num_heads"
    pre_tokens: str = "pre_tokens"
    next_tokens: str = "next_tokens"


_NAMES = {
    "npu::npu_fused_infer_attention_score": _Names(),
    "npu::npu_fused_infer_attention_score_v2": _Names("num_query_heads"),
    "npu::npu_fusion_attention_v3": _Names("head_num", "pre_tockens", "next_tockens"),
}


@dataclass(frozen=True, slots=True)
class FusedCall:
    """A call of one of these ops.

    Args:
        node: it.
        contract: of the op.
        arguments: all, by name.
    """

    node: fx.Node
    contract: OpContract
    arguments: dict[str, Any]

    @property
    def mode(self) -> int:
        return int(self.arguments["sparse_mode"])

    @property
    def mask(self) -> fx.Node | None:
        mask = self.arguments["atten_mask"]
        return mask if isinstance(mask, fx.Node) else None

    @property
    def reach(self) -> tuple[int, int]:
        """How many tokens before and behind its own place a query sees, as far as its mode asks."""
        names = _NAMES[self.contract.name]
        before, behind = (int(self.arguments[name]) for name in (names.pre_tokens, names.next_tokens))
        return min(before, UNLIMITED), min(behind, UNLIMITED)

    @property
    def decodes(self) -> bool:
        """Whether each query is one token, for which there is no future."""
        layout, heads = self.arguments["input_layout"], self.arguments[_NAMES[self.contract.name].num_heads]
        query = values.tensor(self.arguments["query"])
        assert query is not None
        return known_equal(sizes(query, layout, heads).tokens, 1)


def fused_call(node: fx.Node) -> FusedCall | None:
    """A node as such a call, else None."""
    for name in _NAMES:
        contract = CONTRACTS[name]
        if node.target is contract.op:
            return FusedCall(node, contract, values.arguments(node))
    return None


def writes_its_result(node: fx.Node) -> bool:
    """Whether a node, which is none of these calls, is one in the form that writes its result into a given tensor."""
    op = node.args[0] if node.target is auto_functionalized_v2 else node.target
    schema = getattr(op, "_schema", None)
    return schema is not None and schema.name in _NAMES


def described(call: FusedCall) -> str:
    """What a call hides, in words."""
    if call.mask is None:
        return "none"
    if call.mode not in COMPRESSED:
        return f"{_whole_mask(call.mask).kind} (a whole mask, sparse_mode {call.mode})"
    if call.mode != BAND:
        return f"causal (sparse_mode {call.mode})"
    before, behind = call.reach
    return f"a band (sparse_mode {BAND}, pre_tokens {before}, next_tokens {behind})"


def has_causal_part(call: FusedCall) -> bool:
    """Whether a call hides keys behind the place of a query.

    Raises:
        Refused: it isn't known, or it can't be told from the rest of what it hides.
    """
    if call.mask is None or call.decodes:
        return False
    if call.mode in COMPRESSED:
        _, behind = call.reach
        return call.mode != BAND or behind <= 0
    if call.mode == DEFAULT_MASK and call.reach != (UNLIMITED, UNLIMITED):
        raise Refused(f"it has a mask, and of that only a band: pre_tokens and next_tokens are {call.reach}")
    found = _whole_mask(call.mask)
    if found.visibility is None:
        reason = found.reason or f"it is {values.dtype(call.mask)}"
        raise Refused(f"the causal part of its mask can't be told from the rest: {reason}")
    return found.visibility.band.upper is not None


def without_causal_part(call: FusedCall, edit: Edit) -> FusedCall:
    """A call as it is to be; it is not in the graph yet.

    Args:
        call: one that hides the future.
        edit: the rewrite.

    Raises:
        Refused: what else it hides can't be expressed.
    """
    if call.mode == BAND:
        before, behind = call.reach
        if behind < 0:
            raise Refused(f"a query doesn't see itself (next_tokens {behind}), so its window has no middle")
        if before < UNLIMITED:
            return _changed(call, **{_NAMES[call.contract.name].next_tokens: before})
    if call.mode in COMPRESSED:
        return _changed(call, atten_mask=None, sparse_mode=DEFAULT_MASK)
    assert call.mask is not None
    found, shape = _whole_mask(call.mask), values.shape(call.mask)
    seen = found.visibility
    assert seen is not None
    assert seen.band.upper is not None
    if seen.band.lower is not None or seen.chunk is not None or seen.segments is not None:
        raise Refused(f"its mask hides more than the future and padding ({found.kind})")
    beyond = (seen.band.upper - (of_size(shape[-1]) - of_size(shape[-2]))).number
    if seen.padding is None and beyond is not None and beyond >= 0:
        return _changed(call, atten_mask=None, sparse_mode=DEFAULT_MASK)
    last = edit.call(aten.slice.Tensor, call.mask, len(shape) - 2, -1, _TO_THE_END)
    return _changed(call, atten_mask=edit.contiguous(edit.call(aten.expand.default, last, edit.sizes(call.mask))))


def _whole_mask(mask: fx.Node) -> Mask:
    if values.dtype(mask) != torch.bool:
        return Mask("other")
    *_, rows, keys = values.shape(mask)
    return classify(mask, rows, keys, hides=True)


def _changed(call: FusedCall, **arguments: Any) -> FusedCall:
    return replace(call, arguments={**call.arguments, **arguments})


def put_in_place(old: FusedCall, new: FusedCall, edit: Edit) -> None:
    """Puts a call in place of another.

    Raises:
        Refused: its contract doesn't allow it.
    """
    parameters = {p.name: p for p in new.contract.parsed_schema.arguments}
    arguments = {
        name: value
        for name, value in new.arguments.items()
        if not (parameters[name].has_default_value() and value == parameters[name].default_value)
    }
    result = edit.op(new.contract, **arguments)
    for user in list(old.node.users):
        assert user.target is operator.getitem
        assert isinstance(user.args[1], int)
        if values.tensor(user) is not None and user.users:
            edit.replace(user, edit.item(result, user.args[1]))
