"""Real decoders of transformers over static caches: 200 tokens replayed are eager's tokens."""

import pytest
import torch
from transformers import StaticCache

from npu_fuse import GraphRunner
from tiny_models import build, prompt

LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 0,
    "mlp_only_layers": [0, 1],
}
TOKENS = 200


def generate(model, wrap):
    cache = StaticCache(config=model.config, max_cache_len=256)

    def step(input_ids, position_ids):
        return model(input_ids=input_ids, cache=cache, position_ids=position_ids).logits

    ids = prompt(batch=2, tokens=8)
    token = step(ids, torch.arange(8)[None].expand(2, -1))[:, -1:].argmax(-1)
    decode = wrap(step)
    tokens = [token]
    for i in range(TOKENS):
        tokens.append(decode(tokens[-1], torch.full((2, 1), 8 + i)).argmax(-1))
    return torch.cat(tokens, 1), decode


@torch.no_grad()
@pytest.mark.parametrize(("name", "sizes"), [("qwen3", {}), ("qwen3_next", LINEAR)])
def test_tokens_are_eagers(name, sizes):
    model = build(name, max_position_embeddings=512, **sizes)
    expected, _ = generate(model, lambda step: step)
    tokens, runner = generate(model, GraphRunner)
    assert torch.equal(tokens, expected)
    assert len(expected[0].unique()) > 10
    assert (runner.stats.captures, runner.stats.replays) == (1, TOKENS)
