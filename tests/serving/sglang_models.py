"""Small models of SGLang's own modules: a DFlash draft, attention of Qwen3-Next.

They are built without their constructors, which ask for process groups.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang_on_cpu import (
    AttentionType,
    GemmaRMSNorm,
    RMSNorm,
    RotaryEmbedding,
    SiluAndMul,
    UnquantizedLinearMethod,
    dflash,
    layernorm,
    qwen3_next,
    rotary_embedding,
)
from torch import nn
from torch.nn import functional

from npu_fuse.runtime.ops.register import register
from npu_fuse.runtime.target import Target

WIDTH, HEADS, KV_HEADS, D, BLOCK, WINDOW, VOCABULARY, MOST = 64, 4, 2, 32, 4, 2, 50, 64
EPS = 1e-6
BOTH_WAYS, CAUSAL = AttentionType.ENCODER_ONLY, AttentionType.DECODER

# What each layer is, and its window.
LAYERS = ((BOTH_WAYS, None), (BOTH_WAYS, WINDOW), (CAUSAL, WINDOW))


class Projection(nn.Linear):
    """A linear layer as SGLang's are called."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return super().forward(x), None


class BlockAttention(nn.Module):
    """Attention within each block of tokens, in place of that over SGLang's pool of keys and values.

    Args:
        layer_id, attn_type: as RadixAttention has them.
        window: how many tokens a query sees, itself among them; None for all.
        trusts: whether a causal mask is handed in whatever the type, as it is on some of SGLang's paths; else the mask
            that the type asks for.
    """

    def __init__(self, layer_id: int, attn_type: AttentionType, window: int | None, trusts: bool) -> None:
        super().__init__()
        self.layer_id, self.attn_type, self.window, self.trusts = layer_id, attn_type, window, trusts

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, forward_batch: object) -> torch.Tensor:
        q, k, v = (x.view(-1, BLOCK, x.shape[-1] // D, D).transpose(1, 2) for x in (q, k, v))
        place = torch.arange(BLOCK)
        behind = place[:, None] - place
        mask = behind < (self.window or BLOCK)
        if self.trusts or self.attn_type is CAUSAL:
            mask = mask & (behind >= 0)
        elif self.window:
            mask = mask & (behind > -self.window)
        mixed = functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(-1, HEADS * D)


def attention(layer_id: int, rotary: RotaryEmbedding, *, trusts: bool = True) -> nn.Module:
    """One DFlashAttention."""
    layer = _bare(dflash.DFlashAttention)
    layer.num_heads, layer.num_kv_heads, layer.head_dim = HEADS, KV_HEADS, D
    layer.q_size, layer.kv_size = HEADS * D, KV_HEADS * D
    layer.qkv_proj = Projection(WIDTH, (HEADS + 2 * KV_HEADS) * D, bias=False)
    layer.qkv_proj.quant_method = UnquantizedLinearMethod()
    layer.o_proj = Projection(HEADS * D, WIDTH, bias=False)
    layer.q_norm, layer.k_norm, layer.rotary_emb = RMSNorm(D, eps=EPS), RMSNorm(D, eps=EPS), rotary
    layer.use_gemma_norm = layer.use_table_qk_norm_rope = False
    layer.attention_sink_bias = None
    layer.v_scale = 0.5
    layer.attn = BlockAttention(layer_id, *LAYERS[layer_id], trusts)
    return layer


def draft(dtype: torch.dtype = torch.float32, *, trusts: bool = True) -> nn.Module:
    """A DFlashDraftModel with a layer for each of `LAYERS`, its parameters the same each time."""
    torch.manual_seed(0)
    rotary = RotaryEmbedding(D, D, MOST, 10000, True, dtype)
    model = _bare(dflash.DFlashDraftModel)
    model.embed_tokens, model.norm = nn.Embedding(VOCABULARY, WIDTH), RMSNorm(WIDTH, eps=EPS)
    model.layers = nn.ModuleList()
    for layer_id in range(len(LAYERS)):
        layer = _bare(dflash.DFlashDecoderLayer)
        layer.input_layernorm, layer.post_attention_layernorm = RMSNorm(WIDTH, eps=EPS), RMSNorm(WIDTH, eps=EPS)
        layer.self_attn = attention(layer_id, rotary, trusts=trusts)
        layer.mlp = _bare(dflash.DFlashMLP)
        layer.mlp.gate_up_proj = Projection(WIDTH, 4 * WIDTH, bias=False)
        layer.mlp.act_fn = SiluAndMul()
        layer.mlp.down_proj = Projection(2 * WIDTH, WIDTH, bias=False)
        layer.attention_conv = layer.mlp_conv = None
        model.layers.append(layer)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model.to(dtype).requires_grad_(False)


def _bare(kind: type[nn.Module]) -> nn.Module:
    """A module that has not been set up."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    return module


def natively(model: nn.Module) -> nn.Module:
    """The model with its ops in torch, as SGLang sets them for torch.compile."""
    for module in model.modules():
        if hasattr(module, "enter_torch_compile"):
            module.enter_torch_compile(num_tokens=BLOCK)
    return model


def on_npu(model: nn.Module) -> nn.Module:
    """The model with its norms and rotations as SGLang has them on an NPU, calls of ops."""
    for module in natively(model).modules():
        if isinstance(module, (RMSNorm, GemmaRMSNorm, RotaryEmbedding)):
            module._forward_method = module.forward_npu
    return model


def call_npu_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets SGLang's files find the ops of torch_npu, and not the optional kernel that turns one shared key."""
    register(Target())
    names = ("npu_rms_norm", "npu_gemma_rms_norm", "npu_add_rms_norm", "npu_mrope")
    torch_npu = SimpleNamespace(**{name: getattr(torch.ops.npu, name) for name in names})
    for module in (layernorm, rotary_embedding):
        monkeypatch.setattr(module, "torch_npu", torch_npu, raising=False)
    monkeypatch.setattr(layernorm, "npu_gemma_rms_norm", torch_npu.npu_gemma_rms_norm, raising=False)
    monkeypatch.setattr(rotary_embedding, "fused_rope_qk_mqa", None, raising=False)


def gemma_attention() -> nn.Module:
    """One causal DFlashAttention with Gemma's norms, its parameters the same each time."""
    torch.manual_seed(0)
    layer = attention(2, RotaryEmbedding(D, D, MOST, 10000, True, torch.float32))
    layer.use_gemma_norm = True
    layer.q_norm, layer.k_norm = (GemmaRMSNorm(D, eps=EPS) for _ in range(2))
    for norm in (layer.q_norm, layer.k_norm):
        nn.init.uniform_(norm.weight, -0.5, 0.5)
    return layer.requires_grad_(False)


def gated_attention(dtype: torch.dtype) -> nn.Module:
    """One layer of full attention of Qwen3-Next: a gate behind each head of q, half of each head is turned."""
    torch.manual_seed(0)
    layer = _bare(qwen3_next.Qwen3HybridAttentionDecoderLayer)
    layer.num_heads, layer.num_kv_heads, layer.head_dim = HEADS, KV_HEADS, D
    layer.q_size, layer.kv_size = HEADS * D, KV_HEADS * D
    layer.qkv_proj = Projection(WIDTH, 2 * (HEADS + KV_HEADS) * D, bias=False)
    layer.o_proj = Projection(HEADS * D, WIDTH, bias=False)
    layer.q_norm, layer.k_norm = (GemmaRMSNorm(D, eps=EPS) for _ in range(2))
    for norm in (layer.q_norm, layer.k_norm):
        nn.init.uniform_(norm.weight, -0.5, 0.5)
    layer.rotary_emb = RotaryEmbedding(D, D // 2, MOST, 10000, True, dtype)
    layer.attn_output_gate, layer.alt_stream = True, None
    layer.attn = BlockAttention(0, CAUSAL, None, trusts=True)
    return layer.to(dtype).requires_grad_(False)
