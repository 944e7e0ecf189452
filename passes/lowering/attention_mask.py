"""What a mask becomes in a call of a fused attention op: nothing, a mode, or the tensor, inverted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ...patterns import values
from ...patterns.attention import Attention
from ...patterns.cone import walk
from ...patterns.masks.band import Band
from ...patterns.masks.integers import Linear, of_size
from ...patterns.masks.visibility import Visibility
from ...patterns.match import Match
from ...patterns.movement import is_movement
from ...patterns.values import CASTS
from ...runtime.ops.attention_call import SHIFT_ALIGNMENT
from ...runtime.ops.attention_mask import (
    BAND,
    LEFT_UP_CAUSAL,
    RIGHT_DOWN_CAUSAL,
    UNLIMITED,
    compressed_causal_mask,
)
from ...runtime.sizes import known_equal, known_same_shape, known_true, static_int
from ..edit import Edit, Refused
from .attention_ops import AttentionOp

aten = torch.ops.aten

_UNPROVEN = "it is not proven that every query sees a key"


@dataclass(frozen=True, slots=True)
class Masking:
    """The arguments of a call that say what is hidden, and what is added to the scores.

    Args:
        arguments: by name, those that differ from their defaults.
        zeros_blank_rows: whether the op has to give zeros to a query that sees no key.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    zeros_blank_rows: bool = False


def masking(match: Match, query: fx.Node, key: fx.Node, op: AttentionOp, edit: Edit) -> Masking:
    """Says what a site hides in the arguments of an op.

    Args:
        match: a site of attention.
        query: [batch, heads, tokens, head_dim].
        key: likewise.
        op: the op.
        edit: the rewrite of the site.

    Raises:
        Refused: the op has no way to say it.
    """
    p = match.params
    assert isinstance(p, Attention)
    arguments: dict[str, Any] = {}
    if "bias" in match.inputs:
        arguments[op.shift] = _shift(match, query, key, op, edit)
    if p.mask.kind in ("none", "all_true", "bias"):
        return Masking(arguments)
    zeros = _zeros_blank_rows(p, query, op)
    mode = _mode(p.mask.visibility, query, key, op) if op.has_modes else None
    if mode is None:
        sizes = tuple(map(of_size, (values.shape(query)[2], values.shape(key)[2])))
        if "mask" in match.inputs:
            shared = ("hidden", edit.current(match.inputs["mask"]), p.hides, *sizes)
            arguments["atten_mask"] = edit.share(shared, lambda: _hidden(match, query, key, edit))
        else:
            band = _band(p.mask.visibility)
            arguments["atten_mask"] = edit.share(("beyond", band, *sizes), lambda: _beyond(band, query, key, edit))
    else:
        value = values.tensor(query)
        assert value is not None
        compressed = edit.constant("_compressed_causal_mask", value.device, compressed_causal_mask)
        arguments |= {"atten_mask": compressed, **mode}
    return Masking(arguments, zeros)


def _zeros_blank_rows(p: Attention, query: fx.Node, op: AttentionOp) -> bool:
    """Whether the model gives zeros to a query that sees no key, and there may be one.

    Raises:
        Refused: there may be one, and the op gives something else.
    """
    if p.mask.visibility is not None and p.mask.visibility.every_query_sees_a_key:
        return False
    if p.blank_rows != "zeros":
        given = {"NaN": "NaN", "mean": "the mean of all values"}[p.blank_rows]
        raise Refused(f"{_UNPROVEN}: the model gives {given} to one that sees none, the op does not")
    if op.zeros_for == "none" or (op.zeros_for == "several tokens" and not known_true(values.shape(query)[2] > 1)):
        tokens = values.shape(query)[2]
        raise Refused(f"{_UNPROVEN}: what one gets that sees none, the op leaves open for a query of {tokens} tokens")
    return True


def _mode(visible: Visibility | None, query: fx.Node, key: fx.Node, op: AttentionOp) -> dict[str, Any] | None:
    """The sparse mode that hides the same; None where there is none."""
    if visible is None or visible.chunk is not None or visible.segments is not None or visible.padding is not None:
        return None
    q_len, kv_len = (values.shape(node)[2] for node in (query, key))
    if not known_true(q_len > 1):
        return None  # modes have no effect for a query of one token
    lower, upper = visible.band.lower, visible.band.upper
    surplus = of_size(kv_len) - of_size(q_len)
    if lower is None and upper == surplus:
        return {"sparse_mode": RIGHT_DOWN_CAUSAL}
    if lower is None and upper == Linear(0):
        return {"sparse_mode": LEFT_UP_CAUSAL}
    before = (surplus - lower).number if lower is not None else UNLIMITED
    after = (upper - surplus).number if upper is not None else UNLIMITED
    if before is None or after is None:
        return None
    return {"sparse_mode": BAND, op.pre_tokens: before, op.next_tokens: after}


def _band(visible: Visibility | None) -> Band:
    """The band that a mask without a tensor is."""
    if visible is None or visible.chunk or visible.segments or visible.padding:
        raise Refused("the op takes what it hides only as a mask, and the model has none")
    return visible.band


def _beyond(band: Band, query: fx.Node, key: fx.Node, edit: Edit) -> fx.Node:
    """A mask as the op takes it, of what lies outside a band whose bounds are numbers."""
    value = values.tensor(query)
    assert value is not None
    rows, keys = (
        edit.call(aten.arange.default, edit.rewriter.size(values.shape(of)[2], of, 2), device=value.device)
        for of in (query, key)
    )
    offsets = edit.call(aten.sub.Tensor, keys, edit.call(aten.unsqueeze.default, rows, 1))
    hidden = None
    for bound, compare in ((band.upper, aten.gt.Scalar), (band.lower, aten.lt.Scalar)):
        if bound is None:
            continue
        if bound.number is None:
            raise Refused(f"the op takes what it hides only as a mask, and the model has none for {band}")
        beyond = edit.call(compare, offsets, bound.number)
        hidden = beyond if hidden is None else edit.call(aten.logical_or.default, hidden, beyond)
    assert hidden is not None, band
    for _ in range(2):
        hidden = edit.call(aten.unsqueeze.default, hidden, 0)
    return hidden


def _hidden(match: Match, query: fx.Node, key: fx.Node, edit: Edit) -> fx.Node:
    """The mask as the op takes it: bool, True hides, contiguous [batch or 1, 1, tokens, keys]."""
    mask, p = edit.current(match.inputs["mask"]), match.params
    assert isinstance(p, Attention)
    is_float = values.dtype(mask) != torch.bool
    if is_float and not p.mask.only_hides:
        raise Refused(f"its mask is float, and {p.mask.reason or 'not known to hide keys only'}")
    found = _four_axes(mask, match, edit)
    if not known_equal(values.shape(found)[1], 1):
        if not _is_alike_for_all_heads(found, p):
            raise Refused(f"its mask is one for each of {values.shape(found)[1]} heads; the op takes one for all")
        found = edit.call(aten.slice.Tensor, found, 1, 0, 1)
    if is_float:
        found = edit.call(aten.lt.Scalar, found, 0)
    elif not p.hides:
        found = edit.call(aten.logical_not.default, found)
    return edit.contiguous(_expanded(found, query, key, edit))


def _is_alike_for_all_heads(mask: fx.Node, p: Attention) -> bool:
    """Whether a mask [batch, heads, tokens, keys] is, being proven so, or one in memory."""
    value = values.tensor(mask)
    assert value is not None
    return p.mask.alike_for_all_heads or known_equal(value.stride()[1], 0)


def _four_axes(node: fx.Node, match: Match, edit: Edit) -> fx.Node:
    """[batch or 1, heads or 1, tokens or 1, keys]. Of three axes the first is of heads where q has heads."""
    without_heads = len(values.shape(edit.current(match.inputs["query"]))) == 3
    rank = len(values.shape(node))
    for axis in (1,) if rank == 3 and without_heads else (0,) * (4 - rank):
        node = edit.call(aten.unsqueeze.default, node, axis)
    return node


def _expanded(node: fx.Node, query: fx.Node, key: fx.Node, edit: Edit, heads: int = 1) -> fx.Node:
    """[batch or 1, heads, tokens, keys]."""
    rows, keys = (values.shape(of)[2] for of in (query, key))
    batch = values.shape(node)[0]
    if known_same_shape(values.shape(node), (batch, heads, rows, keys)):
        return node
    sizes = [-1, heads, edit.rewriter.size(rows, query, 2), edit.rewriter.size(keys, key, 2)]
    return edit.call(aten.expand.default, node, sizes)


# Numbers that are added -----------------------------------------------------------------------------------------------


def _shift(match: Match, query: fx.Node, key: fx.Node, op: AttentionOp, edit: Edit) -> fx.Node:
    """A bias as the op takes it: [batch or 1, heads, tokens, keys]."""
    p = match.params
    assert isinstance(p, Attention)
    bias = edit.current(match.inputs["bias"])
    if values.dtype(bias) != values.dtype(query):
        raise Refused(f"a bias of {values.dtype(bias)} is added; the op takes one of {values.dtype(query)}")
    if not p.is_written_out and not _is_finite(bias, edit):
        raise Refused(
            "numbers are added to its scores that may be -inf in a whole row, where the model gives zeros and the op"
            " something undefined"
        )
    edit.note(f"the op adds the bias in float32; the model in {values.dtype(bias)}")

    def make() -> fx.Node:
        shape = values.shape(bias)
        if p.merged and len(shape) == 3 and not known_equal(shape[0], 1):
            rows, keys = (edit.rewriter.size(shape[axis], bias, axis) for axis in (1, 2))
            by_head = edit.view(bias, [-1, p.num_heads, rows, keys])
        else:
            by_head = _four_axes(bias, match, edit)
        whole = _expanded(by_head, query, key, edit, p.num_heads)
        return edit.contiguous(_aligned(whole, edit) if op.pads_shift else whole)

    sizes = map(of_size, (values.shape(query)[2], values.shape(key)[2]))
    return edit.share(("shift", bias, p.num_heads, op.pads_shift, *sizes), make)


def _aligned(shift: fx.Node, edit: Edit) -> fx.Node:
    """The bias with rows that the op can read: what they are padded with it doesn't."""
    keys = static_int(values.shape(shift)[-1])
    missing = -keys % (SHIFT_ALIGNMENT // values.dtype(shift).itemsize) if keys is not None else 0
    return edit.call(aten.constant_pad_nd.default, shift, [0, missing]) if missing else shift


# What gives finite numbers for finite numbers, if none is too large.
_KEEPS_FINITE = CASTS | {
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.neg.default,
    aten.abs.default,
    aten.where.self,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.embedding.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.gather.default,
    aten.cat.default,
    aten.full.default,
    aten.zeros.default,
    aten.scalar_tensor.default,
}


def _is_finite(bias: fx.Node, edit: Edit) -> bool:
    """Whether a bias is computed from parameters, integers and finite numbers alone, so that none of it is -inf."""
    cone = walk(bias, lambda node: not values.is_float(node), limit=128)
    if cone is None:
        return False
    largest = torch.finfo(values.dtype(bias)).max
    numbers = [abs(a) for n in cone.nodes for a in (*n.args, *n.kwargs.values()) if isinstance(a, (int, float))]
    return (
        all(n in edit.rewriter.parameters or n.target in _KEEPS_FINITE or is_movement(n) for n in cone.nodes)
        and not any(values.is_float(n) for n in cone.inputs if n not in edit.rewriter.parameters)
        and all(number <= largest for number in numbers)
        and sum(number > largest / 2 for number in numbers) < 2  # the sum of two would be infinite
    )
