"""npu_scatter_pa_kv_cache slot by slot, what it leaves alone, and its limits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_fuse.runtime.ops.scatter_pa_kv_cache import NORM, NPU_SCATTER_PA_KV_CACHE, NZ
from npu_fuse.runtime.target import Target

SCATTER = NPU_SCATTER_PA_KV_CACHE
HALF, BRAIN, FLOAT, CHAR = torch.float16, torch.bfloat16, torch.float32, torch.int8


def filled(*shape, dtype=HALF, start=1):
    """Values that differ element by element as far as the type allows."""
    count = torch.Size(shape).numel()
    return (torch.arange(start, start + count) % (100 if dtype == CHAR else 2000)).reshape(shape).to(dtype)


def cache_of(mode, blocks, block_size, heads, head_dim, dtype=HALF):
    """A cache full of -1."""
    if mode == NZ:
        last = 32 if dtype == CHAR else 16
        return torch.full((blocks, heads * head_dim // last, block_size, last), -1, dtype=dtype)
    return torch.full((blocks, block_size, heads, head_dim), -1, dtype=dtype)


def token_at(cache, mode, slot, heads, head_dim):
    """[heads, head_dim] of a slot, element by element."""
    block_size = cache.shape[2] if mode == NZ else cache.shape[1]
    block, place = divmod(slot, block_size)
    token = torch.empty(heads, head_dim, dtype=cache.dtype)
    for head in range(heads):
        for column in range(head_dim):
            if mode == NZ:
                row, rest = divmod(head * head_dim + column, cache.shape[3])
                token[head, column] = cache[block, row, place, rest]
            else:
                token[head, column] = cache[block, place, head, column]
    return token


@settings(max_examples=40, deadline=None)
@given(
    mode=st.sampled_from([NORM, NZ]),
    dtype=st.sampled_from([HALF, BRAIN, CHAR]),
    index=st.sampled_from([torch.int32, torch.int64]),
    heads=st.integers(1, 2),
    head_dims=st.sampled_from([(32, 32), (32, 64), (64, 32)]),
    slots=st.lists(st.integers(0, 11), unique=True, max_size=5),
)
def test_each_token_is_written_to_its_slot_and_nothing_else(mode, dtype, index, heads, head_dims, slots):
    tensors = [filled(len(slots), heads, head_dim, dtype=dtype, start=7 * i) for i, head_dim in enumerate(head_dims)]
    caches = [cache_of(mode, 3, 4, heads, head_dim, dtype) for head_dim in head_dims]
    slot_mapping = torch.tensor(slots, dtype=index)
    assert SCATTER.refusal(Target(), *tensors, *caches, slot_mapping, cache_mode=mode) is None
    assert SCATTER.op(*tensors, *caches, slot_mapping, cache_mode=mode) is None
    for tokens, cache, head_dim in zip(tensors, caches, head_dims, strict=True):
        written = dict(zip(slots, tokens, strict=True))
        for slot in range(12):
            expected = written.get(slot, torch.full((heads, head_dim), -1, dtype=dtype))
            assert torch.equal(token_at(cache, mode, slot, heads, head_dim), expected)


def test_the_default_is_nz_and_none_is_norm():
    key, slots = filled(2, 2, 16), torch.tensor([5, 0])
    nz, norm, by_none, other = cache_of(NZ, 2, 4, 2, 16), *(cache_of(NORM, 2, 4, 2, 16) for _ in range(3))
    SCATTER.op(key, key, nz, nz.clone(), slots)
    assert torch.equal(token_at(nz, NZ, 5, 2, 16), key[0])
    SCATTER.op(key, key, norm, other, slots, cache_mode=NORM)
    SCATTER.op(key, key, by_none, other, slots, cache_mode=None)
    assert torch.equal(norm, by_none)
    assert torch.equal(norm[0, 0], key[1])


@pytest.mark.parametrize("mode", [NORM, NZ])
def test_opcheck(mode):
    arguments = (filled(2, 2, 16), filled(2, 2, 32), cache_of(mode, 2, 4, 2, 16), cache_of(mode, 2, 4, 2, 32))
    torch.library.opcheck(
        SCATTER.op,
        (*arguments, torch.tensor([5, 0])),
        {"cache_mode": mode},
        test_utils=("test_schema", "test_faketensor"),
    )


def test_a_graph_keeps_the_write_and_its_order():
    def step(cache, key, slots):
        before = cache[0, 0].clone()
        torch.ops.npu.npu_scatter_pa_kv_cache(key, key, cache, cache.clone(), slots, cache_mode=NORM)
        return before, cache[0, 0].clone()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    cache, key = cache_of(NORM, 2, 4, 2, 16), filled(1, 2, 16)
    before, after = compiled(cache, key, torch.tensor([0]))
    assert (before == -1).all()
    assert torch.equal(after, key[0])
    assert torch.equal(cache[0, 0], key[0])


def test_float32_is_for_newer_socs_alone():
    assert "key is float32, which" in SCATTER.refusal(Target(), **call(dtype=FLOAT))
    arguments = call(dtype=FLOAT)
    SCATTER.op(**arguments)  # the reference knows what they do


def test_symbolic_tokens_and_blocks_are_not_refused(symbolic):
    key, cache = symbolic(("S", 2, 64), HALF), symbolic(("T", 16, 2, 64), HALF)
    slots = symbolic(("S",), torch.int32)
    assert SCATTER.refusal(Target(), key, key, cache, cache, slots, cache_mode=NORM) is None
    nz = symbolic(("T", 8, 16, 16), HALF)
    assert SCATTER.refusal(Target(), key, key, nz, nz, slots) is None
    assert "is not known to have" in SCATTER.refusal(Target(), key, key, nz, nz, symbolic(("B",), torch.int32))


def call(mode=NORM, *, key=(2, 2, 16), value=(2, 2, 32), dtype=HALF, slots=(5, 0), **rest):
    """A legal call, changed."""
    arguments = {
        "key": torch.zeros(key, dtype=dtype),
        "value": torch.zeros(value, dtype=dtype),
        "key_cache": cache_of(mode, 2, 4, 2, 16, dtype),
        "value_cache": cache_of(mode, 2, 4, 2, 32, dtype),
        "slot_mapping": torch.tensor(slots),
        "cache_mode": mode,
    }
    return arguments | rest


def zeros(*shape, dtype=HALF):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("outside", "reason", "inside"),
    [
        (call(cache_mode="ND"), "cache_mode 'ND' is unknown; known: PA_NZ, Norm, None", call()),
        (
            call(dtype=torch.float64),
            "key is float64 (the kernel takes float16, bfloat16, float32, int8)",
            call(dtype=BRAIN),
        ),
        (call(NZ, dtype=FLOAT), "key is float32 (the kernel takes float16, bfloat16, int8)", call(NZ, dtype=BRAIN)),
        (call(key=(1, 2, 2, 16)), "key has 4 dims", call()),
        (call(value_cache=zeros(2, 4, 64)), "value_cache has 3 dims", call()),
        (
            call(value=(2, 2, 32)) | {"value": zeros(2, 2, 32, dtype=BRAIN)},
            "value is bfloat16 but key is float16",
            call(),
        ),
        (call(key_cache=zeros(2, 4, 2, 16, dtype=BRAIN)), "key_cache is bfloat16 but key is float16", call()),
        (call(key=(2, 2, 16)) | {"key": zeros(2, 16, 2).mT}, "key [2, 2, 16] with strides [32, 1, 2] is not", call()),
        (call(value_cache=zeros(4, 2, 2, 32).transpose(0, 1)), "value_cache [2, 4, 2, 32] with strides", call()),
        (call(key_cache=zeros(2, 4, 1, 32)), "key_cache [2, 4, 1, 32] is not [blocks, block_size, 2, 16]", call()),
        (
            call(NZ, key_cache=zeros(2, 2, 4, 8)),
            "key_cache [2, 2, 4, 8] is not [blocks, 2, block_size, 16] (PA_NZ)",
            call(NZ),
        ),
        (
            call(NZ, key_cache=zeros(2, 3, 4, 16)),
            "key_cache [2, 3, 4, 16] is not [blocks, 2, block_size, 16] (PA_NZ)",
            call(NZ),
        ),
        (
            call(NZ, dtype=CHAR, key_cache=zeros(2, 2, 4, 16, dtype=CHAR)),
            "key_cache [2, 2, 4, 16] is not [blocks, 1, block_size, 32] (PA_NZ)",
            call(NZ, dtype=CHAR),
        ),
        (
            call(NZ, key=(2, 2, 12), key_cache=zeros(2, 1, 4, 16)),
            "a token of key takes 24 elements, not known to be a multiple of 16 (PA_NZ)",
            call(NZ, key=(2, 2, 24), key_cache=zeros(2, 3, 4, 16)),
        ),
        (call(value=(3, 2, 32)), "key [2, 2, 16] and value [3, 2, 32] differ in tokens or heads", call()),
        (
            call(value_cache=zeros(3, 4, 2, 32)),
            "key_cache [2, 4, 2, 16] and value_cache [3, 4, 2, 32] differ in blocks or block_size",
            call(),
        ),
        (
            call(NZ, value_cache=zeros(2, 4, 8, 16)),
            "key_cache [2, 2, 4, 16] and value_cache [2, 4, 8, 16] differ in blocks or block_size",
            call(NZ),
        ),
        (
            call(slot_mapping=torch.tensor([5.0, 0.0])),
            "slot_mapping is float32 (the kernel takes int32, int64)",
            call(),
        ),
        (call(slots=[[5, 0]]), "slot_mapping has 2 dims", call()),
        (call(slot_mapping=torch.tensor([5, 9, 0, 9])[::2]), "slot_mapping [2] with strides [2]", call()),
        (call(slots=(5, 0, 1)), "slot_mapping [3] is not known to have 2 slots", call()),
        (
            call(compress_lens=torch.tensor([1, 1])),
            "compress_lens is given (npu_fuse supports its default alone",
            call(),
        ),
        (call(compress_seq_offsets=torch.tensor([1, 1])), "compress_seq_offsets is given", call()),
        (call(seq_lens=torch.tensor([1, 1])), "seq_lens is given", call()),
    ],
)
def test_borders(outside, reason, inside, assert_border):
    assert_border(SCATTER, outside, reason, inside)


@pytest.mark.parametrize("slots", [(-1, 0), (8, 0)])
@pytest.mark.parametrize("mode", [NORM, NZ])
def test_a_slot_outside_of_the_cache_is_an_error_and_nothing_is_written(mode, slots):
    arguments = call(mode, slots=slots)
    with pytest.raises(ValueError, match=rf"slot_mapping names slots \[{slots[0]}\] of a cache of 2 blocks of 4"):
        SCATTER.op(**arguments)
    assert (arguments["key_cache"] == -1).all()
    SCATTER.op(**call(mode, slots=(7, 0)))


@pytest.mark.parametrize("soc", ["ascend910b", "ascend910_93", "ascend950", "ascend310p"])
def test_socs(soc):
    assert (SCATTER.refusal(Target(soc), **call()) is None) == (soc in ("ascend910b", "ascend910_93"))
