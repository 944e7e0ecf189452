"""Pairs of writes at the same slots are recognised, however they are spelled; a write alone is none."""

from collections.abc import Callable

import pytest
import torch

from helpers import compiled, repeats, same
from npu_fuse.patterns.kv_cache_write import KIND, KvCacheWrite

Tensor = torch.Tensor
BLOCKS, BLOCK_SIZE, HEADS, DIM, TOKENS = 6, 16, 2, 32, 5
SLOTS = torch.tensor([3, 17, 40, 95, 60])


def by_slots(cache: Tensor, tokens: Tensor, slots: Tensor) -> None:
    cache.view(-1, HEADS, DIM)[slots] = tokens


def by_blocks(cache: Tensor, tokens: Tensor, slots: Tensor) -> None:
    cache[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = tokens


def by_floor(cache: Tensor, tokens: Tensor, slots: Tensor) -> None:
    cache[torch.div(slots, BLOCK_SIZE, rounding_mode="floor"), torch.remainder(slots, BLOCK_SIZE)] = tokens


def by_index_put(cache: Tensor, tokens: Tensor, slots: Tensor) -> None:
    cache.flatten(0, 1).index_put_((slots,), tokens)


def by_index_copy(cache: Tensor, tokens: Tensor, slots: Tensor) -> None:
    cache.view(-1, HEADS, DIM).index_copy_(0, slots, tokens)


def by_scatter(cache: Tensor, tokens: Tensor, slots: Tensor) -> None:
    cache.view(-1, HEADS, DIM).scatter_(0, slots[:, None, None].expand(-1, HEADS, DIM), tokens)


SPELLINGS = (by_slots, by_blocks, by_floor, by_index_put, by_index_copy, by_scatter)
Write = Callable[[Tensor, Tensor, Tensor], None]


def inputs(cache: tuple[int, ...] = (BLOCKS, BLOCK_SIZE, HEADS, DIM)) -> tuple[Tensor, ...]:
    """key, value, key_cache, value_cache, slots."""
    return *(torch.randn(TOKENS, HEADS, DIM) for _ in range(2)), *(torch.randn(cache) for _ in range(2)), SLOTS.clone()


def pair(write: Write) -> Callable[..., None]:
    def model(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
        write(key_cache, key, slots)
        write(value_cache, value, slots)

    return model


@pytest.mark.parametrize("write", SPELLINGS)
@pytest.mark.parametrize("dynamic", [None, True])
def test_every_spelling_is_one(write: Write, dynamic: bool | None) -> None:
    found = compiled(pair(write), *inputs(), dynamic=dynamic)
    (match,) = found.findings().of(KIND)
    params = match.params
    assert isinstance(params, KvCacheWrite)
    assert params.layout == "blocks"
    assert params.block_size == (BLOCK_SIZE if dynamic is None else params.block_size)
    assert params.wraps == (write not in (by_index_copy, by_scatter))
    values = found.values()
    assert repeats(match, values)
    of_key = params.key_spelling
    assert same(of_key(**{name: values[match.inputs[name]] for name in of_key.inputs}), values[params.key_node])


def test_a_pool_of_slots_and_a_cache_of_batches_have_no_blocks() -> None:
    found = compiled(pair(lambda cache, tokens, slots: cache.index_copy_(0, slots, tokens)), *inputs((96, HEADS, DIM)))
    (match,) = found.findings().of(KIND)
    assert (match.params.layout, match.params.block_size) == ("slots", None)

    def static_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, at: Tensor) -> None:
        k_cache.index_copy_(2, at, k)
        v_cache.index_copy_(2, at, v)

    shapes = ((1, HEADS, TOKENS, DIM), (1, HEADS, 40, DIM))
    found = compiled(static_cache, *(torch.randn(shape) for shape in shapes for _ in range(2)), torch.arange(3, 8))
    (match,) = found.findings().of(KIND)
    assert match.params.layout == "batch"
    assert repeats(match, found.values())


def test_layers_are_pairs_of_their_own() -> None:
    def model(x: Tensor, slots: Tensor, *caches: Tensor) -> Tensor:
        for key_cache, value_cache in zip(caches[::2], caches[1::2], strict=True):
            by_slots(key_cache, x * 2, slots)
            by_slots(value_cache, x + 1, slots)
            x = x + key_cache.view(-1, HEADS, DIM)[slots] * value_cache.view(-1, HEADS, DIM)[slots]
        return x

    caches = [torch.randn(BLOCKS, BLOCK_SIZE, HEADS, DIM) for _ in range(6)]
    found = compiled(model, torch.randn(TOKENS, HEADS, DIM), SLOTS, *caches)
    matches = found.findings().of(KIND)
    assert len(matches) == 3
    caches_of = [(m.inputs["key_cache"].args[0], m.inputs["value_cache"].args[0]) for m in matches]
    assert len({cache for of in caches_of for cache in of}) == 6


def other_slots(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    by_slots(k_cache, k, slots)
    by_slots(v_cache, v, slots + 0)


def alone(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    by_slots(k_cache, k + v, slots)


def read_between(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    by_slots(k_cache, k, slots)
    by_slots(v_cache, v + k_cache.sum(), slots)


def added(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    for cache, tokens in ((k_cache, k), (v_cache, v)):
        cache.view(-1, HEADS, DIM).index_put_((slots,), tokens, accumulate=True)


def one_token_for_all(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    by_slots(k_cache, k[0], slots)
    by_slots(v_cache, v[0], slots)


def by_mask(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    chosen = (torch.arange(BLOCKS * BLOCK_SIZE)[:, None] == slots).any(1)
    for cache in (k_cache, v_cache):
        cache.view(-1, HEADS, DIM)[chosen] = torch.ones(HEADS, DIM)


def of_its_own(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Tensor:
    """Tensors that live no longer than the call."""
    new = [cache * 2 for cache in (k_cache, v_cache)]
    for cache, tokens in zip(new, (k, v), strict=True):
        by_slots(cache, tokens, slots)
    return new[0] + new[1]


def in_blocks_and_flat(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    by_slots(k_cache, k, slots)
    by_blocks(v_cache, v, slots)


@pytest.mark.parametrize(
    "model", [other_slots, alone, read_between, added, one_token_for_all, by_mask, of_its_own, in_blocks_and_flat]
)
def test_what_is_no_pair(model: Callable[..., object]) -> None:
    assert not compiled(model, *inputs()).findings().of(KIND)
