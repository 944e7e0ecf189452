"""Prologues of attention as an NPU's graph has them, where sgl_kernel_npu is installed: the same ops as on a CPU."""

from collections import Counter

import pytest
import torch
import torch_npu

import npu_fuse
from npu.fake_npu import on_fake_npu
from tiny_models import build

TARGET = npu_fuse.Target("ascend910b", "npu", {"sgl_kernel_npu": "2026.8.21"})
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
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS = {
    "qwen3": ("sgl_kernel_npu::split_qkv_rmsnorm_rope", {}),
    "olmo2": ("sgl_kernel_npu::split_qkv_tp_rmsnorm_rope", {}),
    "qwen3_next": (
        "sgl_kernel_npu::split_qkvgate_gemma_rmsnorm_rope",
        {**EXPERTS, "shared_expert_intermediate_size": 32, "layer_types": ["full_attention"] * 2},
    ),
    "glm4": ("sgl_kernel_npu::split_qkv_rmsnorm_rope", {}),  # repeats columns with an op that a CPU's graph has not
    "deepseek_v2": ("sgl_kernel_npu::fused_rope_qk_mqa", LATENT),
}


def fused_ops(model: torch.nn.Module, token_ids: torch.Tensor) -> Counter[str]:
    torch._dynamo.reset()
    backend = npu_fuse.Backend(strict=True, target=TARGET)
    torch.compile(model, backend=backend)(input_ids=token_ids, use_cache=False)
    return backend.report.ops


@pytest.mark.parametrize("name", MODELS)
def test_the_op_of_both_layers(name: str) -> None:
    op, config = MODELS[name]
    model = build(name, torch.bfloat16, **config)
    assert on_fake_npu(fused_ops, model, torch.arange(16).reshape(2, 8))[op] == 2


class Called(torch.nn.Module):
    """A prologue as SGLang calls it on an NPU, by torch_npu's own functions."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = torch.nn.Linear(64, 512, bias=False)
        self.q_weight, self.k_weight = (torch.nn.Parameter(torch.ones(64)) for _ in range(2))
        self.register_buffer("cache", torch.ones(32, 64))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = self.projection(x).split([256, 128, 128], dim=-1)
        q, k = (
            torch_npu.npu_rms_norm(rows.reshape(-1, 64), weight, 1e-6)[0].view(rows.shape)
            for rows, weight in ((q, self.q_weight), (k, self.k_weight))
        )
        rotated = torch_npu.npu_mrope(positions, q, k, self.cache, 64, mrope_section=[0, 0, 0], rotary_mode="half")
        return *rotated, v


def test_calls_of_torch_npu_become_the_op() -> None:
    def ops(model: torch.nn.Module, x: torch.Tensor, positions: torch.Tensor) -> Counter[str]:
        torch._dynamo.reset()
        backend = npu_fuse.Backend(strict=True, target=TARGET)
        torch.compile(model, backend=backend, fullgraph=True)(x, positions)
        return backend.report.ops

    tokens = torch.randn(5, 64, dtype=torch.bfloat16), torch.arange(5)
    found = on_fake_npu(ops, Called().bfloat16(), *tokens)
    assert found == {"sgl_kernel_npu::split_qkv_rmsnorm_rope_pos_cache_half_npu": 1}
