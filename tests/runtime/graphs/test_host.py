"""The emulation of a device: aliases, writes and constants as a graph at fixed addresses has them."""

import pytest
import torch
from torch import nn

from npu_fuse import GraphRunner


def chunks_written_in_place(x):
    y = x.clone()
    first, second = y.chunk(2, -1)
    first.mul_(2)
    second.add_(first)
    return y


def written_through_a_view_of_a_view(x):
    y = torch.zeros(8, 4)
    y.view(4, 2, 4)[:, 1].copy_(x)
    return y


def transposed_in_place(x):
    y = x * 1
    y.t_()
    return y @ x


def out_argument(x):
    y = torch.empty(4, 4)
    torch.mul(x, 3, out=y)
    return y


def many_outputs(x):
    values, indices = x.sort(-1)
    return {"values": values, "rest": (indices, [x.max(), None, 3])}


def accumulated_into_a_constant(x):
    total = torch.tensor([1.0, 2.0, 3.0, 4.0])
    total += x[0]
    return total


def list_of_results(x):
    rows = x.unbind(0)
    return torch.stack([rows[3], rows[2]]) + torch.cat(torch.split(x, 2, 1), 0)[:2, :1]


def expanded(x):
    return x.sum().expand(4), x[:1].expand(3, 4)


def allocated_and_freed(x):
    for i in range(20):
        x = x + torch.full((4,), float(i)) * x
    return x


FUNCTIONS = [chunks_written_in_place, written_through_a_view_of_a_view, transposed_in_place, out_argument, many_outputs,
             accumulated_into_a_constant, list_of_results, expanded, allocated_and_freed]  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS, ids=[function.__name__ for function in FUNCTIONS])
def test_replays_are_eager_calls_bit_for_bit(function):
    runner = GraphRunner(function)
    for seed in range(4):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(runner(x), function(x), rtol=0, atol=0)
    assert runner.stats.captures == 1
    assert runner.stats.replays == 4


def test_an_input_that_the_function_writes_is_written():
    def function(x, y):
        x[:, 0] = 5
        y.add_(x)
        return y.sum()

    runner = GraphRunner(function)
    for seed in range(3):
        x, y = (torch.randn(3, 2, generator=torch.Generator().manual_seed(seed + i)) for i in (0, 9))
        a, b, c, d = x.clone(), y.clone(), x.clone(), y.clone()
        assert torch.equal(runner(a, b), function(c, d))
        assert torch.equal(a, c)
        assert torch.equal(b, d)


def test_an_output_that_is_an_input_or_a_parameter():
    weight = nn.Parameter(torch.ones(3))
    runner = GraphRunner(lambda x: (x, weight, x[1:]))
    with torch.no_grad():
        x = torch.randn(3)
        first = runner(x)
        second = runner(x + 1)
        assert torch.equal(first[0], x)
        assert torch.equal(first[2], x[1:])
        assert torch.equal(second[0], x + 1)
        weight.mul_(2)  # the output is the parameter, as it is in eager
        assert torch.equal(first[1], weight)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes(mode):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    runner = GraphRunner(model)
    with mode():
        for _ in range(3):
            x = torch.randn(2, 4)
            assert torch.equal(runner(x), model(x))
    x = torch.randn(2, 4)
    assert torch.equal(runner(x), model(x))  # with gradients on, the runner gives none
    assert not runner(x).requires_grad


def test_autocast_and_training_have_graphs_of_their_own():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    runner = GraphRunner(model)
    x = torch.randn(6, 4)
    with torch.no_grad():
        runner(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert runner(x).dtype == model(x).dtype
        model.train()
        reference = torch.nn.BatchNorm1d(4)
        torch.testing.assert_close(runner(x), reference(model[0](x)), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model[1].running_mean, reference.running_mean)
    assert runner.stats.captures == 3
