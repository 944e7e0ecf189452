"""Full attention of SGLang's Qwen3-Next, its own code."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from sglang_models import BLOCK, MOST, WIDTH, call_npu_ops, gated_attention, natively, on_npu
from sglang_on_cpu import ForwardMode
from torch import nn

from npu_fuse import Backend

GATED = "sgl_kernel_npu::split_qkvgate_gemma_rmsnorm_rope"


@pytest.mark.parametrize("ops", [natively, on_npu])
def test_a_prologue_with_gates_is_one_op(
    ops: Callable[[nn.Module], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In prompts SGLang writes it out on an NPU too: a split, a norm each, and one call that turns q and k."""
    call_npu_ops(monkeypatch)
    layer = ops(gated_attention(torch.float32))
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND)
    inputs = (torch.randint(0, MOST, (BLOCK,)), torch.randn(BLOCK, WIDTH), batch)
    torch._dynamo.reset()
    backend = Backend(strict=True)
    with torch.no_grad():
        output = torch.compile(layer.self_attention, backend=backend, fullgraph=True)(*inputs)
    assert backend.report.ops[GATED] == 1
    assert not {"npu::npu_gemma_rms_norm", "npu::npu_mrope"} & backend.report.ops.keys()
    torch.testing.assert_close(output, layer.self_attention(*inputs))
