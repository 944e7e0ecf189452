"""The example of a server's convolutions: every flow on its pool, against a reference that goes token by token."""

from __future__ import annotations

import pytest
import sglang_gdn
import torch

Served = tuple[sglang_gdn.Layer, torch.Tensor, list[sglang_gdn.Flow]]


@pytest.fixture(scope="module")
def served() -> list[Served]:
    return [sglang_gdn.serve(), sglang_gdn.serve_drafts()]


def test_flows_are_those_of_the_reference(served: list[Served]) -> None:
    found = {flow.name: list(flow.check(layer)) for layer, _, flows in served for flow in flows}
    assert found == {
        name: []
        for name in ("extend", "decode", "extend, tracked", "decode, tracked", "extend, before drafts", "verify")
    }


def test_flows_are_calls_on_the_pool_itself_but_for_prompts_before_drafts(served: list[Served]) -> None:
    """The op reads the first rows of a slot in a prompt, and SGLang keeps them in the last."""
    flows = [flow for _, _, flows in served for flow in flows]
    refused = [flow for flow in flows if flow.site.status != "lowered"]
    assert [flow.name for flow in refused] == ["extend, before drafts"]
    assert "the op writes in place what is contiguous" in refused[0].site.reason
    assert all(flow.backend.reports[-1].launches_after < flow.backend.reports[-1].launches_before for flow in flows)


def test_what_differs_is_found(served: list[Served]) -> None:
    layer, pool, flows = served[0]
    decode = flows[1]
    batch, x = sglang_gdn.Batch(sglang_gdn.ints(0, 1), sglang_gdn.ints(3)), sglang_gdn.tokens(1, seed=5)
    y, states = sglang_gdn.step_by_step(layer, x, pool, batch)
    states[3, 0] += 1
    with torch.no_grad():
        decode(layer, x, pool.clone(), batch, (y + 10, states))
    failures = list(decode.check(layer))
    assert failures[0] == "a state is not that of the reference"
    assert "roundings from those of the reference" in failures[1]
