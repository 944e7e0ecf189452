"""Attention as torch itself has it, for a machine without an NPU.

    out = softmax(scale * q k^T + mask) v

Two ops: the public one, which takes a flag for causality or a mask, and the kernel behind it on a CPU, which takes
both. It computes no block of keys that lies behind a block of queries, takes fewer heads of keys than of queries as
they are, and masks that are broadcast along any axis.
"""

import torch

from ..sizes import known_equal, known_same_shape
from ..target import Target
from .contract import OpContract
from .reasons import FLOATS, dtype_among, dtype_name, emptiness, rank_between, shape_text

__all__ = ["CPU_ATTENTION", "HOST_ATTENTION", "HOST_CONTRACTS"]


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


def _refuse_on_cpu(
    target: Target,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    attn_mask: torch.Tensor | None,
    scale: float | None,
) -> str | None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.device.type != "cpu":
            return f"{name} is on {tensor.device.type} (the kernel runs on a CPU)"
        for reason in (*dtype_among(name, tensor, FLOATS), *rank_between(name, tensor, 4, 4), *emptiness(name, tensor)):
            return reason
        if tensor.dtype != query.dtype:
            return f"{name} is {dtype_name(tensor.dtype)} but query is {dtype_name(query.dtype)}"
        if not known_equal(tensor.stride(-1), 1):
            return f"{name} has strides {shape_text(tensor.stride())}, of which the last isn't 1"
    batch, heads, tokens, head_dim = query.shape
    if not known_same_shape(key.shape, value.shape):
        return f"value {shape_text(value.shape)} has another shape than key {shape_text(key.shape)}"
    if not (known_equal(key.shape[0], batch) and known_equal(key.shape[3], head_dim)):
        return f"key {shape_text(key.shape)} has another batch or head_dim than query {shape_text(query.shape)}"
    if not known_equal(heads % key.shape[1], 0):
        return f"query has {heads} heads, no multiple of key's {key.shape[1]}"
    if attn_mask is not None:
        if attn_mask.dtype != query.dtype:
            return f"attn_mask is {dtype_name(attn_mask.dtype)} (it may be {dtype_name(query.dtype)})"
        whole = (batch, heads, tokens, key.shape[2])
        if attn_mask.dim() != 4 or not all(
            known_equal(size, 1) or known_equal(size, of) for size, of in zip(attn_mask.shape, whole, strict=True)
        ):
            return f"attn_mask {shape_text(attn_mask.shape)} does not spread over {shape_text(whole)}"
    return f"dropout_p is {dropout_p} (nothing is dropped in inference)" if dropout_p else None


def _attention_on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's own kernel, which is the reference of itself.

    Args:
        query: [batch, heads, tokens, head_dim] of any float type; the last stride is 1.
        key: [batch, heads or a divisor of them, keys, head_dim], likewise.
        value: of the shape of key.
        dropout_p: 0.
        is_causal: whether a query sees keys up to its own place only, counted from the first key.
        attn_mask: of query's type, 4 axes, each of the size of the scores' or 1; added to them, `is_causal` or not.
        scale: factor of the scores; 1 / sqrt(head_dim) if None.

    Returns:
        [batch, heads, tokens, head_dim], tokens before heads in memory, and the logarithms of the sums. A query that
        sees no key gets zeros.
    """
    output, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )
    return output, sums


CPU_ATTENTION = OpContract(
    name="aten::_scaled_dot_product_flash_attention_for_cpu",
    schema=(
        "_scaled_dot_product_flash_attention_for_cpu(Tensor query, Tensor key, Tensor value, float dropout_p=0.0,"
        " bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)"
    ),
    reference=_attention_on_cpu,
    fake=_attention_on_cpu,
    refuse=_refuse_on_cpu,
    socs=frozenset({"host"}),
    source="torch 2.13",
)

HOST_CONTRACTS = (HOST_ATTENTION, CPU_ATTENTION)
