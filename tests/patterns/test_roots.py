"""Rules that are asked only about some ops find what they find when they are asked about all."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from helpers import capture
from npu_fuse.patterns import RULES, recognise
from tiny_models import build, prompt

LATENT = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 16, "v_head_dim": 16, "kv_lora_rank": 32, "q_lora_rank": 32}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS = {
    "deepseek_v3": {
        **LATENT,
        **EXPERTS,
        "head_dim": 64,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 0,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
    },
    "qwen3_next": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
}


@pytest.mark.parametrize("name", MODELS)
def test_no_root_is_passed_over(name: str) -> None:
    model, ids = build(name, torch.bfloat16, **MODELS[name]), prompt()
    graph = capture(lambda: model(input_ids=ids, use_cache=False).logits).graph
    some, all_ = (recognise(graph, rules) for rules in (RULES, [replace(rule, roots=None) for rule in RULES]))
    assert [(match.kind, match.node) for match in some.all()] == [(match.kind, match.node) for match in all_.all()]
    assert [(miss.kind, miss.node, miss.reason) for miss in some.misses.values()] == [
        (miss.kind, miss.node, miss.reason) for miss in all_.misses.values()
    ]
    assert len(Counter(match.kind for match in some.all())) > 4
