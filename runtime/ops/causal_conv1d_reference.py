"""What a causal convolution with state computes, sequence by sequence, and which rows it leaves out."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import silu

from .causal_conv1d_call import SILU, UPDATE, ConvCall

__all__ = ["convolved", "skipped_rows", "value_reasons"]


@dataclass(frozen=True, slots=True)
class _Sequence:
    """Tokens [start, stop) of all, the slot of their state, and which rows of it are their history, if any are."""

    start: int
    stop: int
    slot: int
    first_row: int
    has_history: bool


def value_reasons(call: ConvCall) -> Iterator[str]:
    """What only the values of tensors show to be undefined on the device."""
    tokens = call.x.shape[0]
    if call.query_start_loc is not None:
        starts = call.query_start_loc.tolist()
        if starts != sorted(starts) or starts[0] < 0 or starts[-1] > tokens:
            yield f"query_start_loc is {starts}, which must rise, or stay, from 0 or more to at most {tokens} tokens"
    slots = [sequence.slot for sequence in _sequences(call)]
    if outside := [slot for slot in slots if not 0 <= slot < len(call.conv_states)]:
        yield f"cache_indices names slots {outside} of conv_states with {len(call.conv_states)}"
    if twice := [slot for slot, count in Counter(slots).items() if count > 1]:
        yield f"cache_indices names slots {twice} more than once, and it is not known which sequence they would hold"


def convolved(call: ConvCall, skipped: float) -> torch.Tensor:
    """The outputs, with `skipped` in rows that belong to no sequence; writes `call.conv_states`."""
    out = torch.full_like(call.x, skipped)
    tokens, rows = call.x.view(-1, call.x.shape[-1]), out.view(-1, call.x.shape[-1])
    for sequence in _sequences(call):
        segment = tokens[sequence.start : sequence.stop]
        state = call.conv_states[sequence.slot]
        past = call.width - 1
        history = state[sequence.first_row : sequence.first_row + past]
        window = torch.cat((history if sequence.has_history else torch.zeros_like(history), segment))
        rows[sequence.start : sequence.stop] = _taps(call, window).to(call.x.dtype)
        # A speculative update keeps all of its tokens, so that the next call may go back to an earlier one.
        if call.num_accepted_tokens is not None and 2 + len(segment) <= len(state):
            kept = state[sequence.first_row + 1 : sequence.first_row + 3]
            state[: 2 + len(segment)] = torch.cat((kept, segment))
        else:
            state[:past] = window[len(segment) :]
    return out


def skipped_rows(call: ConvCall) -> torch.Tensor | None:
    """Which rows of the result belong to no sequence, bool of x's shape without its last dim or a broadcast of it.

    None where no row can. Computed on the device, without waiting for it.
    """
    pads = None if call.cache_indices is None else call.cache_indices == call.pad_slot_id
    if call.query_start_loc is None:
        return None if pads is None else pads.unsqueeze(1)
    starts = call.query_start_loc.long()
    places = torch.arange(call.x.shape[0], device=starts.device)
    # Of sequences that start at one place all but the last are empty; 0 stands for what is before the first.
    sequence = torch.searchsorted(starts, places, right=True)
    outside = torch.ones(1, dtype=torch.bool, device=starts.device)
    between = torch.zeros_like(starts[1:], dtype=torch.bool) if pads is None else pads
    return torch.cat((outside, between, outside))[sequence]


def _sequences(call: ConvCall) -> Iterator[_Sequence]:
    """Those that have tokens and a slot that isn't the pad's."""
    if call.query_start_loc is None:
        batch, length = call.x.shape[:2]
        bounds = [length * index for index in range(batch + 1)]
    else:
        bounds = call.query_start_loc.tolist()
    batch = len(bounds) - 1
    slots = range(batch) if call.cache_indices is None else call.cache_indices.tolist()
    initial = [False] * batch if call.has_initial_state is None else call.has_initial_state.tolist()
    accepted = [1] * batch if call.num_accepted_tokens is None else call.num_accepted_tokens.tolist()
    last_row = call.conv_states.shape[1] - (call.width - 1)
    for index, slot in enumerate(slots):
        if bounds[index] < bounds[index + 1] and slot != call.pad_slot_id:
            yield _Sequence(
                start=bounds[index],
                stop=bounds[index + 1],
                slot=slot,
                first_row=min(max(accepted[index] - 1, 0), last_row),
                has_history=call.run_mode == UPDATE or bool(initial[index]),
            )


def _taps(call: ConvCall, window: torch.Tensor) -> torch.Tensor:
    """The convolution of width - 1 + L rows, [L, dim] in float32: bias first, then the oldest tap to the newest.

    Products of two float16 or two bfloat16 numbers are exact in float32, so it makes no difference whether they are
    fused with the sum.
    """
    length = len(window) - (call.width - 1)
    total = window.new_zeros((length, window.shape[1]), dtype=torch.float32)
    if call.bias is not None:
        total += call.bias.float()
    for tap, weight in enumerate(call.weight.float()):
        total += window[tap : tap + length].float() * weight
    return silu(total) if call.activation_mode == SILU else total
