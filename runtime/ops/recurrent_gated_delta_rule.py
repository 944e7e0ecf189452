"""The gated delta rule for a few tokens of each sequence, with states in a pool:

S = state[slot of the last accepted token]
state[slot of each token] = S after it
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..sizes import known_true
from ..target import Target
from .contract import OpContract
from .gated_delta_rule import advanced, int32_vector, packed_heads, per_token, state_blocks
from .partly_covered import PartlyCovered
from .reasons import raise_first
from .sequence_lengths import packed_spans

__all__ = ["NPU_RECURRENT_GATED_DELTA_RULE"]

_MAX_HEADS = 256
_MAX_HEAD_DIM = 512
_MAX_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What the contract covers.

    Args:
        query: [T, Nk, Dk], bfloat16, contiguous as all tensors; the caller norms query and key.
        key: likewise.
        value: [T, Nv, Dv], bfloat16; Nv is a multiple of Nk up to 256, Dk and Dv are at most 512.
        state: [blocks, Nv, Dv, Dk], bfloat16, written; T blocks or more.
        beta: [T, Nv], bfloat16, between 0 and 1; needed.
        scale: factor of query; needed.
        actual_seq_lengths: [sequences], int32, 1 to 8 tokens each, T together; needed.
        ssm_state_indices: [T], int32, the block of each token; needed. No block of two sequences.
        num_accepted_tokens: [sequences], int32, 1 to the tokens of the sequence: it starts from the block of this one
            of its tokens, the first without it.
        g: [T, Nv], float32, the logarithm of the decay; None for no decay.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    state: torch.Tensor
    beta: torch.Tensor | None
    scale: float | None
    actual_seq_lengths: torch.Tensor | None
    ssm_state_indices: torch.Tensor | None
    num_accepted_tokens: torch.Tensor | None
    g: torch.Tensor | None


# gk is a decay of each column of the state; how it is applied is not documented beyond doubt.
_PART = PartlyCovered(
    "npu::npu_recurrent_gated_delta_rule",
    "npu_recurrent_gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor(a!) state, *, Tensor? beta=None,"
    " float? scale=None, Tensor? actual_seq_lengths=None, Tensor? ssm_state_indices=None,"
    " Tensor? num_accepted_tokens=None, Tensor? g=None, Tensor? gk=None) -> Tensor",
    _Call,
)


def _invalid(call: _Call) -> Iterator[str]:
    yield from packed_heads(call.query, call.key, call.value, _MAX_HEADS)
    for name, tensor in (("key", call.key), ("value", call.value)):
        if not known_true(tensor.shape[2] <= _MAX_HEAD_DIM):
            yield f"{name} has head_dim {tensor.shape[2]}, not known to be at most {_MAX_HEAD_DIM}"
    yield from state_blocks("state", call.state, call.key, call.value)
    tokens = call.value.shape[0]
    if not known_true(call.state.shape[0] >= tokens):
        yield f"state has {call.state.shape[0]} blocks, not known to be enough for {tokens} tokens"
    for name in ("beta", "scale", "actual_seq_lengths", "ssm_state_indices"):
        if getattr(call, name) is None:
            yield f"{name} is missing, which the kernel needs"
    yield from per_token("beta", call.beta, call.value, torch.bfloat16)
    yield from per_token("g", call.g, call.value, torch.float32)
    if call.ssm_state_indices is not None and call.actual_seq_lengths is not None:
        yield from int32_vector("ssm_state_indices", call.ssm_state_indices, tokens)
        yield from int32_vector("actual_seq_lengths", call.actual_seq_lengths)
        if call.num_accepted_tokens is not None:
            yield from int32_vector("num_accepted_tokens", call.num_accepted_tokens, call.actual_seq_lengths.shape[0])


@dataclass(frozen=True, slots=True)
class _Sequence:
    """Tokens [start, stop), the blocks that they are written to, and how many of them were accepted before."""

    start: int
    stop: int
    blocks: list[int]
    accepted: int


def _sequences(call: _Call) -> list[_Sequence]:
    assert call.actual_seq_lengths is not None
    assert call.ssm_state_indices is not None
    lengths = call.actual_seq_lengths
    spans = packed_spans(lengths.cumsum(0).tolist())
    blocks = call.ssm_state_indices.tolist()
    accepted = [1] * len(lengths) if call.num_accepted_tokens is None else call.num_accepted_tokens.tolist()
    return [
        _Sequence(start, stop, blocks[start:stop], count) for (start, stop), count in zip(spans, accepted, strict=True)
    ]


def _value_reasons(call: _Call) -> Iterator[str]:
    sequences = _sequences(call)
    lengths = [sequence.stop - sequence.start for sequence in sequences]
    if not all(1 <= length <= _MAX_TOKENS for length in lengths) or sum(lengths) != len(call.value):
        yield f"actual_seq_lengths is {lengths}, not 1 to {_MAX_TOKENS} each and {len(call.value)} together"
    blocks = [block for sequence in sequences for block in sequence.blocks]
    if outside := [block for block in blocks if not 0 <= block < len(call.state)]:
        yield f"ssm_state_indices names blocks {outside} of a state with {len(call.state)}"
    users = Counter(block for sequence in sequences for block in set(sequence.blocks))
    if shared := [block for block, count in users.items() if count > 1]:
        yield f"ssm_state_indices names blocks {shared} for more than one sequence, and which comes first is not known"
    for sequence, length in zip(sequences, lengths, strict=True):
        if not 1 <= sequence.accepted <= length:
            yield f"num_accepted_tokens is {sequence.accepted} for a sequence of {length} tokens"


@_PART.refuse
def _refuse(target: Target, call: _Call) -> Iterator[str]:
    yield from _invalid(call)


@_PART.kernel
def recurrent_gated_delta_rule_reference(call: _Call) -> torch.Tensor:
    """What `npu::npu_recurrent_gated_delta_rule` computes: float32 inside, outputs and states rounded once.

    A sequence goes on from the unrounded state; what it reads first is rounded, as it was written.

    Args:
        call: the arguments, see `_Call`. gk has to be None.

    Returns:
        [T, Nv, Dv], bfloat16.

    Raises:
        ValueError: shapes or dtypes don't fit, a needed argument is missing, or values are out of range.

    Source: torch_npu 2.13.0 (schema), op-plugin's document (shapes, ranges, formula); the order of roundings and the
    grouping of heads as in sgl-kernel-npu's open kernel of this name.
    """
    raise_first(_PART.name, _invalid(call))
    raise_first(_PART.name, _value_reasons(call))
    assert call.beta is not None
    assert call.scale is not None
    out = torch.empty_like(call.value)
    for sequence in _sequences(call):
        tokens = slice(sequence.start, sequence.stop)
        steps = advanced(
            call.state[sequence.blocks[sequence.accepted - 1]],
            call.query[tokens],
            call.key[tokens],
            call.value[tokens],
            call.beta[tokens],
            None if call.g is None else call.g[tokens],
            call.scale,
        )
        for row, block, (output, state) in zip(out[tokens], sequence.blocks, steps, strict=True):
            row.copy_(output)
            call.state[block] = state.to(call.state.dtype)
    return out


@_PART.kernel
def recurrent_gated_delta_rule_fake(call: _Call) -> torch.Tensor:
    """Shape of `recurrent_gated_delta_rule_reference`."""
    return call.value.new_empty(call.value.shape, dtype=torch.bfloat16)


NPU_RECURRENT_GATED_DELTA_RULE = OpContract(
    name=_PART.name,
    schema=_PART.schema,
    reference=recurrent_gated_delta_rule_reference,
    fake=recurrent_gated_delta_rule_fake,
    refuse=_refuse,
    socs=frozenset({"ascend910b", "ascend910_93"}),
    source="torch_npu 2.13.0 (schema), op-plugin 517f2e7d (shapes, ranges, formula)",
    mutates=("state",),
)
