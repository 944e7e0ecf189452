"""Graphs of the real torch_npu, by the calls that its runtime gets: no kernel runs here.

`torch.npu.graph`, its dispatch mode and `NPUGraph.update` are torch_npu's own; what they call in CANN is written down.
"""

import pytest
import torch
import torch_npu

from npu_fuse import CaptureError, GraphRunner, InputSpec

OP = "npu_fused_infer_attention_score"
SPECS = {
    "query": InputSpec("batch"),
    "keys": InputSpec("batch"),
    "lengths": InputSpec("batch", host="actual_seq_lengths_kv"),
}


class ExternalEvent:
    """What a captured op waits for until it was renewed."""

    def __init__(self, calls):
        self._calls = calls

    def wait(self, stream):
        self._calls.append("event.wait")

    def reset(self, stream):
        self._calls.append("event.reset")

    def record(self, stream):
        self._calls.append("event.record")


@pytest.fixture
def calls(monkeypatch):
    """The calls, in order."""
    calls = []

    def note(name, result=None):
        def call(*args, **kwargs):
            calls.append((name, kwargs) if kwargs else name)
            return result

        return call

    graph = torch.npu.NPUGraph
    used = graph.capture_begin.__globals__  # of the module that runs: it may have been imported under two names
    monkeypatch.setattr(graph, "capture_begin", lambda self, *pool, **kwargs: calls.append(("begin", pool, kwargs)))
    monkeypatch.setattr(graph, "capture_end", note("end"))
    monkeypatch.setattr(graph, "replay", note("replay"))
    for name in ("graph_task_group_begin", "graph_task_group_end", "graph_task_update_begin", "graph_task_update_end"):
        monkeypatch.setitem(used, name, note(name))
    monkeypatch.setattr(torch.npu, "ExternalEvent", lambda: ExternalEvent(calls))
    monkeypatch.setattr(torch_npu, f"_{OP}_get_max_workspace", lambda *a, **k: torch.empty(8, device="npu"))
    monkeypatch.setattr(
        torch_npu, f"_{OP}_infer_output", lambda query, value, **k: (torch.empty_like(query), query.new_empty(1))
    )

    def attention(query, key, value, *, actual_seq_lengths_kv=None, **kwargs):
        calls.append(("attention", list(actual_seq_lengths_kv)))
        return torch.empty_like(query), query.new_empty(1)

    def attention_out(query, key, value, *, actual_seq_lengths_kv=None, out, **kwargs):
        calls.append(("attention.out", list(actual_seq_lengths_kv)))
        return out

    with torch.library._scoped_library("npu", "IMPL") as library:
        library.impl(OP, attention, "PrivateUse1", allow_override=True)
        library.impl(f"{OP}.out", attention_out, "PrivateUse1", allow_override=True)
        yield calls


def attend(query, keys, lengths):
    attention = torch.ops.npu.npu_fused_infer_attention_score
    return attention(
        query, keys, keys, actual_seq_lengths_kv=lengths, num_heads=1, num_key_value_heads=1, input_layout="BNSD"
    )[0]


def call(count=2, lengths=(3, 7)):
    query = torch.empty(count, 1, 1, 128, dtype=torch.float16, device="npu")
    return query, torch.empty(count, 1, 16, 128, dtype=torch.float16, device="npu"), list(lengths)


def test_a_capture_and_its_replays(calls):
    runner = GraphRunner(attend, buckets=[2], inputs=SPECS, warm_ups=2)
    output = runner(*call())
    assert output.shape == (2, 1, 1, 128)
    begin = calls[2]
    assert calls[:2] == [("attention", [3, 7])] * 2  # warm-ups, outside the capture
    assert begin[0] == "begin"
    assert len(begin[1]) == 1  # the pool
    assert begin[2] == {"capture_error_mode": "thread_local"}
    captured = [
        "event.wait",
        "event.reset",
        "graph_task_group_begin",
        ("attention.out", [3, 7]),
        "graph_task_group_end",
    ]
    assert calls[3:9] == [*captured, "end"]
    update = ["graph_task_update_begin", ("attention.out", [3, 7]), "graph_task_update_end", "event.record", "replay"]
    assert calls[9:] == update
    del calls[:]
    runner(*call(lengths=(5, 1)))
    update[1] = ("attention.out", [5, 1])  # complete before the replay
    assert calls == update


def test_graphs_of_all_sizes_share_one_pool_and_one_stream(calls):
    runner = GraphRunner(attend, buckets=[1, 2], inputs=SPECS)
    runner(*call(2))
    runner(*call(1, [4]))
    pools = [entry[1] for entry in calls if entry[0] == "begin"]
    assert len(pools) == 2
    assert pools[0] == pools[1]


def test_the_address_of_an_output_stays_the_graphs(calls):
    runner = GraphRunner(attend, buckets=[2], inputs=SPECS)
    first = runner(*call())
    address = first.data_ptr()
    second = runner(*call())
    assert second.data_ptr() == address
    assert first.data_ptr() != address
    assert runner.stats.moved_outputs == 1


def test_a_parameter_that_moved_is_captured_anew(calls):
    model = torch.nn.Module()
    model.keys = torch.nn.Parameter(torch.empty(2, 1, 16, 128, dtype=torch.float16, device="npu"))
    model.forward = lambda query, lengths: attend(query, model.keys, lengths)
    runner = GraphRunner(model.forward, inputs={"lengths": SPECS["lengths"]})
    query, keys, lengths = call()
    with torch.no_grad():
        runner(query, lengths)
        runner(query, lengths)
        assert runner.stats.captures == 1
        model.keys.data = keys
        runner(query, lengths)
    assert (runner.stats.captures, runner.stats.recaptures) == (2, 1)


def test_what_a_run_that_fails_has_written_is_put_back_after_it(calls, monkeypatch):
    waiting = []
    wait = torch.npu.Stream.wait_stream
    monkeypatch.setattr(torch.npu.Stream, "wait_stream", lambda a, b: (waiting.append((a, b)), wait(a, b))[1])

    def function(query, keys, lengths):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        GraphRunner(function, buckets=[2], inputs={"query": SPECS["query"]})(*call())
    (side, current), *rest = waiting
    assert (current, side) in rest


def test_the_key_of_another_version_is_an_error(calls):
    specs = {**SPECS, "lengths": InputSpec("batch", host="actual_seq_kvlen")}
    with pytest.raises(CaptureError, match="npu_fused_infer_attention_score takes actual_seq_lengths"):
        GraphRunner(attend, buckets=[2], inputs=specs)(*call())


def test_a_copy_to_the_host_inside_is_an_error(calls):
    def function(query, keys, lengths):
        return attend(query, keys.cpu().to("npu"), lengths)

    with pytest.raises(CaptureError, match=r"aten._to_copy.default copies between cpu and npu"):
        GraphRunner(function, buckets=[2], inputs=SPECS)(*call())
    assert not any(entry[0] == "begin" for entry in calls)


def test_our_table_of_host_lists_is_torch_npus():
    from torch_npu.npu._npugraph_handlers.npugraph_handler import _NPU_GRAPH_OP_HANDLERS

    from npu_fuse.runtime.graphs.host_lists import HOST_LISTS

    for op, keys in HOST_LISTS.items():
        name = f"{op.partition('::')[2]}.default"
        specs = _NPU_GRAPH_OP_HANDLERS[name].UPDATE_SPECS[name]
        assert keys == {key for _, _, key in specs}
        schema = getattr(torch.ops.npu, op.partition("::")[2]).default._schema
        names = [argument.name for argument in schema.arguments]
        assert keys <= set(names)
