"""The models that coverage is measured on: classes of transformers and diffusers, tiny and with random weights.

What a model is called by depends on the phase:

    prefill           a prompt without a cache; for what is no decoder, simply its inputs
    eager             likewise, with attention written out
    padded            likewise, with a mask: of a decoder the first tokens are padding, of an encoder the last
    prefill_cached    a prompt that fills an empty static cache
    decode            one token after a prompt, with a static cache
    chunk             four tokens after a prompt, with a static cache

The phases of each model are those that `true_sites.json` has counts for.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["MODELS", "Model"]

BATCH, PROMPT, CHUNK, PADDING, CACHE, VOCABULARY = 2, 16, 4, 3, 32, 128

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """How to make a model, and what to call it with.

    Args:
        build: the module for inference, in the given dtype.
        inputs: its keyword arguments in a phase. Those that hold a cache have it filled, by running the module.
    """

    build: Callable[[torch.dtype], nn.Module]
    inputs: Callable[[nn.Module, str], Inputs]


# ------------------------------------------------------------------------------------------------------------- sizes

# By the names that configs use; each config takes those that it knows.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "type_vocab_size": 2,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # width
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 128),
    # depth
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    # attention
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    "num_key_value_heads": 2,
    "head_dim": 16,
    "d_kv": 16,
    "rotary_dim": 8,
    "sliding_window": 8,
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16),
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_shared_experts", "n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    "num_experts_per_tok": 2,
    "router_jitter_noise": 0.0,
    # state-space layers and linear attention
    **dict.fromkeys(("mamba_d_state", "state_size"), 16),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "time_step_rank"), 8),
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_ssm": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    # images
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
}

LOCAL_THEN_GLOBAL = {"layer_types": ["sliding_attention", "full_attention"]}
GLOBAL_THEN_LOCAL = {"layer_types": ["full_attention", "sliding_attention"], "local_attention": 8}
CONV_THEN_GLOBAL = {"layer_types": ["conv", "full_attention"]}
LINEAR_THEN_GLOBAL = {"layer_types": ["linear_attention", "full_attention"]}
LATENT = {"num_key_value_heads": 4}
MULTIMODAL_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
WAVE_FRONTEND = {
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}


# ------------------------------------------------------------------------------------------------------ transformers


def transformer(
    inputs: Callable[[nn.Module, str], Inputs], model_type: str, *, head: bool = False, **sizes: Any
) -> Model:
    """A model of transformers, by the type of its config; with its language-modelling head or without."""

    def build(dtype: torch.dtype) -> nn.Module:
        from transformers import AutoModel, AutoModelForCausalLM
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
        from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

        # The one class of these models that AutoModel doesn't know by itself.
        AutoModel.register(Qwen2VLVisionConfig, Qwen2VisionTransformerPretrainedModel, exist_ok=True)
        config_class = CONFIG_MAPPING[model_type]
        known = {field.name for field in dataclasses.fields(config_class)} - set(config_class.attribute_map)
        config = config_class(**{name: SIZES[name] for name in SIZES if name in known} | sizes)
        torch.manual_seed(0)
        return (AutoModelForCausalLM if head else AutoModel).from_config(config, dtype=dtype).eval()

    return Model(build, inputs)


def tokens(count: int = PROMPT) -> torch.Tensor:
    """Token ids, [batch, count]; none of them special."""
    return torch.randint(3, VOCABULARY, (BATCH, count), generator=torch.Generator().manual_seed(1))


def noise(module: nn.Module, *shape: int) -> torch.Tensor:
    """Random numbers in the dtype of a module."""
    dtype = next(module.parameters()).dtype
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2)).to(dtype)


def of_decoder(module: nn.Module, phase: str) -> Inputs:
    if phase in ("prefill", "eager"):
        return {"input_ids": tokens(), "use_cache": False}
    if phase == "padded":
        mask = torch.ones(BATCH, PROMPT, dtype=torch.long)
        mask[0, :PADDING] = 0
        return {"input_ids": tokens(), "use_cache": False, "attention_mask": mask}
    cache = filled_cache(module)
    if phase == "prefill_cached":
        cache.reset()
        return {"input_ids": tokens(), "use_cache": True, "cache": cache}
    count = {"decode": 1, "chunk": CHUNK}[phase]
    inputs = {"input_ids": tokens(count), "use_cache": True, "cache": cache}
    if "position_ids" in inspect.signature(module.forward).parameters:
        inputs["position_ids"] = torch.arange(PROMPT, PROMPT + count).repeat(BATCH, 1)
    return inputs


def filled_cache(module: nn.Module) -> Any:
    """A static cache that holds a prompt."""
    from transformers import StaticCache

    try:
        cache = StaticCache(config=module.config, max_cache_len=CACHE)
        module(input_ids=tokens(), use_cache=True, cache=cache)
    except ValueError:  # MiniMax takes a cache of its own class only
        cache = module(input_ids=tokens(), use_cache=True)["cache"]
    return cache


def of_encoder(module: nn.Module, phase: str) -> Inputs:
    inputs = {"input_ids": tokens()}
    if phase == "padded":
        inputs["attention_mask"] = torch.ones(BATCH, PROMPT, dtype=torch.long)
        inputs["attention_mask"][0, -PADDING:] = 0
    return inputs


def of_text_to_text(module: nn.Module, phase: str) -> Inputs:
    return {"input_ids": tokens(), "decoder_input_ids": tokens(8), "use_cache": False}


def of_speech_to_text(module: nn.Module, phase: str) -> Inputs:
    return {"input_values": noise(module, BATCH, 4000), "decoder_input_ids": tokens(8), "use_cache": False}


def of_speech_encoder(module: nn.Module, phase: str) -> Inputs:
    return {"input_values": noise(module, BATCH, 400)}


def of_image_encoder(module: nn.Module, phase: str) -> Inputs:
    return {"pixel_values": noise(module, BATCH, 3, 32, 32)}


def of_patch_encoder(module: nn.Module, phase: str) -> Inputs:
    """Patches of one image in a row, as the vision towers of Qwen's multimodal models take them."""
    patch = 3 * module.config.temporal_patch_size * module.config.patch_size**2
    return {"hidden_states": noise(module, 64, patch), "grid_thw": torch.tensor([[1, 8, 8]])}


def decoder(model_type: str, *, head: bool = True, **sizes: Any) -> Model:
    return transformer(of_decoder, model_type, head=head, **sizes)


def encoder(model_type: str, **sizes: Any) -> Model:
    return transformer(of_encoder, model_type, **sizes)


def vision(model_type: str, **sizes: Any) -> Model:
    return transformer(of_image_encoder, model_type, **sizes)


def patch_vision(model_type: str, **sizes: Any) -> Model:
    return transformer(of_patch_encoder, model_type, **sizes)


# --------------------------------------------------------------------------------------------------------- diffusers


def diffusion(class_name: str, inputs: Callable[[Callable[..., torch.Tensor]], Inputs], **sizes: Any) -> Model:
    """A transformer of diffusers, by its class; `inputs` is given a function that makes noise of a shape."""

    def build(dtype: torch.dtype) -> nn.Module:
        import diffusers

        torch.manual_seed(0)
        return getattr(diffusers, class_name)(**sizes).to(dtype).eval()

    def of_diffusion(module: nn.Module, phase: str) -> Inputs:
        return inputs(lambda *shape: noise(module, *shape)) | {"return_dict": False}

    return Model(build, of_diffusion)


STEP = torch.ones(BATCH)  # the timestep
IMAGE = {"in_channels": 4, "attention_head_dim": 16, "num_attention_heads": 2}

DIFFUSION = {
    "auraflow": diffusion(
        "AuraFlowTransformer2DModel",
        lambda noise: {
            "hidden_states": noise(2, 4, 8, 8),
            "encoder_hidden_states": noise(2, 8, 32),
            "timestep": noise(2),
        },
        **IMAGE,
        sample_size=8,
        patch_size=2,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        joint_attention_dim=32,
        caption_projection_dim=32,
        out_channels=4,
        pos_embed_max_size=16,
    ),
    "cogvideox": diffusion(
        "CogVideoXTransformer3DModel",
        lambda noise: {
            "hidden_states": noise(2, 2, 4, 8, 8),
            "encoder_hidden_states": noise(2, 8, 32),
            "timestep": STEP.long(),
            "image_rotary_emb": (noise(32, 16).float(), noise(32, 16).float()),
        },
        **IMAGE,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=32,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=5,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=8,
        use_rotary_positional_embeddings=True,
    ),
    "cogview4": diffusion(
        "CogView4Transformer2DModel",
        lambda noise: {
            "hidden_states": noise(2, 4, 8, 8),
            "encoder_hidden_states": noise(2, 8, 32),
            "timestep": STEP.long(),
            "original_size": noise(2, 2),
            "target_size": noise(2, 2),
            "crop_coords": noise(2, 2),
        },
        **IMAGE,
        patch_size=2,
        out_channels=4,
        num_layers=2,
        text_embed_dim=32,
        time_embed_dim=8,
        condition_dim=4,
        pos_embed_max_size=16,
        sample_size=8,
        rope_axes_dim=(8, 8),
    ),
    "cosmos": diffusion(
        "CosmosTransformer3DModel",
        lambda noise: {
            "hidden_states": noise(1, 4, 1, 8, 8),
            "timestep": noise(1),
            "encoder_hidden_states": noise(1, 8, 32),
        },
        **IMAGE | {"attention_head_dim": 12},
        out_channels=4,
        num_layers=2,
        mlp_ratio=2,
        text_embed_dim=32,
        adaln_lora_dim=4,
        max_size=(4, 32, 32),
        patch_size=(1, 2, 2),
        concat_padding_mask=False,
        extra_pos_embed_type=None,
    ),
    "ltx": diffusion(
        "LTXVideoTransformer3DModel",
        lambda noise: {
            "hidden_states": noise(2, 16, 4),
            "encoder_hidden_states": noise(2, 8, 32),
            "timestep": noise(2),
            "encoder_attention_mask": torch.ones(2, 8, dtype=torch.bool),
            "num_frames": 1,
            "height": 4,
            "width": 4,
        },
        **IMAGE,
        out_channels=4,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=32,
    ),
    "pixart": diffusion(
        "PixArtTransformer2DModel",
        lambda noise: {
            "hidden_states": noise(2, 4, 8, 8),
            "encoder_hidden_states": noise(2, 8, 16),
            "timestep": STEP.long(),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
        **IMAGE,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=32,
        sample_size=8,
        caption_channels=16,
    ),
    "sd3": diffusion(
        "SD3Transformer2DModel",
        lambda noise: {
            "hidden_states": noise(2, 4, 8, 8),
            "encoder_hidden_states": noise(2, 8, 32),
            "pooled_projections": noise(2, 32),
            "timestep": STEP,
        },
        **IMAGE,
        sample_size=8,
        patch_size=2,
        num_layers=2,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=32,
        out_channels=4,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    ),
    "wan": diffusion(
        "WanTransformer3DModel",
        lambda noise: {
            "hidden_states": noise(2, 4, 2, 8, 8),
            "encoder_hidden_states": noise(2, 8, 16),
            "timestep": STEP.long(),
        },
        **IMAGE | {"attention_head_dim": 12},
        patch_size=(1, 2, 2),
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        rope_max_seq_len=32,
    ),
}


# ------------------------------------------------------------------------------------------------------------ models

PLAIN_DECODERS = [
    *("afmoe", "apertus", "bloom", "dots1", "falcon_h1", "falcon_mamba", "flex_olmo", "gemma", "gemma2", "glm"),
    *("gpt2", "gpt_neox", "gptj", "granite", "helium", "hunyuan_v1_dense", "hy_v3", "internlm3", "kimi_linear"),
    *("laguna", "llama", "mamba", "mistral", "nanochat", "nemotron", "olmo", "olmo2", "olmoe", "phi3", "qwen2"),
    *("qwen2_moe", "qwen3", "seed_oss", "smollm3"),
]
PLAIN_ENCODERS = ["bert", "deberta-v2", "electra", "jina_embeddings_v3", "nomic_bert", "xlm-roberta"]
PLAIN_VISION = ["clip_vision_model", "dinov2", "dinov3_vit", "pixtral", "sapiens2", "siglip_vision_model", "vit"]

MODELS: dict[str, Model] = {
    **{name: decoder(name) for name in PLAIN_DECODERS},
    "bamba": decoder("bamba", attn_layer_indices=[1]),
    "chameleon": decoder("chameleon", head=False, vocabulary_map={"<image>": 5}),
    "codegen": decoder("codegen", n_inner=None),
    "cohere": decoder("cohere", use_qk_norm=True),
    "cohere2": decoder("cohere2", **LOCAL_THEN_GLOBAL),
    "deepseek_v2": decoder("deepseek_v2", topk_method="greedy", **LATENT),
    "deepseek_v3": decoder("deepseek_v3", **LATENT),
    "exaone4": decoder("exaone4", **LOCAL_THEN_GLOBAL),
    "falcon_new": decoder("falcon", new_decoder_architecture=True, num_kv_heads=2, alibi=False),
    "gemma3_text": decoder("gemma3_text", **LOCAL_THEN_GLOBAL),
    "gemma4_text": decoder(
        "gemma4_text",
        **LOCAL_THEN_GLOBAL,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=VOCABULARY,
    ),
    "glm4_moe": decoder("glm4_moe", use_qk_norm=True),
    "glm4v_text": decoder("glm4v_text", head=False, **MULTIMODAL_ROPE),
    "gpt_oss": decoder("gpt_oss", **LOCAL_THEN_GLOBAL),
    "lfm2": decoder("lfm2", **CONV_THEN_GLOBAL),
    "lfm2_moe": decoder("lfm2_moe", **CONV_THEN_GLOBAL, num_dense_layers=1),
    "llama4_text": decoder(
        "llama4_text", attn_temperature_tuning=False, interleave_moe_layer_step=1, intermediate_size_mlp=128
    ),
    "longcat_flash": decoder("longcat_flash", **LATENT),
    "mamba2": decoder("mamba2", head_dim=32, n_groups=1, expand=2),
    "minicpm3": decoder("minicpm3", **LATENT),
    "minimax": decoder("minimax", **LINEAR_THEN_GLOBAL, block_size=8),
    "modernbert-decoder": decoder("modernbert-decoder", **GLOBAL_THEN_LOCAL),
    "muse_spark_text": decoder("muse_spark_text", head=False),
    "olmo3": decoder("olmo3", **LOCAL_THEN_GLOBAL),
    "opt": decoder("opt", word_embed_proj_dim=64),
    "persimmon": decoder("persimmon", qk_layernorm=True),
    "qwen2_5_vl_text": decoder("qwen2_5_vl_text", head=False, **MULTIMODAL_ROPE),
    "qwen2_vl_text": decoder("qwen2_vl_text", head=False, **MULTIMODAL_ROPE),
    "qwen3_5_text": decoder("qwen3_5_text", **LINEAR_THEN_GLOBAL),
    "qwen3_moe": decoder("qwen3_moe", decoder_sparse_step=1),
    "qwen3_next": decoder("qwen3_next", **LINEAR_THEN_GLOBAL, decoder_sparse_step=1, mlp_only_layers=[]),
    "qwen3_vl_text": decoder("qwen3_vl_text", head=False),
    "stablelm": decoder("stablelm", qk_layernorm=True),
    **{name: encoder(name) for name in PLAIN_ENCODERS},
    "esm": encoder("esm", position_embedding_type="rotary"),
    "modernbert": encoder("modernbert", **GLOBAL_THEN_LOCAL),
    **{name: vision(name) for name in PLAIN_VISION},
    "qwen2_vl_vision": patch_vision("qwen2_vl_vision", depth=2, mlp_ratio=2),
    "qwen2_5_vl_vision": patch_vision(
        "qwen2_5_vl_vision", depth=2, out_hidden_size=64, window_size=32, fullatt_block_indexes=[1]
    ),
    "wav2vec2-conformer": transformer(
        of_speech_encoder,
        "wav2vec2-conformer",
        **WAVE_FRONTEND,
        position_embeddings_type="rotary",
        conv_depthwise_kernel_size=5,
    ),
    "bart": transformer(of_text_to_text, "bart", decoder_start_token_id=1, forced_eos_token_id=None),
    "t5": transformer(of_text_to_text, "t5", feed_forward_proj="gated-gelu", decoder_start_token_id=0),
    "moonshine": transformer(
        of_speech_to_text,
        "moonshine",
        encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
        decoder_start_token_id=1,
    ),
    **{f"diffusers_{name}": model for name, model in DIFFUSION.items()},
}
