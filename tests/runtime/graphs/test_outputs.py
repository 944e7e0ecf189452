"""What a caller keeps is never overwritten, and what it doesn't keep costs no copy."""

import dataclasses
import gc

import pytest
import torch
from torch import nn

from npu_fuse import CaptureError, GraphRunner, InputSpec


def make(**settings):
    model = nn.Linear(4, 4, bias=False)
    return model, GraphRunner(model, **settings)


def xs(count):
    return [torch.randn(3, 4, generator=torch.Generator().manual_seed(i)) for i in range(count)]


@torch.no_grad()
def test_kept_outputs_stay():
    model, runner = make()
    kept = [(runner(x), model(x)) for x in xs(5)]
    for got, expected in kept:
        assert torch.equal(got, expected)
    assert runner.stats.moved_outputs == 4


@torch.no_grad()
def test_views_of_outputs_stay_when_the_outputs_are_gone():
    model, runner = make()
    kept = [(runner(x)[:, 1:].t()[0], model(x)[:, 1:].t()[0]) for x in xs(5)]
    for got, expected in kept:
        assert torch.equal(got, expected)


@torch.no_grad()
def test_outputs_that_nobody_keeps_are_views_of_the_same_memory():
    _, runner = make()
    addresses = {runner(x).data_ptr() for x in xs(5)}
    assert len(addresses) == 1
    assert runner.stats.moved_outputs == 0


@torch.no_grad()
def test_after_an_output_was_moved_the_address_is_the_graphs_again():
    _, runner = make()
    first = runner(xs(1)[0])
    address = first.data_ptr()
    second = runner(xs(1)[0])
    assert second.data_ptr() == address
    assert first.data_ptr() != address


@torch.no_grad()
def test_an_output_comes_back_as_an_input():
    model, runner = make()
    got = expected = torch.randn(3, 4)
    for _ in range(5):
        got, expected = runner(got), model(expected)
    assert torch.equal(got, expected)


@torch.no_grad()
def test_outputs_in_one_memory_stay_together():
    def function(x):
        y = x * 2
        return y[0], y[1:], y

    runner = GraphRunner(function)
    first = runner(torch.ones(3, 2))
    runner(torch.zeros(3, 2))
    first[2].add_(1)  # as eager's outputs do, they share
    assert torch.equal(first[0], torch.full((2,), 3.0))
    assert torch.equal(first[1], torch.full((2, 2), 3.0))
    assert torch.equal(runner(torch.ones(3, 2))[2], torch.full((3, 2), 2.0))


@torch.no_grad()
def test_what_a_caller_writes_to_an_output_is_gone_at_the_next_replay():
    _, runner = make()
    x = xs(1)[0]
    expected = runner(x).clone()
    runner(x).zero_()
    assert torch.equal(runner(x), expected)


@torch.no_grad()
def test_clone_copies_and_static_overwrites():
    model, runner = make(outputs="clone")
    a, b = xs(2)
    first = runner(a)
    runner(b)
    assert torch.equal(first, model(a))
    assert runner.stats.moved_outputs == 0
    model, runner = make(outputs="static")
    first = runner(a)
    runner(b)
    assert torch.equal(first, model(b))
    with pytest.raises(ValueError, match=r"GraphRunner.outputs: 'copy' is unknown; known: 'views', 'clone', 'static'"):
        make(outputs="copy")


@torch.no_grad()
def test_outputs_outlive_their_graph():
    model, runner = make(buckets=[1, 2, 4], inputs={"input": InputSpec("batch")}, max_graphs=1)
    kept = [(runner(x[:n]), model(x[:n])) for x, n in zip(xs(6), (3, 1, 2, 3, 1, 2), strict=True)]
    assert runner.stats.evictions == 5
    del runner
    gc.collect()
    for got, expected in kept:
        torch.testing.assert_close(got, expected)


@torch.no_grad()
def test_a_storage_that_a_caller_keeps_stays():
    _, runner = make()
    x = xs(1)[0]
    got = runner(x)
    expected, storage = got.clone(), got.untyped_storage()
    del got
    runner(x + 1)
    assert torch.equal(torch.empty(0).set_(storage, 0, (3, 4), (4, 1)), expected)


@torch.no_grad()
def test_outputs_of_several_dtypes_in_one_memory_of_an_odd_size_stay():
    def function(x):
        y = torch.empty(7, dtype=torch.uint8).copy_(x)
        return y[:4].view(torch.int32), y[4:]

    runner = GraphRunner(function)
    kept = [(runner(x), function(x)) for x in (torch.arange(7) + i for i in range(3))]
    for got, expected in kept:
        assert all(map(torch.equal, got, expected))


@torch.no_grad()
def test_lazily_conjugated_outputs_stay():
    def function(x):
        return (x * 2).conj()

    runner = GraphRunner(function)
    kept = [(runner(x), function(x)) for x in (torch.randn(3, dtype=torch.complex64) for _ in range(3))]
    for got, expected in kept:
        assert torch.equal(got, expected)


@dataclasses.dataclass
class Result:
    hidden: torch.Tensor


@pytest.mark.parametrize("wrap", [Result, lambda x: [{x}], lambda x: {"a": Result([x])}], ids=["object", "set", "deep"])
@pytest.mark.parametrize("buckets", [None, [4]])
def test_objects_that_hide_an_output_are_refused(wrap, buckets):
    runner = GraphRunner(lambda x: wrap(x * 2), buckets=buckets, inputs={"x": InputSpec("n")})
    with pytest.raises(CaptureError, match=r"returns a (Result|set), whose .* is a tensor \[3\] that it computed"):
        runner(torch.ones(3))


def test_an_object_of_the_function_is_returned_as_it_is():
    result = Result(torch.ones(3))
    runner = GraphRunner(lambda x: (result, result.hidden.add_(x)))
    for i in range(3):
        assert runner(torch.ones(3))[0] is result
        assert torch.equal(result.hidden, torch.full((3,), i + 2.0))
