"""Attention as torch itself has it, for a machine without an NPU.

    out = softmax(scale * q k^T + mask) v

The public op takes a flag for causality or a mask, the kernel behind it on a CPU both. It computes no block of keys
that lies behind a block of queries, takes fewer heads of keys than of queries as they are, and masks that are broadcast
along any axis. `banded_attention` is calls of that kernel, of what a band and padding leave to be computed.
"""

from collections.abc import Iterator

import torch

from ..sizes import known_equal, known_same_shape
from ..target import Target
from .contract import OpContract
from .reasons import FLOATS, dtype_among, dtype_name, emptiness, rank_between, shape_text

__all__ = ["BANDED_ATTENTION", "CPU_ATTENTION", "HOST_ATTENTION", "HOST_CONTRACTS"]


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
            known_equal(size, 1) or known_equal(size, of) for size, of in zip(attn_mask.shape, whole, strict=False)
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
        [batch, heads, tokens, head_dim], dense and in the order of query's axes, and the logarithms of the sums. A
        query that sees no key gets zeros.
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

# Queries in one call of the kernel where a window hides what is far behind: it then takes 512 keys at a time.
_BLOCK = 512


def _refuse_banded(
    target: Target,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor | None,
    window: int | None,
    scale: float | None,
) -> str | None:
    reason = _refuse_on_cpu(target, query, key, value, 0.0, True, None, scale)
    if reason is not None:
        return reason
    if not known_equal(query.shape[2], key.shape[2]):
        return f"query {shape_text(query.shape)} has other tokens than key {shape_text(key.shape)}"
    if window is not None and window < 1:
        return f"window is {window} (a query sees one key at least)"
    if seen is not None:
        batch, tokens = query.shape[0], query.shape[2]
        if seen.dtype != torch.bool or seen.dim() != 2:
            return f"seen is {dtype_name(seen.dtype)} {shape_text(seen.shape)} (it may be bool [batch or 1, keys])"
        if not (known_equal(seen.shape[1], tokens) and any(known_equal(seen.shape[0], n) for n in (1, batch))):
            return f"seen {shape_text(seen.shape)} is not for keys {shape_text(key.shape)}"
    return None


def _banded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor | None = None,
    window: int | None = None,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """Causal attention that leaves out what is hidden: later keys, those before a window, padding before all prompts.

    What is padding before all prompts is read from `seen` when it runs.

    Args:
        query: [batch, heads, tokens, head_dim] of any float type; the last stride is 1.
        key: [batch, heads or a divisor of them, tokens, head_dim], likewise.
        value: of the shape of key.
        seen: bool [batch or 1, tokens], False where a key is padding; all are seen if None.
        window: how many keys a query sees, its own the last; all up to its own if None.
        scale: factor of the scores; 1 / sqrt(head_dim) if None.

    Returns:
        [batch, heads, tokens, head_dim], dense and in the order of query's axes. A query that sees no key gets zeros.
    """
    tokens = query.shape[2]
    start = 0
    if seen is not None:
        by_any = seen.any(0)
        start = int(by_any.to(torch.uint8).argmax()) if by_any.any() else tokens
        seen = None if seen[:, start:].all() else seen
    results = [
        _attention_on_cpu(
            query[:, :, a:b],
            key[:, :, first:b],
            value[:, :, first:b],
            is_causal=a == first,
            attn_mask=mask,
            scale=scale,
        )[0]
        for a, b, first, mask in _blocks(query, seen, window, start)
    ]
    if start == 0 and len(results) == 1:
        return results[0]
    output = torch.empty_like(query)
    output[:, :, :start] = 0
    for result in results:
        output[:, :, start : start + result.shape[2]] = result
        start += result.shape[2]
    return output


def _blocks(
    query: torch.Tensor, seen: torch.Tensor | None, window: int | None, start: int
) -> Iterator[tuple[int, int, int, torch.Tensor | None]]:
    """Blocks of queries from one to another, the first key that one of them sees, and what is added to their scores."""
    tokens = query.shape[2]
    if start == tokens:
        return
    if window is None or window >= tokens - start:
        yield start, tokens, start, None if seen is None else _hiding(seen[:, None, None, start:], query)
        return
    step = _BLOCK if 2 * window <= tokens - start else tokens - start
    place = torch.arange(tokens)
    for a in range(start, tokens, step):
        b, first = min(a + step, tokens), max(start, a - window + 1)
        behind = place[a:b, None] - place[first:b]
        within = (behind >= 0) & (behind < window)
        yield a, b, first, _hiding(within[None, None] if seen is None else within & seen[:, None, None, first:b], query)


def _hiding(seen: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return torch.zeros(seen.shape, dtype=query.dtype).masked_fill_(~seen, -torch.inf)


def _banded_fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor | None = None,
    window: int | None = None,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    return torch.empty_like(query)


BANDED_ATTENTION = OpContract(
    name="npu_fuse::banded_attention",
    schema=(
        "banded_attention(Tensor query, Tensor key, Tensor value, Tensor? seen=None, int? window=None, *,"
        " float? scale=None) -> Tensor"
    ),
    reference=_banded_attention,
    fake=_banded_fake,
    refuse=_refuse_banded,
    socs=frozenset({"host"}),
    source="torch 2.13",
)

HOST_CONTRACTS = (HOST_ATTENTION, CPU_ATTENTION, BANDED_ATTENTION)
