"""Models that hold torch_npu's own quantisers, compiled as on an NPU."""

from collections import Counter

import pytest
import torch

import npu_fuse
from npu.fake_npu import on_fake_npu

Tensor = torch.Tensor


class Block(torch.nn.Module):
    """A residual add, its norm, and what `mode` makes of that."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        for name in ("weight", "scale"):
            self.register_buffer(name, torch.rand(64, dtype=torch.bfloat16) + 0.5)

    def forward(self, x: Tensor, residual: Tensor) -> object:
        total = x + residual
        wide = total.float()
        y = self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        if self.mode == "npu_quantize":
            return total, torch.ops.npu.npu_quantize(y, self.scale, None, torch.qint8, -1)
        if self.mode == "npu_dynamic_quant":
            return total, torch.ops.npu.npu_dynamic_quant(y)
        if self.mode == "static":
            return total, (y / self.scale).round().clamp(-128, 127).to(torch.int8)
        return total, y, y.float()


def fused_ops(module: torch.nn.Module, *inputs: Tensor) -> Counter[str]:
    torch._dynamo.reset()
    backend = npu_fuse.Backend(strict=True)
    torch.compile(module, backend=backend, fullgraph=True)(*inputs)
    return backend.report.ops


@pytest.mark.parametrize(
    ("mode", "op"),
    [
        ("npu_quantize", "npu::npu_add_rms_norm_quant"),
        ("npu_dynamic_quant", "npu::npu_add_rms_norm_dynamic_quant"),
        ("static", "npu::npu_add_rms_norm_quant"),
        ("cast", "npu::npu_add_rms_norm_cast"),
    ],
)
def test_the_quantiser_goes_into_the_norm_as_on_the_cpu(mode: str, op: str) -> None:
    x, residual = torch.randn(2, 3, 64, dtype=torch.bfloat16), torch.randn(2, 3, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        assert fused_ops(Block(mode), x, residual) == {op: 1}
    assert on_fake_npu(fused_ops, Block(mode), x, residual) == {op: 1}
