"""Attention as torch itself has it, for a machine without an NPU.

    out = softmax(scale * q k^T + mask) v
"""

import torch

from ..sizes import known_equal, known_same_shape
from ..target import Target
from .contract import OpContract
from .reasons import FLOATS, dtype_among, dtype_name, rank_between, shape_text

__all__ = ["HOST_ATTENTION"]


def _refuse(
    target: Target,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> str | None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        for reason in (*dtype_among(name, tensor, FLOATS), *rank_between(name, tensor, 4, 4)):
            return reason
        if tensor.dtype != query.dtype:
            return f"{name} is {dtype_name(tensor.dtype)} but query is {dtype_name(query.dtype)}"
    if not enable_gqa and not known_equal(query.shape[1], key.shape[1]):
        return f"key {shape_text(key.shape)} has other heads than query {shape_text(query.shape)}"
    if not known_same_shape(key.shape[:3], value.shape[:3]):
        return f"value {shape_text(value.shape)} has other tokens or heads than key {shape_text(key.shape)}"
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, query.dtype):
        return f"attn_mask is {dtype_name(attn_mask.dtype)} (it may be bool or {dtype_name(query.dtype)})"
    if attn_mask is not None and is_causal:
        return "is_causal and attn_mask are both given (torch takes one)"
    return f"dropout_p is {dropout_p} (nothing is dropped in inference)" if dropout_p else None


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch's own function, which is the reference of itself.

    Args:
        query: [batch, heads, tokens, head_dim] of any float type and strides.
        key: [batch, heads or a divisor of them, keys, head_dim].
        value: likewise; head_dim may be another.
        attn_mask: bool (True: seen) or of query's type (added), broadcasts to [batch, heads, tokens, keys].
        dropout_p: 0.
        is_causal: whether a query sees the keys up to its own place, counted from the first key.
        scale: factor of the scores; 1 / sqrt(head_dim) if None.
        enable_gqa: whether key has fewer heads.

    Returns:
        [batch, heads, tokens, head_dim of value]. A query that sees no key gets zeros.
    """
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


HOST_ATTENTION = OpContract(
    name="aten::scaled_dot_product_attention",
    schema=(
        "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None,"
        " float dropout_p=0., bool is_causal=False, *, float? scale=None, bool enable_gqa=False) -> Tensor"
    ),
    reference=_attention,
    fake=_attention,
    refuse=_refuse,
    socs=frozenset({"host"}),
    source="torch 2.13",
)
