"""SGLang's DFlash draft, its own code, compiled and fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang_models import (
    BLOCK,
    LAYERS,
    MOST,
    VOCABULARY,
    WIDTH,
    call_npu_ops,
    draft,
    gemma_attention,
    natively,
    on_npu,
)
from sglang_on_cpu import dflash
from torch import nn

from npu_fuse import Backend, GraphRunner, InputSpec

Tensor = torch.Tensor
PROLOGUE = "sgl_kernel_npu::split_qkv_rmsnorm_rope"
LOOKED_UP = f"{PROLOGUE}_pos_cache_half_npu"


def call(model: nn.Module) -> Callable[..., Tensor]:
    def hidden_states(input_ids: Tensor, positions: Tensor, input_embeds: Tensor | None = None) -> Tensor:
        return model(input_ids, positions, None, input_embeds).hidden_states

    return hidden_states


def inputs(blocks: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, MOST - BLOCK, (blocks, 1), generator=generator)
    return {
        "input_ids": torch.randint(0, VOCABULARY, (blocks * BLOCK,), generator=generator),
        "positions": (starts + torch.arange(BLOCK)).flatten(),
    }


def compiled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Backend, Callable[..., Any]]:
    torch._dynamo.reset()
    backend = Backend(strict=True, keep_graphs=True)
    through = torch.compile(function, backend=backend, fullgraph=True)
    with torch.no_grad():
        return through(*args, **kwargs), backend, through


@pytest.fixture(scope="module")
def found() -> tuple[Tensor, Backend, Callable[..., Any]]:
    return compiled(call(natively(draft())), **inputs(3))


def test_each_layer_is_one_prologue(found: tuple[Tensor, Backend, Callable[..., Any]]) -> None:
    _, backend, _ = found
    (report,) = backend.reports
    assert report.ops[PROLOGUE] == report.ops["npu::npu_fusion_attention_v3"] == len(LAYERS)
    assert report.ops["npu::npu_swiglu"] == len(LAYERS)
    assert report.count("qkv", style="fused", norm=True, looked_up=True) == len(LAYERS)


def test_layers_that_look_both_ways_are_freed(found: tuple[Tensor, Backend, Callable[..., Any]]) -> None:
    output, backend, _ = found
    freed = {s.module: s.params["new_mask"] for s in backend.report.sites if s.kind == "encoder_only"}
    first, second = freed.values()
    assert [path.split(".")[-2] for path in freed] == ["self_attn", "self_attn"]
    assert first == "none"
    assert second.startswith("sliding_bidirectional")
    masks = [site.params["mask"] for site in backend.report.sites if site.kind == "attention"]
    assert masks == ["none", "sliding_bidirectional", "sliding_causal"]
    with torch.no_grad():
        wanted, causal = (call(natively(draft(trusts=trusts)))(**inputs(3)) for trusts in (False, True))
    torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(output, causal, atol=0.01)


def test_a_draft_of_bfloat16_looks_its_tables_up_in_the_op() -> None:
    output, backend, _ = compiled(call(natively(draft(torch.bfloat16))), **inputs(2))
    assert backend.report.ops[LOOKED_UP] == backend.report.ops["npu::npu_fused_infer_attention_score"] == len(LAYERS)
    assert backend.report.ops["npu::npu_add_rms_norm"] == 2 * len(LAYERS)  # SGLang adds in float32
    wanted = call(natively(draft(torch.bfloat16, trusts=False)))(**inputs(2))
    assert (output - wanted).abs().max() < 0.1


def test_a_draft_is_replayed_with_embeddings() -> None:
    """As the target hands them in: the rows behind those of a batch are whatever was there before."""
    model, wanted = natively(draft()), call(natively(draft(trusts=False)))
    torch._dynamo.reset()
    backend = Backend(strict=True)
    names = ("input_ids", "positions", "input_embeds")
    runner = GraphRunner(
        torch.compile(call(model), backend=backend, fullgraph=True, dynamic=False),  # as SGLang does
        buckets=[BLOCK, 3 * BLOCK],
        inputs={name: InputSpec("batch") for name in names},
        check_padding=False,
    )
    with torch.no_grad():
        one = {**inputs(1), "input_embeds": torch.randn(BLOCK, WIDTH)}
        runner.capture(one)
        for blocks in (3, 1, 2):
            given = {**inputs(blocks, seed=blocks), "input_embeds": torch.randn(blocks * BLOCK, WIDTH)}
            torch.testing.assert_close(runner(**given), wanted(**given), rtol=1e-4, atol=1e-4)
    assert (runner.stats.replays, runner.stats.eager) == (3, 0)
    assert {report.ops[PROLOGUE] for report in backend.reports} == {len(LAYERS)}


# Keys and values of the target's hidden states -----------------------------------------------------------------------


def appended(model: nn.Module) -> Callable[[Tensor, Tensor], list[tuple[Tensor, Tensor]]]:
    """What `_append_target_hidden_sequential` writes for each layer, where it is no NPU."""

    def append(hidden: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        written = []
        for layer in model.layers:
            k, v = layer.self_attn.kv_proj_only(hidden)
            written.append((layer.self_attn.apply_k_rope(positions, layer.self_attn.apply_k_norm(k)), v))
        return written

    return append


def test_keys_of_hidden_states_need_no_query() -> None:
    hidden, positions = torch.randn(6, WIDTH), torch.randint(0, MOST, (6,))
    append = appended(natively(draft()))
    output, backend, _ = compiled(append, hidden, positions)
    assert backend.report.ops["npu::npu_rms_norm"] == len(LAYERS)
    for found, wanted in zip(output, append(hidden, positions), strict=True):
        torch.testing.assert_close(found, wanted)


# On an NPU -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's paths for an NPU, and the ops that they call."""
    call_npu_ops(monkeypatch)
    monkeypatch.setattr(dflash, "_is_npu", True)
    function = torch.ops.sgl_kernel_npu.split_qkv_rmsnorm_rope.default  # as the plug-in hooks it
    monkeypatch.setattr(dflash, "split_qkv_rmsnorm_rope", function, raising=False)


def test_tables_that_are_state_of_a_module_are_made_once_and_anew(npu: None) -> None:
    """The first layer looks them up, the others read them; the projection is called twice, and computed once."""
    model = on_npu(draft())
    output, backend, through = compiled(call(model), **inputs(2))
    (report,) = backend.reports
    assert report.ops[PROLOGUE] == len(LAYERS)
    assert report.ops["npu::npu_add_rms_norm"] == 2 * len(LAYERS)
    ((_, graph),) = backend.graphs
    targets = [str(node.target) for node in graph.graph.nodes]
    assert targets.count("aten.linear.default") == 4 * len(LAYERS)  # of qkv, o, gate and up, down
    assert targets.count("aten.index_select.default") == 1
    wanted = call(on_npu(draft(trusts=False)))
    torch.testing.assert_close(output, wanted(**inputs(2)), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        again = through(**inputs(2, seed=1))
    torch.testing.assert_close(again, wanted(**inputs(2, seed=1)), rtol=1e-4, atol=1e-5)


def test_keys_of_hidden_states_on_an_npu(npu: None) -> None:
    """The same op, and nothing reads its query."""
    model, hidden, positions = on_npu(draft()), torch.randn(6, WIDTH), torch.randint(0, MOST, (6,))

    def append(hidden: Tensor, positions: Tensor) -> list[Tensor]:
        return [x for layer in model.layers for x in layer.self_attn.forward_prepare_npu(positions, hidden)[1:]]

    output, backend, _ = compiled(append, hidden, positions)
    assert backend.report.ops == {PROLOGUE: len(LAYERS)}
    others = appended(natively(draft()))(hidden, positions)
    for found, wanted in zip(output, (x for k, v in others for x in (k, v / 0.5)), strict=True):
        torch.testing.assert_close(found, wanted)


def test_calls_of_an_npu_that_are_no_prologue_yet_become_one(npu: None) -> None:
    """With Gemma's norms SGLang splits, norms and turns by a call each."""
    layers = [on_npu(layer) for layer in (gemma_attention(), gemma_attention())]
    hidden, positions = torch.randn(BLOCK, WIDTH), torch.arange(3, 3 + BLOCK)
    output, backend, _ = compiled(layers[0], positions, hidden, None)
    assert backend.report.ops[PROLOGUE] == 1
    assert "npu::npu_mrope" not in backend.report.ops
    torch.testing.assert_close(output, layers[1](positions, hidden, None), rtol=1e-4, atol=1e-5)
