"""Activations, norms, matmuls and gatings, compiled as on an NPU: torch_npu changes the graph, and not what fuses."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import npu_fuse
from npu.fake_npu import on_fake_npu

Tensor = torch.Tensor
EXPERTS, GROUPS, K_GROUP, K = 16, 4, 2, 3


class Unit(nn.Module):
    """A function of a module and its input."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function
        self.weight, self.bias = nn.Parameter(torch.randn(EXPERTS)), nn.Parameter(torch.randn(EXPERTS))
        self.absorbed = nn.Parameter(torch.randn(4, 128, 256))

    def forward(self, x: Tensor) -> object:
        return self.function(self, x)


def gpt_oss(module: Unit, x: Tensor) -> Tensor:
    gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def geglu(module: Unit, x: Tensor) -> Tensor:
    up, gate = x.chunk(2, -1)
    return up * functional.gelu(gate)


def block(module: Unit, x: Tensor) -> Tensor:
    return functional.silu(functional.group_norm(x, 4, module.weight.to(x.dtype), module.bias.to(x.dtype)))


def deepseek_v3(module: Unit, x: Tensor) -> tuple[Tensor, Tensor]:
    scores = x.sigmoid()
    choice = scores + module.bias
    group_scores = choice.view(-1, GROUPS, EXPERTS // GROUPS).topk(2, dim=-1)[0].sum(dim=-1)
    best = torch.topk(group_scores, k=K_GROUP, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(group_scores)
    mask.scatter_(1, best, 1)
    mask = mask.unsqueeze(-1).expand(-1, GROUPS, EXPERTS // GROUPS).reshape(-1, EXPERTS)
    choice = choice.masked_fill(~mask.bool(), float("-inf"))
    experts = torch.topk(choice, k=K, dim=-1, sorted=False)[1]
    weights = scores.gather(1, experts)
    weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return weights * 2.5, experts


CASES: dict[str, tuple[str, Callable[..., object], tuple[int, ...]]] = {
    "CLIP": ("npu_fast_gelu", lambda module, x: x * torch.sigmoid(1.702 * x), (3, 16)),
    "GPT-OSS": ("npu_clipped_swiglu", gpt_oss, (3, 16)),
    "geglu": ("npu_geglu", geglu, (3, 16)),
    "group norm": ("npu_group_norm_silu", block, (2, EXPERTS, 4, 5)),
    "narrow group norm": ("npu_group_norm_silu", lambda module, x: block(module, x.bfloat16()), (2, EXPERTS, 4, 5)),
    "bmm": (
        "npu_transpose_batchmatmul",
        lambda module, x: torch.bmm(x.transpose(0, 1), module.absorbed).transpose(0, 1).contiguous(),
        (5, 4, 128),
    ),
    "matmul": (
        "npu_transpose_batchmatmul",
        lambda module, x: (x.transpose(0, 1) @ module.absorbed).transpose(0, 1).flatten(1),
        (5, 4, 128),
    ),
    "einsum": (
        "npu_transpose_batchmatmul",
        lambda module, x: torch.einsum("mbk,bkn->mbn", x, module.absorbed).contiguous(),
        (5, 4, 128),
    ),
    "softmax": (
        "npu_moe_gating_top_k_softmax",
        lambda module, x: functional.softmax(x, dim=-1, dtype=torch.float).topk(K),
        (6, EXPERTS),
    ),
    "softmax of float16": (
        "npu_moe_gating_top_k_softmax",
        lambda module, x: functional.softmax(x.half(), dim=-1, dtype=torch.float).topk(K),
        (6, EXPERTS),
    ),
    "DeepSeek-V3": ("npu_moe_gating_top_k", deepseek_v3, (6, EXPERTS)),
}


def fused_ops(module: nn.Module, x: Tensor) -> Counter[str]:
    torch._dynamo.reset()
    backend = npu_fuse.Backend(strict=True)
    torch.compile(module, backend=backend, fullgraph=True)(x)
    return backend.report.ops


@pytest.mark.parametrize("name", CASES)
def test_the_same_op_is_reached_as_on_the_cpu(name: str) -> None:
    op, function, shape = CASES[name]
    module, x = Unit(function).eval(), torch.randn(shape)
    with torch.no_grad():
        on_cpu = fused_ops(module, x)
    assert on_cpu == {f"npu::{op}": 1}
    assert on_fake_npu(fused_ops, module, x) == on_cpu
