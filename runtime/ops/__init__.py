"""The fused ops that a graph may be rewritten to, as contracts. Importing this registers nothing; `register` does."""

from collections.abc import Mapping
from types import MappingProxyType

from .causal_conv1d import CAUSAL_CONV1D, NPU_CAUSAL_CONV1D
from .causal_conv1d_columns import CAUSAL_CONV1D_COLUMNS
from .chunk_gated_delta_rule import NPU_CHUNK_GATED_DELTA_RULE
from .clipped_swiglu import NPU_CLIPPED_SWIGLU
from .contract import OpContract
from .fused_infer_attention_score import NPU_FUSED_INFER_ATTENTION_SCORE, NPU_FUSED_INFER_ATTENTION_SCORE_V2
from .fused_rope_qk import FUSED_ROPE_QK_MQA
from .fusion_attention import NPU_FUSION_ATTENTION_V3
from .gelu import NPU_FAST_GELU, NPU_GEGLU
from .group_norm_silu import NPU_GROUP_NORM_SILU
from .interleave_rope import NPU_INTERLEAVE_ROPE
from .kv_rmsnorm_rope_cache import NPU_KV_RMSNORM_ROPE_CACHE, NPU_KV_RMSNORM_ROPE_CACHE_V2
from .mm_all_reduce import NPU_MM_ALL_REDUCE_BASE
from .moe_gating import NPU_MOE_GATING_TOP_K, NPU_MOE_GATING_TOP_K_SOFTMAX
from .mrope import NPU_MROPE
from .norm_quant import (
    NPU_ADD_RMS_NORM_CAST,
    NPU_ADD_RMS_NORM_DYNAMIC_QUANT,
    NPU_ADD_RMS_NORM_QUANT,
    NPU_RMS_NORM_QUANT,
)
from .prompt_flash_attention import NPU_PROMPT_FLASH_ATTENTION
from .quantize import NPU_DYNAMIC_QUANT, NPU_QUANTIZE
from .recurrent_gated_delta_rule import NPU_RECURRENT_GATED_DELTA_RULE
from .rms_norm import NPU_ADD_RMS_NORM, NPU_GEMMA_RMS_NORM, NPU_RMS_NORM
from .rotary import NPU_ROTARY_MUL
from .scatter_pa_kv_cache import NPU_SCATTER_PA_KV_CACHE
from .split_qkv import SPLIT_QKV_RMSNORM_ROPE
from .split_qkv_mrope import TRITON_SPLIT_QKV_RMSNORM_MROPE
from .split_qkv_pos_cache import SPLIT_QKV_RMSNORM_ROPE_POS_CACHE_HALF
from .split_qkv_tp import SPLIT_QKV_TP_RMSNORM_ROPE
from .split_qkvgate import SPLIT_QKVGATE_GEMMA_RMSNORM_ROPE
from .swiglu import NPU_SWIGLU
from .transpose_batchmatmul import NPU_TRANSPOSE_BATCHMATMUL

__all__ = ["CONTRACTS", "OpContract"]

_ALL = (
    SPLIT_QKV_RMSNORM_ROPE,
    SPLIT_QKV_RMSNORM_ROPE_POS_CACHE_HALF,
    SPLIT_QKV_TP_RMSNORM_ROPE,
    SPLIT_QKVGATE_GEMMA_RMSNORM_ROPE,
    TRITON_SPLIT_QKV_RMSNORM_MROPE,
    FUSED_ROPE_QK_MQA,
    NPU_RMS_NORM,
    NPU_GEMMA_RMS_NORM,
    NPU_ADD_RMS_NORM,
    NPU_ADD_RMS_NORM_CAST,
    NPU_ADD_RMS_NORM_QUANT,
    NPU_ADD_RMS_NORM_DYNAMIC_QUANT,
    NPU_RMS_NORM_QUANT,
    NPU_QUANTIZE,
    NPU_DYNAMIC_QUANT,
    NPU_ROTARY_MUL,
    NPU_MROPE,
    NPU_INTERLEAVE_ROPE,
    NPU_SWIGLU,
    NPU_CLIPPED_SWIGLU,
    NPU_FAST_GELU,
    NPU_GEGLU,
    NPU_GROUP_NORM_SILU,
    NPU_TRANSPOSE_BATCHMATMUL,
    NPU_MOE_GATING_TOP_K_SOFTMAX,
    NPU_MM_ALL_REDUCE_BASE,
    NPU_MOE_GATING_TOP_K,
    NPU_FUSED_INFER_ATTENTION_SCORE,
    NPU_FUSED_INFER_ATTENTION_SCORE_V2,
    NPU_PROMPT_FLASH_ATTENTION,
    NPU_FUSION_ATTENTION_V3,
    NPU_SCATTER_PA_KV_CACHE,
    NPU_KV_RMSNORM_ROPE_CACHE,
    NPU_KV_RMSNORM_ROPE_CACHE_V2,
    CAUSAL_CONV1D,
    NPU_CAUSAL_CONV1D,
    CAUSAL_CONV1D_COLUMNS,
    NPU_RECURRENT_GATED_DELTA_RULE,
    NPU_CHUNK_GATED_DELTA_RULE,
)

CONTRACTS: Mapping[str, OpContract] = MappingProxyType({contract.name: contract for contract in _ALL})
