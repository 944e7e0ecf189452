"""Attention over a prompt, the op that ascend310p has:

    out = softmax(scale_value * q k^T + pse_shift, hidden keys at -inf) v

Mind the defaults: scale_value is 1.0, and next_tokens 0, so that a mask in mode 0 shows no key after the row's own.
"""

from collections.abc import Iterator, Sequence

import torch

from ..sizes import known_true
from ..target import Target
from .attention_call import (
    AttentionCall,
    head_dim_reasons,
    head_reasons,
    shift_reasons,
    size_reasons,
    tensor_reasons,
)
from .attention_mask import DEFAULT_MASK, UNLIMITED, mask_reasons
from .attention_reference import attended, fake_result, result, value_reasons
from .contract import OpContract
from .partly_covered import PartlyCovered
from .reasons import raise_first
from .sequence_lengths import batch_length_reasons

__all__ = ["NPU_PROMPT_FLASH_ATTENTION"]

_LAYOUTS = ("BSH", "BSND", "BNSD", "BNSD_BSND")
_MAX_BATCH_310P = 128
_MAX_TOKENS_310P = 65535


def _call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    atten_mask: torch.Tensor | None,
    pse_shift: torch.Tensor | None,
    actual_seq_lengths: Sequence[int] | None,
    num_heads: int,
    scale_value: float,
    pre_tokens: int,
    next_tokens: int,
    input_layout: str,
    num_key_value_heads: int,
    actual_seq_lengths_kv: Sequence[int] | None,
    sparse_mode: int,
) -> AttentionCall:
    """What the contract covers.

    Args:
        query: float16 or bfloat16, contiguous as all tensors, in the layout: B batch, S tokens, N heads, D head_dim,
            H = N * D. D is a multiple of 16 up to 512.
        key: in the layout.
        value: as key, of the same shape.
        atten_mask: bool, int8 or uint8, True hides. In sparse modes 0 and 1 [S, keys], [B or 1, S, keys] or
            [B or 1, 1, S, keys]; in modes 2 to 4 `compressed_causal_mask`.
        pse_shift: [B or 1, N, S, keys or more], of query's type; added to the scores.
        actual_seq_lengths: tokens of each batch entry, or one length for all.
        num_heads: heads of query.
        scale_value: factor of the scores.
        pre_tokens: see `attention_mask`.
        next_tokens: likewise.
        input_layout: "BSH", "BSND", "BNSD" or "BNSD_BSND"; the last gives a result as "BSND".
        num_key_value_heads: heads of key and value, 0 for num_heads; divides num_heads, by at most 64.
        actual_seq_lengths_kv: likewise of key.
        sparse_mode: 0 to 4, see `attention_mask`.
    """
    return AttentionCall(
        query=query,
        key=key,
        value=value,
        pse_shift=pse_shift,
        atten_mask=atten_mask,
        q_lengths=actual_seq_lengths,
        kv_lengths=actual_seq_lengths_kv,
        num_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        scale=scale_value,
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
        input_layout=input_layout,
        sparse_mode=sparse_mode,
        names=("num_heads", "actual_seq_lengths", "actual_seq_lengths_kv"),
    )


_PART = PartlyCovered(
    "npu::npu_prompt_flash_attention",
    "npu_prompt_flash_attention(Tensor query, Tensor key, Tensor value, *, Tensor? padding_mask=None,"
    " Tensor? atten_mask=None, Tensor? pse_shift=None, int[]? actual_seq_lengths=None, Tensor? deq_scale1=None,"
    " Tensor? quant_scale1=None, Tensor? deq_scale2=None, Tensor? quant_scale2=None, Tensor? quant_offset2=None,"
    " int num_heads=1, float scale_value=1.0, int pre_tokens=2147483647, int next_tokens=0,"
    ' str input_layout="BSH", int num_key_value_heads=0, int[]? actual_seq_lengths_kv=None, int sparse_mode=0)'
    " -> Tensor",
    _call,
)


def _invalid(call: AttentionCall) -> Iterator[str]:
    if call.input_layout not in _LAYOUTS:
        yield f"input_layout {call.input_layout!r} is not supported; known: {', '.join(_LAYOUTS)}"
    yield from tensor_reasons(call)
    yield from head_reasons(call)
    yield from head_dim_reasons(call)
    yield from size_reasons(call)
    batch, tokens, _, _ = call.query_sizes
    _, q_name, kv_name = call.names
    yield from batch_length_reasons(q_name, call.q_lengths, batch, tokens)
    yield from batch_length_reasons(kv_name, call.kv_lengths, batch, call.tokens_of_key)
    mask = (tokens, call.tokens_of_key)
    full_shapes = [mask, (1, *mask), (batch, *mask), (1, 1, *mask), (batch, 1, *mask)]
    yield from mask_reasons(call.atten_mask, call.sparse_mode, call.pre_tokens, call.next_tokens, full_shapes)
    yield from shift_reasons(call)


def _invalid_on_310p(call: AttentionCall) -> Iterator[str]:
    batch, tokens, _, _ = call.query_sizes
    if call.num_key_value_heads:
        yield f"num_key_value_heads is {call.num_key_value_heads} (ascend310p takes 0: a key head for each of query)"
    if call.sparse_mode != DEFAULT_MASK:
        yield f"sparse_mode is {call.sparse_mode} (ascend310p takes {DEFAULT_MASK})"
    if call.pre_tokens != UNLIMITED or call.next_tokens not in (0, UNLIMITED):
        yield (
            f"pre_tokens is {call.pre_tokens} and next_tokens {call.next_tokens}"
            f" (ascend310p takes {UNLIMITED}, and 0 or {UNLIMITED})"
        )
    for name, given in (
        ("pse_shift", call.pse_shift),
        ("actual_seq_lengths", call.q_lengths),
        ("actual_seq_lengths_kv", call.kv_lengths),
    ):
        if given is not None:
            yield f"{name} is given, which ascend310p doesn't take"
    for name, size, most in (
        ("batch", batch, _MAX_BATCH_310P),
        ("length of query", tokens, _MAX_TOKENS_310P),
        ("length of key", call.tokens_of_key, _MAX_TOKENS_310P),
    ):
        if known_true(size > most):
            yield f"the {name} is {size} (ascend310p takes {most})"


@_PART.refuse
def _refuse(target: Target, call: AttentionCall) -> Iterator[str]:
    yield from _invalid(call)
    if target.soc == "ascend310p":
        yield from _invalid_on_310p(call)


@_PART.kernel
def prompt_flash_attention_reference(call: AttentionCall) -> torch.Tensor:
    """What `npu::npu_prompt_flash_attention` computes: all in float32, one rounding.

    Args:
        call: the arguments, see `_call`. The others of the schema have to keep their defaults.

    Returns:
        The result in query's type. Rows of a batch entry without keys are zeros (documented where key has no tokens at
        all; a length of 0 is taken to be the same). NaN stands for what is undefined on the device: other rows that see
        no key, and rows past the length of their batch entry.

    Raises:
        ValueError: the op raises, or what it computes is undefined.

    Source: torch_npu 2.13.0 (shapes), op-plugin 517f2e7d (semantics, limits of ascend310p); the single rounding is
    inferred, CANN's kernel is closed and rounds the weights, too.
    """
    raise_first(_PART.name, _invalid(call))
    raise_first(_PART.name, value_reasons(call))
    return result(call, attended(call, "undefined"))


@_PART.kernel
def prompt_flash_attention_fake(call: AttentionCall) -> torch.Tensor:
    """Shape of `prompt_flash_attention_reference`."""
    return fake_result(call)


NPU_PROMPT_FLASH_ATTENTION = OpContract(
    name=_PART.name,
    schema=_PART.schema,
    reference=prompt_flash_attention_reference,
    fake=prompt_flash_attention_fake,
    refuse=_refuse,
    socs=frozenset({"ascend910b", "ascend910_93", "ascend310p"}),
    source="torch_npu 2.13.0 (schema, shapes), op-plugin 517f2e7d (semantics, limits)",
)
