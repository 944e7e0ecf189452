"""The causal convolutions of hybrid models, tiny and random: all are found in each phase, with the state they keep."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

import npu_fuse
from helpers import same
from npu_fuse.passes.report import Report
from npu_fuse.patterns import KINDS
from npu_fuse.runtime.conv_state import adopt
from tiny_models import build, prompt

OP = "npu_fuse::causal_conv1d_columns"
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}

# Model: what its config takes besides, and how many convolutions its two layers have.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "qwen3_next": ({**LINEAR, **MOE}, 1),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, 1),
    "mamba2": ({"num_heads": 4, "head_dim": 32, "n_groups": 1, "state_size": 16, "chunk_size": 8, "expand": 2}, 2),
}
# Others with the same functions, which are run once, token by token.
MAMBA2 = {"n_heads": 4, "n_groups": 1, "d_state": 16, "chunk_size": 8}
OTHERS: dict[str, tuple[dict[str, Any], int]] = {
    "falcon_h1": ({f"mamba_{k}": v for k, v in {**MAMBA2, "d_ssm": 64, "d_head": 16, "expand": 1}.items()}, 2),
    "bamba": (
        {**{f"mamba_{k}": v for k, v in {**MAMBA2, "d_head": 32, "expand": 2}.items()}, "attn_layer_indices": [1]},
        1,
    ),
    "mamba": ({"state_size": 16, "expand": 2}, 2),
    "falcon_mamba": ({"state_size": 16, "expand": 2}, 2),
    "qwen3_5_text": (LINEAR, 1),
    "olmo_hybrid": (LINEAR, 1),
    "lfm2_moe": (
        {
            "layer_types": ["conv", "full_attention"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_dense_layers": 1,
        },
        1,
    ),
}


def model(name: str) -> torch.nn.Module:
    extra, _ = MODELS[name] if name in MODELS else OTHERS[name]
    return build(name, torch.bfloat16, **extra)


def states(cache: Any) -> list[torch.Tensor]:
    layers = [layer for layer in cache.layers if hasattr(layer, "conv_states")]
    return [state for layer in layers for state in layer.conv_states.values()]


def filled(net: torch.nn.Module) -> Any:
    """A cache behind a prompt."""
    cache = transformers.StaticCache(config=net.config, max_cache_len=64)
    with torch.no_grad():
        net(input_ids=prompt(), cache=cache, use_cache=True)
    return cache


def compiled(net: torch.nn.Module, **inputs: Any) -> Report:
    torch._dynamo.reset()
    backend = npu_fuse.Backend(strict=True)
    with torch.no_grad():
        torch.compile(net, backend=backend, fullgraph=True)(**inputs)
    return backend.report


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("tokens", "mode"), [(16, "prefill"), (4, "prefill"), (1, "update")])
def test_all_are_found_and_become_ops(name: str, tokens: int, mode: str) -> None:
    net, count = model(name), MODELS[name][1]
    cache = filled(net)
    if tokens == 16:
        cache.reset()
    theirs = copy.deepcopy(cache)
    adopt(cache)
    ids = prompt(tokens=tokens)
    report = compiled(net, input_ids=ids, cache=cache, use_cache=True)
    assert report.count("causal_conv1d") == report.count("causal_conv1d", mode=mode) == count
    assert report.count("causal_conv1d", updates_state=True, state=tokens != 16) == count
    assert report.ops[OP] == count
    with torch.no_grad():
        net(input_ids=ids, cache=theirs, use_cache=True)
    assert same(states(cache)[0], states(theirs)[0])  # later ones follow other roundings
    for ours, wanted in zip(states(cache), states(theirs), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=5e-2, atol=5e-2)


def test_a_state_in_other_memory_is_left_to_the_model() -> None:
    net = model("lfm2")
    report = compiled(net, input_ids=prompt(tokens=1), cache=filled(net), use_cache=True)
    (site,) = [site for site in report.sites if site.kind == "causal_conv1d"]
    assert site.status == "refused"
    assert "conv_state.adopt" in site.reason


@pytest.mark.parametrize("name", MODELS)
def test_nothing_but_the_op_touches_a_state_in_a_decode_step(name: str) -> None:
    """No clone, transpose or copy of it, once its cache has our layout."""
    net = model(name)
    cache = filled(net)
    adopt(cache)
    torch._dynamo.reset()
    backend = npu_fuse.Backend(strict=True, keep_graphs=True)
    with torch.no_grad():
        torch.compile(net, backend=backend, fullgraph=True)(input_ids=prompt(tokens=1), cache=cache, use_cache=True)
    ((before, after),) = backend.graphs
    sizes = {state.shape for state in states(cache)}
    kept = [[n for n in g.graph.find_nodes(op="placeholder") if n.meta["val"].shape in sizes] for g in (before, after)]
    assert [len(found) for found in kept] == [MODELS[name][1]] * 2
    assert all(len(state.users) > 1 for state in kept[0])
    assert [[str(user.target) for user in state.users] for state in kept[1]] == [
        ["npu_fuse.causal_conv1d_columns.default"]
    ] * len(kept[1])
    assert backend.report.launches_after < backend.report.launches_before


@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_twenty_steps_keep_the_states_of_eager(name: str) -> None:
    """In each layer all columns but the newest are those of the step before, to the bit.

    The newest column is eager's: to the bit in the first layer, in others but for roundings of the convolutions before.
    """
    net = model(name)
    ours, theirs = filled(net), filled(net)
    assert adopt(ours) == len(states(ours))
    torch._dynamo.reset()
    backend = npu_fuse.Backend(strict=True, disable={*KINDS} - {"causal_conv1d"})
    step = torch.compile(net, backend=backend, fullgraph=True)
    for token in range(20):
        before = [state.clone() for state in states(ours)]
        ids = prompt(tokens=20)[:, token : token + 1]
        with torch.no_grad():
            step(input_ids=ids, cache=ours, use_cache=True)
            net(input_ids=ids, cache=theirs, use_cache=True)
        assert same(states(ours)[0], states(theirs)[0])
        for old, new, wanted in zip(before, states(ours), states(theirs), strict=True):
            assert same(new[..., :-1], old[..., 1:])
            assert not same(new[..., -1], old[..., -1])
            torch.testing.assert_close(new, wanted, rtol=5e-2, atol=5e-2)
    # The first call lays the filters out anew, whose strides Dynamo guards on.
    assert [report.ops[OP] for report in backend.reports] == [len(before)] * 2


def test_the_delta_rule_behind_a_convolution_says_why_it_stays() -> None:
    net = model("qwen3_next")
    report = compiled(net, input_ids=prompt(tokens=1), cache=filled(net), use_cache=True)
    (site,) = [site for site in report.sites if site.kind == "gated_delta_rule"]
    assert (site.params["heads"], site.params["key_dim"], site.params["value_dim"]) == (4, 16, 16)
    assert "its state (2, 4, 16, 16) is float32 with keys before values" in site.reason


def test_a_conformers_convolution_is_none() -> None:
    config = transformers.Wav2Vec2ConformerConfig(
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        conv_dim=(16,),
        conv_stride=(5,),
        conv_kernel=(10,),
        num_feat_extract_layers=1,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        conv_depthwise_kernel_size=5,
    )
    torch.manual_seed(0)
    net = transformers.Wav2Vec2ConformerModel(config).eval()
    report = compiled(net, input_values=torch.randn(1, 400))
    assert not report.count("causal_conv1d")
    (miss,) = [site for site in report.sites if site.kind == "causal_conv1d"]
    assert "2 columns ahead of the first of x: it is not causal" in miss.reason
