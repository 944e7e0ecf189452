"""Causal convolutions on an NPU with sgl_kernel_npu: spelled out or called, they become what they do on a CPU."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import npu_fuse
from npu.fake_npu import on_fake_npu
from npu_fuse.runtime.conv_state import in_pool_memory
from npu_fuse.runtime.effects import register_known
from npu_fuse.runtime.ops.register import register

Tensor = torch.Tensor
BF16 = torch.bfloat16
D, W, SLOTS = 32, 4, 5
TARGET = npu_fuse.Target("ascend910b", "npu", {"sgl_kernel_npu": "2026.8.21"})


class Layer(nn.Module):
    """A convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1d = nn.Conv1d(D, D, W, groups=D, dtype=BF16)


class Spelled(Layer):
    """As transformers has it."""

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        seen = torch.cat([state, x.transpose(1, 2)], -1)
        state.copy_(seen[..., -W:])
        return functional.silu(self.conv1d(seen)[..., -x.shape[1] :]).transpose(1, 2).sum(-1)


class ByHand(Layer):
    """As a backend for NPUs has it, on copies."""

    def forward(self, x: Tensor, pool: Tensor) -> Tensor:
        states = pool.transpose(1, 2).clone()
        weight = self.conv1d.weight.squeeze(1).transpose(0, 1).contiguous()
        y = torch.ops.npu.causal_conv1d(x, weight, states, self.conv1d.bias, activation_mode=1, run_mode=1)
        pool.copy_(states.transpose(1, 2))
        return y


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register(TARGET)
    register_known()


def launched(module: nn.Module, *inputs: Tensor) -> list[str]:
    """The ops that run, without views."""

    def call(module: nn.Module, *fakes: Tensor) -> list[str]:
        torch._dynamo.reset()
        laid = [
            torch.empty_strided(f.shape, i.stride(), dtype=f.dtype, device="npu")
            for f, i in zip(fakes, inputs, strict=True)
        ]
        backend = npu_fuse.Backend(strict=True, keep_graphs=True, target=TARGET)
        torch.compile(module, backend=backend, fullgraph=True)(*laid)
        ((_, after),) = backend.graphs
        return [str(node.target) for node in after.graph.nodes if node.op == "call_function"]

    return [op for op in on_fake_npu(call, module, *inputs) if "transpose" not in op and "permute" not in op]


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_convolution_is_one_op_on_the_models_state(tokens: int) -> None:
    x, state = torch.randn(2, tokens, D).to(BF16), in_pool_memory(torch.randn(2, D, W).to(BF16))
    assert launched(Spelled(), x, state) == ["npu_fuse.causal_conv1d_columns.default", "aten.sum.dim_IntList"]


def test_a_call_by_hand_is_left_alone() -> None:
    x, pool = torch.randn(2, 1, D).to(BF16), in_pool_memory(torch.randn(SLOTS, D, W - 1).to(BF16))
    assert launched(ByHand(), x, pool) == ["npu.causal_conv1d.default"]
