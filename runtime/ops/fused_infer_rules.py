"""What npu_fused_infer_attention_score and its second version take, whatever they call their arguments.

A query of one token goes to the decoding kernel, a longer one to the prefill kernel, and packed sequences ("TND") to a
third; each has rules of its own.
"""

from collections.abc import Iterator
from typing import cast

import torch

from ..sizes import Size, known_equal, known_same_shape, known_true, static_int
from .attention_call import (
    MAX_TOKENS,
    AttentionCall,
    head_dim_reasons,
    head_reasons,
    shift_reasons,
    size_reasons,
    tensor_reasons,
)
from .attention_mask import BAND, COMPRESSED, DEFAULT_MASK, RIGHT_DOWN_CAUSAL, UNLIMITED, mask_reasons
from .paged_kv import block_table_reasons, cache_reasons
from .reasons import dtype_name, shape_text
from .sequence_lengths import batch_length_reasons, packed_length_reasons

__all__ = ["LAYOUTS", "doubtful", "invalid"]

LAYOUTS = (
    "BSH",
    "BSND",
    "BNSD",
    "BNSD_BSND",
    "BSH_BNSD",
    "BSND_BNSD",
    "BSH_NBSD",
    "BSND_NBSD",
    "BNSD_NBSD",
    "TND",
    "NTD",
    "TND_NTD",
    "NTD_TND",
    "NSD",
)
# Meta kernels take these; documents have them for latent attention alone, or not at all.
_LATENT_LAYOUTS = ("BSH_BNSD", "BSND_BNSD", "TND_NTD", "NSD")
# Where a full mask may do without its batch dim.
_PLAIN_LAYOUTS = ("BSH", "BSND", "BNSD", "BNSD_BSND")
_SINK_LAYOUTS = ("TND", "NTD_TND")
_MAX_TRANSPOSED_TOKENS = 16

_MAX_DECODED_TOKENS = 262144
_MAX_SINK_HEAD_DIM = 128

# How much of a mask over a cache in blocks the decoding kernel is trusted with: with wider ones, of a documented shape,
# hidden keys were seen (vllm-ascend#15503).
_MAX_PAGED_MASK = 512


def invalid(call: AttentionCall, *, takes_64: bool) -> Iterator[str]:
    """Why the kernel raises, or computes something undefined.

    Args:
        call: the call.
        takes_64: whether packed sequences may have a head_dim of 64.
    """
    if call.input_layout not in LAYOUTS:
        yield f"input_layout {call.input_layout!r} is unknown; known: {', '.join(LAYOUTS)}"
    yield from tensor_reasons(call)
    yield from head_reasons(call)
    yield from head_dim_reasons(call)
    yield from size_reasons(call)
    yield from _query_lengths(call)
    if call.block_table is not None:
        yield from _paging(call, call.block_table)
    yield from _key_lengths(call)
    yield from _packing(call, takes_64) if call.packed else _batching(call)
    yield from _sink(call)


def _query_lengths(call: AttentionCall) -> Iterator[str]:
    batch, tokens, _, _ = call.query_sizes
    if call.packed:
        yield from packed_length_reasons(call.names[1], call.q_lengths, tokens)
    elif not call.decodes:  # which ignores them
        yield from batch_length_reasons(call.names[1], call.q_lengths, batch, tokens)


def _paging(call: AttentionCall, block_table: torch.Tensor) -> Iterator[str]:
    batch = len(call.q_lengths or ()) if call.packed else call.query_sizes.batch
    yield from block_table_reasons(block_table, batch)
    head_dim = cast(int, static_int(call.query_sizes.head_dim))
    for name, cache in (("key", call.key), ("value", call.value)):
        yield from cache_reasons(name, cache, call.block_size, call.heads_of_key, head_dim)
        if cache.dim() == 4 and call.input_layout not in ("BNSD", "TND"):
            yield f"{name} is a cache of 4 dims ({call.input_layout} takes [blocks, block_size, heads * head_dim])"
    if not known_equal(call.key.shape[0], call.value.shape[0]) or call.key.dim() != call.value.dim():
        yield f"value {shape_text(call.value.shape)} and key {shape_text(call.key.shape)} must have the same shape"
    if call.packed:
        step, most = 16, 1024
    elif call.decodes:
        step, most = 16, 512
    else:
        step, most = 128, 512
    if call.block_size % step or not step <= call.block_size <= most:
        yield f"block_size is {call.block_size} (the kernel takes multiples of {step} up to {most} here)"
    if call.kv_lengths is None:
        yield f"{call.names[2]} is missing, which a block_table needs"


def _key_lengths(call: AttentionCall) -> Iterator[str]:
    _, q_name, kv_name = call.names
    sequences = len(call.q_lengths or ()) if call.packed else call.query_sizes.batch
    if call.packed and call.block_table is None:
        yield from packed_length_reasons(kv_name, call.kv_lengths, call.tokens_of_key)
    else:
        # With a table they are lengths for packed sequences, too: nothing tells where one would begin in a cache.
        yield from batch_length_reasons(kv_name, call.kv_lengths, sequences, call.tokens_of_key)
    if call.packed and sequences != len(call.kv_lengths or ()):
        yield (
            f"{q_name} has {sequences} sequences and {kv_name} {len(call.kv_lengths or ())}"
            " (packed sequences need both, for each)"
        )


def _batching(call: AttentionCall) -> Iterator[str]:
    """Rules of sequences that are not packed."""
    batch, tokens, _, _ = call.query_sizes
    tokens_of_key = call.tokens_of_key
    prefills = call.prefills
    if call.input_layout == "BNSD_BSND" and not prefills:
        yield f"query {shape_text(call.query.shape)} is not known to have more than one token, as BNSD_BSND needs"
    if call.input_layout.endswith("_NBSD") and not (prefills and known_true(tokens <= _MAX_TRANSPOSED_TOKENS)):
        yield (
            f"query {shape_text(call.query.shape)} is not known to have 2 to {_MAX_TRANSPOSED_TOKENS} tokens, as"
            f" {call.input_layout} needs"
        )
    most = _MAX_DECODED_TOKENS if call.decodes else MAX_TOKENS
    if known_true(tokens_of_key > most):
        yield f"key has {tokens_of_key} tokens (the kernel takes {most} for a query of {tokens})"
    yield from mask_reasons(
        call.atten_mask,
        call.sparse_mode,
        call.pre_tokens,
        call.next_tokens,
        _full_shapes(call, batch, tokens, tokens_of_key),
        may_be_wider=call.block_table is not None,
    )
    yield from shift_reasons(call)
    most_precise = 3 if prefills else 1
    if not 0 <= call.inner_precise <= most_precise:
        yield f"inner_precise is {call.inner_precise} (the kernel takes 0 to {most_precise} for a query of {tokens})"


def _full_shapes(call: AttentionCall, batch: Size, tokens: Size, tokens_of_key: Size) -> list[tuple[Size, ...]]:
    shapes: list[tuple[Size, ...]] = [
        (batch, 1, tokens, tokens_of_key),
        (1, 1, tokens, tokens_of_key),
        (1, tokens, tokens_of_key),
    ]
    if call.input_layout in _PLAIN_LAYOUTS and call.prefills:
        shapes.append((tokens, tokens_of_key))
    if call.input_layout in _PLAIN_LAYOUTS and call.decodes:
        shapes.append((batch, tokens_of_key))
    return shapes


def _packed_head_dims(call: AttentionCall, takes_64: bool) -> list[tuple[int, int]]:
    """The head_dims that query and value may have."""
    head_dims = [(128, 128), (192, 128)]
    if call.heads_of_key != call.num_heads:
        return head_dims
    if call.input_layout == "TND" and call.block_table is None:
        head_dims.append((192, 192))
    if call.input_layout == "TND" and takes_64:
        head_dims.append((64, 64))
    return head_dims


def _packing(call: AttentionCall, takes_64: bool) -> Iterator[str]:
    """Rules of packed sequences. What is documented for as many heads of key as of query is taken to hold for fewer."""
    head_dim, of_value = static_int(call.query_sizes.head_dim), static_int(call.value_head_dim)
    head_dims = _packed_head_dims(call, takes_64)
    if (head_dim, of_value) not in head_dims:
        allowed = ", ".join(f"{of_query}/{of_value}" for of_query, of_value in head_dims)
        yield f"head_dim is {head_dim} and {of_value} of value ({call.input_layout} takes {allowed} here)"
    if call.key.dim() == 4 and call.heads_of_key == call.num_heads:
        yield "key is a cache of 4 dims (packed sequences with a key head for each take [blocks, block_size, H])"
    if call.sparse_mode not in (DEFAULT_MASK, RIGHT_DOWN_CAUSAL, BAND):
        yield f"sparse_mode is {call.sparse_mode} (packed sequences take 0, 3 and 4)"
    yield from mask_reasons(call.atten_mask, call.sparse_mode, call.pre_tokens, call.next_tokens, [])
    if call.pse_shift is not None:
        yield "pse_shift is given, which packed sequences don't take"
    most_precise = 0 if call.query.dtype == torch.bfloat16 else 1
    if not 0 <= call.inner_precise <= most_precise:
        yield (
            f"inner_precise is {call.inner_precise}"
            f" (packed {dtype_name(call.query.dtype)} sequences take 0{' and 1' * most_precise})"
        )


def _sink(call: AttentionCall) -> Iterator[str]:
    if call.sink is None:
        return
    if call.input_layout not in _SINK_LAYOUTS:
        yield f"learnable_sink is given (layouts {' and '.join(_SINK_LAYOUTS)} take it, not {call.input_layout})"
    if call.sink.dtype != torch.bfloat16 or not known_same_shape(call.sink.shape, (call.num_heads,)):
        yield (
            f"learnable_sink is {dtype_name(call.sink.dtype)} {shape_text(call.sink.shape)}"
            f" (the kernel takes bfloat16 [{call.num_heads}])"
        )
    if (static_int(call.value_head_dim) or 0) > _MAX_SINK_HEAD_DIM:
        yield f"head_dim of value is {call.value_head_dim} (with learnable_sink the kernel takes {_MAX_SINK_HEAD_DIM})"
    if call.with_lse:
        yield "return_softmax_lse is given with learnable_sink, and whether the sums count the sink is not documented"


def doubtful(call: AttentionCall) -> Iterator[str]:
    """Why a call that the kernel takes shouldn't be made: an argument has no effect, or documents don't cover it."""
    if call.input_layout in _LATENT_LAYOUTS:
        yield f"input_layout {call.input_layout} is documented for latent attention alone"
    if call.packed or call.prefills:
        return
    tokens = call.query_sizes.tokens
    if call.sparse_mode in COMPRESSED:
        yield f"sparse_mode {call.sparse_mode} has no effect for a query of one token, and query may have {tokens}"
    if call.atten_mask is None:
        return
    if call.sparse_mode == DEFAULT_MASK and min(call.pre_tokens, call.next_tokens) < UNLIMITED:
        yield (
            f"pre_tokens {call.pre_tokens} and next_tokens {call.next_tokens} have no effect for a query of one token,"
            f" and query may have {tokens}"
        )
    if call.block_table is not None and not known_true(call.atten_mask.shape[-1] <= _MAX_PAGED_MASK):
        yield (
            f"atten_mask {shape_text(call.atten_mask.shape)} covers more than {_MAX_PAGED_MASK} keys of a cache in"
            f" blocks, of which a query of one token is reported to see hidden ones; use {call.names[2]}"
        )
