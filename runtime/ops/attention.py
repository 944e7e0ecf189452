"""Attention with everything explicit, sequence by sequence:

    out = softmax(scale * q k^T + shift, hidden keys at -inf) v

in float32 throughout; who calls it rounds the result once. Query head h reads key head h // (query heads / key heads).
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from .attention_mask import Masking

__all__ = ["Attended", "KeysOf", "attention"]


class KeysOf(NamedTuple):
    """One sequence: which rows of the query are its, and all its keys.

    Args:
        batch: the query's batch entry.
        start: its first row there.
        stop: the row after its last.
        key: [key heads, keys, head_dim].
        value: [key heads, keys, value's head_dim].
    """

    batch: int
    start: int
    stop: int
    key: torch.Tensor
    value: torch.Tensor


class Attended(NamedTuple):
    """Results in float32.

    Args:
        out: [batch, heads, rows, value's head_dim].
        maximum: [batch, heads, rows, 1], the highest score of the row, a sink's included.
        total: [batch, heads, rows, 1], the sum of exp(score - maximum).
    """

    out: torch.Tensor
    maximum: torch.Tensor
    total: torch.Tensor

    def log_sum_exp(self) -> torch.Tensor:
        """[batch, heads, rows, 1]: maximum + log(total)."""
        return self.maximum + self.total.log()


def attention(
    query: torch.Tensor,
    sequences: Iterable[KeysOf],
    scale: float,
    masking: Masking,
    *,
    value_head_dim: int,
    shift: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
) -> Attended:
    """What attention kernels compute.

    Where a kernel writes something undefined, this writes NaN: in rows of no sequence; and in rows that see no key,
    save that `out` is zeros there where the sequence has no keys at all or where `masking` says so.

    Args:
        query: [batch, heads, rows, head_dim].
        sequences: what each part of the query attends to.
        scale: factor of the scores.
        masking: which keys are hidden.
        value_head_dim: the last dim of the result.
        shift: added to the scores; four dims that broadcast to [batch, heads, rows, keys] or exceed rows and keys.
        sink: [heads], a score for each head that takes its part of the sum and has no value.

    Returns:
        See `Attended`.
    """
    result = Attended(*(_undefined(query, last) for last in (value_head_dim, 1, 1)))
    for sequence in sequences:
        rows = slice(sequence.start, sequence.stop)
        num_rows, num_keys = sequence.stop - sequence.start, sequence.key.shape[1]
        if num_keys == 0:
            result.out[sequence.batch, :, rows] = 0.0
            continue
        q = query[sequence.batch, :, rows].float()
        scores = scale * (q @ _per_head(sequence.key, len(q)).transpose(-1, -2))
        if shift is not None:
            scores = scores + shift[sequence.batch if len(shift) > 1 else 0, :, :num_rows, :num_keys].float()
        hidden = masking.hidden(sequence.batch, num_rows, num_keys, query.device)
        weights, maximum, total = _softmax(scores, hidden, sink)
        out = weights @ _per_head(sequence.value, len(q))
        if hidden is not None:
            blank = hidden.all(-1, keepdim=True).expand_as(maximum)
            out = out.masked_fill(blank, 0.0 if masking.zeroes(num_rows, num_keys) else math.nan)
            maximum, total = maximum.masked_fill(blank, math.nan), total.masked_fill(blank, math.nan)
        for whole, part in zip(result, (out, maximum, total), strict=True):
            whole[sequence.batch, :, rows] = part
    return result


def _undefined(query: torch.Tensor, last: int) -> torch.Tensor:
    return query.new_full((*query.shape[:3], last), math.nan, dtype=torch.float32)


def _per_head(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    return tensor.float().repeat_interleave(heads // len(tensor), 0)


def _softmax(
    scores: torch.Tensor, hidden: torch.Tensor | None, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights of the keys; the highest score; the sum that the weights are divided by."""
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    maximum = scores.amax(-1, keepdim=True)
    if sink is not None:
        maximum = maximum.maximum(sink.float()[:, None, None])
    weights = (scores - maximum).exp()
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink.float()[:, None, None] - maximum).exp()
    return weights / total, maximum, total
