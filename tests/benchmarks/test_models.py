"""Models as the benchmark builds them: tiny, and called as their phase says."""

import pytest
import torch

from models import BATCH, CHUNK, MODELS, PADDING, PROMPT


@pytest.fixture(scope="module")
def llama() -> torch.nn.Module:
    return MODELS["llama"].build(torch.bfloat16)


def test_a_config_takes_the_sizes_that_it_knows(llama: torch.nn.Module) -> None:
    config = llama.config
    assert (config.hidden_size, config.num_hidden_layers, config.num_key_value_heads) == (64, 2, 2)
    assert not hasattr(config, "n_embd")
    assert llama.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["gpt2", "bert", "qwen2_vl_vision", "diffusers_pixart"])
def test_other_families_are_tiny_too(name: str) -> None:
    module = MODELS[name].build(torch.float32)
    assert sum(parameter.numel() for parameter in module.parameters()) < 1_000_000
    assert not module.training
    with torch.no_grad():
        module(**MODELS[name].inputs(module, "prefill"))


@pytest.mark.parametrize(("phase", "tokens"), [("prefill_cached", PROMPT), ("decode", 1), ("chunk", CHUNK)])
def test_a_static_cache_holds_the_prompt_or_is_empty(llama: torch.nn.Module, phase: str, tokens: int) -> None:
    with torch.no_grad():
        inputs = MODELS["llama"].inputs(llama, phase)
    assert inputs["input_ids"].shape == (BATCH, tokens)
    assert inputs["cache"].get_seq_length() == (0 if phase == "prefill_cached" else PROMPT)


def test_padding_is_on_the_left_of_a_decoder_and_on_the_right_of_an_encoder(llama: torch.nn.Module) -> None:
    decoder = MODELS["llama"].inputs(llama, "padded")["attention_mask"]
    encoder = MODELS["bert"].inputs(llama, "padded")["attention_mask"]
    assert decoder[0].tolist() == [0] * PADDING + [1] * (PROMPT - PADDING)
    assert encoder[0].tolist() == [1] * (PROMPT - PADDING) + [0] * PADDING
    assert decoder[1].all()
    assert encoder[1].all()
