"""What one decoder's layer launches on an NPU where its code was written by hand, as SGLang 0.5.23 does.

Read from its source (`sglang/srt`), for one rank, bfloat16, no quantisation and its default settings:

    models/*.py                 the layers; those of Qwen3 and of Llama have a branch for NPUs, `forward_prepare_npu`
    layers/layernorm.py         `forward_npu` of RMSNorm, GemmaRMSNorm and Gemma3RMSNorm
    layers/activation.py        `forward_npu` of SiluAndMul and GeluAndMul
    layers/rotary_embedding/    `forward_npu`, one `npu_mrope`, which looks cos and sin up itself
    hardware_backend/npu/       the cache's write, attention, and what a layer of experts does

Counted are calls that are no views, as in a report. What stands outside of the layers (cos and sin of a whole model,
masks) is left out, as it is where two depths are compared. `CACHE` is there where a cache is written. Attention is one
launch wherever its backend has a kernel, with whatever settings.
"""

from __future__ import annotations

__all__ = ["CACHE", "LAYERS", "launches"]

CACHE = "_npu_reshape_and_cache"

ADD_NORM, NORM, GEMMA, ROTARY = "npu_add_rms_norm", "npu_rms_norm", "npu_gemma_rms_norm", "npu_mrope"
ATTENTION = (CACHE, "attention", "o_proj")
GATED = ("gate_up_proj", "npu_swiglu", "down_proj")
GATED_BY_GELU = ("gate_up_proj", "npu_geglu", "down_proj")

# RMSNorm.forward_native, as Olmo2Attention calls it: of a slice of what the projection gave.
WRITTEN_OUT = ("contiguous", "to float32", "pow", "mean", "add eps", "rsqrt", "mul", "mul weight", "to bfloat16")

# Gemma3RMSNorm.forward_npu has no kernel for a norm behind an add.
WRITTEN_OUT_GEMMA = (
    *("add", "to float32", "pow", "mean", "add eps", "rsqrt", "mul"),
    *("weight to float32", "add 1", "mul weight", "to bfloat16"),
)

# Attention whose scores are capped, by the backend's torch code: of one sequence, without its reading of the cache and
# without its mask.
CAPPED = (
    *("zeros", "repeat k", "repeat v", "matmul", "mul scale", "div cap", "tanh", "mul cap", "add mask", "softmax"),
    *("matmul", "copy"),
)

LLAMA = (ADD_NORM, "qkv_proj", ROTARY, *ATTENTION, ADD_NORM, *GATED)

# A layer by the model's type in transformers.
LAYERS: dict[str, tuple[str, ...]] = {
    "gemma2": (
        *(ADD_NORM, "qkv_proj", ROTARY, CACHE, *CAPPED, "o_proj", GEMMA),
        *(ADD_NORM, *GATED_BY_GELU, GEMMA),
    ),
    "gemma3_text": (
        *(*WRITTEN_OUT_GEMMA, "qkv_proj", GEMMA, GEMMA, "npu_rotary_mul", "npu_rotary_mul", *ATTENTION, GEMMA),
        *(*WRITTEN_OUT_GEMMA, *GATED_BY_GELU, GEMMA),
    ),
    "glm4": (ADD_NORM, "qkv_proj", ROTARY, *ATTENTION, NORM, ADD_NORM, *GATED, NORM),
    "granite": (ADD_NORM, "qkv_proj", ROTARY, *ATTENTION, "mul", ADD_NORM, *GATED, "mul"),
    "llama": LLAMA,  # a decoding step has split_qkv_rmsnorm_rope without norms in the place of the rotation
    "mistral": LLAMA,
    "olmo2": ("qkv_proj", *WRITTEN_OUT, *WRITTEN_OUT, ROTARY, *ATTENTION, NORM, "add", *GATED, NORM, "add"),
    "phi3": LLAMA,
    "qwen2": LLAMA,
    "qwen3": (ADD_NORM, "qkv_proj", "split_qkv_rmsnorm_rope", *ATTENTION, ADD_NORM, *GATED),
    "qwen3_moe": (
        *(ADD_NORM, "qkv_proj", "split_qkv_rmsnorm_rope", *ATTENTION, ADD_NORM),
        *("router", "npu_moe_gating_top_k_softmax", "l1_norm", "to float32", "npu_moe_init_routing_v2"),
        *("npu_grouped_matmul", "npu_swiglu", "npu_grouped_matmul", "npu_moe_finalize_routing"),
    ),
}


def launches(model: str, *, has_cache: bool) -> int:
    """How many launches a layer has."""
    return sum(has_cache or launch != CACHE for launch in LAYERS[model])
