"""torch.compile with graphs: fused, captured, replayed; as eager in every call."""

import copy
import warnings

import pytest
import torch
from torch import nn
from transformers import StaticCache

import npu_fuse
from npu_fuse import Backend
from tiny_models import build, prompt


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.rand(8))
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x):
        h = self.linear(x)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        self.count.add_(1)
        return h, h + self.count


def compiled(model, **settings):
    torch._dynamo.reset()
    backend = Backend(graphs=settings, strict=True)
    return torch.compile(model, backend=backend), backend


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def pair():
    model = Normed()
    return model, copy.deepcopy(model)


@torch.no_grad()
def test_calls_are_fused_and_replayed_and_kept_outputs_stay():
    model, eager = pair()
    function, backend = compiled(model)
    kept = []
    for _ in range(5):
        x = torch.randn(3, 8)
        kept.append((function(x), eager(x)))
    for got, expected in kept:
        assert_same(got, expected)
    assert torch.equal(model.count, eager.count)
    assert backend.report.count("rms_norm") == 1
    (replayed,) = backend.runners
    assert (replayed.runner.stats.captures, replayed.runner.stats.replays) == (1, 5)
    assert replayed.runner.memory().inputs == 3 * 8 * 4  # parameters and buffers aren't copied


@torch.no_grad()
def test_sizes_that_vary_are_padded_to_buckets():
    model, eager = pair()
    torch._dynamo.reset()
    backend = Backend(graphs={"buckets": [1, 2, 4, 8]}, strict=True)
    function = torch.compile(model, backend=backend, dynamic=True)
    for n in (3, 8, 2, 5, 4, 7, 9):
        x = torch.randn(n, 8)
        if n == 9:
            with pytest.warns(UserWarning, match="larger than the largest bucket"):
                assert_same(function(x), eager(x))
        else:
            assert_same(function(x), eager(x))
    (replayed,) = backend.runners
    stats = replayed.runner.stats
    assert (stats.captures, stats.replays, stats.eager) == (3, 6, 1)
    assert stats.padded_rows == 1 + 3 + 1


def halved(model):
    for parameter in model.parameters():
        parameter.mul_(0.5)


def data_replaced(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def assigned(model):
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)


@torch.no_grad()
@pytest.mark.parametrize("change", [halved, data_replaced, assigned])
def test_weights_change(change):
    model, eager = pair()
    function, backend = compiled(model)
    for i in range(6):
        if i in (2, 4):
            change(model)
            change(eager)
        x = torch.randn(3, 8)
        assert_same(function(x), eager(x))
    stats = [replayed.runner.stats for replayed in backend.runners]
    assert (sum(s.captures for s in stats) > 1) == (change is not halved)


@torch.no_grad()
@pytest.mark.filterwarnings("error:npu_fuse")  # such as that weights can't be packed
def test_packed_weights_are_replayed_and_followed():
    model = build("qwen3")
    eager = copy.deepcopy(model)
    function, backend = compiled(model)
    for i in range(4):
        if i == 2:
            weight = torch.randn(64, 64) / 8
            for m in (model, eager):
                m.model.layers[0].self_attn.q_proj.weight.data = weight.clone()
        ids = prompt() + i
        got, expected = function(input_ids=ids, use_cache=False).logits, eager(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert backend.report.count("qkv", style="separate") == 2
    assert [replayed.runner.stats.captures for replayed in backend.runners] == [2]


@torch.no_grad()
def test_a_decoder_over_a_static_cache():
    model = build("qwen3", max_position_embeddings=512)
    ids = prompt(batch=2, tokens=8)

    def generate(step):
        cache = StaticCache(config=model.config, max_cache_len=64)
        token = model(input_ids=ids, cache=cache).logits[:, -1:].argmax(-1)
        tokens = [token]
        for i in range(30):
            position = torch.full((2, 1), 8 + i)
            tokens.append(step(input_ids=tokens[-1], cache=cache, position_ids=position).logits.argmax(-1))
        return torch.cat(tokens, 1)

    function, backend = compiled(model)
    assert torch.equal(generate(function), generate(model))
    assert sum(replayed.runner.stats.replays for replayed in backend.runners) == 30


class Counter:
    def __init__(self):
        self.calls, self.rows = 0, 3


class Counting(nn.Module):
    """Counts in Python: calls, of which no tensor knows, and rows, by which one is scaled."""

    def forward(self, x, counter):
        counter.calls += 1
        counter.rows += x.shape[0]
        return x * counter.rows if self.scaled else x * 2


@torch.no_grad()
@pytest.mark.parametrize(("scaled", "captures"), [(False, 2), (True, 6)])
def test_what_is_counted_beside_the_tensors_is_no_part_of_a_capture(scaled, captures):
    model, counter, x = Counting(), Counter(), torch.randn(2, 3)
    model.scaled = scaled
    function, backend = compiled(model)
    for i in range(6):
        torch.testing.assert_close(function(x, counter), x * (3 + 2 * (i + 1)) if scaled else x * 2)
        assert (counter.calls, counter.rows) == (i + 1, 3 + 2 * (i + 1))
    assert sum(replayed.runner.stats.captures for replayed in backend.runners) == captures


@torch.no_grad()
def test_state_that_moves_before_every_call_ends_the_captures():
    model, eager = pair()
    function, _ = compiled(model)
    x = torch.randn(3, 8)
    assert_same(function(x), eager(x))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(12):
            model.count = model.count.clone()
            assert_same(function(x), eager(x))
    (warning,) = warned
    assert "a graph runs without capture: its caches or weights moved before each of 8 calls" in str(warning.message)


class Dropped(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, 0.5, training=True) * 0 + x


@torch.no_grad()
def test_a_graph_that_cannot_be_captured_runs_as_it_is():
    torch._dynamo.reset()
    function = torch.compile(Dropped(), backend="npu_fuse", mode="reduce-overhead")
    x = torch.randn(3)
    with pytest.warns(UserWarning, match="a graph runs without capture: .* draws random numbers"):
        assert torch.equal(function(x), x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(function(x), x)


@torch.no_grad()
@pytest.mark.parametrize("arguments", [{"mode": "reduce-overhead"}, {"options": {"graphs": {"outputs": "clone"}}}])
def test_by_name(arguments, monkeypatch):
    made = []
    original = npu_fuse.GraphRunner.__init__

    def noted(self, *args, **kwargs):
        original(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(npu_fuse.GraphRunner, "__init__", noted)
    torch._dynamo.reset()
    model, eager = pair()
    function = torch.compile(model, backend="npu_fuse", **arguments)
    for _ in range(3):
        x = torch.randn(3, 8)
        assert_same(function(x), eager(x))
    assert [runner.stats.replays for runner in made] == [3]


def test_settings_that_are_unknown():
    with pytest.raises(ValueError, match=r"Options.graphs: unknown setting 'bucket'; known: buckets, outputs"):
        Backend(graphs={"bucket": [1]})
    with pytest.raises(ValueError, match="without a name"):
        Backend(graphs={"buckets": {"batch": [1]}})


@torch.no_grad()
@pytest.mark.parametrize(
    "layout", [torch.t, lambda x: x[:, ::2], lambda x: x[:1].expand(3, 5), lambda x: x[:, :1].expand(3, 5)]
)
def test_inputs_that_are_views_of_other_memory(layout):
    def function(x):
        return (x * 2).reshape(-1), x.t().reshape(-1) + 1

    replayed, _ = compiled(function)
    for _ in range(2):
        x = layout(torch.randn(3, 5))
        for got, expected in zip(replayed(x), function(x), strict=True):
            assert torch.equal(got, expected)


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True])
def test_transposed_inputs(dynamic):
    def function(x):
        return x.permute(1, 2, 0).reshape(-1) * 1, x * 2

    torch._dynamo.reset()
    backend = Backend(graphs={"buckets": [4, 8]}, strict=True)
    replayed = torch.compile(function, backend=backend, dynamic=dynamic)
    for n in (3, 4, 2, 3):
        x = torch.randn(5, 2, n).permute(2, 0, 1) if dynamic else torch.randn(5, 2, 3).permute(2, 0, 1)
        for got, expected in zip(replayed(x), function(x), strict=True):
            assert torch.equal(got, expected)
            assert got.stride() == expected.stride()
    assert sum(replayed.runner.stats.replays for replayed in backend.runners) == 4


@torch.no_grad()
def test_views_of_what_the_model_holds_are_given_back():
    class Holder(Normed):
        def forward(self, x):
            h, _ = super().forward(x)
            return h, self.count[2:], self.linear.weight.T

    model, eager = Holder(), Holder()
    eager.load_state_dict(model.state_dict())
    function, backend = compiled(model)
    for _ in range(3):
        x = torch.randn(3, 8)
        got = function(x)
        assert_same(got, eager(x))
        for view, held in zip(got[1:], (model.count, model.linear.weight), strict=True):
            assert view.untyped_storage().data_ptr() == held.untyped_storage().data_ptr()
    (replayed,) = backend.runners
    assert (replayed.runner.stats.captures, replayed.runner.stats.replays) == (1, 3)
