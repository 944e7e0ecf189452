"""Attention as torch_npu's own dispatch leaves it in a graph, a call of npu_fusion_attention_v3:

    out, … = npu_fusion_attention_v3(q, k, v, heads, "BNSD", pse, None, mask, scale, …, sparse_mode)

Its True hides a key. Without a mask nothing is hidden, whatever the mode is.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..runtime.ops.attention_mask import BAND, COMPRESSED, DEFAULT_MASK, LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL, UNLIMITED
from . import values
from .mask import NO_MASK, Mask, of_band
from .masks.band import Band
from .masks.integers import Linear, of_size
from .movement import source
from .scores import Addition, Operand, Scores, operand

_NAME = "npu::npu_fusion_attention_v3"

# What makes a call something else than attention alone, where it differs.
_PLAIN: Mapping[str, Any] = {
    "padding_mask": None,
    "keep_prob": 1.0,
    "prefix": None,
    "actual_seq_qlen": None,
    "actual_seq_kvlen": None,
    "sink": None,
}


@dataclass(frozen=True, slots=True)
class FusionAttention:
    """What a call computes.

    Args:
        scores: of query and key.
        value: the value.
        mask: what its mode hides.
        compressed: the mask that the mode takes, from which nothing more is to be learnt.
    """

    scores: Scores
    value: Operand
    mask: Mask = NO_MASK
    compressed: fx.Node | None = None


def is_fusion_attention(node: fx.Node) -> bool:
    """Whether a node is the first result of such a call."""
    if node.target is not operator.getitem or node.args[1] != 0:
        return False
    schema = getattr(source(node).target, "_schema", None)
    return schema is not None and schema.name == _NAME and not schema.overload_name


def read(node: fx.Node) -> FusionAttention | str:
    """Reads the first result of a call; or says what else it computes than attention alone."""
    call = source(node)
    given = values.arguments(call)
    if any(user is not node and user.users for user in call.users):
        return "its maxima and sums are used"
    if given["input_layout"] != "BNSD":
        return f"its layout is {given['input_layout']}, and BNSD is read"
    for name, default in _PLAIN.items():
        if given[name] != default:
            return f"its {name} is {given[name]}"
    query, key, value = (operand(given[name], takes_factors=name != "value") for name in ("query", "key", "value"))
    scores = Scores(query, key, float(given["scale"]))
    if isinstance(given["pse"], fx.Node):
        scores = scores.plus(Addition(given["pse"], shape=values.shape(node)))
    mask, mode = given["atten_mask"], given["sparse_mode"]
    if not isinstance(mask, fx.Node):
        return FusionAttention(scores, value)
    before, behind = (min(given[name], UNLIMITED) for name in ("pre_tockens", "next_tockens"))
    if mode in COMPRESSED:
        q_len, kv_len = (values.shape(given[name])[2] for name in ("query", "key"))
        band = _band(mode, before, behind, of_size(kv_len) - of_size(q_len))
        return FusionAttention(scores, value, of_band(band, q_len, kv_len), mask)
    if mode == DEFAULT_MASK and (before, behind) != (UNLIMITED, UNLIMITED):
        return f"it has a mask, and of that only a band: pre_tockens and next_tockens are {before} and {behind}"
    if values.dtype(mask) != torch.bool:
        return f"its mask is {values.dtype(mask)}"
    return FusionAttention(scores.plus(Addition(mask, hides=True, shape=values.shape(node))), value)


def _band(mode: int, before: int, behind: int, surplus: Linear) -> Band:
    """The keys that a query sees in a mode."""
    if mode == LEFT_UP_CAUSAL:
        return Band(None, Linear(0))
    if mode == RIGHT_DOWN_CAUSAL:
        return Band(None, surplus)
    assert mode == BAND
    return Band(None if before == UNLIMITED else surplus - before, None if behind == UNLIMITED else surplus + behind)
