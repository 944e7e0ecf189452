"""The Gemma example on a tiny model of the same architecture, without its weights."""

from collections import Counter
from dataclasses import replace

import gemma3_270m
import pytest
import torch
from gemma3_270m import FUSED_QKV, Comparison, Continuation
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedModel

import npu_fuse

STEPS = 5


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def comparison(model: PreTrainedModel) -> Comparison:
    return gemma3_270m.compare(model, torch.tensor([[2, 3, 5, 7]]), STEPS)


def test_eager_and_compiled_agree(model: PreTrainedModel, comparison: Comparison) -> None:
    assert comparison.agreeing == STEPS
    assert comparison.max_difference < 1e-5
    assert list(gemma3_270m.check(comparison, model)) == []


def test_a_layer_left_unfused_is_found(model: PreTrainedModel, comparison: Comparison) -> None:
    one_less = npu_fuse.Report(ops=Counter({FUSED_QKV: 1}))
    [failure] = gemma3_270m.check(replace(comparison, reports=[one_less]), model)
    assert failure == f"graph 0 has 1 {FUSED_QKV} for 2 attention layers"


def test_only_what_was_said_alike_is_compared(model: PreTrainedModel, comparison: Comparison) -> None:
    tokens, logits = comparison.eager.tokens.clone(), comparison.eager.logits.clone()
    tokens[2] += 1
    logits[2, 0] += 0.5
    logits[3, 0] += 100.0
    diverging = replace(comparison, compiled=Continuation(tokens, logits))
    assert diverging.agreeing == 2
    assert diverging.max_difference == pytest.approx(0.5)
    assert list(gemma3_270m.check(diverging, model)) == ["token 2 differs"]


def test_both_dtypes_are_tried_unless_one_is_chosen() -> None:
    assert gemma3_270m.parse([]).dtype == ["float32", "bfloat16"]
    assert gemma3_270m.parse(["--dtype", "bfloat16"]).dtype == ["bfloat16"]
