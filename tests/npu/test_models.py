"""Models of transformers, compiled as on an NPU: torch_npu changes the graph, and must not change what fuses."""

from collections import Counter

import pytest
import torch
import transformers

import npu_fuse
from npu.fake_npu import on_fake_npu

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def fused_ops(model: torch.nn.Module, token_ids: torch.Tensor) -> list[Counter[str]]:
    """Compile a prompt and the step after it; return the fused ops of each graph."""
    torch._dynamo.reset()
    backend = npu_fuse.Backend(strict=True)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    prompt = compiled(input_ids=token_ids)
    compiled(input_ids=token_ids[:, -1:], past_key_values=prompt.past_key_values)
    return [report.ops for report in backend.reports]


@pytest.mark.parametrize(
    "config_class",
    [transformers.Qwen3Config, transformers.LlamaConfig, transformers.Gemma3TextConfig, transformers.Olmo2Config],
    ids=lambda config_class: config_class.model_type,
)
def test_the_same_ops_are_reached_as_on_the_cpu(config_class: type[transformers.PreTrainedConfig]) -> None:
    model = transformers.AutoModelForCausalLM.from_config(config_class(**SIZES), dtype=torch.bfloat16).eval()
    token_ids = torch.arange(16).reshape(2, 8)
    with torch.no_grad():
        on_cpu = fused_ops(model, token_ids)
    assert len(on_cpu) == 2
    assert all(on_cpu)
    assert on_fake_npu(fused_ops, model, token_ids) == on_cpu
