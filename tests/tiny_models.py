"""Random models of transformers, as small as real code allows: two layers, four heads of 16."""

from __future__ import annotations

import torch
import transformers

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(model_type: str, dtype: torch.dtype = torch.float32, **sizes: object) -> torch.nn.Module:
    """A causal model of a model type, always the same one.

    Its vectors (norms' weights, biases) differ by element, so that one taken for another shows.
    """
    torch.manual_seed(0)
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type](**{**SIZES, **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def prompt(batch: int = 2, tokens: int = 16) -> torch.Tensor:
    """Token ids, always the same."""
    return torch.randint(3, 120, (batch, tokens), generator=torch.Generator().manual_seed(1))
