"""State is used where it is; a capture leaves no trace in it."""

import copy

import pytest
import torch
from torch import nn

from npu_fuse import CaptureError, GraphRunner, InputSpec
from npu_fuse.runtime.effects import register_side_effects


class Cached(nn.Module):
    """Writes a row of a cache in each way models have."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("rows", torch.randn(6, 4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.caches = [torch.randn(6, 4), {"more": torch.randn(6, 4)}]

    def forward(self, x, slots):
        self.rows[slots] = x * self.weight
        self.caches[0].index_copy_(0, slots, x)
        self.caches[1]["more"].index_add_(0, slots, x)
        self.count.add_(1)
        return self.rows.sum(0) + self.caches[0][0] + self.caches[1]["more"].sum() + self.count

    def state(self):
        return [self.rows, self.count, self.caches[0], self.caches[1]["more"]]


@torch.no_grad()
def test_replays_write_state_once_each_and_captures_never():
    model = Cached()
    eager = copy.deepcopy(model)
    runner = GraphRunner(model, warm_ups=3)
    where = [tensor.data_ptr() for tensor in model.state()]
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        x, slots = torch.randn(2, 4, generator=generator), torch.randperm(6, generator=generator)[:2]
        assert torch.equal(runner(x, slots), eager(x, slots))
        for mine, its in zip(model.state(), eager.state(), strict=True):
            assert torch.equal(mine, its)
    assert [tensor.data_ptr() for tensor in model.state()] == where
    assert runner.stats.captures == 1


@torch.no_grad()
def test_capturing_ahead_leaves_every_slot_as_it_was():
    model = Cached()
    before = [tensor.clone() for tensor in model.state()]
    runner = GraphRunner(model, buckets=[1, 2, 3], inputs={"x": InputSpec("n"), "slots": InputSpec("n")})
    runner.capture({"x": torch.randn(1, 4), "slots": torch.zeros(1, dtype=torch.long)}, progress=False)
    assert runner.stats.captures == 3
    for tensor, content in zip(model.state(), before, strict=True):
        assert torch.equal(tensor, content)


@torch.no_grad()
def test_a_replaced_cache_is_noticed():
    model = Cached()
    eager = copy.deepcopy(model)
    runner = GraphRunner(model)
    slots = torch.tensor([1, 2])
    for i in range(4):
        x = torch.full((2, 4), float(i))
        assert torch.equal(runner(x, slots), eager(x, slots))
        if i == 1:
            for m in (model, eager):
                m.caches[1]["more"] = torch.ones(6, 4)
    assert runner.stats.recaptures == 1


@torch.no_grad()
def test_a_replaced_number_is_noticed_though_it_equals_the_old_one():
    model = Cached()
    runner = GraphRunner(model)
    runner(torch.ones(2, 4), torch.tensor([0, 1]))
    model.count = model.count.clone()
    runner(torch.ones(2, 4), torch.tensor([0, 1]))
    assert model.count == 2


@torch.no_grad()
def test_state_made_in_the_first_run_begins_as_it_was_made():
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.total = None

        def forward(self, x):
            if self.total is None:
                self.total = torch.zeros(4)
            self.total.add_(x)
            return self.total * 2

    model, eager = Lazy(), Lazy()
    runner = GraphRunner(model)
    for seed in range(4):
        x = torch.randn(4, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(runner(x), eager(x))


@torch.no_grad()
def test_state_that_an_op_writes_undeclared_is_refused_until_it_is_registered():
    with torch.library._scoped_library("graphs_test", "FRAGMENT") as library:
        library.define("silent(Tensor x, Tensor state) -> Tensor")
        library.impl("silent", lambda x, state: state.add_(x).clone(), "CPU")

        def function(x, state):
            return torch.ops.graphs_test.silent(x, state)

        specs = {"state": InputSpec(static=True)}
        with pytest.raises(CaptureError, match="an op writes to state undeclared"):
            GraphRunner(function, inputs=specs)(torch.ones(3), torch.zeros(3))
        register_side_effects("graphs_test::silent", mutates=("state",))
        runner, state = GraphRunner(function, inputs=specs), torch.zeros(3)
        for i in range(3):
            assert torch.equal(runner(torch.ones(3), state), torch.full((3,), i + 1.0))
        assert torch.equal(state, torch.full((3,), 3.0))


def test_a_tensor_that_the_function_keeps_for_later_is_refused():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.seen = {}

        def forward(self, x):
            y = self.inner(x)
            self.seen["last"] = y
            return y + 1

    with pytest.raises(CaptureError, match=r"keeps a tensor \[2, 4\] that it computed, as .*seen.*last"):
        GraphRunner(Keeps())(torch.randn(2, 4))


@torch.no_grad()
def test_arguments_that_share_memory_which_is_written():
    def function(x, y):
        x.mul_(2)
        return x + y

    runner, base = GraphRunner(function), torch.arange(6.0)
    for i, j in ((0, 3), (0, 0), (3, 0), (0, 1)):
        mine, its = base.clone(), base.clone()
        assert torch.equal(runner(mine[i : i + 3], mine[j : j + 3]), function(its[i : i + 3], its[j : j + 3]))
        assert torch.equal(mine, its)
    runner = GraphRunner(lambda x, y: x + y)  # writes nothing
    runner(base, base)
    assert runner.stats.replays == 1


@torch.no_grad()
def test_an_argument_that_is_a_row_of_the_cache():
    def make():
        cache = torch.arange(6.0)

        def function(x):
            cache.add_(1)
            return x * 1

        return cache, function

    cache, function = make()
    runner = GraphRunner(function)
    its, eager = make()
    for _ in range(2):
        assert torch.equal(runner(torch.ones(2)), eager(torch.ones(2)))
        assert torch.equal(runner(cache[2:4]), eager(its[2:4]))
    assert (runner.stats.replays, runner.stats.eager) == (2, 2)


@torch.no_grad()
def test_weights_that_a_later_capture_moves():
    weight = nn.Parameter(torch.randn(3))

    def function(x, move=False):
        if move and weight.data_ptr() == original:
            weight.data = weight.data * 2
        return x * weight

    original = weight.data_ptr()
    runner, x = GraphRunner(function), torch.ones(3)
    before = runner(x).clone()
    assert torch.equal(runner(x, move=True), before * 2)
    assert torch.equal(runner(x), before * 2)
    weight.mul_(2)
    assert torch.equal(runner(x), before * 4)
    assert torch.equal(runner(x, move=True), before * 4)


@torch.no_grad()
def test_a_table_made_in_the_first_run_may_be_made_in_any_way():
    class Tabled(nn.Module):
        table = None

        def forward(self, x):
            if self.table is None:
                self.table = torch.rand(5)[torch.rand(5) > 0.2].sum().item() * torch.ones(3)
            return x * self.table

    model = Tabled()
    runner = GraphRunner(model)
    for _ in range(3):
        x = torch.randn(3)
        assert torch.equal(runner(x), x * model.table)


@torch.no_grad()
def test_a_memory_passed_as_it_is_is_not_copied_and_other_memory_is_captured_anew():
    def function(x, cache):
        cache.mul_(0.5).add_(x)
        return cache.sum()

    runner = GraphRunner(function, inputs={"cache": InputSpec(static=True)})
    caches = [torch.randn(4), torch.randn(4)]
    copies = [cache.clone() for cache in caches]
    for which in (0, 0, 1, 1, 0):
        x = torch.randn(4)
        assert torch.equal(runner(x, caches[which]), function(x, copies[which]))
        assert torch.equal(caches[which], copies[which])
    assert runner.stats.captures == 3
    assert runner.stats.recaptures == 2


class Cache:
    def __init__(self):
        self.rows = torch.zeros(3)


@torch.no_grad()
def test_a_memory_that_two_cache_objects_had_in_common():
    a, b = Cache(), Cache()
    b.rows = a.rows
    runner = GraphRunner(lambda x, cache: cache.rows + x)
    runner(torch.ones(3), a)
    runner(torch.ones(3), b)
    b.rows = torch.full((3,), 2.0)
    assert torch.equal(runner(torch.ones(3), b), torch.full((3,), 3.0))
    assert torch.equal(runner(torch.ones(3), a), torch.full((3,), 1.0))


@torch.no_grad()
def test_a_cache_object_is_known_by_its_identity():
    def function(x, cache):
        cache.rows += x
        return cache.rows * 1

    runner = GraphRunner(function)
    a, b = Cache(), Cache()
    for cache, expected in ((a, 1), (a, 2), (b, 1), (a, 3)):
        assert torch.equal(runner(torch.ones(3), cache), torch.full((3,), float(expected)))
    assert runner.stats.captures == 2
    a.rows = torch.full((3,), 10.0)
    assert torch.equal(runner(torch.ones(3), a), torch.full((3,), 11.0))
