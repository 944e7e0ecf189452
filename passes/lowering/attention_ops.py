"""What each attention op calls its arguments, and which of the things that a site may need it can say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from ...runtime.ops.attention_mask import UNLIMITED
from ...runtime.target import Soc

__all__ = ["ATTENTION_OPS", "AttentionOp", "Layout"]

# B batch, N heads, S tokens, D head_dim; H = N * D.
Layout = Literal["BNSD", "BSND", "SBH"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOp:
    """One op.

    Args:
        num_heads: its name of the heads of query.
        num_kv_heads: its name of the heads of key; None where key tells.
        scale: its name of the factor of the scores.
        shift: its name of what is added to the scores.
        pre_tokens: its name of how far back a query sees.
        next_tokens: likewise forward.
        has_modes: whether a mode may stand for a mask everywhere it is lowered for.
        zeros_for: the queries for which it can give zeros where no key is seen: none, several tokens, or any.
        layouts: those it takes q, k and v in, the preferred one first.
        swaps_result: whether it takes "BNSD_BSND".
        gives_several: whether the result is the first of several.
        pads_shift: whether rows of the shift are padded to whole blocks.
        repeats_heads_on: the SoCs on which key needs a head for each of query.
        constant: arguments that are always given.
    """

    num_heads: str = "num_heads"
    num_kv_heads: str | None = "num_key_value_heads"
    scale: str = "scale"
    shift: str = "pse_shift"
    pre_tokens: str = "pre_tokens"
    next_tokens: str = "next_tokens"
    has_modes: bool = True
    zeros_for: Literal["none", "several tokens", "any"] = "none"
    layouts: tuple[Layout, ...] = ("BNSD", "BSND")
    swaps_result: bool = True
    gives_several: bool = True
    pads_shift: bool = True
    repeats_heads_on: frozenset[Soc] = frozenset()
    constant: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


# In order of preference: the kernels of inference, that of training which takes more types and shapes, and the one that
# the oldest SoC has.
ATTENTION_OPS: Mapping[str, AttentionOp] = {
    "npu::npu_fused_infer_attention_score": AttentionOp(zeros_for="several tokens"),
    "npu::npu_fusion_attention_v3": AttentionOp(
        num_heads="head_num",
        num_kv_heads=None,
        shift="pse",
        pre_tokens="pre_tockens",
        next_tokens="next_tockens",
        zeros_for="any",
        layouts=("BNSD", "BSND", "SBH"),
        swaps_result=False,
        pads_shift=False,
    ),
    "npu::npu_prompt_flash_attention": AttentionOp(
        scale="scale_value",
        has_modes=False,
        gives_several=False,
        repeats_heads_on=frozenset({"ascend310p"}),
        constant={"next_tokens": UNLIMITED},
    ),
}
