"""The example of states in place: prefill and a few steps of tiny Qwen3-Next."""

from dataclasses import replace

import gdn_decode
import pytest
import torch

import npu_fuse


@pytest.fixture(scope="module")
def found() -> tuple[gdn_decode.Runs, npu_fuse.Backend]:
    torch._dynamo.reset()
    backend = npu_fuse.Backend(strict=True, keep_graphs=True)
    return gdn_decode.compare(gdn_decode.tiny(), gdn_decode.prompt(4), backend), backend


def test_states_are_eagers(found: tuple[gdn_decode.Runs, npu_fuse.Backend]) -> None:
    runs, backend = found
    assert [*gdn_decode.check_graphs(backend), *gdn_decode.check_values(runs)] == []
    assert len(backend.graphs) == 2
    assert len(runs.compiled) == 5


def test_the_graph_is_printed_before_and_after(found: tuple[gdn_decode.Runs, npu_fuse.Backend]) -> None:
    before, after = (list(gdn_decode.convolution(module.graph)) for module in found[1].graphs[1])
    assert [line.partition(" = ")[2].partition("(")[0] for line in before] == [
        "squeeze.dim",
        "cat.default",
        "slice.Tensor",
        "copy.default",
        "unsqueeze.default",
        "convolution.default",
        "slice.Tensor",
        "silu.default",
        "copy_.default",
    ]
    assert [line.partition(" = ")[2].partition("(")[0] for line in after] == [
        "transposed",
        "causal_conv1d_columns.default",
        "permute.default",
    ]


def test_a_state_of_another_value_is_found(found: tuple[gdn_decode.Runs, npu_fuse.Backend]) -> None:
    runs, _ = found
    last = runs.compiled[-1]
    off = replace(last, columns=[columns + 0.01 for columns in last.columns])
    failures = list(gdn_decode.check_values(replace(runs, compiled=[*runs.compiled[:-1], off])))
    assert [failure.partition(":")[0] for failure in failures] == ["step 4", "columns"]


def test_states_that_are_copied_are_found() -> None:
    """A cache that is not adopted keeps its memory, and the model's own ops."""
    backend = npu_fuse.Backend(strict=True, keep_graphs=True)
    model, tokens = gdn_decode.tiny().bfloat16(), gdn_decode.prompt(0)
    torch._dynamo.reset()
    cache = gdn_decode.StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad():
        model(tokens[:, :1], past_key_values=cache)
        torch.compile(model, backend=backend, fullgraph=True)(tokens[:, :1], past_key_values=cache)
    failures = list(gdn_decode.check_graphs(backend))
    assert "conv_state.adopt" in failures[0]
    assert failures[-1] == "there are 0 convolutions"
