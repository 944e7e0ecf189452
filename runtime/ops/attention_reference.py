"""What inference attention ops compute: all the same, save for rows that see no key and for queries of one token."""

from collections.abc import Iterator, Sequence
from typing import cast

import torch

from ..sizes import Size
from .attention import Attended, KeysOf, attention
from .attention_call import AttentionCall
from .attention_layout import AttentionSizes, heads_first, result_shape, written
from .attention_mask import (
    COMPRESSED,
    DEFAULT_MASK,
    UNLIMITED,
    BlankRows,
    Masking,
    four_dims,
    is_compressed_causal_mask,
)
from .layout import row_major
from .paged_kv import missing_blocks, tokens_of
from .sequence_lengths import batch_lengths, packed_spans

__all__ = ["attended", "fake_lse", "fake_result", "lse", "result", "value_reasons"]


def value_reasons(call: AttentionCall) -> Iterator[str]:
    """What only the values of tensors show to be undefined on the device."""
    compressed = call.atten_mask if call.sparse_mode in COMPRESSED else None
    if compressed is not None and not is_compressed_causal_mask(compressed):
        yield f"atten_mask of sparse_mode {call.sparse_mode} is not True above the diagonal and False elsewhere"
    if call.block_table is not None:
        lengths = cast(Sequence[int], call.kv_lengths)
        rows = batch_lengths(lengths, len(call.block_table), 0)
        if missing := missing_blocks(call.block_table, rows, call.block_size, len(call.key)):
            yield f"block_table names blocks {missing} of a cache of {len(call.key)}"


def attended(call: AttentionCall, blank_rows: BlankRows, *, decodes: bool = False) -> Attended:
    """The results in float32, heads first.

    Args:
        call: a call that the op takes.
        blank_rows: what a row gets that sees no key.
        decodes: whether query has one token and the op then ignores its lengths, the sparse mode and pre_tokens and
            next_tokens; a mask of mode 0 or 1 still holds.
    """
    masking = Masking(
        sparse_mode=DEFAULT_MASK if decodes else call.sparse_mode,
        mask=None if call.sparse_mode in COMPRESSED else four_dims(call.atten_mask, by_batch=decodes),
        pre_tokens=UNLIMITED if decodes else call.pre_tokens,
        next_tokens=UNLIMITED if decodes else call.next_tokens,
        blank_rows=blank_rows,
    )
    return attention(
        heads_first(call.query, call.input_layout, call.num_heads),
        _packed_sequences(call) if call.packed else _batched_sequences(call, decodes),
        call.scale,
        masking,
        value_head_dim=int(call.value_head_dim),
        shift=call.pse_shift,
        sink=call.sink,
    )


def result(call: AttentionCall, of: Attended) -> torch.Tensor:
    """The attention, rounded to query's type, in the layout of the result."""
    return written(of.out.to(call.query.dtype), call.input_layout)


def lse(call: AttentionCall, of: Attended) -> torch.Tensor:
    """log(sum(exp(score))) of each row, [B, N, S, 1] or [T, N, 1]; [0] where the call doesn't ask for it."""
    if not call.with_lse:
        return of.out.new_empty(0)
    rows = of.log_sum_exp()
    return row_major(rows[0].transpose(0, 1) if call.packed else rows)


def fake_result(call: AttentionCall) -> torch.Tensor:
    """Shape of `result`."""
    batch, tokens, heads, _ = call.query_sizes
    shape = result_shape(call.input_layout, AttentionSizes(batch, tokens, heads, call.value_head_dim))
    return call.query.new_empty(shape)


def fake_lse(call: AttentionCall) -> torch.Tensor:
    """Shape of `lse`."""
    batch, tokens, heads, _ = call.query_sizes
    shape: list[Size] = [0]
    if call.with_lse:
        shape = [tokens, heads, 1] if call.packed else [batch, heads, tokens, 1]
    return call.query.new_empty(shape, dtype=torch.float32)


def _batched_sequences(call: AttentionCall, decodes: bool) -> Iterator[KeysOf]:
    batch, tokens = int(call.query_sizes.batch), int(call.query_sizes.tokens)
    rows = batch_lengths(None if decodes else cast(Sequence[int] | None, call.q_lengths), batch, tokens)
    keys = batch_lengths(cast(Sequence[int] | None, call.kv_lengths), batch, int(call.tokens_of_key))
    for entry, (row_count, key_count) in enumerate(zip(rows, keys, strict=True)):
        yield KeysOf(entry, 0, row_count, *_keys(call, entry, entry, 0, key_count))


def _packed_sequences(call: AttentionCall) -> Iterator[KeysOf]:
    rows = packed_spans(cast(Sequence[int], call.q_lengths))
    ends = cast(Sequence[int], call.kv_lengths)
    keys = packed_spans(ends) if call.block_table is None else [(0, length) for length in ends]
    for sequence, ((first, stop), (first_key, stop_key)) in enumerate(zip(rows, keys, strict=True)):
        yield KeysOf(0, first, stop, *_keys(call, sequence, 0, first_key, stop_key))


def _keys(call: AttentionCall, sequence: int, batch: int, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a sequence, [heads, tokens, head_dim]: by its row of the table, else of the batch entry."""
    heads = call.heads_of_key
    if call.block_table is not None:
        blocks = call.block_table[sequence]
        return tokens_of(call.key, blocks, stop, heads), tokens_of(call.value, blocks, stop, heads)
    key, value = (heads_first(tensor, call.input_layout, heads)[batch] for tensor in (call.key, call.value))
    return key[:, first:stop], value[:, first:stop]
