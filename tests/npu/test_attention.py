"""Attention compiled as on an NPU, where torch_npu takes the calls of torch apart in its own way: nothing changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import attentions
import pytest
import torch
from attentions import BATCH, HEAD_DIM, HEADS, KV_HEADS, TOKENS
from torch import nn

import npu_fuse
from npu.fake_npu import on_fake_npu

Tensor = torch.Tensor


class Each(nn.Module):
    """Several spellings of attention in one graph."""

    def __init__(self, functions: list[attentions.Attention]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        return [function(*inputs) for function in self.functions]


def outcome(model: nn.Module, *inputs: Tensor) -> tuple[Counter[str], list[tuple[str, str | None]]]:
    """The fused ops of a graph, and what became of each attention in it."""
    torch._dynamo.reset()
    backend = npu_fuse.Backend(strict=True)
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    (report,) = backend.reports
    return report.ops, [(site.status, site.op) for site in report.sites if site.kind == "attention"]


def tensors(kv_heads: int = HEADS, *further: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    of_kv = (BATCH, kv_heads, TOKENS, HEAD_DIM)
    return [torch.randn(shape).to(dtype) for shape in ((BATCH, HEADS, TOKENS, HEAD_DIM), of_kv, of_kv, *further)]


TABLES: dict[str, list[Tensor]] = {
    "PLAIN": tensors(),
    "MERGED": tensors(),
    "CAUSAL": tensors(),
    "GROUPED": tensors(KV_HEADS),
    "ONE_KV_HEAD": tensors(1),
    "BIASED": tensors(HEADS, (HEADS, TOKENS, TOKENS)),
    "MARKED": tensors(HEADS, (HEADS, TOKENS, TOKENS)),
}


def functions(table: str) -> list[Callable[..., Tensor]]:
    return [value if callable(value) else value[0] for value in getattr(attentions, table).values()]


@pytest.mark.parametrize("table", TABLES)
def test_the_same_becomes_of_each_spelling_as_on_the_cpu(table: str) -> None:
    model = Each(functions(table))
    on_cpu = outcome(model, *TABLES[table])
    assert on_fake_npu(outcome, model, *TABLES[table]) == on_cpu


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_same_becomes_of_other_types(dtype: torch.dtype) -> None:
    model = Each([attentions.eager, attentions.sdpa, *functions("CAUSAL")[:4]])
    inputs = tensors(dtype=dtype)
    on_cpu = outcome(model, *inputs)
    assert on_cpu[0].total() == len(model.functions)
    assert on_fake_npu(outcome, model, *inputs) == on_cpu


class Block(nn.Module):
    """Projections, heads, attention with padding, and the way back: what a model does around it."""

    def __init__(self, function: attentions.Attention) -> None:
        super().__init__()
        self.projection = nn.Linear(HEADS * HEAD_DIM, 3 * HEADS * HEAD_DIM, dtype=torch.bfloat16)
        self.out = nn.Linear(HEADS * HEAD_DIM, HEADS * HEAD_DIM, dtype=torch.bfloat16)
        self.function = function

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for y in self.projection(x).chunk(3, -1))
        position = torch.arange(x.shape[1], device=x.device)
        mask = (position[:, None] >= position) & kept[:, None, None]
        return self.out(self.function(q, k, v, mask).transpose(1, 2).flatten(2))


def test_the_same_becomes_of_a_block() -> None:
    model = Block(attentions.sdpa)
    inputs = torch.randn(BATCH, TOKENS, HEADS * HEAD_DIM, dtype=torch.bfloat16), torch.ones(BATCH, TOKENS).bool()
    on_cpu = outcome(model, *inputs)
    assert on_cpu[1] == [("lowered", "npu::npu_fused_infer_attention_score")]
    assert on_fake_npu(outcome, model, *inputs) == on_cpu
