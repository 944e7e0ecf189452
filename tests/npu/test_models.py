"""Models of transformers, compiled as on an NPU: torch_npu changes the graph, and must not change what fuses."""

from collections import Counter

import npu_fuse
import pytest
import torch
import transformers
from npu.fake_npu import compile_on_fake_npu

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


@pytest.mark.parametrize(
    "config_class",
    [transformers.Qwen3Config, transformers.LlamaConfig, transformers.Gemma3TextConfig, transformers.Olmo2Config],
    ids=lambda config_class: config_class.model_type,
)
def test_the_same_ops_are_reached_as_on_the_cpu(config_class: type[transformers.PreTrainedConfig]) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_class(**SIZES), dtype=torch.bfloat16).eval()
    inputs = {"input_ids": torch.arange(16).reshape(2, 8)}

    on_cpu = npu_fuse.Backend()
    with torch.no_grad():
        torch.compile(model, backend=on_cpu)(**inputs, use_cache=False)
    on_npu = npu_fuse.Backend()
    compile_on_fake_npu(model, inputs, on_npu)

    assert on_cpu.reports[-1].ops != Counter()
    assert on_npu.reports[-1].ops == on_cpu.reports[-1].ops
