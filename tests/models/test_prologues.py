"""Which op the prologue of attention becomes in real model code, tiny and random, and that its numbers are eager's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch

import npu_fuse
from tiny_models import build, prompt

WHOLE = "sgl_kernel_npu::split_qkv_tp_rmsnorm_rope"
GATED = "sgl_kernel_npu::split_qkvgate_gemma_rmsnorm_rope"
PLAIN = "sgl_kernel_npu::split_qkv_rmsnorm_rope"
MQA = "sgl_kernel_npu::fused_rope_qk_mqa"
APART, ROTARY = "npu::npu_interleave_rope", "npu::npu_rotary_mul"

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
FULL = {"layer_types": ["full_attention"] * 2}
LATENT = {
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "head_dim": 64,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
}


@dataclass(frozen=True)
class Expected:
    """What a model's config takes besides, how often an op is in its two layers, and what its prologue is."""

    op: str
    count: int = 2
    config: Mapping[str, object] = field(default_factory=dict)
    qkv: Mapping[str, object] | None = field(default_factory=dict)
    dtype: torch.dtype = torch.float32


MODELS: dict[str, Expected] = {
    "olmo2": Expected(WHOLE),
    "olmo3": Expected(WHOLE),
    "olmoe": Expected(WHOLE, config=EXPERTS),
    "flex_olmo": Expected(WHOLE, config=EXPERTS),
    "minimax_m2": Expected(
        WHOLE,
        config={"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
        qkv={"rope_dim": 8},
    ),
    "qwen3_next": Expected(
        GATED,
        config={**EXPERTS, **FULL, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
        qkv={"gate": True, "rope_dim": 4},
    ),
    "qwen3_5_text": Expected(GATED, config=FULL, qkv={"gate": True, "rope_dim": 4}),
    "glm4": Expected(PLAIN, qkv={"rope_style": "interleave"}),
    "cohere": Expected(PLAIN, qkv={"rope_style": "interleave", "norm": False}),
    "deepseek_v2": Expected(MQA, config=LATENT, qkv=None),
    "deepseek_v3": Expected(APART, 4, LATENT, None, torch.bfloat16),
    "gpt_neox": Expected(ROTARY, 4, qkv={"style": "fused", "norm": False}),
    "codegen": Expected(
        ROTARY, 4, {"n_embd": 64, "n_head": 4, "n_layer": 2, "rotary_dim": 8, "n_inner": 128}, {"style": "fused"}
    ),
}


# One model of each op, in sizes that vary too: compiling those takes longest.
VARYING = ("olmo2", "qwen3_5_text", "glm4", "deepseek_v2", "deepseek_v3", "gpt_neox")
CASES = [*((name, None) for name in MODELS), *((name, True) for name in VARYING)]


@pytest.mark.parametrize(("name", "dynamic"), CASES)
def test_the_op_and_the_logits(name: str, dynamic: bool | None) -> None:
    expected, ids = MODELS[name], prompt()
    model = build(name, expected.dtype, **expected.config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)  # so that attention weighs
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits
        torch._dynamo.reset()
        backend = npu_fuse.Backend(strict=True)
        compiled = torch.compile(model, backend=backend, dynamic=dynamic)
        logits = compiled(input_ids=ids, use_cache=False).logits
    report = backend.report
    assert report.ops[expected.op] == expected.count, str(report)
    assert report.count("rope") == 4
    assert report.count("qkv", **(expected.qkv or {})) == (0 if expected.qkv is None else 2)
    bound = 1e-4 if expected.dtype == torch.float32 else 0.1
    torch.testing.assert_close(logits, wanted, atol=bound, rtol=bound)


def test_a_head_of_which_a_part_is_rotated_is_not_copied_for_attention() -> None:
    """The model puts the parts together, in memory of its own; the op that gives q and k doesn't have to."""
    model, ids = build("glm4", torch.bfloat16), prompt()
    backend = npu_fuse.Backend(strict=True, keep_graphs=True)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend)(input_ids=ids, use_cache=False)
    ((_, after),) = backend.graphs
    calls = [node for node in after.graph.nodes if "infer_attention_score" in str(node.target)]
    assert len(calls) == 2
    copied = [n for call in calls for n in call.args[:2] if n.target is torch.ops.aten.clone.default]
    assert not copied
