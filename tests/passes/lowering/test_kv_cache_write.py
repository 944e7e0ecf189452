"""Keys and values at the same slots are one launch into the caches themselves, which hold what eager's hold."""

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from helpers import Compiled, compiled
from npu_fuse import Target
from npu_fuse.passes.edit import Edit, Refused
from npu_fuse.passes.lowering.kv_cache_write import _of_the_buffer
from npu_fuse.passes.rewriter import Rewriter

Tensor = torch.Tensor
BLOCKS, BLOCK_SIZE, HEADS, DIM, TOKENS = 6, 16, 2, 32, 5
SLOTS = torch.tensor([3, 17, 40, 95, 60])
OP = "npu::npu_scatter_pa_kv_cache"
NAME = "npu.npu_scatter_pa_kv_cache.default"
# What is left of a write that isn't in place.
COPIES = ("aten.clone.default", "aten.copy_.default", "auto_functionalized_v2", "aten.index_put.default")


def check(model: Callable[..., object], *inputs: Tensor, dynamic: bool | None = None, **settings: object) -> Compiled:
    """Compiles the call, and compares results and all inputs with eager's, twice: nothing is rounded."""
    own, expected = (tuple(value.clone() for value in inputs) for _ in range(2))
    found = compiled(model, *own, dynamic=dynamic, **settings)
    for output in (found.output, None):
        wanted = model(*expected)
        output = found.function(*own) if output is None and wanted is not None else output
        for value, want in zip((output, *own), (wanted, *expected), strict=True):
            assert value is want is None or torch.equal(value, want)
    return found


def cache_inputs(dtype: torch.dtype = torch.float16, index: torch.dtype = torch.int64) -> tuple[Tensor, ...]:
    tokens = (torch.randn(TOKENS, HEADS, DIM, dtype=dtype) for _ in range(2))
    caches = (torch.randn(BLOCKS, BLOCK_SIZE, HEADS, DIM, dtype=dtype) for _ in range(2))
    return (*tokens, *caches, SLOTS.to(index))


def write(cache: Tensor, tokens: Tensor, slots: Tensor) -> None:
    cache.view(-1, *cache.shape[2:])[slots] = tokens


def pair(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Tensor:
    write(k_cache, k, slots)
    write(v_cache, v, slots)
    return k_cache[1, 3:7] + v_cache[1, 3:7]


def blocks(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    for cache, tokens in ((k_cache, k), (v_cache, v)):
        cache[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = tokens


def copied(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    for cache, tokens in ((k_cache, k), (v_cache, v)):
        cache.view(-1, HEADS, DIM).index_copy_(0, slots, tokens)


def is_in_place(found: Compiled) -> bool:
    return found.report.ops == {OP: 1} and not any(copy in found.targets() for copy in COPIES)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_both_are_one_launch(dtype: torch.dtype, index: torch.dtype, dynamic: bool | None) -> None:
    found = check(pair, *cache_inputs(dtype, index), dynamic=dynamic)
    assert is_in_place(found)
    # remainder, the op, and the sum of what is read afterwards
    assert found.report.launches_after == 3


def test_the_arguments_of_the_op() -> None:
    found = check(copied, *cache_inputs())
    (call,) = found.after.graph.find_nodes(op="call_function", target=torch.ops.npu.npu_scatter_pa_kv_cache.default)
    key, value, key_cache, value_cache, slots = call.args
    assert all(node.op == "placeholder" for node in call.args)
    assert key.meta["val"].shape == value.meta["val"].shape == (TOKENS, HEADS, DIM)
    assert key_cache.meta["val"].shape == value_cache.meta["val"].shape == (BLOCKS, BLOCK_SIZE, HEADS, DIM)
    assert slots.meta["val"].shape == (TOKENS,)
    assert call.kwargs["cache_mode"] == "Norm"
    assert found.report.launches_after == 1


def test_negative_slots_count_from_the_end() -> None:
    k, v, k_cache, v_cache, _ = cache_inputs()
    slots = torch.tensor([-1, 17, -96, 95 - 16, -40])
    for model in (pair, blocks):
        found = check(model, k, v, k_cache, v_cache, slots)
        assert is_in_place(found)


def test_negative_blocks_and_places_count_from_the_end_each() -> None:
    def model(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, block: Tensor, place: Tensor) -> None:
        k_cache[block, place] = k
        v_cache[block, place] = v

    inputs = cache_inputs()[:4]
    found = check(model, *inputs, torch.tensor([0, -1, 2, -6, 5]), torch.tensor([-1, 3, -16, 15, 0]))
    assert is_in_place(found)


def test_a_slot_that_is_there_twice_holds_one_of_its_tokens() -> None:
    k, v, k_cache, v_cache, _ = cache_inputs()
    slots = torch.tensor([3, 17, 3, 95, 60])
    before = k_cache.clone()
    found = compiled(pair, k, v, k_cache, v_cache, slots)
    assert is_in_place(found)
    for tokens, cache in ((k, k_cache), (v, v_cache)):
        rows = cache.view(-1, HEADS, DIM)
        assert any(torch.equal(rows[3], tokens[i]) for i in (0, 2))
        assert all(torch.equal(rows[slots[i]], tokens[i]) for i in (1, 3, 4))
    others = [slot for slot in range(BLOCKS * BLOCK_SIZE) if slot not in slots]
    assert torch.equal(k_cache.view(-1, HEADS, DIM)[others], before.view(-1, HEADS, DIM)[others])


def test_slots_are_worked_out_once_for_all_layers() -> None:
    def model(x: Tensor, slots: Tensor, *caches: Tensor) -> Tensor:
        for k_cache, v_cache in zip(caches[::2], caches[1::2], strict=True):
            blocks(x * 2, x + 1, k_cache, v_cache, slots)
            x = x + k_cache.view(-1, HEADS, DIM)[slots] * v_cache.view(-1, HEADS, DIM)[slots]
        return x

    caches = [torch.randn(BLOCKS, BLOCK_SIZE, HEADS, DIM).half() for _ in range(6)]
    found = check(model, torch.randn(TOKENS, HEADS, DIM).half(), SLOTS, *caches)
    assert found.report.ops == {OP: 3}
    assert found.targets().count("aten.remainder.Scalar") == 1
    assert "aten.floor_divide.default" not in found.targets()
    assert not any(copy in found.targets() for copy in COPIES)


@pytest.mark.parametrize("pick", [lambda kv: kv.unbind(0), lambda kv: (kv[0], kv[1]), lambda kv: (kv[1], kv[0])])
def test_caches_of_one_buffer(pick: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    def model(k: Tensor, v: Tensor, kv: Tensor, slots: Tensor) -> Tensor:
        k_cache, v_cache = pick(kv)
        write(k_cache, k, slots)
        write(v_cache, v, slots)
        return kv.sum((1, 2))

    k, v, k_cache, v_cache, slots = cache_inputs()
    assert is_in_place(check(model, k, v, torch.stack([k_cache, v_cache]), slots))


@pytest.mark.parametrize("pick", [lambda kv: kv.unbind(0), lambda kv: (kv[0], kv[1])])
def test_what_reads_one_buffer_between_the_writes_sees_the_first(
    pick: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> None:
    def model(k: Tensor, v: Tensor, kv: Tensor, slots: Tensor) -> Tensor:
        k_cache, v_cache = pick(kv)
        write(k_cache, k, slots)
        between = v_cache.float().sum((1, 2, 3))
        write(v_cache, v, slots)
        return between

    k, v, k_cache, v_cache, slots = cache_inputs()
    found = check(model, k, v, torch.stack([k_cache, v_cache]), slots)
    assert "something reads the buffer of both caches between the writes" in reason_of(found)
    assert found.targets().count("aten.index_put_.default") == 2


def test_halves_of_a_cache_are_not_contiguous() -> None:
    def model(k: Tensor, v: Tensor, kv: Tensor, slots: Tensor) -> None:
        k_cache, v_cache = kv.chunk(2, -1)
        k_cache[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = k
        v_cache[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = v

    k, v, k_cache, v_cache, slots = cache_inputs()
    found = check(model, k, v, torch.cat([k_cache, v_cache], -1), slots)
    (reason,) = (site.reason for site in found.report.sites if site.kind == "kv_cache_write")
    assert found.report.ops == {}
    assert reason


def test_tokens_of_a_batch_and_values_of_another_width() -> None:
    def model(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        k_cache[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = k.transpose(1, 2)
        v_cache[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = v

    caches = (torch.randn(BLOCKS, BLOCK_SIZE, HEADS, dim).half() for dim in (DIM, 2 * DIM))
    k, v = torch.randn(2, HEADS, 3, DIM).half(), torch.randn(2, 3, HEADS, 2 * DIM).half()
    assert is_in_place_but_for_tokens(check(model, k, v, *caches, torch.arange(6).view(2, 3) * 7))


def is_in_place_but_for_tokens(found: Compiled) -> bool:
    clones = found.after.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    return found.report.ops == {OP: 1} and len(clones) == 1 and "aten.copy_.default" not in found.targets()


def test_caches_without_heads() -> None:
    inputs = (
        *(torch.randn(TOKENS, dim).half() for dim in (512, 64)),
        *(torch.randn(BLOCKS, BLOCK_SIZE, dim).half() for dim in (512, 64)),
    )
    assert is_in_place(check(blocks, *inputs, SLOTS))


def test_a_pool_of_slots_is_cut_into_blocks() -> None:
    def model(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        k_cache[slots] = k
        v_cache[slots] = v

    k, v, k_cache, v_cache, slots = cache_inputs()
    found = check(model, k, v, k_cache.flatten(0, 1), v_cache.flatten(0, 1), slots)
    assert is_in_place(found)
    (call,) = found.after.graph.find_nodes(op="call_function", target=torch.ops.npu.npu_scatter_pa_kv_cache.default)
    assert call.args[2].meta["val"].shape == (3, 32, HEADS, DIM)
    found = check(model, k, v, k_cache.flatten(0, 1)[1:], v_cache.flatten(0, 1)[1:], slots - 1)
    assert found.report.ops == {}
    assert "key_cache has 95 slots, which are no blocks of 16" in reason_of(found)
    assert found.targets().count("aten.index_put_.default") == 2


def reason_of(found: Compiled) -> str:
    (reason,) = (site.reason for site in found.report.sites if site.kind == "kv_cache_write")
    return reason


def test_a_static_cache_stays_as_it_is_and_in_place() -> None:
    def model(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, at: Tensor) -> Tensor:
        k_cache.index_copy_(2, at, k)
        v_cache.index_copy_(2, at, v)
        return k_cache @ v_cache.mT

    shapes = ((1, HEADS, TOKENS, DIM), (1, HEADS, 40, DIM))
    found = check(model, *(torch.randn(shape).half() for shape in shapes for _ in range(2)), torch.arange(3, 8))
    assert "its caches (1, 2, 40, 32) have a batch" in reason_of(found)
    assert found.targets().count("aten.index_copy_.default") == 2
    assert not any(copy in found.targets() for copy in COPIES)


def test_other_types_and_socs_are_refused() -> None:
    found = check(pair, *cache_inputs(torch.float32))
    assert "key is float32" in reason_of(found)
    assert found.targets().count("aten.index_put_.default") == 2
    found = check(pair, *cache_inputs(), target=Target(soc="ascend310p"))
    assert "no kernel on ascend310p" in reason_of(found)
    assert "turned off" in reason_of(check(pair, *cache_inputs(), disable={"kv_cache_write"}))


def test_a_copy_of_both_is_no_gain() -> None:
    def model(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        write(k_cache, k, slots)
        write(v_cache, v, slots)

    _, v, k_cache, v_cache, slots = cache_inputs()
    strided = [torch.randn(TOKENS, 3, HEADS, DIM).half() for _ in range(2)]
    half = check(lambda k, *rest: model(k[:, 1], *rest), strided[0], v, k_cache, v_cache, slots)
    assert is_in_place_but_for_tokens(half)
    both = check(lambda k, v, *rest: model(k[:, 1], v[:, 1], *rest), *strided, k_cache, v_cache, slots)
    assert both.report.ops == {}
    assert "neither key nor value is contiguous" in reason_of(both)


# Who else reads ------------------------------------------------------------------------------------------------------


def test_the_old_value_is_read_before() -> None:
    def model(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Tensor:
        old = k_cache.sum((2, 3))
        write(k_cache, k, slots)
        write(v_cache, v, slots)
        return old + k_cache.sum((2, 3))

    assert is_in_place(check(model, *cache_inputs()))


def test_the_old_value_is_kept_for_later() -> None:
    def model(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Tensor:
        old = k_cache.clone()
        write(k_cache, k, slots)
        write(v_cache, v, slots)
        return old - k_cache

    check(model, *cache_inputs())


def test_the_new_key_is_read_before_the_value_is_written() -> None:
    def model(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Tensor:
        write(k_cache, k, slots)
        seen = k_cache.view(-1, HEADS, DIM)[slots] * 2
        write(v_cache, v, slots)
        return seen + v_cache.view(-1, HEADS, DIM)[slots]

    assert is_in_place(check(model, *cache_inputs()))


def test_the_old_value_cache_is_read_between_the_writes() -> None:
    def model(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Tensor:
        write(k_cache, k, slots)
        seen = v_cache.view(-1, HEADS, DIM)[slots] * 2
        write(v_cache, v, slots)
        return seen

    check(model, *cache_inputs())


def test_caches_are_written_twice() -> None:
    def model(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Tensor:
        write(k_cache, k, slots)
        write(v_cache, v, slots)
        between = k_cache.view(-1, HEADS, DIM)[slots] + 1
        write(k_cache, v, slots + 0)
        write(v_cache, k, slots - 1)
        return between + k_cache.view(-1, HEADS, DIM)[slots]

    check(model, *cache_inputs())


def test_key_and_value_go_to_one_cache() -> None:
    def model(k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
        write(cache, k, slots)
        write(cache, v, slots)

    k, v, cache, _, slots = cache_inputs()
    assert check(model, k, v, cache, slots).report.ops == {}


def test_caches_that_share_memory() -> None:
    """The caller's two caches are views of one buffer, a block apart: what is written into one is seen in the other."""

    def model(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Tensor:
        write(k_cache, k, slots)
        write(v_cache, v, slots)
        return k_cache.sum((1, 2, 3))

    k, v, k_cache, _, _ = cache_inputs()
    slots = torch.tensor([3, 17, 40, 60, 70])
    own, expected = k_cache.clone(), k_cache.clone()
    wanted = model(k, v, expected[1:], expected[:-1], slots)
    found = compiled(lambda k, v, base, slots: model(k, v, base[1:], base[:-1], slots), k, v, own, slots)
    assert torch.equal(found.output, wanted)
    assert torch.equal(own, expected)


def test_views_given_to_the_caller() -> None:
    def model(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Tensor:
        write(k_cache, k, slots)
        write(v_cache, v, slots)
        return k_cache[1:3]

    own = cache_inputs()
    found = compiled(model, *own)
    assert found.output.data_ptr() == own[2][1:].data_ptr()
    assert torch.equal(found.output, own[2][1:3])


def test_what_else_is_unbound_between_the_writes_reads_both() -> None:
    def model(kv: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        k_cache, v_cache = torch.select_scatter(kv, new, 0, 0).unbind(0)
        return k_cache.sin(), v_cache.cos()

    module = make_fx(model, tracing_mode="fake")(torch.randn(2, 3, 4), torch.randn(3, 4))
    (cos,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.cos.default)
    edit = Edit(Rewriter(module, Target(), {}, pack_weights=True), cos, [cos])
    with pytest.raises(Refused, match="something reads the buffer of both caches between the writes"):
        _of_the_buffer(cos.args[0], edit)
