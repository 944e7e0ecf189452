"""Public bug reports on capture and replay, re-expressed: what happened elsewhere must not happen here."""

import threading

import pytest
import torch
from torch import nn

import npu_fuse
from npu_fuse import CaptureError, GraphRunner, InputSpec
from npu_fuse.runtime.graphs.host import HostBackend, HostGraph
from npu_fuse.runtime.ops.register import register
from npu_fuse.runtime.target import Target


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 8)

    def forward(self, input_ids, input_embeds=None):
        hidden = self.embed(input_ids) if input_embeds is None else input_embeds
        return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)


@torch.no_grad()
@pytest.mark.parametrize("first", ["ids", "embeddings"])
def test_vllm_35917_the_first_call_had_no_embeddings(first):
    model = Embedded()
    runner = GraphRunner(model, buckets=[4], inputs={name: InputSpec("n") for name in ("input_ids", "input_embeds")})
    ids = (torch.arange(4), None)
    embeddings = (torch.arange(4), torch.randn(4, 8))
    calls = [ids, embeddings, (torch.arange(3) + 5, None), (torch.arange(2), torch.randn(2, 8)), ids]
    for call in calls if first == "ids" else calls[1:]:
        torch.testing.assert_close(runner(*call), model(*call))
    assert runner.stats.captures == 2


@torch.no_grad()
def test_sglang_37531_a_batch_larger_than_any_capture():
    model = nn.Linear(8, 8)
    runner = GraphRunner(model, buckets=[1, 2, 4, 8], inputs={"input": InputSpec("batch")})
    runner.capture({"input": torch.randn(1, 8)}, progress=False)
    for n in (3, 8):
        x = torch.randn(n, 8)
        torch.testing.assert_close(runner(x), model(x))
    x = torch.randn(9, 8)
    with pytest.warns(UserWarning, match="runs without a graph"):
        torch.testing.assert_close(runner(x), model(x))
    x = torch.randn(2, 8)
    torch.testing.assert_close(runner(x), model(x))
    assert (runner.stats.captures, runner.stats.eager, runner.stats.replays) == (4, 1, 3)


def attend(query, keys, lengths):
    return torch.ops.npu.npu_fused_infer_attention_score(
        query, keys, keys, actual_seq_lengths_kv=lengths, num_heads=1, num_key_value_heads=1, input_layout="BNSD"
    )[0]


LENGTHS = {
    "query": InputSpec("batch"),
    "keys": InputSpec("batch"),
    "lengths": InputSpec("batch", host="actual_seq_lengths_kv"),
}


def attention_call(count):
    query, keys = torch.randn(count, 1, 1, 128).half(), torch.randn(count, 1, 16, 128).half()
    return query, keys, torch.randint(1, 17, (count,)).tolist()


def test_sglang_16498_the_update_is_complete_before_the_replay(monkeypatch):
    register(Target())
    events = []
    update, replay = HostGraph.update, HostGraph.replay

    def slow_update(self, lists):
        events.append(("update", threading.get_ident()))
        update(self, lists)
        events.append(("updated", threading.get_ident()))

    def observed_replay(self):
        events.append(("replay", threading.get_ident()))
        replay(self)

    runner = GraphRunner(attend, buckets=[4], inputs=LENGTHS)
    runner(*attention_call(4))
    monkeypatch.setattr(HostGraph, "update", slow_update)
    monkeypatch.setattr(HostGraph, "replay", observed_replay)
    for count in (2, 4):
        call = attention_call(count)
        del events[:]
        assert torch.equal(runner(*call), attend(*call))
        assert [name for name, _ in events[-3:]] == ["update", "updated", "replay"]
        assert len({thread for _, thread in events}) == 1


def test_pytorch_114844_an_attribute_that_forward_sets():
    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden = None

        def forward(self, x):
            self.hidden = x * 2
            return self.hidden + 1

    with pytest.raises(CaptureError, match=r"keeps a tensor \[3\] that it computed, as Remembers.hidden"):
        GraphRunner(Remembers())(torch.ones(3))


@torch.no_grad()
def test_pytorch_114844_a_tensor_that_forward_copies_to():
    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("hidden", torch.zeros(3))

        def forward(self, x):
            self.hidden.copy_(x * 2)
            return self.hidden + 1

    model = Remembers()
    runner = GraphRunner(model)
    for i in range(3):
        runner(torch.full((3,), float(i)))
        assert torch.equal(model.hidden, torch.full((3,), 2.0 * i))


def test_vllm_ascend_8107_lists_are_padded_with_the_batch():
    register(Target())
    seen = []

    def function(query, keys, lengths):
        seen.append((len(query), len(lengths)))
        return attend(query, keys, lengths)

    runner = GraphRunner(function, buckets=[16], inputs=LENGTHS)
    call = attention_call(9)
    assert torch.equal(runner(*call), attend(*call))
    assert {(9, 9), (16, 16)} == set(seen)


@torch.no_grad()
def test_vllm_omni_4519_a_runner_inside_a_capture_runs_plainly():
    inner = GraphRunner(nn.Linear(4, 4))
    outer = GraphRunner(lambda x: inner(x) + 1)
    x = torch.randn(2, 4)
    expected = inner(x) + 1
    replays = inner.stats.replays
    for _ in range(3):
        assert torch.equal(outer(x), expected)
    assert inner.stats.replays == replays
    assert inner.stats.captures == 1


@torch.no_grad()
def test_vllm_omni_4519_a_runner_inside_a_compiled_function():
    inner = GraphRunner(nn.Linear(4, 4))
    compiled = torch.compile(lambda x: inner(x) + 1, backend=npu_fuse.Backend(strict=True), fullgraph=True)
    x = torch.randn(2, 4)
    torch.testing.assert_close(compiled(x), inner(x) + 1)


class Lazy(nn.Module):
    """Makes its cache in the first call, and writes a row in each."""

    def __init__(self):
        super().__init__()
        self.cache = None

    def forward(self, x, slot):
        if self.cache is None:
            self.cache = torch.zeros(4, 3)
        self.cache[slot] += x
        return self.cache.sum(0)


@torch.no_grad()
def test_transformers_48199_a_cache_made_in_the_first_call():
    model, eager = Lazy(), Lazy()
    runner = GraphRunner(model)
    for i in (0, 1, 1, 3, 0):
        x, slot = torch.randn(3), torch.tensor([i])
        assert torch.equal(runner(x, slot), eager(x, slot))
    assert torch.equal(model.cache, eager.cache)


def test_transformers_48199_a_cache_made_anew_in_every_call():
    class Anew(Lazy):
        def forward(self, x, slot):
            self.cache = None
            return super().forward(x, slot)

    with pytest.raises(CaptureError, match=r"keeps a tensor \[4, 3\] that it computed, as Anew.cache"):
        GraphRunner(Anew())(torch.randn(3), torch.tensor([1]))


def test_trt_llm_18207_an_input_left_out_is_not_the_one_before():
    def function(x, scale=None):
        return x if scale is None else x * scale

    runner = GraphRunner(function, debug_poison=True)
    x = torch.randn(3)
    for scale in (torch.full((3,), 2.0), None, torch.full((3,), 3.0), None):
        assert torch.equal(runner(x, scale), function(x, scale))


def test_vllm_ascend_9564_the_number_of_graphs_is_known_before():
    class Counting(HostBackend):
        captured = 0

        def capture(self, run, host_lists):
            self.captured += 1
            return super().capture(run, host_lists)

    backend = Counting()
    runner = GraphRunner(lambda x: x * 1, buckets=[1, 2, 4], inputs={"x": InputSpec("n")}, backend=backend)
    assert runner.forecast({"x": torch.ones(1)}).graphs == 3
    assert backend.captured == 0
    runner.capture({"x": torch.ones(1)}, progress=False)
    assert backend.captured == 3
