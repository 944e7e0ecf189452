"""torch_npu's ops that write, declared or not, write the model's own buffers in the graph of an NPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import npu_fuse
from npu.fake_npu import on_fake_npu

Tensor = torch.Tensor


class Unit(nn.Module):
    """A function, as a module to compile."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> object:
        return self.function(*inputs)


class _Recording(npu_fuse.Backend):
    """Keeps the graphs that run."""

    def _optimised(self, *arguments: Any) -> fx.GraphModule:
        self.graph = super()._optimised(*arguments)
        return self.graph


def ran(function: Callable[..., object], *inputs: Tensor) -> list[str]:
    """The ops that run on an NPU."""

    def call(module: nn.Module, *fakes: Tensor) -> list[str]:
        torch._dynamo.reset()
        backend = _Recording(strict=True)
        torch.compile(module, backend=backend, fullgraph=True)(*fakes)
        nodes = backend.graph.graph.nodes
        return [str(node.target).removesuffix(".default") for node in nodes if node.op == "call_function"]

    return on_fake_npu(call, Unit(function), *inputs)


SLOTS = torch.tensor([5, 0, 9])


def paged(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Tensor:
    torch.ops.npu.npu_scatter_pa_kv_cache(k, v, k_cache, v_cache, slots, cache_mode="Norm")
    return k_cache.sum() + v_cache.sum()


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = q * 2, k * 3
    torch.ops.npu.npu_apply_rotary_pos_emb(q, k, cos, sin)
    return q + 1, k + 1


def rows(cache: Tensor, slots: Tensor, k: Tensor) -> Tensor:
    torch.ops.npu.npu_scatter_nd_update_(cache, slots.unsqueeze(-1), k)
    return cache.sum()


def latent(kv: Tensor, gamma: Tensor, cos: Tensor, index: Tensor, k_cache: Tensor, ckv_cache: Tensor) -> Tensor:
    torch.ops.npu.npu_kv_rmsnorm_rope_cache(kv, gamma, cos, cos, index, k_cache, ckv_cache)
    return k_cache.sum() + ckv_cache.sum()


def latent_2(kv: Tensor, gamma: Tensor, cos: Tensor, index: Tensor, k_cache: Tensor, ckv_cache: Tensor) -> Tensor:
    torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2(kv, gamma, cos, cos, index, k_cache, ckv_cache)
    return k_cache.sum() + ckv_cache.sum()


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


LATENT = (
    *(tokens(2, 1, 1, 576), tokens(512), tokens(2, 1, 1, 64), torch.zeros(2, 1, dtype=torch.int64)),
    *(tokens(2, 1, 8, 64), tokens(2, 1, 8, 512)),
)
CASES: dict[str, tuple[Callable[..., object], tuple[Tensor, ...]]] = {
    "npu_scatter_pa_kv_cache": (
        paged,
        (*(tokens(3, 2, 8) for _ in range(2)), *(tokens(3, 4, 2, 8) for _ in range(2)), SLOTS),
    ),
    "npu_apply_rotary_pos_emb": (
        rotated,
        (tokens(2, 3, 4, 64), tokens(2, 3, 2, 64), *(tokens(2, 3, 1, 64) for _ in range(2))),
    ),
    "npu_scatter_nd_update_": (rows, (tokens(12, 8), SLOTS, tokens(3, 8))),
    "npu_kv_rmsnorm_rope_cache": (latent, LATENT),
    "npu_kv_rmsnorm_rope_cache_v2": (latent_2, LATENT),
}


@pytest.mark.parametrize("name", CASES)
def test_an_op_writes_the_models_own_buffers(name: str) -> None:
    function, inputs = CASES[name]
    ops = ran(function, *inputs)
    assert ops.count(f"npu.{name}") == 1
    assert not [op for op in ops if "copy_" in op or "clone" in op or "functional" in op]
