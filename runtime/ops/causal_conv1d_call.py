"""The arguments of a causal convolution with state, and what the kernel asks of them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..sizes import Size, known_equal, known_same_shape, known_true, static_int
from .reasons import contiguity, dtype_among, dtype_name, emptiness, rank_between, shape_text

__all__ = ["PREFILL", "SILU", "SPECULATIVE_WIDTH", "UPDATE", "ConvCall", "invalid"]

# Values of run_mode.
PREFILL, UPDATE = 0, 1

# Values of activation_mode.
NO_ACTIVATION, SILU = 0, 1

# The kernel reads num_accepted_tokens for this width alone; for others it ignores it without a word.
SPECULATIVE_WIDTH = 4

_MIN_WIDTH, _MAX_WIDTH = 2, 4

# Rows are copied in pieces of 32 bytes.
_ALIGNMENT = 16

_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvCall:
    """The arguments of one call.

    Args:
        x: [T, dim] tokens of packed sequences, or [batch, S, dim]; float16 or bfloat16, contiguous, not empty; dim is a
            multiple of 16.
        weight: [width, dim], of x's dtype, contiguous; width is 2 to 4, the last row meets the current token.
        conv_states: [slots, state_len, dim], of x's dtype, contiguous, written; state_len is width - 1 or more. The
            first width - 1 rows of a slot are its history, oldest first.
        bias: [dim], of x's dtype, contiguous.
        query_start_loc: [batch + 1] integers, where each packed sequence starts and the last one ends; for an x of two
            dims, and then needed. Tokens outside of all sequences are skipped.
        cache_indices: [batch] integers, the slot of each sequence; without it sequence i has slot i.
        has_initial_state: [batch] integers or bool, which sequences read their slot; without it none does. For
            `PREFILL`; `UPDATE` always reads.
        num_accepted_tokens: [batch] integers, for `UPDATE` of width 4: how many tokens of the last call were accepted.
            The history starts that many rows later, less one.
        activation_mode: 0 for none, 1 for SiLU.
        pad_slot_id: the slot of sequences that are skipped; negative without cache_indices.
        run_mode: `PREFILL` or `UPDATE`.
    """

    x: torch.Tensor
    weight: torch.Tensor
    conv_states: torch.Tensor
    bias: torch.Tensor | None
    query_start_loc: torch.Tensor | None
    cache_indices: torch.Tensor | None
    has_initial_state: torch.Tensor | None
    num_accepted_tokens: torch.Tensor | None
    activation_mode: int
    pad_slot_id: int
    run_mode: int

    @property
    def dim(self) -> Size:
        """The number of channels."""
        return self.x.shape[-1]

    @property
    def width(self) -> int:
        """The number of taps."""
        return int(self.weight.shape[0])

    @property
    def batch(self) -> Size:
        """The number of sequences."""
        if self.query_start_loc is None:
            return self.x.shape[0]
        return self.query_start_loc.shape[0] - 1


def invalid(call: ConvCall) -> Iterator[str]:
    """What shapes and dtypes show to be undefined, or to be ignored by the kernel."""
    yield from _tensors(call)
    yield from _sizes(call)
    if call.activation_mode not in (NO_ACTIVATION, SILU):
        yield f"activation_mode is {call.activation_mode} (0 is none, 1 is SiLU)"
    if call.run_mode not in (PREFILL, UPDATE):
        yield f"run_mode is {call.run_mode} (0 is prefill, 1 is update)"
    yield from _sequences(call)
    yield from _histories(call)


def _tensors(call: ConvCall) -> Iterator[str]:
    yield from dtype_among("x", call.x, (torch.float16, torch.bfloat16))
    yield from rank_between("x", call.x, 2, 3)
    yield from rank_between("weight", call.weight, 2, 2)
    yield from rank_between("conv_states", call.conv_states, 3, 3)
    for name, tensor in (("weight", call.weight), ("conv_states", call.conv_states), ("bias", call.bias)):
        if tensor is not None and tensor.dtype != call.x.dtype:
            yield f"{name} is {dtype_name(tensor.dtype)} but x is {dtype_name(call.x.dtype)} (they must be equal)"
    for name, tensor in (("x", call.x), ("conv_states", call.conv_states)):
        yield from emptiness(name, tensor)
    for name, tensor in (
        ("x", call.x),
        ("weight", call.weight),
        ("conv_states", call.conv_states),
        ("bias", call.bias),
    ):
        if tensor is not None:
            yield from contiguity(name, tensor)


def _sizes(call: ConvCall) -> Iterator[str]:
    width = static_int(call.weight.shape[0])
    if width is None:
        yield f"width {call.weight.shape[0]} of weight is not static"
    elif not _MIN_WIDTH <= width <= _MAX_WIDTH:
        allowed = f"{_MIN_WIDTH} to {_MAX_WIDTH}"
        yield f"weight {shape_text(call.weight.shape)} has width {width} (the kernel takes {allowed})"
    for name, tensor in (("weight", call.weight), ("conv_states", call.conv_states)):
        if not known_equal(tensor.shape[-1], call.dim):
            yield f"{name} {shape_text(tensor.shape)} is not known to have the {call.dim} channels of x"
    if not known_true(call.dim % _ALIGNMENT == 0):
        yield f"x has {call.dim} channels, not known to be a multiple of {_ALIGNMENT}"
    if not known_true(call.conv_states.shape[1] >= call.width - 1):
        yield (
            f"conv_states {shape_text(call.conv_states.shape)} is not known to hold the {call.width - 1} tokens"
            f" before the current one that width {call.width} reads"
        )
    if call.bias is not None and not known_same_shape(call.bias.shape, (call.dim,)):
        yield f"bias {shape_text(call.bias.shape)} is not [{call.dim}]"


def _sequences(call: ConvCall) -> Iterator[str]:
    starts = call.query_start_loc
    if call.x.dim() == 3:
        if starts is not None:
            yield "query_start_loc is given, which the kernel ignores where x has 3 dims"
    elif starts is None:
        yield "query_start_loc is missing, which an x of 2 dims needs"
    else:
        yield from dtype_among("query_start_loc", starts, _INTEGERS)
        yield from rank_between("query_start_loc", starts, 1, 1)
        yield from contiguity("query_start_loc", starts)
        if not known_true(starts.shape[0] >= 2):
            yield f"query_start_loc {shape_text(starts.shape)} is not known to have 2 entries or more"
    if call.cache_indices is not None:
        yield from _one_each("cache_indices", call.cache_indices, call, _INTEGERS)
    elif call.pad_slot_id >= 0:
        yield (
            f"pad_slot_id is {call.pad_slot_id} without cache_indices, and whether the kernel then skips the sequence"
            " of this number is not known; give a negative one"
        )
    elif not known_true(call.batch <= call.conv_states.shape[0]):
        yield (
            f"conv_states has {call.conv_states.shape[0]} slots, not known to be enough for {call.batch} sequences"
            " without cache_indices"
        )


def _histories(call: ConvCall) -> Iterator[str]:
    if call.has_initial_state is not None:
        if call.run_mode == UPDATE:
            yield "has_initial_state is given, which the kernel ignores in run_mode 1 (it always reads the state)"
        yield from _one_each("has_initial_state", call.has_initial_state, call, (*_INTEGERS, torch.bool))
    if call.num_accepted_tokens is not None:
        if call.run_mode == PREFILL:
            yield "num_accepted_tokens is given, which the kernel ignores in run_mode 0"
        if call.width != SPECULATIVE_WIDTH:
            yield (
                f"num_accepted_tokens is given, which the kernel ignores for width {call.width}"
                f" (it reads it for {SPECULATIVE_WIDTH} alone)"
            )
        yield from _one_each("num_accepted_tokens", call.num_accepted_tokens, call, _INTEGERS)


def _one_each(name: str, tensor: torch.Tensor, call: ConvCall, dtypes: tuple[torch.dtype, ...]) -> Iterator[str]:
    """The tensor has one value for each sequence."""
    yield from dtype_among(name, tensor, dtypes)
    yield from rank_between(name, tensor, 1, 1)
    yield from contiguity(name, tensor)
    if not known_equal(tensor.shape[0], call.batch):
        yield f"{name} {shape_text(tensor.shape)} is not known to have one entry for each of {call.batch} sequences"
