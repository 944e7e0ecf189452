"""Real model code of transformers, tiny and random: what fuses, how many launches a layer keeps, the same tokens."""

from collections import Counter

import pytest
import torch
import transformers

import npu_fuse
from tiny_models import SIZES, build, prompt

MODELS = ("qwen3", "llama", "gemma3_text", "olmo2")
QKV, ADD = "sgl_kernel_npu::split_qkv_rmsnorm_rope", "npu::npu_add_rms_norm"
WHOLE = "sgl_kernel_npu::split_qkv_tp_rmsnorm_rope"
NORM, GEMMA, GLU = "npu::npu_rms_norm", "npu::npu_gemma_rms_norm", "npu::npu_swiglu"
GEGLU = "npu::npu_geglu"
ATTENTION = "npu::npu_fused_infer_attention_score"

# Ops of one layer, and its launches in bfloat16: calls that are no views, for two prompts of 16 tokens.
LAYERS = {
    "qwen3": ({QKV: 1, ATTENTION: 1, ADD: 2, GLU: 1}, 9),
    "llama": ({QKV: 1, ATTENTION: 1, ADD: 2, GLU: 1}, 9),
    "gemma3_text": ({QKV: 1, ATTENTION: 1, GEMMA: 4, GEGLU: 1}, 17),
    "olmo2": ({WHOLE: 1, ATTENTION: 1, NORM: 2, GLU: 1}, 11),
}


def compile_prefill(
    model: torch.nn.Module, ids: torch.Tensor, dynamic: bool | None = None
) -> tuple[torch.Tensor, npu_fuse.Report]:
    torch._dynamo.reset()
    backend = npu_fuse.Backend(strict=True)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        return compiled(input_ids=ids, use_cache=False).logits, backend.report


@pytest.mark.parametrize("name", MODELS)
def test_a_layers_ops_and_launches(name: str) -> None:
    ids = prompt()
    (_, two), (_, three) = (compile_prefill(build(name, torch.bfloat16, num_hidden_layers=n), ids) for n in (2, 3))
    ops, launches = LAYERS[name]
    assert three.ops - two.ops == Counter(ops)
    assert three.launches_after - two.launches_after == launches


def test_nothing_of_a_norm_or_a_rotation_is_left_in_a_qwen3_layer() -> None:
    graphs = []

    class Recording(npu_fuse.Backend):
        def _optimised(self, *arguments: object) -> torch.fx.GraphModule:
            graphs.append(super()._optimised(*arguments))
            return graphs[-1]

    torch._dynamo.reset()
    with torch.no_grad():
        backend = Recording(strict=True)
        torch.compile(build("qwen3", dtype=torch.bfloat16), backend=backend)(input_ids=prompt(), use_cache=False)
    (graph,) = graphs
    in_layers = {
        str(node.target)
        for node in graph.graph.nodes
        if any("layers" in path for path, _ in node.meta.get("nn_module_stack", {}).values())
    }
    assert not {t for t in in_layers if any(op in t for op in ("pow", "rsqrt", "mean", "neg", "cat.", "silu", "mul."))}
    assert any("split_qkv" in target for target in in_layers)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", MODELS)
def test_float32_logits_are_eagers(name: str, dynamic: bool | None) -> None:
    model, ids = build(name), prompt()
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits
    logits, report = compile_prefill(model, ids, dynamic=dynamic)
    torch.testing.assert_close(logits, wanted, atol=2e-5, rtol=2e-5)
    assert report.ops


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_logits_are_as_near_to_the_truth_as_eagers(name: str) -> None:
    ids = prompt()
    model = build(name, dtype=torch.bfloat16)
    with torch.no_grad():
        eager = model(input_ids=ids, use_cache=False).logits.double()
        truth = build(name, dtype=torch.bfloat16).double()(input_ids=ids, use_cache=False).logits
    fused = compile_prefill(model, ids)[0].double()
    # A fused op rounds less often than the ops that it stands for: its error is no larger but for chance.
    assert (fused - truth).pow(2).mean().sqrt() <= 1.25 * (eager - truth).pow(2).mean().sqrt()


@pytest.mark.parametrize("name", MODELS)
def test_generates_eagers_tokens(name: str) -> None:
    model, ids = build(name), prompt()
    arguments = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    torch._dynamo.reset()
    backend = npu_fuse.Backend(strict=True)
    model.forward = torch.compile(model.forward, backend=backend, dynamic=True)
    assert torch.equal(model.generate(ids, attention_mask=torch.ones_like(ids), **arguments), wanted)
    assert all(report.ops for report in backend.reports)
    assert len(backend.reports) <= 4


def test_left_padding_and_a_given_mask() -> None:
    model, ids = build("qwen3"), prompt()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    torch._dynamo.reset()
    with torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        backend = npu_fuse.Backend(strict=True)
        logits = torch.compile(model, backend=backend)(input_ids=ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(logits, wanted, atol=2e-5, rtol=2e-5)
    assert backend.report.ops[QKV] == 2


def test_two_geometries_in_one_process_again_and_again() -> None:
    geometries = (
        {},
        {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-3, "hidden_size": 96},
    )
    for _ in range(2):
        for sizes in geometries:
            model, ids = build("qwen3", **sizes), prompt()
            with torch.no_grad():
                wanted = model(input_ids=ids, use_cache=False).logits
            logits, report = compile_prefill(model, ids)
            assert report.ops == {QKV: 2, "npu::npu_fusion_attention_v3": 2, ADD: 4, GLU: 2, NORM: 1}
            assert report.count("qkv", eps=sizes.get("rms_norm_eps", 1e-6), head_dim=sizes.get("head_dim", 16)) == 2
            torch.testing.assert_close(logits, wanted, atol=2e-5, rtol=2e-5)
    # And side by side, neither forgotten.
    torch._dynamo.reset()
    models = [build("qwen3", **sizes) for sizes in geometries]
    backends = [npu_fuse.Backend(strict=True) for _ in models]
    fused = [torch.compile(m, backend=b) for m, b in zip(models, backends, strict=True)]
    with torch.no_grad():
        for _ in range(2):
            for model, through, backend in zip(models, fused, backends, strict=True):
                wanted = model(input_ids=ids, use_cache=False).logits
                logits = through(input_ids=ids, use_cache=False).logits
                torch.testing.assert_close(logits, wanted, atol=2e-5, rtol=2e-5)
                assert [report.ops[QKV] for report in backend.reports] == [2]


def test_qkv_bias_of_qwen2() -> None:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    with torch.no_grad():
        wanted = model(input_ids=prompt(), use_cache=False).logits
    logits, report = compile_prefill(model, prompt())
    assert report.ops[QKV] == 2
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("config", "kind", "reason"),
    [
        (transformers.GPTNeoXConfig(**SIZES), "qkv", "heads of q start at columns 0, 48, 96, 144"),
        (transformers.HunYuanDenseV1Config(**SIZES), "rope_then_norm", "after the rotation"),
        (transformers.CohereConfig(**SIZES, use_qk_norm=True), "qkv", "not from a projection"),
        (transformers.Qwen3Config(**{**SIZES, "head_dim": 24}), "qkv", "24"),
    ],
    ids=["gpt_neox", "hunyuan", "cohere", "head_dim 24"],
)
def test_what_is_not_legal_is_refused_with_the_reason(config: object, kind: str, reason: str) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = model(input_ids=prompt(), use_cache=False).logits
    logits, report = compile_prefill(model, prompt())
    torch.testing.assert_close(logits, wanted, atol=2e-5, rtol=2e-5)
    reasons = [site.reason for site in report.sites if site.kind == kind and site.status != "lowered"]
    assert reasons
    assert all(reason in found for found in reasons)
