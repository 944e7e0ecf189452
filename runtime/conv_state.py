"""Memory in which the kernel of a causal convolution finds its pool, whatever shape a framework gives its states.

Frameworks keep states as [slots, dim, state_len] and read the last width - 1 columns; the kernel wants a contiguous
[slots, rows, dim] and reads the first width - 1 rows. So the logical shape stays, and channels lie side by side in
memory: then the transposed view is the pool. Where a state has more columns than are read (transformers keeps width of
them), the pool starts that many rows later, and ends in the next slot, where the kernel touches nothing. Behind the
last slot there is memory to spare for that.

    memory   a0 a1 a2 a3 | b0 b1 b2 b3 | - - - -      a0: the oldest token of slot a, all channels
    states   [a0 a1 a2 a3] [b0 b1 b2 b3]
    pool        [a1 a2 a3 b0] [b1 b2 b3 -]            of width 4: rows 0 to 2 are read and written

That holds for calls without `num_accepted_tokens`. With them the kernel reads and writes further rows, and such states
are its own business from the first column on.
"""

import warnings
from typing import Protocol

import torch

from .sizes import is_contiguous

__all__ = ["HasLayers", "adopt", "has_pool_memory", "in_pool_memory", "new_states", "pool", "write_back"]


class HasLayers(Protocol):
    """A cache of transformers: each of its layers that convolves has `conv_states`, a dict of states by number."""

    layers: list[object]


def new_states(
    slots: int, dim: int, state_len: int, *, dtype: torch.dtype, device: torch.device | str | None = None
) -> torch.Tensor:
    """Zeros [slots, dim, state_len], in memory that holds the pool of every width."""
    rows = torch.zeros((slots + 1, state_len, dim), dtype=dtype, device=device)
    return rows[:slots].transpose(1, 2)


def in_pool_memory(states: torch.Tensor) -> torch.Tensor:
    """A copy of states [slots, dim, state_len], of this shape, in memory that holds the pool of every width."""
    moved = new_states(*states.shape, dtype=states.dtype, device=states.device)
    return moved.copy_(states)


def has_pool_memory(states: torch.Tensor) -> bool:
    """Whether the channels of states [slots, dim, state_len] lie side by side, so that `pool` may be a view.

    Sizes may be symbolic; no guard is installed. What is behind the last slot is known only when a program runs.
    """
    return is_contiguous(states.transpose(1, 2))


def pool(states: torch.Tensor, width: int) -> torch.Tensor:
    """The pool that the kernel of this width takes for states [slots, dim, state_len]; state_len is width - 1 or more.

    Returns:
        [slots, state_len, dim], contiguous, its first width - 1 rows the last columns of states. A view of states where
        their memory allows it. Else a copy [slots, width - 1, dim] of what is read, and `write_back` is needed.
    """
    unread = states.shape[2] - (width - 1)
    rows = states.transpose(1, 2)
    if rows.is_contiguous():
        if not unread:
            return rows
        start = rows.storage_offset() + unread * rows.shape[2]
        if (start + rows.numel()) * rows.element_size() <= rows.untyped_storage().nbytes():
            return rows.as_strided(rows.shape, (rows.shape[1] * rows.shape[2], rows.shape[2], 1), start)
    warnings.warn(
        f"npu_fuse: convolution states {list(states.shape)} with strides {list(states.stride())} are copied for each"
        " call, as their memory is not laid out as the kernel's pool. npu_fuse.runtime.conv_state.adopt(cache) moves"
        " those of a transformers cache once; new_states and in_pool_memory make others.",
        stacklevel=2,
    )
    return rows[:, unread:].contiguous()


def write_back(states: torch.Tensor, pool: torch.Tensor) -> None:
    """Puts what the kernel wrote into states, where `pool` is a copy; a view has written it already."""
    if pool.untyped_storage()._cdata != states.untyped_storage()._cdata:
        states[:, :, states.shape[2] - pool.shape[1] :] = pool.transpose(1, 2)


def adopt(cache: HasLayers) -> int:
    """Moves the convolution states of a transformers cache, once they exist, into memory that holds the kernel's pool.

    They are made by the first forward, the prefill; from then on each forward writes them in place, so that they stay
    where they are. Beam search, offloading and `crop` replace them: call this again. Layers that record the past for
    `crop` replace them in every forward, and are left alone, as are states that hold no float numbers.

    Returns:
        How many were moved; those that lie well are not.
    """
    moved = 0
    for layer in cache.layers:
        states: dict[int, torch.Tensor | None] = getattr(layer, "conv_states", {})
        if getattr(layer, "record_past", False):
            continue
        for index, state in states.items():
            if state is None or state.dim() != 3 or not state.is_floating_point() or _has_spare_slot(state):
                continue
            replacement = in_pool_memory(state)
            if hasattr(state, "_dynamo_static_input_type"):  # transformers marks them, for graphs that are replayed
                torch._dynamo.mark_static_address(replacement)
            states[index] = replacement
            moved += 1
    return moved


def _has_spare_slot(states: torch.Tensor) -> bool:
    slots, dim, state_len = states.shape
    end = states.storage_offset() + (slots + 1) * dim * state_len
    return has_pool_memory(states) and end * states.element_size() <= states.untyped_storage().nbytes()
