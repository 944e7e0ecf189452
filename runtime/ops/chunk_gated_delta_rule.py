"""The gated delta rule for a whole sequence, computed in chunks: all outputs, and the state after the last token."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..sizes import known_equal
from ..target import Target
from .contract import OpContract
from .gated_delta_rule import advanced, int32_vector, packed_heads, per_token, state_blocks
from .partly_covered import PartlyCovered
from .reasons import raise_first

__all__ = ["NPU_CHUNK_GATED_DELTA_RULE"]

_MAX_HEADS = 64

# Newer documents say up to 128; which CANN is installed is not known.
_HEAD_DIM = 128

_MIN_G = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What the contract covers.

    Args:
        query: [T, Nk, 128], bfloat16, contiguous as all tensors; the caller norms query and key.
        key: likewise.
        value: [T, Nv, 128], bfloat16; Nv is a multiple of Nk up to 64.
        beta: [T, Nv], bfloat16, between 0 and 1; needed.
        initial_state: [1, Nv, 128, 128], bfloat16, value dim before key dim; needed.
        actual_seq_lengths: [1], int32, is T; needed. Of several sequences it is not known whether it holds their
            lengths or their ends.
        scale: factor of query, None for 1.
        g: [T, Nv], float32, the logarithm of the decay, -1 to 0; None for no decay.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    beta: torch.Tensor | None
    initial_state: torch.Tensor | None
    actual_seq_lengths: torch.Tensor | None
    scale: float | None
    g: torch.Tensor | None


_PART = PartlyCovered(
    "npu::npu_chunk_gated_delta_rule",
    "npu_chunk_gated_delta_rule(Tensor query, Tensor key, Tensor value, *, Tensor? beta=None,"
    " Tensor? initial_state=None, Tensor? actual_seq_lengths=None, float? scale=None, Tensor? g=None)"
    " -> (Tensor, Tensor)",
    _Call,
)


def _invalid(call: _Call) -> Iterator[str]:
    yield from packed_heads(call.query, call.key, call.value, _MAX_HEADS)
    for name, tensor in (("key", call.key), ("value", call.value)):
        if not known_equal(tensor.shape[2], _HEAD_DIM):
            yield f"{name} has head_dim {tensor.shape[2]} (the kernel takes {_HEAD_DIM})"
    for name in ("beta", "initial_state", "actual_seq_lengths"):
        if getattr(call, name) is None:
            yield f"{name} is missing, which the kernel needs"
    yield from per_token("beta", call.beta, call.value, torch.bfloat16)
    yield from per_token("g", call.g, call.value, torch.float32)
    if call.initial_state is not None and call.actual_seq_lengths is not None:
        yield from state_blocks("initial_state", call.initial_state, call.key, call.value)
        sequences = call.initial_state.shape[0]
        if not known_equal(sequences, 1):
            yield (
                f"initial_state has {sequences} sequences, and of several it is not known whether actual_seq_lengths"
                " holds their lengths or their ends"
            )
        yield from int32_vector("actual_seq_lengths", call.actual_seq_lengths, 1)


@_PART.refuse
def _refuse(target: Target, call: _Call) -> Iterator[str]:
    yield from _invalid(call)
    if call.g is not None:
        yield f"g is given, whose values must lie in {_MIN_G} to 0, which is not known before the program runs"


def _value_reasons(call: _Call) -> Iterator[str]:
    assert call.actual_seq_lengths is not None
    if call.actual_seq_lengths.tolist() != [len(call.value)]:
        yield f"actual_seq_lengths is {call.actual_seq_lengths.tolist()}, and there are {len(call.value)} tokens"
    if call.g is not None and not bool(((call.g >= _MIN_G) & (call.g <= 0)).all()):
        yield f"g goes from {call.g.min().item():g} to {call.g.max().item():g} (the kernel takes {_MIN_G} to 0)"


@_PART.kernel
def chunk_gated_delta_rule_reference(call: _Call) -> tuple[torch.Tensor, torch.Tensor]:
    """What `npu::npu_chunk_gated_delta_rule` computes, token by token in float32; how the kernel's chunks round inside
    is not documented.

    Args:
        call: the arguments, see `_Call`.

    Returns:
        The outputs [T, Nv, 128] and the state [1, Nv, 128, 128] after them, bfloat16.

    Raises:
        ValueError: shapes or dtypes don't fit, a needed argument is missing, or values are out of range.

    Source: torch_npu 2.13.0 (schema), op-plugin's document (shapes, ranges, formula).
    """
    raise_first(_PART.name, _invalid(call))
    raise_first(_PART.name, _value_reasons(call))
    assert call.beta is not None
    assert call.initial_state is not None
    scale = 1.0 if call.scale is None else call.scale
    steps = advanced(call.initial_state[0], call.query, call.key, call.value, call.beta, call.g, scale)
    outputs, states = zip(*steps, strict=True)
    return torch.stack(outputs).to(call.value.dtype), states[-1].to(call.initial_state.dtype).unsqueeze(0)


@_PART.kernel
def chunk_gated_delta_rule_fake(call: _Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes of `chunk_gated_delta_rule_reference`."""
    assert call.initial_state is not None
    return (
        call.value.new_empty(call.value.shape, dtype=torch.bfloat16),
        call.initial_state.new_empty(call.initial_state.shape),
    )


NPU_CHUNK_GATED_DELTA_RULE = OpContract(
    name=_PART.name,
    schema=_PART.schema,
    reference=chunk_gated_delta_rule_reference,
    fake=chunk_gated_delta_rule_fake,
    refuse=_refuse,
    socs=frozenset({"ascend910b", "ascend910_93", "ascend950"}),
    source="torch_npu 2.13.0 (schema), op-plugin 517f2e7d (shapes, ranges, formula)",
)
