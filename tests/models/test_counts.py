"""How many sites public models have, counted by running them eagerly with tagged tensors, and that all are found."""

import pytest
import torch

import npu_fuse
from tiny_models import build, prompt

ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}

# Model: what its config takes besides, and its true number of sites in two layers.
MODELS = {
    "qwen3": ({}, {"rms_norm": 9, "add_rms_norm": 4, "rope": 4, "norm_rope_chain": 4, "glu": 2, "silu": 2}),
    "llama": ({}, {"rms_norm": 5, "add_rms_norm": 4, "rope": 4, "glu": 2, "silu": 2}),
    "qwen2": ({}, {"rms_norm": 5, "add_rms_norm": 4, "rope": 4, "glu": 2, "silu": 2}),
    "gemma": ({}, {"rms_norm": 5, "add_rms_norm": 4, "rope": 4, "glu": 2, "gelu_tanh": 2}),
    "gemma2": (ALTERNATING, {"rms_norm": 9, "add_rms_norm": 4, "rope": 4, "glu": 2, "gelu_tanh": 2}),
    "gemma3_text": (
        ALTERNATING,
        {"rms_norm": 13, "add_rms_norm": 4, "rope": 4, "norm_rope_chain": 4, "glu": 2, "gelu_tanh": 2},
    ),
    "olmo2": ({}, {"rms_norm": 9, "add_rms_norm": 1, "rope": 4, "full_width": 4, "glu": 2, "silu": 2}),
    "hunyuan_v1_dense": (
        {},
        {"rms_norm": 9, "add_rms_norm": 4, "rope": 4, "rope_then_norm": 4, "glu": 2, "silu": 2},
    ),
    "cohere": ({}, {"rope": 4, "glu": 2, "silu": 2}),
    "phi3": ({}, {"rms_norm": 5, "add_rms_norm": 4, "rope": 4, "glu": 2, "silu": 2}),
    "glm": ({}, {"rms_norm": 5, "add_rms_norm": 4, "rope": 4, "glu": 2, "silu": 2}),
    "nanochat": ({}, {"rms_norm": 10, "add_rms_norm": 4, "rope": 4, "rope_then_norm": 4}),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_site_is_counted(name: str) -> None:
    extra, wanted = MODELS[name]
    model, ids = build(name, torch.bfloat16, **extra), prompt()
    torch._dynamo.reset()
    report = npu_fuse.explain(model, input_ids=ids, use_cache=False)
    found = {
        **{kind: report.count(kind) for kind in ("rms_norm", "add_rms_norm", "rope", "rope_then_norm", "glu")},
        "norm_rope_chain": report.count("norm_rope_chain", per_head=True),
        "full_width": report.count("norm_rope_chain", per_head=False),
        "silu": report.count("glu", activation="silu"),
        "gelu_tanh": report.count("glu", activation="gelu_tanh"),
    }
    assert {kind: count for kind, count in found.items() if count} == wanted
