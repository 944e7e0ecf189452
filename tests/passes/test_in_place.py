"""Writes are put back in place where nothing reads the old value, and are as in eager everywhere."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from helpers import Compiled, compiled
from npu_fuse.passes.cleanup import cleanup
from npu_fuse.passes.edit import Edit, Refused
from npu_fuse.passes.in_place import _lie_apart, _may_lie, overlaps_itself, put_back, same_place
from npu_fuse.passes.report import Site
from npu_fuse.passes.rewriter import Rewriter
from npu_fuse.runtime.ops import CONTRACTS
from npu_fuse.runtime.ops.register import register
from npu_fuse.runtime.target import Target

aten = torch.ops.aten
Tensor = torch.Tensor


@pytest.fixture(scope="module", autouse=True)
def _ops(undeclared_aliases: None) -> Iterator[None]:
    library = torch.library.Library("npu_fuse_test_in_place", "FRAGMENT")
    library.define("store(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!)? v_cache, int at) -> Tensor")
    library.impl("store", _store, "CompositeExplicitAutograd")
    torch.library.register_fake("npu_fuse_test_in_place::store", lambda k, *_: torch.empty_like(k), lib=library)
    library.define("same(Tensor x) -> Tensor")
    library.impl("same", lambda x: x, "CompositeExplicitAutograd")
    torch.library.register_fake("npu_fuse_test_in_place::same", lambda x: torch.empty_like(x), lib=library)
    yield
    library._destroy()


def _store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor | None, at: int) -> Tensor:
    k_cache[at] = k
    if v_cache is not None:
        v_cache[at] += v
    return k * 2


def check(model: Callable[..., object], *inputs: Tensor, dynamic: bool | None = None, strides: bool = True) -> Compiled:
    """Compiles the call, and compares outputs, inputs and strides with eager's, twice."""
    own = tuple(value.clone() for value in inputs)
    found = compiled(model, *own, dynamic=dynamic)
    expected = tuple(value.clone() for value in inputs)
    _compare(found.output, model(*expected), own, expected, strides)
    _compare(found.function(*own), model(*expected), own, expected, strides)
    return found


def _compare(
    output: object, wanted: object, inputs: tuple[Tensor, ...], expected: tuple[Tensor, ...], strides: bool
) -> None:
    outputs, wants = ((value if isinstance(value, tuple) else (value,)) for value in (output, wanted))
    for value, want in zip((*outputs, *inputs), (*wants, *expected), strict=True):
        assert torch.equal(value, want)
        assert not strides or value.stride() == want.stride()


VIEWS = ("slice", "select", "view", "permute", "transpose", "as_strided", "alias", "expand", "unsqueeze", "getitem")


def ops(found: Compiled) -> list[str]:
    """The ops that launch something, without their overloads."""
    names = [node.target.__name__.partition(".")[0] for node in found.after.graph.nodes if node.op == "call_function"]
    return [name for name in names if name not in VIEWS]


CACHE = torch.arange(48.0).view(4, 2, 6)
AT, ROW = torch.tensor([2]), torch.randn(1, 2, 6)


def _index_copy(cache: Tensor, at: Tensor, row: Tensor) -> Tensor:
    cache.index_copy_(0, at, row)
    return cache.sin()


def _index_put(cache: Tensor, at: Tensor, row: Tensor) -> Tensor:
    cache[at] = row
    return cache.sin()


def _last_axis(cache: Tensor, at: Tensor, row: Tensor) -> Tensor:
    cache[:, :, at] = row[..., :1]
    return cache.sin()


def _through_a_view(cache: Tensor, at: Tensor, row: Tensor) -> Tensor:
    cache.transpose(0, 1)[1].index_add_(0, at, row[:, 0])
    return cache.sin()


def _scatter(cache: Tensor, at: Tensor, row: Tensor) -> Tensor:
    cache.scatter_(0, at.view(1, 1, 1).expand(1, 2, 6), row)
    return cache.sin()


@pytest.mark.parametrize(
    ("model", "op"),
    [
        (_index_copy, "index_copy_"),
        (_index_put, "index_put_"),
        (_last_axis, "index_put_"),
        (_through_a_view, "index_add_"),
        (_scatter, "scatter_"),
    ],
)
def test_a_write_of_rows_copies_no_cache(model: Callable[..., Tensor], op: str) -> None:
    found = check(model, CACHE, AT, ROW)
    assert ops(found) == [op, "sin"]
    assert found.report.launches_after == found.report.launches_before - (2 if model is _through_a_view else 1)
    (site,) = found.report.sites
    assert (site.kind, site.status, site.op) == ("in_place", "lowered", f"aten::{op}")
    assert "test_in_place.py" in site.source


def test_only_the_cache_sees_how_a_new_value_is_laid_out() -> None:
    """torch's function of index_copy_ gives contiguous tensors, whatever it is given."""

    def model(cache: Tensor, at: Tensor, row: Tensor) -> Tensor:
        cache.index_copy_(0, at, row)
        return row.sin()

    cache = CACHE.transpose(1, 2).contiguous().transpose(1, 2)
    found = check(model, cache, AT, ROW)
    assert ops(found) == ["index_copy_", "sin"]


def test_it_can_be_turned_off() -> None:
    found = compiled(_index_copy, CACHE.clone(), AT, ROW, disable={"in_place"})
    assert ops(found) == ["index_copy", "sin", "copy_"]
    assert found.report.sites == []


def test_slices_are_written_where_they_are() -> None:
    def model(cache: Tensor, row: Tensor) -> Tensor:
        cache[1:2, :, 2:4] = row[..., :2]
        cache[3] = row[0]
        return cache * 2

    assert ops(check(model, CACHE, ROW)) == ["copy_", "copy_", "mul"]


def test_views_of_views_written_in_turn() -> None:
    def model(cache: Tensor, row: Tensor) -> Tensor:
        part = cache[1][:, 2:5]
        part[0].copy_(row[0, 0, :3])
        part.mul_(2)
        return part + 1

    assert ops(check(model, CACHE, ROW)) == ["copy_", "mul", "copy_", "add"]


def test_arithmetic_in_place_stays_so() -> None:
    def model(count: Tensor) -> Tensor:
        count.add_(1)
        return count * 2

    assert ops(check(model, torch.zeros(3))) == ["add_", "mul"]


def test_a_buffer_that_is_given_back_is_the_buffer() -> None:
    def model(cache: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        cache[2] = row[0]
        return cache, cache[:, 1]

    found = check(model, CACHE, ROW)
    assert ops(found) == ["copy_"]
    cache = CACHE.clone()
    whole, part = found.function(cache, ROW)
    assert whole is cache
    assert part.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()


@pytest.mark.parametrize("dynamic", [False, True])
def test_symbolic_sizes(dynamic: bool) -> None:
    def model(cache: Tensor, at: Tensor, rows: Tensor) -> Tensor:
        cache.index_copy_(1, at, rows)
        return cache[:, : rows.shape[1] + 1].sum(1)

    cache, at = torch.randn(3, 8, 6), torch.tensor([2, 5])
    found = check(model, cache, at, torch.randn(3, 2, 6), dynamic=dynamic)
    assert ops(found)[0] == "index_copy_"
    if dynamic:
        other, wanted = (torch.ones(5, 7, 6) for _ in range(2))
        rows, places = torch.randn(5, 3, 6), torch.tensor([0, 6, 1])
        torch.testing.assert_close(found.function(other, places, rows), model(wanted, places, rows))
        assert torch.equal(other, wanted)


def test_a_branch_that_writes() -> None:
    """It stands in the graph as a function that no op is called by."""

    def model(x: Tensor, cache: Tensor, flag: Tensor) -> Tensor:
        def write(x: Tensor, cache: Tensor) -> Tensor:
            cache[1:].add_(x)
            return x + 1

        before = cache.sin()
        y = torch.cond(flag, write, lambda x, cache: cache[1:] - x, (x, cache))
        cache[:1].mul_(2)
        return before[1:] + y

    for flag in (True, False):
        x, ours, theirs = torch.randn(3, 6), CACHE[:, 0].clone(), CACHE[:, 0].clone()
        found = compiled(model, x, ours, torch.tensor(flag))
        with torch.no_grad():
            assert torch.equal(found.output, model(x, theirs, torch.tensor(flag)))
        assert torch.equal(ours, theirs)


def test_the_rest_of_a_state_moves_up() -> None:
    def model(state: Tensor, x: Tensor) -> Tensor:
        state[:, :-1] = state[:, 1:].clone()
        state[:, -1] = x
        return state.sum(-1)

    assert ops(check(model, torch.randn(2, 4), torch.randn(2))) == ["clone", "copy_", "copy_", "sum"]


# Values that the graph makes itself -----------------------------------------------------------------------------------


def test_rows_are_added_to_a_new_tensor_without_copies() -> None:
    def model(x: Tensor, at: Tensor) -> Tensor:
        total = torch.zeros(4, 6)
        total.index_add_(0, at, x)
        total.index_add_(0, at + 1, x)
        return total

    assert ops(check(model, torch.randn(2, 6), torch.tensor([0, 2]))) == ["zeros", "index_add_", "add", "index_add_"]


def test_a_new_tensor_whose_old_value_is_read_is_copied() -> None:
    def model(x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        old = x.sin()
        return torch.index_add(old, 0, at, x[:1]), old

    assert "index_add" in ops(check(model, torch.randn(2, 6), torch.tensor([1])))


def test_a_new_tensor_whose_elements_share_memory_is_copied() -> None:
    def model(x: Tensor, at: Tensor) -> Tensor:
        return torch.index_copy(x.sin().expand(4, 6), 0, at, x)

    assert ops(check(model, torch.randn(1, 6), torch.tensor([1]))) == ["sin", "index_copy"]

    def copied(x: Tensor, at: Tensor, buffer: Tensor) -> Tensor:
        buffer.copy_(torch.index_copy(x.sin().expand(4, 6), 0, at, x))
        return x.sum()

    found = check(copied, torch.randn(1, 6), torch.tensor([1]), torch.zeros(4, 6))
    assert ops(found) == ["sin", "index_copy", "copy_", "sum"]


def test_inputs_that_are_not_written_are_not_written() -> None:
    def model(x: Tensor, at: Tensor, row: Tensor) -> Tensor:
        return torch.index_copy(x, 0, at, row).sin() + torch.index_copy(x[1:], 0, at, row).cos().sum()

    assert "index_copy_" not in ops(check(model, CACHE, AT, ROW))


def test_what_an_op_of_others_gives_may_be_its_argument() -> None:
    def model(x: Tensor, at: Tensor, row: Tensor) -> Tensor:
        return torch.index_copy(torch.ops.npu_fuse_test_in_place.same(x), 0, at, row)

    assert "index_copy" in ops(check(model, CACHE, AT, ROW))


# What forbids it ------------------------------------------------------------------------------------------------------


def refused(model: Callable[..., object], *inputs: Tensor) -> str:
    """Why the one write of a model isn't put in place."""
    found = check(model, *inputs)
    sites = [site for site in found.report.sites if site.status == "refused"]
    assert "copy_" in ops(found)
    return sites[0].reason


def test_the_old_value_is_read_later() -> None:
    def model(cache: Tensor, at: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        new = torch.index_copy(cache, 0, at, row)
        old = cache.cos()
        cache.copy_(new)
        return new.sin(), old

    reason = refused(model, CACHE, AT, ROW)
    assert reason.startswith("the old value is read later, by aten.cos.default")
    assert "test_in_place.py" in reason


@pytest.mark.parametrize("early", [True, False])
def test_a_view_of_the_old_value_is_read_later(early: bool) -> None:
    def model(cache: Tensor, at: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        view = cache[1].transpose(0, 1)
        new = torch.index_copy(cache, 0, at, row)
        if not early:
            view = cache[1:].transpose(0, 1)[0]
        old = view.reshape(-1).cos()
        cache.copy_(new)
        return new.sin(), old

    assert refused(model, CACHE, AT, ROW).startswith("the old value is read later")


def test_the_old_value_is_read_before_and_that_is_no_hindrance() -> None:
    def model(cache: Tensor, at: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        old = cache[1].cos()
        cache.index_copy_(0, at, row)
        return cache.sin(), old

    assert ops(check(model, CACHE, AT, ROW)) == ["cos", "index_copy_", "sin"]


def test_the_new_value_is_a_tensor_of_its_own() -> None:
    def model(cache: Tensor, at: Tensor, row: Tensor) -> Tensor:
        new = torch.index_copy(cache, 0, at, row)
        cache.copy_(new)
        return new

    assert refused(model, CACHE, AT, ROW) == "the new value is given back as a tensor of its own"
    found = compiled(model, CACHE.clone(), AT, ROW)
    cache = CACHE.clone()
    found.function(cache, AT, ROW).zero_()
    assert cache.sum() != 0


def test_a_part_of_the_new_value_is_a_tensor_of_its_own() -> None:
    def model(cache: Tensor, at: Tensor, row: Tensor) -> Tensor:
        new = torch.index_copy(cache, 0, at, row)
        cache.copy_(new)
        return new[1]

    assert refused(model, CACHE, AT, ROW) == "the new value is given back as a tensor of its own"


def test_a_buffer_that_is_copied_into_itself_is_read() -> None:
    """A part that lies where it is put already is an old value, as long as it is not the new one."""

    def model(cache: Tensor) -> Tensor:
        half = cache[:2] * 0.5
        cache.copy_(cache)
        return half.sum()

    found = check(model, CACHE)
    assert "mul_" not in ops(found)


def test_it_reads_what_it_writes() -> None:
    def model(cache: Tensor, at: Tensor) -> Tensor:
        cache.copy_(torch.index_copy(cache, 0, at, cache[:1]))
        return cache.sin()

    assert refused(model, CACHE, AT) == "it reads the buffer that it writes"


def test_the_old_value_is_copied_back() -> None:
    def model(cache: Tensor, at: Tensor, row: Tensor) -> Tensor:
        new = torch.index_copy(cache, 0, at, row)
        cache.copy_(cache[:, :, :1])
        return new.sin()

    check(model, CACHE, AT, ROW)


def test_a_value_on_the_way_is_not_seen_in_the_buffer() -> None:
    def model(state: Tensor, x: Tensor) -> Tensor:
        state.copy_(state * 0.5 + x)
        return state.sin()

    assert ops(check(model, torch.randn(3), torch.randn(3))) == ["mul", "add", "copy_", "sin"]


def test_a_write_of_another_type_is_a_copy() -> None:
    def model(state: Tensor, x: Tensor) -> Tensor:
        state.copy_(torch.add(state, x))
        return state.sin()

    found = check(model, torch.randn(3).bfloat16(), torch.randn(3))
    assert "add_" not in ops(found)


# Buffers that share memory --------------------------------------------------------------------------------------------


def test_one_buffer_given_twice() -> None:
    def model(a: Tensor, b: Tensor, at: Tensor, row: Tensor) -> Tensor:
        a.index_copy_(0, at, row)
        return b.sin()

    cache, expected = CACHE.clone(), CACHE.clone()
    wanted = model(expected, expected, AT, ROW)
    found = compiled(model, cache, cache, AT, ROW)
    assert torch.equal(found.output, wanted)
    assert torch.equal(cache, expected)
    assert ops(found) == ["index_copy_", "sin"]


def test_two_views_of_one_buffer_as_inputs() -> None:
    """pytorch/pytorch#198095"""

    def model(a: Tensor, b: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        old = b.cos()
        a[2] = row[0]
        b.mul_(2)
        return old, a.sin()

    def call(function: Callable[..., object], base: Tensor) -> object:
        return function(base[:3], base[1:], ROW)

    base, expected = CACHE.clone(), CACHE.clone()
    wanted = call(model, expected)
    output = call(lambda *inputs: compiled(model, *inputs).output, base)
    for value, want in zip((*output, base), (*wanted, expected), strict=True):
        assert torch.equal(value, want)


def test_inputs_side_by_side_in_one_buffer_are_buffers_of_their_own() -> None:
    """As the caches of layers are that are allocated as one: torch knows that they share no element."""

    def model(a: Tensor, b: Tensor, at: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        halves = b.split(2)
        a[at] = row
        halves[1].mul_(2)
        b.index_copy_(0, at, row * 3)
        return a.sin(), halves[0] + 1

    base, expected = (torch.stack((CACHE, CACHE * 2, CACHE * 3)) for _ in range(2))
    wanted = model(*expected[:2].unbind(), AT, ROW)
    found = compiled(model, *base[:2].unbind(), AT, ROW)
    assert torch.equal(base, expected)
    assert all(map(torch.equal, found.output, wanted))
    assert sorted({*ops(found)}) == ["add", "index_copy_", "index_put_", "mul", "mul_", "sin", "split"]


def test_an_op_that_writes_a_view_of_an_input_inside_a_larger_buffer_writes_nothing_beside_it() -> None:
    """torch says where a view begins in the storage of a copy; the input itself begins elsewhere."""

    def model(rows: Tensor, k: Tensor, cache: Tensor, at: Tensor) -> Tensor:
        cache.index_copy_(0, at, rows)
        torch.ops.npu_fuse_test_in_place.store(k, k + 1, cache.view(cache.shape), None, 0)
        return rows.sin()

    buffer, expected = (torch.arange(72.0).view(3, 4, 6) for _ in range(2))
    rows, k = torch.ones(1, 6), torch.full((1, 6), 9.0)
    model(rows, k, expected[2], torch.tensor([1]))
    compiled(model, rows, k, buffer[2], torch.tensor([1]))
    assert torch.equal(buffer, expected)


def test_inputs_that_come_to_share_memory() -> None:
    """pytorch/pytorch#139789. What torch has compiled for inputs that share memory, it uses for all later ones."""

    def model(a: Tensor, b: Tensor, at: Tensor, row: Tensor) -> Tensor:
        a.index_copy_(0, at, row)
        return b.sin()

    torch._dynamo.reset()
    through = torch.compile(model, backend="npu_fuse")
    for shared in (False, True):
        results = []
        for function in (through, model):
            base = CACHE.clone()
            with torch.no_grad():
                results.append((function(base[:3], base[1:] if shared else CACHE[1:].clone(), AT, ROW), base))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


# Ops that write -------------------------------------------------------------------------------------------------------


def test_an_op_that_says_what_it_writes_is_called_as_the_model_called_it() -> None:
    def model(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        out = torch.ops.npu_fuse_test_in_place.store(k, v, k_cache, v_cache, 2)
        return out + k_cache.sum(0)

    found = check(model, *(torch.randn(2, 6) for _ in range(2)), CACHE, CACHE + 1)
    assert ops(found) == ["store", "sum", "add"]
    assert [site.op for site in found.report.sites] == ["npu_fuse_test_in_place::store"]


def test_an_op_that_writes_nothing_for_an_argument() -> None:
    def model(k: Tensor, k_cache: Tensor) -> Tensor:
        return torch.ops.npu_fuse_test_in_place.store(k, k, k_cache, None, 1)

    assert ops(check(model, torch.randn(2, 6), CACHE)) == ["store"]


def test_an_op_that_writes_two_views_of_one_buffer() -> None:
    """pytorch/pytorch#153389"""

    def model(k: Tensor, v: Tensor, caches: Tensor) -> Tensor:
        out = torch.ops.npu_fuse_test_in_place.store(k, v, caches[0], caches[1], 2)
        return out + caches.sum((0, 1))

    assert ops(check(model, *(torch.randn(2, 6) for _ in range(2)), torch.stack((CACHE, CACHE + 1)))) == [
        "store",
        "sum",
        "add",
    ]


def test_an_op_that_writes_one_buffer_through_two_arguments() -> None:
    """pytorch/pytorch#132238"""

    def model(k: Tensor, v: Tensor, cache: Tensor) -> Tensor:
        return torch.ops.npu_fuse_test_in_place.store(k, v, cache, cache, 2) + cache.sum(0)

    check(model, *(torch.randn(2, 6) for _ in range(2)), CACHE)


def test_an_op_whose_buffer_is_read_later_gets_a_copy() -> None:
    def model(k: Tensor, cache: Tensor) -> Tensor:
        old = cache.clone()
        out = torch.ops.npu_fuse_test_in_place.store(k, k, cache, None, 2)
        return out + (cache - old).sum(0)

    check(model, torch.randn(2, 6), CACHE)


def test_an_op_that_writes_a_value_of_the_graph_needs_no_copy() -> None:
    def model(k: Tensor, x: Tensor) -> Tensor:
        new = x * 2
        torch.ops.npu_fuse_test_in_place.store(k, k, new, None, 2)
        return new

    assert ops(check(model, torch.randn(2, 6), CACHE)) == ["mul", "store"]


def test_the_paged_cache_is_written_in_place() -> None:
    register(Target())
    slots = torch.tensor([5, 0, 9])

    def model(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        torch.ops.npu.npu_scatter_pa_kv_cache(k, v, k_cache, v_cache, slots, cache_mode="Norm")
        return k_cache.view(-1, 2, 8)[slots] + v_cache.view(-1, 2, 8)[slots]

    inputs = (*(torch.randn(3, 2, 8).half() for _ in range(2)), *(torch.randn(3, 4, 2, 8).half() for _ in range(2)))
    found = check(model, *inputs)
    assert "npu_scatter_pa_kv_cache" in ops(found)
    assert "auto_functionalized_v2" not in ops(found)
    assert "copy_" not in ops(found)


# A fused op that writes, as a lowering calls it -----------------------------------------------------------------------


def _paged(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Tensor:
    for tokens, cache in ((k, k_cache), (v, v_cache)):
        cache.view(-1, 2, 8).index_copy_(0, slots, tokens)
    return k_cache.sum((0, 1)) + v_cache.sum((0, 1))


def _paged_graph() -> tuple[Rewriter, tuple[Tensor, ...]]:
    """The graph of `_paged` as AOTAutograd made it, with what it is called with."""
    register(Target())
    caches = (torch.randn(3, 4, 2, 8).half() for _ in range(2))
    found = compiled(_paged, *(torch.randn(3, 2, 8).half() for _ in range(2)), *caches, torch.tensor([5, 0, 9]))
    return Rewriter(found.before, Target(), {}, pack_weights=True), found.inputs


def _lower(rewriter: Rewriter, one_cache: bool = False) -> None:
    contract = CONTRACTS["npu::npu_scatter_pa_kv_cache"]
    copies = list(rewriter.graph.find_nodes(op="call_function", target=aten.index_copy.default))
    sources = {copy: next(iter(copy.users)) for copy in copies}
    slots = copies[0].args[2]
    keys, values = (copy.args[3] for copy in copies)
    key_cache, value_cache = (copy.args[0].args[0] for copy in copies)
    with rewriter.edit(copies[1], []) as edit:
        results, new = edit.functional(
            contract,
            key=keys,
            value=values,
            key_cache=key_cache,
            value_cache=key_cache if one_cache else value_cache,
            slot_mapping=slots,
            cache_mode="Norm",
        )
        assert results == []
        edit.replace(sources[copies[0]], new["key_cache"])
        edit.replace(sources[copies[1]], new["value_cache"])


def test_a_lowering_gives_new_values_and_the_op_writes_the_buffers() -> None:
    rewriter, inputs = _paged_graph()

    def run() -> tuple[Tensor, ...]:
        rewriter.module.recompile()
        given = tuple(value.clone() + 1 if value.is_floating_point() else value for value in inputs)
        return *rewriter.module(*given), *given

    wanted = run()
    _lower(rewriter)
    for value, want in zip(run(), wanted, strict=True):  # the graph runs before its writes are in place, too
        torch.testing.assert_close(value, want)
    (site,) = put_back(rewriter)
    assert (site.status, site.op) == ("lowered", "npu::npu_scatter_pa_kv_cache")
    cleanup(rewriter.module)
    names = [node.target for node in rewriter.graph.find_nodes(op="call_function", target=aten.copy_.default)]
    assert names == []
    for value, want in zip(run(), wanted, strict=True):
        torch.testing.assert_close(value, want)


def test_a_lowering_may_not_write_one_tensor_through_two_arguments() -> None:
    rewriter, _ = _paged_graph()
    before = str(rewriter.graph)
    with pytest.raises(Refused, match="one tensor through two of key_cache, value_cache"):
        _lower(rewriter, one_cache=True)
    assert str(rewriter.graph) == before


def test_a_lowering_asks_the_contract() -> None:
    rewriter, _ = _paged_graph()
    (first, *_) = rewriter.graph.find_nodes(op="call_function", target=aten.index_copy.default)
    nodes = {"key": first.args[2], "value": first, "key_cache": first, "value_cache": first, "slot_mapping": first}
    with pytest.raises(Refused, match="key is int64"):
        Edit(rewriter, first, []).functional(CONTRACTS["npu::npu_scatter_pa_kv_cache"], **nodes)


# Random programs ------------------------------------------------------------------------------------------------------


def _program(seed: int) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]:
    """A random sequence of views, writes and reads of two buffers and a new tensor."""
    draw = random.Random(seed)
    steps = [(draw.randrange(9), *(draw.randrange(60) for _ in range(3))) for _ in range(draw.randint(2, 8))]

    def model(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        tensors, results = [a, b, x * 2], []
        for step, which, other, place in steps:
            target = tensors[which % len(tensors)]
            at = torch.tensor([place % target.shape[0]])
            if step == 0 and target.dim() > 1:
                tensors.append(target[place % target.shape[0]])
            elif step == 1 and target.shape[0] > 1:
                tensors.append(target[1:])
            elif step == 2 and target.dim() > 1:
                tensors.append(target.transpose(0, 1))
            elif step == 3:
                target.mul_(2)
            elif step == 4:
                target[-1:].copy_(tensors[other % len(tensors)].sum() + 1)
            elif step == 5:
                target.index_add_(0, at, torch.ones_like(target[:1]))
            elif step == 6:
                target.copy_(torch.index_copy(target, 0, at, torch.ones_like(target[:1])))
            elif step == 7:
                new = torch.index_copy(target, 0, at, torch.ones_like(target[:1]))
                tensors.append(new)
                results.append(new if place % 2 else new.sum(-1))
            else:
                results.append(target.sum(-1))
        return tuple(results) or (a.sum(),)

    return model


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_are_as_in_eager(seed: int) -> None:
    model = _program(seed)
    # Written through a transposed view, a new tensor may come out of AOTAutograd with other strides than eager's.
    inputs = torch.arange(12.0).view(3, 4), torch.arange(12.0).view(4, 3) + 20, torch.ones(3, 4)
    check(model, *inputs, strides=False)


@pytest.mark.parametrize(
    ("size", "stride", "overlaps"),
    [
        ((3, 4), (4, 1), False),
        ((3, 4), (1, 3), False),
        ((3, 2), (4, 1), False),
        ((3, 2), (4, 2), False),
        ((3, 4), (0, 1), True),
        ((3, 4), (3, 1), True),
        ((1, 4), (0, 1), False),
        ((2, 3, 4), (12, 4, 1), False),
        ((), (), False),
    ],
)
def test_elements_that_share_memory(size: tuple[int, ...], stride: tuple[int, ...], overlaps: bool) -> None:
    assert overlaps_itself(torch.empty(64).as_strided(size, stride)) is overlaps


def test_strides_that_are_not_known_may_overlap() -> None:
    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env):
        strides = [shape_env.create_unbacked_symint() for _ in range(2)]
        assert overlaps_itself(torch.empty(9).as_strided((2, 2), strides))


LINE = torch.arange(24.0)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (LINE.view(4, 6), LINE.view(4, 6), True),
        (LINE.view(4, 6), LINE.clone().view(4, 6), False),
        (LINE.view(4, 6), LINE.view(torch.int32).view(4, 6), False),
        (LINE.view(4, 6), LINE.view(4, 6)[:2], False),
        (LINE[:12].view(2, 6), LINE[12:].view(2, 6), False),
        (LINE.view(4, 6)[:2, :2], LINE[:4].view(2, 2), False),
    ],
)
def test_one_place_is_the_same_elements_in_one_order(a: Tensor, b: Tensor, same: bool) -> None:
    assert same_place(a, b) is same


@pytest.mark.parametrize(
    ("a", "b", "apart"),
    [
        (LINE, LINE.clone(), True),
        (LINE[:12], LINE[12:], True),
        (LINE[:12], LINE[11:], False),
        (LINE[:20:10], LINE[5:12], False),
        (LINE[4:8], LINE.view(torch.float64)[2:4], False),
    ],
)
def test_parts_that_share_no_element_are_told(a: Tensor, b: Tensor, apart: bool) -> None:
    assert _lie_apart(a, b) is _lie_apart(b, a) is apart


@pytest.mark.parametrize(
    ("new", "is_seen", "may"),
    [
        (torch.empty(4, 6), True, True),
        (torch.empty(6, 4).t(), True, False),
        (torch.empty(6, 4).t(), False, True),
        (torch.empty(4, 6).half(), False, False),
        (torch.empty(4, 6, device="meta"), False, False),
        (torch.empty(2, 6), False, False),
    ],
)
def test_a_value_may_lie_in_a_buffer_of_its_kind(new: Tensor, is_seen: bool, may: bool) -> None:
    graph = fx.Graph()
    base, result = graph.placeholder("base"), graph.placeholder("result")
    base.meta["val"], result.meta["val"] = torch.empty(4, 6), new
    graph.call_function(aten.copy_.default, (base, result))
    if is_seen:
        graph.output(result)
    assert _may_lie(result, base) is may


def _behind(cache: Tensor, new: Tensor) -> Tensor:
    cache.copy_(new * 2)
    return new.sin()


def by_hand(model: Callable[..., object]) -> fx.GraphModule:
    """A graph that is written as AOTAutograd's is, but for what `model` writes where AOTAutograd would not."""
    module = make_fx(model, tracing_mode="fake")(CACHE, AT, ROW)
    for node in module.graph.find_nodes(op="call_function", target=aten.copy_.default):
        node.args = (next(iter(module.graph.nodes)), node.args[1])
    return module


@pytest.mark.parametrize(
    "model",
    [
        # A copy of the buffer is written behind the buffer's last value.
        lambda cache, at, row: cache.copy_(torch.index_copy(cache, 0, at, row)).index_copy(0, at, row * 2),
        # The buffer gets another value in the end, and the first is read behind that.
        lambda cache, at, row: _behind(cache, torch.index_copy(cache, 0, at, row)),
        # The buffer is written before it gets the new value.
        lambda cache, at, row: cache.copy_((torch.index_copy(cache, 0, at, row), cache.mul_(2))[0]).sin(),
    ],
)
def test_what_is_written_besides_keeps_its_order(model: Callable[..., Tensor]) -> None:
    module = by_hand(model)
    own, expected = CACHE.clone(), CACHE.clone()
    wanted = model(expected, AT, ROW)
    put_back(Rewriter(module, Target(), {}, pack_weights=True))
    module.recompile()
    assert torch.equal(module(own, AT, ROW), wanted)
    assert torch.equal(own, expected)


def test_a_buffer_that_ranks_are_sent_is_not_written_before_they_have_it() -> None:
    module = by_hand(lambda cache, at, row: cache.copy_(torch.index_copy(cache, 0, at, row)) + row.sum())
    graph = module.graph
    cache = next(iter(graph.nodes))
    (total,) = graph.find_nodes(op="call_function", target=aten.sum.default)
    ops = torch.ops._c10d_functional
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        sent = graph.call_function(ops.all_reduce.default, (cache, "sum", "0"))
    with graph.inserting_before(total):
        waited = graph.call_function(ops.wait_tensor.default, (sent,))
    for node in (sent, waited):
        node.meta["val"] = cache.meta["val"].clone()
    total.args = (waited,)
    (site,) = put_back(Rewriter(module, Target(), {}, pack_weights=True))
    assert site.reason == "a collective that reads the buffer may still be under way"


def _in_one_buffer(parts: Callable[[Tensor], tuple[Tensor, Tensor]], put: tuple[Any, ...], reads: bool) -> list[Site]:
    """What becomes of one op's writes into two views of one buffer, the first of which may be read between them."""
    register(Target())

    def model(k: Tensor, v: Tensor, kv: Tensor, slots: Tensor) -> Tensor:
        k_cache, v_cache = parts(kv)
        k_new = torch.index_copy(k_cache.view(-1, 2, 8), 0, slots, k).view(k_cache.shape)
        first = put[0](kv, k_new, *put[1])
        between = first.sum() if reads else k.sum()
        v_new = torch.index_copy(v_cache.view(-1, 2, 8), 0, slots, v).view(v_cache.shape)
        kv.copy_(put[0](first, v_new, *put[2]))
        return between

    tokens, slots = torch.randn(3, 2, 8).half(), torch.tensor([5, 0, 9])
    module = make_fx(model, tracing_mode="fake")(tokens, tokens + 1, torch.randn(6, 4, 2, 8).half(), slots)
    rewriter = Rewriter(module, Target(), {}, pack_weights=True)
    _lower(rewriter)
    return put_back(rewriter)


SLICES = (aten.slice_scatter.default, (0, 0, 3), (0, 3, 6))


def test_two_parts_of_one_buffer_are_written_at_once() -> None:
    (site,) = _in_one_buffer(lambda kv: (kv[:3], kv[3:]), SLICES, reads=False)
    assert site.status == "lowered"


def test_what_reads_one_part_between_the_writes_would_see_both() -> None:
    site, *_ = _in_one_buffer(lambda kv: (kv[:3], kv[3:]), SLICES, reads=True)
    assert site.reason.startswith("the old value of a part is read between the writes, by aten.sum")


def test_parts_that_share_elements_are_not_written_at_once() -> None:
    put = (aten.slice_scatter.default, (0, 0, 3), (0, 2, 5))
    site, *_ = _in_one_buffer(lambda kv: (kv[:3], kv[2:5]), put, reads=False)
    assert site.reason == "it writes one buffer through two arguments"


def test_arithmetic_on_a_new_value_stays_as_it_is() -> None:
    assert ops(check(lambda x: x.sin() + 1, CACHE)) == ["sin", "add"]


def test_what_a_fused_op_gives_is_a_new_value() -> None:
    def model(x: Tensor, w: Tensor, at: Tensor, row: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w
        y.index_copy_(0, at, row)
        return y

    x, w = torch.randn(4, 2, 6), torch.randn(6)
    found = compiled(model, x, w, AT, ROW)
    assert found.report.ops == {"npu::npu_rms_norm": 1}
    assert "index_copy_" in ops(found)
    torch.testing.assert_close(found.output, model(x, w, AT, ROW))


def test_what_an_op_gives_beside_what_it_writes_is_a_new_value() -> None:
    def model(k: Tensor, cache: Tensor, at: Tensor, row: Tensor) -> Tensor:
        out = torch.ops.npu_fuse_test_in_place.store(k, k, cache, None, 2)
        out.index_copy_(0, at, row)
        return out

    assert ops(check(model, torch.randn(2, 6), CACHE, torch.tensor([1]), torch.randn(1, 6))) == ["store", "index_copy_"]


def test_arithmetic_on_a_buffer_that_gets_another_value_stays_as_it_is() -> None:
    def model(cache: Tensor, at: Tensor, row: Tensor) -> Tensor:
        y = (cache + 1).sin()
        cache.copy_(torch.cat([row] * 4))
        return y

    module = by_hand(model)
    put_back(Rewriter(module, Target(), {}, pack_weights=True))
    assert module.graph.find_nodes(op="call_function", target=aten.add.Tensor)
