"""What no replay could repeat is refused at capture, with the op and the line."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

from npu_fuse import CaptureError, GraphRunner, InputSpec


def random(x):
    return x + torch.rand(4)


def dropout(x):
    return nn.functional.dropout(x, 0.5, training=True)


def attention_with_dropout(x):
    return nn.functional.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)


def item(x):
    return x * x.sum().item()


def branch(x):
    if x.sum() > 0:
        return x
    return -x


def nonzero(x):
    return x.nonzero()


def masked(x):
    return x[x > 0]


def masked_write(x):
    y = x.clone()
    y[y > 0] = torch.ones(7)
    return y


def resized(x):
    return x.new_empty(0).resize_(4)


REFUSED = [
    (random, "aten.rand", "draws random numbers"),
    (dropout, "aten.bernoulli_", "draws random numbers"),
    (attention_with_dropout, "aten.bernoulli_", "draws random numbers"),
    (item, "aten._local_scalar_dense", "reads a number back to the host"),
    (branch, "aten._local_scalar_dense", "reads a number back to the host"),
    (nonzero, "aten.nonzero", "whose shape depends on the data"),
    (masked, "aten.index.Tensor", "whose shape depends on the data"),
    (masked_write, "aten.index_put_", "writes to places that a mask selects"),
    (resized, "aten.resize_", "replaces a tensor's memory"),
]


@pytest.mark.parametrize(("function", "op", "reason"), REFUSED, ids=[case[0].__name__ for case in REFUSED])
def test_refused(function, op, reason):
    x = torch.arange(16.0).view(4, 4) - 8
    with pytest.raises(CaptureError) as raised:
        GraphRunner(function)(x)
    message = str(raised.value)
    assert op in message
    assert reason in message
    lines, start = inspect.getsourcelines(function)
    assert __file__ in message
    assert any(f"line {start + i}," in message for i in range(len(lines)))


def test_a_branch_that_the_data_choose_is_refused():
    def function(x):
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    with pytest.raises(CaptureError, match="cond is a higher-order op"):
        GraphRunner(function)(torch.ones(3))


def dropout_in_eval(x):
    return nn.functional.dropout(x, 0.5, training=False)


def attention(x):
    return nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])


def gathered(x):
    return x[torch.tensor([2, 0])]


def selected(x):
    return torch.where(x > 0, x, 0.5)


def one_value_written(x):
    y = x.clone()
    y[y > 0] = 7.0
    return y


@pytest.mark.parametrize("function", [dropout_in_eval, attention, gathered, selected, one_value_written])
def test_what_is_next_to_it_is_captured(function):
    runner = GraphRunner(function)
    for seed in range(3):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(runner(x), function(x))


def test_after_a_refusal_nothing_has_changed_and_other_calls_are_served():
    counter = torch.zeros(4)

    def function(x, fail=False):
        counter.add_(1)
        return x * x.sum().item() if fail else x + counter

    runner = GraphRunner(function)
    x = torch.randn(4)
    with pytest.raises(CaptureError):
        runner(x, fail=True)
    assert torch.equal(counter, torch.zeros(4))
    assert torch.equal(runner(x), x + 1)


def test_ops_behind_the_dispatcher_are_not_taken_for_captured():
    compiled = torch.compile(lambda x: (x.sin() + 1).cos() * 2, backend="inductor")
    with pytest.raises(CaptureError, match="past torch's dispatcher"):
        GraphRunner(compiled)(torch.randn(64))


def test_gradients_are_refused():
    runner = GraphRunner(lambda x: x * 2)
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(ValueError, match="requires gradients"):
        runner(x)
    with torch.no_grad():
        assert torch.equal(runner(x), x * 2)


def test_no_python_of_the_function_runs_at_a_replay():
    calls = []
    runner = GraphRunner(lambda x: (calls.append(1), x * 2)[1])
    x = torch.randn(3)
    runner(x)
    before = len(calls)
    for _ in range(5):
        runner(x)
    assert len(calls) == before


def test_a_compiled_function_is_replayed_without_its_wrapper():
    model = nn.Sequential(nn.Linear(4, 4), nn.SiLU()).eval()
    frames = []

    def backend(module, _):
        return lambda *inputs: (frames.append(1), module(*inputs))[1]

    compiled = torch.compile(model, backend=backend)
    runner = GraphRunner(compiled)
    with torch.no_grad():
        runner(torch.randn(3, 4))
        before = len(frames)
        x = torch.randn(3, 4)
        assert torch.equal(runner(x), model(x))
        assert len(frames) == before
        model[0].weight.data = torch.randn(4, 4)  # behind the wrapper too
        torch.testing.assert_close(runner(x), model(x))


def test_the_signature_is_the_functions():
    class Draft(nn.Module):
        def forward(self, input_ids, positions, input_embeds=None):
            return input_ids

    for function in (Draft(), torch.compile(Draft())):
        assert "input_embeds" in inspect.signature(GraphRunner(function)).parameters
    with pytest.raises(ValueError, match="'input_embed' is no parameter; known: input_embeds"):
        GraphRunner(Draft(), inputs={"input_embed": InputSpec("tokens")})
    with pytest.raises(TypeError, match="4 arguments for the 3 parameters input_ids"):
        GraphRunner(Draft())(1, 2, 3, 4)
    with pytest.raises(TypeError, match="'embeds' is given but no parameter"):
        GraphRunner(Draft())(torch.ones(2), embeds=1)
    with pytest.raises(TypeError, match="'input_ids' is given twice"):
        GraphRunner(Draft())(torch.ones(2), input_ids=torch.ones(2))


def transposed_input(x):
    x.t_()
    return x * 1


def transposed_state(x, state=torch.arange(12.0).view(4, 3)):  # noqa: B008
    state.view(3, 4).t_()  # a view may be
    state.t_()
    return state @ x[:, :4].view(4, -1)


@pytest.mark.parametrize("function", [transposed_input, transposed_state])
def test_tensors_that_get_another_shape_are_refused_and_have_theirs_again(function):
    x = torch.randn(4, 3)
    with pytest.raises(CaptureError, match=r"aten.t_.default changes the shape of a tensor .*\n.*\n.*t_\(\)"):
        GraphRunner(function)(x)
    state = (*(function.__defaults__ or ()), x)[0]
    assert state.shape == (4, 3)
    assert state.is_contiguous()


def test_an_argument_that_gets_other_memory_is_refused():
    def function(x):
        x.data = x * 2
        return x + 1

    with pytest.raises(CaptureError, match="gives its argument 'x' other memory"):
        GraphRunner(function)(torch.ones(3))


def test_what_has_no_memory_of_its_own_is_refused():
    with pytest.raises(CaptureError, match=r"_to_sparse\.default works on a tensor of layout torch.sparse_coo"):
        GraphRunner(lambda x: x.to_sparse())(torch.ones(3))


def test_casts_of_autocast_follow_the_weights():
    model = nn.Linear(4, 4)
    runner, x = GraphRunner(model), torch.randn(2, 4)
    with torch.no_grad():
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(runner(x), model(x))
            model.weight.mul_(3)


def tracers():
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def faked(runner, x):
        with FakeTensorMode() as mode:
            assert runner(mode.from_tensor(x)).shape == x.shape
        return runner(x)

    yield "fake tensors", faked
    yield "make_fx", lambda runner, x: make_fx(runner)(torch.zeros_like(x))(x)
    yield "export", lambda runner, x: torch.export.export(Calls(runner), (torch.zeros_like(x),)).module()(x)
    yield "vmap", lambda runner, x: torch.func.vmap(runner)(x)
    yield "jvp", lambda runner, x: torch.func.jvp(runner, (x,), (x,))[1]


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize(("trace"), [pytest.param(trace, id=name) for name, trace in tracers()])
def test_a_tracer_sees_the_function(trace):
    runner = GraphRunner(lambda x: x * 2)
    runner(torch.ones(3, 2))
    x = torch.randn(3, 2)
    assert torch.equal(trace(runner, x), x * 2)


def test_copies_begin_without_graphs():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.runner = GraphRunner(self.linear, buckets=[4], inputs={"input": InputSpec("batch")})

        def forward(self, x):
            return self.runner(x)

    with torch.no_grad():
        model, x = Model(), torch.randn(2, 3)
        model(x)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model.runner)), copy.copy(model.runner)):
            torch.testing.assert_close(twin(x), model.linear(x))
        deep = copy.deepcopy(model)
        deep.linear.weight.zero_()
        torch.testing.assert_close(deep(x), deep.linear(x))
        torch.testing.assert_close(model(x), model.linear(x))
        assert deep.runner.stats.padded_rows == 2
