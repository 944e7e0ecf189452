"""The gated delta rule: a state S [value dim, key dim] of each value head that decays, and is corrected by each token:

    S = exp(g) S
    S = S + beta (v - S k) k^T
    o = S (scale q)

Value heads share keys and queries in groups, one after the other.
"""

from collections.abc import Iterator

import torch

from ..sizes import Size, known_equal, known_same_shape, known_true
from .reasons import contiguity, dtype_among, emptiness, rank_between, shape_text

__all__ = ["advanced", "int32_vector", "packed_heads", "per_token", "state_blocks"]

_BRAIN = (torch.bfloat16,)


def advanced(
    state: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    beta: torch.Tensor,
    g: torch.Tensor | None,
    scale: float,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The output [Nv, Dv] of each token of a sequence and the state [Nv, Dv, Dk] after it, in float32.

    Args:
        state: [Nv, Dv, Dk] before the first token, any float dtype.
        query: [L, Nk, Dk], as the following ones of any float dtype.
        key: [L, Nk, Dk].
        value: [L, Nv, Dv].
        beta: [L, Nv].
        g: [L, Nv], the logarithm of the decay; None for no decay.
        scale: factor of query.
    """
    group = value.shape[1] // key.shape[1]
    state = state.float()
    for token in range(len(value)):
        q, k = (heads[token].float().repeat_interleave(group, 0) for heads in (query, key))
        if g is not None:
            state = state * g[token].float().exp()[:, None, None]
        correction = value[token].float() - (state * k[:, None]).sum(-1)
        state = state + (correction * beta[token].float()[:, None])[..., None] * k[:, None]
        yield (state * (q * scale)[:, None]).sum(-1), state


def packed_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, max_heads: int) -> Iterator[str]:
    """query and key are [T, Nk, Dk], value is [T, Nv, Dv], and Nv is a multiple of Nk, at most `max_heads`."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        yield from dtype_among(name, tensor, _BRAIN)
        yield from rank_between(name, tensor, 3, 3)
        yield from emptiness(name, tensor)
        yield from contiguity(name, tensor)
    if not known_same_shape(query.shape, key.shape):
        yield f"query {shape_text(query.shape)} and key {shape_text(key.shape)} are not known to have one shape"
    if not known_equal(value.shape[0], key.shape[0]):
        yield f"value {shape_text(value.shape)} and key {shape_text(key.shape)} are not known to have as many tokens"
    heads, shared = value.shape[1], key.shape[1]
    if not known_true(heads % shared == 0):
        yield f"{heads} heads of value are not known to be a multiple of {shared} heads of key"
    if not known_true(heads <= max_heads):
        yield f"value has {heads} heads, not known to be at most {max_heads}"


def state_blocks(name: str, state: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Iterator[str]:
    """The state is [blocks, Nv, Dv, Dk]."""
    yield from dtype_among(name, state, _BRAIN)
    yield from rank_between(name, state, 4, 4)
    yield from emptiness(name, state)
    yield from contiguity(name, state)
    heads, value_dim, key_dim = value.shape[1], value.shape[2], key.shape[2]
    if not known_same_shape(state.shape[1:], (heads, value_dim, key_dim)):
        yield f"{name} {shape_text(state.shape)} is not [blocks, {heads}, {value_dim}, {key_dim}]"


def per_token(name: str, tensor: torch.Tensor | None, value: torch.Tensor, dtype: torch.dtype) -> Iterator[str]:
    """The tensor, if there is one, is [T, Nv]."""
    if tensor is None:
        return
    yield from dtype_among(name, tensor, (dtype,))
    yield from contiguity(name, tensor)
    if not known_same_shape(tensor.shape, value.shape[:2]):
        yield f"{name} {shape_text(tensor.shape)} is not {shape_text(value.shape[:2])}"


def int32_vector(name: str, tensor: torch.Tensor, length: Size | None = None) -> Iterator[str]:
    """The tensor is a vector of int32, of `length` elements where that is given."""
    yield from dtype_among(name, tensor, (torch.int32,))
    yield from rank_between(name, tensor, 1, 1)
    yield from contiguity(name, tensor)
    if length is not None and not known_equal(tensor.shape[0], length):
        yield f"{name} {shape_text(tensor.shape)} is not known to have {length} entries"
