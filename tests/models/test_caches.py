"""Caches of whole models: paged ones are written and read by ops, a static one is written in place, without a copy."""

import copy
from collections import Counter

import torch
import transformers
from torch import nn
from torch.nn import functional

from helpers import compiled
from tiny_models import build, prompt

Tensor = torch.Tensor
HEADS, KV_HEADS, DIM, HIDDEN, BLOCKS, SIZE, LAYERS = 4, 2, 64, 128, 9, 128, 2


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Layer(nn.Module):
    """Attention with norms of q and k over a paged cache, one token a sequence, as serving frameworks have it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HIDDEN, heads * DIM, bias=False) for heads in (HEADS, KV_HEADS, KV_HEADS))
        self.o = nn.Linear(HEADS * DIM, HIDDEN, bias=False)
        self.q_norm, self.k_norm = Norm(DIM), Norm(DIM)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, table: Tensor, key_cache: Tensor, value_cache: Tensor
    ) -> Tensor:
        cos, sin = cos[:, None], sin[:, None]
        q = rotated(self.q_norm(self.q(x).view(-1, HEADS, DIM)), cos, sin)
        k = rotated(self.k_norm(self.k(x).view(-1, KV_HEADS, DIM)), cos, sin)
        key_cache[slots // SIZE, slots % SIZE] = k
        value_cache[slots // SIZE, slots % SIZE] = self.v(x).view(-1, KV_HEADS, DIM)
        keys, values = (cache[table].flatten(1, 2).transpose(1, 2) for cache in (key_cache, value_cache))
        out = functional.scaled_dot_product_attention(q.unsqueeze(2), keys, values, enable_gqa=True)
        return x + self.o(out.reshape(-1, HEADS * DIM))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, table: Tensor, *caches: Tensor) -> Tensor:
        for layer, key_cache, value_cache in zip(self.layers, caches[::2], caches[1::2], strict=True):
            x = layer(x, cos, sin, slots, table, key_cache, value_cache)
        return x


def test_a_model_over_paged_caches() -> None:
    torch.manual_seed(0)
    model, angles = Model().bfloat16(), torch.rand(3, DIM // 2) * 6
    tables = (torch.cat([half, half], -1).bfloat16() for half in (angles.cos(), angles.sin()))
    caches = [torch.randn(BLOCKS, SIZE, KV_HEADS, DIM).bfloat16() for _ in range(2 * LAYERS)]
    table = torch.tensor([[0, 1], [2, 3], [5, 6]], dtype=torch.int32)
    given = (torch.randn(3, HIDDEN).bfloat16(), *tables, torch.tensor([5, 300, 700]), table)
    theirs = [cache.clone() for cache in caches]
    found = compiled(model, *given, *caches)
    with torch.no_grad():
        torch.testing.assert_close(found.output, model(*given, *theirs), rtol=3e-2, atol=3e-2)
    for ours, wanted in zip(caches, theirs, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=3e-2, atol=3e-2)
    assert found.report.ops == Counter(
        {
            "sgl_kernel_npu::split_qkv_rmsnorm_rope": LAYERS,
            "npu::npu_scatter_pa_kv_cache": LAYERS,
            "npu::npu_fused_infer_attention_score": LAYERS,
        }
    )
    # a layer: a projection, the prologue, the write, attention, a projection and an add; once: slots and table
    assert found.report.launches_after == 6 * LAYERS + 2


def test_a_static_cache_is_written_in_place() -> None:
    net = build("llama", torch.bfloat16)
    cache = transformers.StaticCache(config=net.config, max_cache_len=64)
    ids = prompt(1, 8)
    with torch.no_grad():
        net(input_ids=ids, past_key_values=cache, use_cache=True)
    theirs = copy.deepcopy(cache)
    token = ids[:, :1]
    found = compiled(lambda token: net(input_ids=token, past_key_values=cache, use_cache=True).logits, token)
    with torch.no_grad():
        net(input_ids=token, past_key_values=theirs, use_cache=True)
    for ours, wanted in zip(cache.layers, theirs.layers, strict=True):
        torch.testing.assert_close(ours.keys, wanted.keys, rtol=3e-2, atol=3e-2)
        torch.testing.assert_close(ours.values, wanted.values, rtol=3e-2, atol=3e-2)
    targets = Counter(found.targets())
    assert targets["aten.index_copy_.default"] == 4
    assert not targets["aten.copy_.default"] + targets["aten.clone.default"] + targets["aten.index_copy.default"]
    reasons = {site.reason for site in found.report.sites if site.kind == "kv_cache_write"}
    assert len(reasons) == 1
    assert "its caches (1, 2, 64, 16) have a batch" in reasons.pop()


def test_a_growing_cache_has_no_slots() -> None:
    """transformers' DynamicCache joins what it has with what is new: nothing is there that could be written."""
    net = build(
        "deepseek_v3",
        torch.bfloat16,
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=2,
    )
    cache = transformers.DynamicCache(config=net.config)
    ids = prompt(1, 8)
    with torch.no_grad():
        net(input_ids=ids, past_key_values=cache, use_cache=True)
    found = compiled(lambda token: net(input_ids=token, past_key_values=cache, use_cache=True).logits, ids[:, :1])
    assert not {"kv_cache_write", "latent_cache_write"} & {site.kind for site in found.report.sites}
