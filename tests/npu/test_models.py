"""Models of transformers, compiled as on an NPU: torch_npu changes the graph, and must not change what fuses."""

from collections import Counter

import pytest
import torch

import npu_fuse
from npu.fake_npu import on_fake_npu
from tiny_models import build


def fused_ops(model: torch.nn.Module, token_ids: torch.Tensor) -> list[Counter[str]]:
    """Compile a prompt and the step after it; return the fused ops of each graph."""
    torch._dynamo.reset()
    backend = npu_fuse.Backend(strict=True)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    prompt = compiled(input_ids=token_ids)
    compiled(input_ids=token_ids[:, -1:], past_key_values=prompt.past_key_values)
    return [report.ops for report in backend.reports]


@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma3_text", "olmo2"])
def test_the_same_ops_are_reached_as_on_the_cpu(name: str) -> None:
    model = build(name, torch.bfloat16)
    token_ids = torch.arange(16).reshape(2, 8)
    with torch.no_grad():
        on_cpu = fused_ops(model, token_ids)
    assert len(on_cpu) == 2
    assert all(on_cpu)
    assert on_fake_npu(fused_ops, model, token_ids) == on_cpu


def launches(model: torch.nn.Module, token_ids: torch.Tensor) -> int:
    """Compile a prompt; return its launches, calls that are no views."""
    torch._dynamo.reset()
    target = npu_fuse.Target("ascend910b", "npu", {"sgl_kernel_npu": "2026.8.21"})
    backend = npu_fuse.Backend(strict=True, target=target)
    torch.compile(model, backend=backend, fullgraph=True)(input_ids=token_ids, use_cache=False)
    return backend.report.launches_after


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_a_layer_has_at_most_ten_launches(name: str) -> None:
    token_ids = torch.arange(16).reshape(2, 8)
    two, three = (build(name, torch.bfloat16, num_hidden_layers=layers) for layers in (2, 3))
    with torch.no_grad():
        assert on_fake_npu(launches, three, token_ids) - on_fake_npu(launches, two, token_ids) <= 10
