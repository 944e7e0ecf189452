"""`generate` of real transformers code, compiled: eager's tokens, however it is called, and what is left behind."""

import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import CompileConfig, DynamicCache, StaticCache

import npu_fuse
from npu_fuse.runtime.serving.transformers import enable
from tiny_models import build, prompt

Tensor = torch.Tensor
TOKENS = 8
QKV, GATED = "sgl_kernel_npu::split_qkv_rmsnorm_rope", "sgl_kernel_npu::split_qkvgate_gemma_rmsnorm_rope"
ROTARY, ADD, SWIGLU = "npu::npu_rotary_mul", "npu::npu_add_rms_norm", "npu::npu_swiglu"
CONV = "npu_fuse::causal_conv1d_columns"

EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
WINDOW = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}  # filled while decoding

# Sizes beside those of tiny_models, and an op that each of its layers, or its attention, is fused to.
FAMILIES: Mapping[str, tuple[dict[str, Any], str]] = {
    "qwen3": ({}, QKV),
    "llama": ({}, QKV),
    "gemma3_text": ({"num_hidden_layers": 2, **WINDOW}, "npu::npu_geglu"),
    "olmo2": ({}, "sgl_kernel_npu::split_qkv_tp_rmsnorm_rope"),
    "qwen3_next": (
        {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "mlp_only_layers": [0, 1],
        },
        GATED,
    ),
    "lfm2": ({"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3}, QKV),
    "mamba2": ({"num_heads": 8, "state_size": 16, "n_groups": 1, "chunk_size": 8, "expand": 2}, "npu::npu_rms_norm"),
    "mixtral": (EXPERTS, QKV),
    "phi": ({}, QKV),
    "gpt_oss": ({"num_hidden_layers": 2, **EXPERTS, **WINDOW}, "npu::npu_clipped_swiglu"),
    "deepseek_v3": (
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "first_k_dense_replace": 1,
        },
        ROTARY,
    ),
    "glm": ({}, QKV),
}


def tiny(name: str, dtype: torch.dtype = torch.float32, **sizes: object) -> Any:
    return build(name, dtype, **{"num_hidden_layers": 1, **FAMILIES[name][0], **sizes})


def padded() -> dict[str, Any]:
    """A batch of two prompts, one of them padded on the left."""
    ids = prompt()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: Any, **arguments: Any) -> Any:
    defaults = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None}
    torch.manual_seed(3)
    return model.generate(**{**padded(), **defaults, **arguments})


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def graphs(on: Any) -> tuple[int, int]:
    return len(on.prefill.reports), len(on.decode.reports)


# Twelve families


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_captured_and_replayed(name: str) -> None:
    model = tiny(name)
    details = {"output_logits": True, "return_dict_in_generate": True}
    wanted = generate(model, **details)
    with enable(model, strict=True, graphs={}) as on:
        found = [generate(model, **details) for _ in range(2)]  # the second has a new cache, and compiles nothing
    logits = torch.stack(wanted.logits)
    best, second = logits.topk(2).values.unbind(-1)
    tolerance = 1e-5 * logits.abs().max().item()
    assert (best - second).min().item() > 4 * tolerance  # so that equal tokens say something
    for each in found:
        assert torch.equal(each.sequences, wanted.sequences)
        torch.testing.assert_close(torch.stack(each.logits), logits, rtol=0, atol=tolerance)
    # One graph for prompts; one for a step, or two, where a window is filled on the way.
    assert graphs(on) == (1, 2 if "sliding_window" in FAMILIES[name][0] else 1)
    assert all(FAMILIES[name][1] in report.ops for report in on.reports)
    stats = [replayed.runner.stats for replayed in on.decode.runners]
    assert sum(each.replays for each in stats) == 2 * (TOKENS - 1)
    assert [each.captures for each in stats] == [2] * len(stats)  # one for each cache


def test_states_of_convolutions_are_moved_to_the_kernels_pool() -> None:
    """In bfloat16, in which the kernel takes them. Tokens are eager's here too."""
    model = tiny("lfm2", torch.bfloat16)
    wanted = generate(model)
    with warnings.catch_warnings(), enable(model, strict=True) as on:
        warnings.simplefilter("error")  # such as one that states are copied
        assert torch.equal(generate(model), wanted)
    assert [report.ops[CONV] for report in on.decode.reports] == [1, 1]  # before filters were laid out, and after


# Ways to call it


def beams(model: Any) -> Any:
    return generate(model, num_beams=3)


def samples(model: Any) -> Any:
    return generate(model, do_sample=True, temperature=2.0, num_return_sequences=2)


def embeddings(model: Any) -> Any:
    given = padded()
    return generate(model, input_ids=None, inputs_embeds=model.get_input_embeddings()(given["input_ids"]))


def configured(model: Any) -> Any:
    config = transformers.GenerationConfig(max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    found = model.generate(padded()["input_ids"], config, attention_mask=padded()["attention_mask"])
    assert config.cache_implementation is None
    return found


def conversation(cache: Any) -> Callable[[Any], Any]:
    def talk(model: Any) -> Any:
        given, own = padded(), cache(model)
        first = generate(model, cache=own)
        mask = torch.cat([given["attention_mask"], torch.ones(2, TOKENS + 5, dtype=torch.long)], 1)
        return generate(model, input_ids=torch.cat([first, prompt(2, 5)], 1), attention_mask=mask, cache=own)

    return talk


static_talk = conversation(lambda model: StaticCache(config=model.config, max_cache_len=64))
growing_talk = conversation(lambda model: DynamicCache(config=model.config))


def test_ways_to_call_it() -> None:
    ways = (generate, samples, embeddings, configured, static_talk, growing_talk, beams)
    model = tiny("qwen3")
    wanted = [way(model) for way in ways]
    with warnings.catch_warnings(), enable(model, strict=True, graphs={}) as on:
        warnings.filterwarnings("ignore", ".*its caches or weights moved before each of 8 calls")  # by beam search
        for way, tokens in zip(ways, wanted, strict=True):
            assert torch.equal(way(model), tokens), way
    assert all(report.ops for report in on.reports)


def test_an_assistant() -> None:
    model, assistant, ids = tiny("qwen3"), tiny("qwen3"), prompt(1)
    with torch.no_grad():
        assistant.lm_head.weight += 0.01 * torch.randn(assistant.lm_head.weight.shape)  # so that it errs at times
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "assistant_model": assistant}
    wanted = generate(model, **arguments)
    with enable(model, strict=True) as on:
        assert torch.equal(generate(model, **arguments), wanted)
    assert all(report.ops[QKV] for report in on.reports)


def test_an_encoder_decoder() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1, "num_heads": 4}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.15)
    wanted = generate(model)
    assert len(wanted[:, 1:].unique()) > 3  # no endless repetition
    with enable(model, strict=True, graphs={}) as on:
        for _ in range(2):
            assert torch.equal(generate(model), wanted)
    assert graphs(on) == (2, 1)
    assert on.prefill.reports[0].ops["npu::npu_rms_norm"] == 1  # of the encoder
    assert [replayed.runner.stats.replays for replayed in on.decode.runners] == [14]


# On and off


def test_off_again_the_model_is_what_it_was() -> None:
    model = tiny("qwen3")

    def noting(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return type(model).forward(model, *args, **kwargs)

    calls: list[dict[str, Any]] = []
    model.forward = noting  # such as accelerate sets it
    before = dict(vars(model))
    on = enable(model)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM is switched on already"):
        enable(model)
    with torch.compiler.set_stance("force_eager"):
        wanted = generate(model)
    assert isinstance(calls[-1]["cache"], StaticCache)
    assert set(vars(model)) - set(before) == {"generate", "_previous_max_cache_length"}
    on.disable()
    assert vars(model) == before
    assert torch.equal(generate(model), wanted)
    assert isinstance(calls[-1]["cache"], DynamicCache)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({}, StaticCache),
        ({"cache_implementation": "dynamic"}, DynamicCache),
        ({"output_attentions": True}, DynamicCache),  # whose sizes would be those of the cache
        ({"use_cache": False}, type(None)),
    ],
)
def test_what_cache_there_is(arguments: dict[str, Any], kind: type) -> None:
    model = tiny("qwen3")
    kinds: set[type] = set()
    forward = type(model).forward

    def noting(*args: Any, cache: Any = None, **kwargs: Any) -> Any:
        kinds.add(type(cache))
        return forward(model, *args, cache=cache, **kwargs)

    model.set_attn_implementation("eager")
    model.forward = noting
    with enable(model, static_cache=True), torch.compiler.set_stance("force_eager"):
        generate(model, max_new_tokens=2, **arguments)
    assert kinds == {kind}
    with enable(model, static_cache=False) as on, torch.compiler.set_stance("force_eager"):
        assert "generate" not in vars(model)
        generate(model, max_new_tokens=2, **arguments)
    assert not on.reports
    assert StaticCache not in kinds - {kind}


def test_a_setting_that_is_unknown() -> None:
    model = tiny("qwen3")
    before = dict(vars(model))
    with pytest.raises(ValueError, match=r"unknown option 'disabled' \(did you mean 'disable'\?\)"):
        enable(model, disabled={"qkv"})
    assert vars(model) == before


def test_a_class_is_no_model() -> None:
    with pytest.raises(TypeError, match="give a model, as from_pretrained returns it, not the class Linear"):
        enable(nn.Linear)
    assert "forward" in vars(nn.Linear)
    with pytest.raises(TypeError, match="not a str"):
        enable("Qwen/Qwen3-0.6B")


def test_the_package_does_not_import_transformers() -> None:
    line = "import sys, npu_fuse.runtime.serving.transformers; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", line], check=True, timeout=120)


# What transformers and torch have themselves


def config_for(backend: Any, **settings: Any) -> CompileConfig:
    config = CompileConfig(backend=backend, **settings)
    config._compile_all_devices = True  # generate compiles for CUDA and few others only
    return config


def test_the_config_of_generate() -> None:
    """Its mode is "reduce-overhead" unless another is given, and it copies the backend that it is given."""
    model, backend = tiny("qwen3"), npu_fuse.Backend(strict=True)
    wanted = generate(model)
    for _ in range(2):
        config = config_for(backend)
        assert torch.equal(generate(model, cache_implementation="static", compile_config=config), wanted)
    assert [report.ops[QKV] for report in backend.reports] == [1]  # prompts aren't compiled there
    stats = backend.runners[0].runner.stats
    assert (stats.captures, stats.replays) == (2, 2 * (TOKENS - 1))
    plain = config_for("npu_fuse", mode=None, options={"disable": {"qkv"}}, fullgraph=True)
    assert torch.equal(generate(model, cache_implementation="static", compile_config=plain), wanted)


@torch.no_grad()
def test_a_models_own_compile() -> None:
    model, given = tiny("qwen3"), padded()
    wanted = model(**given, use_cache=False).logits
    for arguments in ({"options": {"strict": True}}, {"mode": "reduce-overhead"}):
        model.compile(backend="npu_fuse", **arguments)
        torch.testing.assert_close(model(**given, use_cache=False).logits, wanted, rtol=0, atol=1e-5)
    model.compile(backend="npu_fuse", mode="max-autotune")
    with pytest.raises(Exception, match="unknown mode 'max-autotune'; known: 'default', 'reduce-overhead'"):
        model(**given, use_cache=False)
    model.compile(backend="npu_fuse", options={"disabled": {"qkv"}})
    with pytest.raises(Exception, match=r"unknown option 'disabled' \(did you mean 'disable'\?\)"):
        model(**given, use_cache=False)
    with pytest.raises(TypeError, match="fullgraf"):
        model.compile(backend="npu_fuse", fullgraf=True)
