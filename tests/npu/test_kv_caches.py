"""Writes into paged caches and attention over them, compiled as on an NPU: torch_npu changes the graph alone."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional

import npu_fuse
from npu.fake_npu import on_fake_npu

Tensor = torch.Tensor
BLOCKS, SIZE, HEADS, DIM, BATCH = 9, 128, 2, 64, 2
SCATTER = "npu::npu_scatter_pa_kv_cache"
FIA = "npu::npu_fused_infer_attention_score"
LATENT = "npu::npu_kv_rmsnorm_rope_cache_v2"


def compiled(module: nn.Module, *tensors: Tensor) -> npu_fuse.Report:
    def call(module: nn.Module, *tensors: Tensor) -> npu_fuse.Report:
        torch._dynamo.reset()
        backend = npu_fuse.Backend(strict=True)
        torch.compile(module, backend=backend, fullgraph=True)(*tensors)
        (report,) = backend.reports
        return report

    return on_fake_npu(call, module, *tensors)


class Layer(nn.Module):
    """A layer of attention over a paged cache, one token a sequence, and what it writes there before."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.copies = copies
        self.q, self.k, self.v = (nn.Linear(64, heads * DIM, bias=False) for heads in (2 * HEADS, HEADS, HEADS))

    def write(self, cache: Tensor, tokens: Tensor, slots: Tensor) -> None:
        if self.copies:
            cache.view(-1, HEADS, DIM).index_copy_(0, slots, tokens)
        else:
            cache[slots // SIZE, slots % SIZE] = tokens

    def forward(self, x: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, table: Tensor) -> Tensor:
        self.write(key_cache, self.k(x).view(-1, HEADS, DIM), slots)
        self.write(value_cache, self.v(x).view(-1, HEADS, DIM), slots)
        keys, of_values = (cache[table].flatten(1, 2).transpose(1, 2) for cache in (key_cache, value_cache))
        query = self.q(x).view(-1, 1, 2 * HEADS, DIM).transpose(1, 2)
        return functional.scaled_dot_product_attention(query, keys, of_values, enable_gqa=True)


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_layer_over_a_paged_cache(copies: bool, dtype: torch.dtype) -> None:
    caches = (torch.randn(BLOCKS, SIZE, HEADS, DIM, dtype=dtype) for _ in range(2))
    slots, table = torch.tensor([20, 400]), torch.zeros(BATCH, 3, dtype=torch.int32)
    report = compiled(Layer(copies).to(dtype), torch.randn(BATCH, 64, dtype=dtype), *caches, slots, table)
    assert report.ops == Counter({FIA: 1, SCATTER: 1})
    # projections of q, k and v, both ops, and what is counted from the start: the table, and the slots of index_put
    assert report.launches_after == 6 + (not copies)


class Latent(nn.Module):
    """What latent attention keeps of a token."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(64, 576, bias=False)
        self.weight = nn.Parameter(torch.rand(512))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, ckv: Tensor, kpe: Tensor, slots: Tensor) -> None:
        latent, k = self.proj(x).split([512, 64], -1)
        wide = latent.float()
        normed = self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        k = k.unsqueeze(1)
        k = k.unflatten(-1, (32, 2)).transpose(-1, -2).reshape(k.shape)
        first, second = k.chunk(2, -1)
        k = k * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]
        ckv.view(-1, 1, 512)[slots] = normed[:, None]
        kpe.view(-1, 1, 64)[slots] = k


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_caches_of_latent_attention(dtype: torch.dtype) -> None:
    tables = (torch.randn(BATCH, 64, dtype=dtype) for _ in range(2))
    caches = (torch.randn(BLOCKS, SIZE, 1, width, dtype=dtype) for width in (512, 64))
    report = compiled(
        Latent().to(dtype), torch.randn(BATCH, 64, dtype=dtype), *tables, *caches, torch.tensor([20, 400])
    )
    assert report.ops == Counter({LATENT: 1})
    assert report.launches_after == 3
    (site,) = (site for site in report.sites if site.kind == "in_place")
    assert (site.status, site.op) == ("lowered", LATENT)


def test_a_static_cache_stays_in_place() -> None:
    class Static(nn.Module):
        def forward(self, k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, at: Tensor) -> Tensor:
            key_cache.index_copy_(2, at, k)
            value_cache.index_copy_(2, at, v)
            return key_cache.mul(value_cache)

    shapes = ((1, HEADS, 3, DIM), (1, HEADS, 40, DIM))
    tensors = (torch.randn(shape).half() for shape in shapes for _ in range(2))
    report = compiled(Static(), *tensors, torch.arange(3))
    assert report.ops == Counter()
    assert report.launches_after == 3
    assert "have a batch" in next(site.reason for site in report.sites if site.kind == "kv_cache_write")
