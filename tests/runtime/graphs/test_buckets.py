"""Which graphs there are: sizes, limits, capture ahead of time, and what is too large or can't be padded."""

import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

from npu_fuse import GraphRunner, InputSpec

ROWS = {"x": InputSpec("batch")}


def row_wise(x):
    return x.softmax(-1), x.sum(-1), x.repeat_interleave(2, 0)


def assert_eager(runner, function, n):
    x = torch.randn(n, 8)
    for got, expected in zip(runner(x), function(x), strict=True):
        torch.testing.assert_close(got, expected)


def test_the_smallest_bucket_that_fits():
    runner = GraphRunner(row_wise, buckets=[1, 2, 4, 8], inputs=ROWS)
    for n in (3, 8, 4, 5, 1, 2, 7):
        assert_eager(runner, row_wise, n)
    assert runner.stats.captures == 4
    assert runner.stats.rows == 4 + 8 + 4 + 8 + 1 + 2 + 8
    assert runner.stats.padded_rows == 1 + 3 + 1


def test_a_call_larger_than_the_largest_runs_eagerly_with_one_notice():
    runner = GraphRunner(row_wise, buckets=[1, 2, 4, 8], inputs=ROWS)
    with pytest.warns(UserWarning, match=r"sizes \{'batch': 9\} is larger than the largest bucket"):
        assert_eager(runner, row_wise, 9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in (8, 9, 100, 2):
            assert_eager(runner, row_wise, n)
    assert runner.stats.eager == 3
    assert runner.stats.replays == 2


def test_no_rows_are_no_rows():
    runner = GraphRunner(row_wise, buckets=[2], inputs=ROWS)
    assert_eager(runner, row_wise, 0)
    assert runner.stats.eager == 1


def test_no_inputs():
    weight = torch.randn(3)
    runner = GraphRunner(lambda: weight * 2)
    for _ in range(2):
        assert torch.equal(runner(), weight * 2)
        weight.add_(1)


def test_an_output_dim_that_equals_a_bucket_by_chance_is_no_batch():
    def function(x):
        return x * 1, torch.ones(4, 8), x.new_ones(3)

    runner = GraphRunner(function, buckets=[4], inputs=ROWS)
    for n in (3, 4, 1):
        assert [tuple(output.shape) for output in runner(torch.randn(n, 4))] == [(n, 4), (4, 8), (3,)]


def sum_over_rows(x):
    return x, (x + 1).sum(0)


def mean_of_count(x):
    return x / x.shape[0]


def norm_over_batch(x):
    return nn.functional.layer_norm(x.t(), (x.shape[0],)).t()


def largest_row(x):
    return x, x.sum(-1).argmax()


def scaled_per_tensor(x):
    return (x / x.abs().max() * 127).round()


def last_row(x):
    return x[-1]


def count_of_rows(x):
    return x, torch.ones_like(x[:, 0]).long().sum()


def written_input(x):
    x.sub_(x.mean(0))
    return x[:, 0] * 0


def kept_mean(x, kept=torch.zeros(8)):  # noqa: B008
    kept.mul_(0.9).add_(x.mean(0))
    return x * 1


MIXING = [sum_over_rows, mean_of_count, norm_over_batch, largest_row, scaled_per_tensor, last_row,
          count_of_rows, written_input, kept_mean]  # fmt: skip


@pytest.mark.parametrize("function", MIXING, ids=[function.__name__ for function in MIXING])
def test_rows_that_mix_are_not_padded(function):
    runner = GraphRunner(function, buckets=[2, 4, 8], inputs=ROWS)

    def assert_same(x):
        y = x.clone()
        for kept in function.__defaults__ or ():
            before = kept.clone()
        got = runner(x)
        for kept in function.__defaults__ or ():
            after = kept.clone()
            kept.copy_(before)
        torch.testing.assert_close(got, function(y))
        torch.testing.assert_close(x, y)
        for kept in function.__defaults__ or ():
            torch.testing.assert_close(after, kept)

    with pytest.warns(UserWarning, match="would change the result"):
        assert_same(torch.randn(3, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in (8, 5, 3, 2):
            assert_same(torch.randn(n, 8))
    assert runner.stats.unpadded == 3
    assert runner.stats.padded_rows == 0
    assert runner.stats.captures == 4


def test_a_mask_whose_numbers_hide_that_rows_mix():
    def function(x, mask):
        return x, mask.all(0), mask.any(0)

    runner = GraphRunner(function, buckets=[4], inputs={"x": InputSpec("n"), "mask": InputSpec("n")})
    x = torch.randn(3, 2)
    with pytest.warns(UserWarning, match="would change the result"):
        runner(x, torch.zeros(3, 2, dtype=torch.bool))
    for mask in (torch.ones(3, 2) > 0, torch.eye(3, 2) > 0):
        for got, expected in zip(runner(x, mask), function(x, mask), strict=True):
            assert torch.equal(got, expected)


def running_maximum(x):
    return x.cummax(0).values


def causal_over_rows(x):
    return (x @ x.t()).tril() @ x


@pytest.mark.parametrize("function", [causal_over_rows, running_maximum])
def test_rows_that_see_only_rows_before_them_are_padded(function):
    runner = GraphRunner(function, buckets=[8], inputs=ROWS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in (3, 8, 5):
            x = torch.randn(n, 8)
            torch.testing.assert_close(runner(x), function(x))
    assert runner.stats.captures == 1


def test_the_graph_used_longest_ago_goes_first():
    runner = GraphRunner(row_wise, buckets=[1, 2, 3], inputs=ROWS, max_graphs=2)
    for n in (1, 2, 1, 3):  # 2 goes
        assert_eager(runner, row_wise, n)
    assert (runner.stats.captures, runner.stats.evictions, runner.memory().graphs) == (3, 1, 2)
    assert_eager(runner, row_wise, 1)
    assert runner.stats.captures == 3
    assert_eager(runner, row_wise, 2)
    assert runner.stats.captures == 4


def test_captured_ahead_largest_first_as_forecast(capsys):
    sizes = []

    def function(ids, embeds=None):
        sizes.append(len(ids))
        return ids[:, None] + (0 if embeds is None else embeds)

    specs = {"ids": InputSpec("batch"), "embeds": InputSpec("batch")}
    runner = GraphRunner(function, buckets=[1, 4, 2], inputs=specs)
    examples = [{"ids": torch.arange(3)}, {"ids": torch.arange(2), "embeds": torch.randn(2, 5)}]
    forecast = runner.forecast(*examples)
    assert (forecast.graphs, forecast.pools, forecast.inputs) == (6, 1, 4 * 8 + 4 * 5 * 4)
    assert not sizes
    runner.capture(*examples)
    assert sizes == sorted(sizes, reverse=True)
    assert runner.stats.captures == 6
    memory = runner.memory()
    assert memory.inputs == forecast.inputs
    assert runner.stats.bytes == memory.total > memory.inputs
    runner(torch.arange(3), torch.randn(3, 5))
    assert runner.stats.captures == 6
    runner.clear()
    assert runner.memory().total == runner.stats.bytes == 0
    runner(torch.arange(3), torch.randn(3, 5))
    assert runner.stats.captures == 7


def test_more_graphs_than_the_limit_are_not_captured():
    runner = GraphRunner(row_wise, buckets=range(1, 9), inputs=ROWS, max_graphs=7)
    with pytest.raises(ValueError, match="8 graphs, and max_graphs is 7"):
        runner.capture({"x": torch.randn(1, 8)})
    assert runner.stats.captures == 0


def test_graphs_of_all_sizes_share_the_memory_of_inputs():
    runner = GraphRunner(row_wise, buckets=[2, 4, 8], inputs=ROWS)
    for n in (2, 4, 8):
        assert_eager(runner, row_wise, n)
    assert runner.memory().inputs == 8 * 8 * 4


@pytest.mark.parametrize(
    ("buckets", "inputs", "reason"),
    [
        ([1, 2], {}, "of which axis"),
        ([1, 2], {"x": InputSpec(("a", "b"))}, "The inputs have the axes a, b"),
        ({"b": [1]}, ROWS, "no input has the axis 'b'; known: batch"),
        ([0], ROWS, "sizes of 'batch' must be positive ints"),
        ([], ROWS, "sizes of 'batch' must be positive ints"),
    ],
)
def test_buckets_that_fit_no_axis(buckets, inputs, reason):
    with pytest.raises(ValueError, match=reason):
        GraphRunner(row_wise, buckets=buckets, inputs=inputs)


def freed(outputs):
    gc.collect()
    return [reference() is None for reference in outputs]


def outputs_of(runner):
    return [weakref.ref(entry.outputs) for entry in runner._memory.entries.values()]


def test_a_graph_that_is_dropped_is_freed():
    runner = GraphRunner(row_wise, buckets=[1, 2], inputs=ROWS, max_graphs=1)
    runner(torch.randn(1, 8))
    first = outputs_of(runner)
    runner(torch.randn(2, 8))
    assert freed(first) == [True]
    runner = GraphRunner(lambda x: x * 2, inputs={"x": InputSpec(static=True)})
    caches = [torch.randn(3) for _ in range(3)]
    first = []
    for cache in caches:
        runner(cache)
        first += outputs_of(runner)
    kept = [weakref.ref(cache) for cache in caches]
    del caches, cache
    assert freed(first) == freed(kept) == [True, True, False]


@torch.no_grad()
@pytest.mark.parametrize("told", [False, True])
def test_whether_rows_mix_is_asked_again_after_a_change(told):
    class Centred(nn.Module):
        on = True

        def forward(self, x):
            return x - x.mean(0) if self.on else x

    model = nn.Sequential(nn.Linear(8, 8), Centred())
    model[1].on = False
    runner = GraphRunner(model, buckets=[4], inputs={"input": InputSpec("batch")})
    x = torch.randn(3, 8)
    torch.testing.assert_close(runner(x), model(x))
    model[1].on = True
    if told:
        runner.invalidate()
    else:
        model[0] = nn.Linear(8, 8)
    with pytest.warns(UserWarning, match="would change the result"):
        torch.testing.assert_close(runner(x), model(x))
