"""softmax(scale * q k^T, masked) v → torch's own attention, with flags in place of masks and of repeated heads."""

from __future__ import annotations

from typing import Any

import torch

from ...patterns import values
from ...patterns.attention import Attention
from ...patterns.mask import Mask
from ...patterns.masks.band import Band
from ...patterns.masks.integers import Linear
from ...patterns.match import Match
from ...runtime.ops.contract import OpContract
from ...runtime.ops.host_attention import HOST_ATTENTION
from ..edit import Edit, Refused

aten = torch.ops.aten


def lower_on_host(match: Match, edit: Edit) -> OpContract:
    """One call, whose mask is a flag where one says the same.

    Raises:
        Refused: it is such a call already, or torch's attention is another.
    """
    p = match.params
    assert isinstance(p, Attention)
    if p.merged or p.key_transposed or len(values.shape(match.node)) != 4:
        raise Refused("its batch and heads are one axis, or its keys lie transposed")
    arguments: dict[str, Any] = {name: edit.current(match.inputs[name]) for name in ("query", "key", "value")}
    if p.num_heads != p.num_kv_heads:
        arguments["enable_gqa"] = True
    arguments |= {"scale": p.scale, **_mask(match, p, edit)}
    if not p.is_written_out and set(match.claimed) == {match.node} and not _drops_mask(match, arguments):
        raise Refused("it is this machine's best already")
    edit.note("torch's attention rounds as its own kernels do")
    result = edit.op(HOST_ATTENTION, **arguments)
    edit.replace(match.node, result)
    return HOST_ATTENTION


def _drops_mask(match: Match, arguments: dict[str, Any]) -> bool:
    return "mask" in match.inputs and "attn_mask" not in arguments


def _mask(match: Match, p: Attention, edit: Edit) -> dict[str, Any]:
    """The arguments that hide what the site hides, or add what it adds."""
    if "bias" in match.inputs:
        if "mask" in match.inputs or p.is_written_out:
            raise Refused("numbers are added to its scores, and a row of -inf gives NaN; torch's attention gives zeros")
        return {"attn_mask": edit.current(match.inputs["bias"])}
    if p.mask.kind in ("none", "all_true"):
        return {}
    if _is_causal(p.mask):
        return {"is_causal": True}
    mask = edit.current(match.inputs["mask"])
    proven = p.mask.visibility is not None and p.mask.visibility.every_query_sees_a_key
    if p.blank_rows == "NaN" and not proven:
        raise Refused("a query that sees no key gets NaN, of torch's attention zeros")
    if values.dtype(mask) == values.dtype(edit.current(match.inputs["query"])):
        return {"attn_mask": mask}
    if p.mask.lowest and not proven:
        raise Refused("a query that sees no key gets the mean of all values, of torch's attention zeros")
    if values.dtype(mask) != torch.bool:
        if not p.mask.only_hides:
            raise Refused(f"its mask is {values.dtype(mask)}, and {p.mask.reason or 'not known to hide keys only'}")
        return {"attn_mask": edit.call(aten.eq.Scalar, mask, 0)}
    return {"attn_mask": edit.call(aten.logical_not.default, mask) if p.hides else mask}


def _is_causal(mask: Mask) -> bool:
    """Whether a query sees the keys up to its own place: as torch counts, from the first key."""
    v = mask.visibility
    only_band = v is not None and v.chunk is None and v.segments is None and v.padding is None
    return only_band and v is not None and v.band == Band(None, Linear(0)) and v.every_query_sees_a_key
