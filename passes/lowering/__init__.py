"""How a recognised site becomes fused ops: one file a kind. Each asks the ops' contracts, and raises `Refused`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...patterns import add_rms_norm as add_rms_norm_pattern
from ...patterns import attention as attention_pattern
from ...patterns import causal_conv1d as causal_conv1d_pattern
from ...patterns import clipped_swiglu as clipped_swiglu_pattern
from ...patterns import fast_gelu as fast_gelu_pattern
from ...patterns import gated_delta_rule as gated_delta_rule_pattern
from ...patterns import glu as glu_pattern
from ...patterns import group_norm_silu as group_norm_silu_pattern
from ...patterns import grouped_moe_gating as grouped_moe_gating_pattern
from ...patterns import kv_cache_write as kv_cache_write_pattern
from ...patterns import latent_cache_write as latent_cache_write_pattern
from ...patterns import mm_all_reduce as mm_all_reduce_pattern
from ...patterns import moe_gating as moe_gating_pattern
from ...patterns import norm_cast as norm_cast_pattern
from ...patterns import norm_quant as norm_quant_pattern
from ...patterns import paged_attention as paged_attention_pattern
from ...patterns import qk_rope as qk_rope_pattern
from ...patterns import qkv as qkv_pattern
from ...patterns import rms_norm as rms_norm_pattern
from ...patterns import rope as rope_pattern
from ...patterns import transpose_batchmatmul as transpose_batchmatmul_pattern
from ...patterns.match import Match
from ...runtime.ops.contract import OpContract
from ..edit import Edit
from . import (
    attention,
    causal_conv1d,
    clipped_swiglu,
    fast_gelu,
    gated_delta_rule,
    glu,
    group_norm_silu,
    kv_cache_write,
    latent_cache_write,
    mm_all_reduce,
    moe_gating,
    norm_cast,
    norm_quant,
    paged_attention,
    qk_rope,
    qkv,
    rms_norm,
    rope,
    transpose_batchmatmul,
)

Lowering = Callable[[Match, Edit], OpContract]

# Larger kinds first: what they take is not lowered again.
LOWERINGS: Mapping[str, Lowering] = {
    latent_cache_write_pattern.KIND: latent_cache_write.lower,
    qkv_pattern.KIND: qkv.lower,
    qk_rope_pattern.KIND: qk_rope.lower,
    # Behind what gives q and k, in whose layout it takes them.
    paged_attention_pattern.KIND: paged_attention.lower,
    attention_pattern.KIND: attention.lower,
    norm_quant_pattern.KIND: norm_quant.lower,
    norm_cast_pattern.KIND: norm_cast.lower,
    mm_all_reduce_pattern.KIND: mm_all_reduce.lower,
    add_rms_norm_pattern.KIND: rms_norm.lower_add,
    clipped_swiglu_pattern.KIND: clipped_swiglu.lower,
    fast_gelu_pattern.KIND: fast_gelu.lower,
    glu_pattern.KIND: glu.lower,
    group_norm_silu_pattern.KIND: group_norm_silu.lower,
    transpose_batchmatmul_pattern.KIND: transpose_batchmatmul.lower,
    grouped_moe_gating_pattern.KIND: moe_gating.lower_grouped,
    moe_gating_pattern.KIND: moe_gating.lower,
    causal_conv1d_pattern.KIND: causal_conv1d.lower,
    gated_delta_rule_pattern.KIND: gated_delta_rule.lower,
    rms_norm_pattern.KIND: rms_norm.lower,
    rope_pattern.KIND: rope.lower,
    # Last, as what is written may be made contiguous by then.
    kv_cache_write_pattern.KIND: kv_cache_write.lower,
}
