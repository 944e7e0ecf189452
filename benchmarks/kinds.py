"""What is counted: the kinds of sites, how many each model truly has, and notes where another count is found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import npu_fuse

__all__ = ["HEADLINE", "KINDS", "NOTES", "TRUE_SITES", "Kind", "Note", "note_on", "true_sites"]


@dataclass(frozen=True)
class Kind:
    """A kind of site as `npu_fuse.Report` counts it.

    Args:
        name: the kind.
        params: what a site must have to be counted here.
    """

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)

    def count(self, report: npu_fuse.Report) -> int:
        return report.count(self.name, **self.params)

    def count_lowered(self, report: npu_fuse.Report) -> int:
        lowered = [site for site in report.sites if site.status == "lowered"]
        return npu_fuse.Report(sites=lowered).count(self.name, **self.params)


# Classes of masks, as they arrive in a compiled graph.
MASKS = (
    *("none", "all_true", "causal_flag", "causal", "causal_offset", "causal_static_cache", "decode_prefix"),
    *("sliding_causal", "sliding_bidirectional", "per_batch_or_head", "bias"),
)

# By the names that true_sites.json uses. A kind that it has counts for is added by one line.
KINDS: dict[str, Kind] = {
    "rms_norm": Kind("rms_norm"),
    "rms_norm:gated": Kind("rms_norm", {"gated": True}),
    "rms_norm:no_weight": Kind("rms_norm", {"weight": False}),
    "add_rms_norm": Kind("add_rms_norm"),
    "rope": Kind("rope"),
    "norm_rope_chain": Kind("norm_rope_chain"),
    "norm_rope_chain:per_head": Kind("norm_rope_chain", {"per_head": True}),
    "norm_rope_chain:full_width": Kind("norm_rope_chain", {"per_head": False}),
    "rope_then_norm": Kind("rope_then_norm"),
    "glu": Kind("glu"),
    "glu:silu": Kind("glu", {"activation": "silu"}),
    "glu:gelu": Kind("glu", {"activation": "gelu"}),
    "glu:gelu_tanh": Kind("glu", {"activation": "gelu_tanh"}),
    "glu:sigmoid": Kind("glu", {"activation": "sigmoid"}),
    "qkv:separate": Kind("qkv", {"style": "separate"}),
    "qkv:fused": Kind("qkv", {"style": "fused"}),
    "causal_conv1d:prefill": Kind("causal_conv1d", {"mode": "prefill"}),
    "causal_conv1d:update": Kind("causal_conv1d", {"mode": "update"}),
    "attention": Kind("attention"),
    **{f"attention:{mask}": Kind("attention", {"mask": mask}) for mask in MASKS},
}

# The kinds that the headline speaks of.
HEADLINE = ("rms_norm", "add_rms_norm", "rope", "norm_rope_chain", "glu:silu")

# By model and phase.
TRUE_SITES: dict[str, dict[str, dict[str, int]]] = json.loads(
    Path(__file__).with_name("true_sites.json").read_text()
)["models"]


def true_sites(model: str, phase: str, kind: str) -> int | None:
    """How many sites of a kind a model has in a phase, over all graphs of one call; None where nobody knows.

    A prompt in float32 has the sites of one in bfloat16.
    """
    sites = TRUE_SITES[model][phase.removesuffix("_fp32")]
    if kind.startswith("qkv:") and "qkv:unknown" in sites:
        return None
    return sites.get(kind, 0)


@dataclass(frozen=True)
class Note:
    """Why the count that is found is not the one of true_sites.json, in some rows.

    Args:
        models: where.
        kinds: likewise.
        why: what differs, with the line of code that shows it.
        is_right: whether the count found is the right one.
        phases: where, if not in all.
    """

    models: tuple[str, ...]
    kinds: tuple[str, ...]
    why: str
    is_right: bool = False
    phases: tuple[str, ...] = ()


# Lines of transformers 5.24 and diffusers 0.42.
NOTES: tuple[Note, ...] = (
    Note(
        ("gemma4_text",),
        ("add_rms_norm",),
        "between the last add of a layer and the next norm stands a product: hidden_states *= self.layer_scalar"
        " (modeling_gemma4.py:1417); so two of the four are no norm of a sum",
        is_right=True,
    ),
    Note(
        ("wav2vec2-conformer",),
        ("rope",),
        "a method of each of the two layers rotates what q and k are projected from: (hidden_states * cos) +"
        " (rotated_states * sin) (modeling_wav2vec2_conformer.py:593)",
        is_right=True,
    ),
    Note(
        ("falcon_mamba",),
        ("rms_norm:no_weight",),
        "the norms of B, C and dt return self._norm(x.float()).type_as(x); the weight that their class holds is said to"
        " be a dummy (modeling_falcon_mamba.py:51-58)",
        is_right=True,
    ),
    Note(
        ("qwen2_5_vl_vision",),
        ("qkv:fused",),
        "there are two layers with one projection each; attention is called once a window"
        " (modeling_qwen2_5_vl.py:318), which was counted",
        is_right=True,
    ),
    Note(
        ("longcat_flash",),
        ("add_rms_norm", "glu", "glu:silu"),
        "graph breaks: experts are chosen by nonzero() and .item() (modeling_longcat_flash.py:187-189), so Dynamo runs"
        " them eagerly and in no graph, and of two pairs the add is in one graph and the norm in the next",
    ),
    Note(
        ("qwen2_5_vl_vision",),
        ("add_rms_norm",),
        "graph breaks: lengths.tolist() (modeling_qwen2_5_vl.py:318) splits each layer, so that the add at its end is"
        " in one graph and the next norm in another",
    ),
    Note(
        ("muse_spark_text",),
        ("rms_norm:no_weight",),
        "the gates of the residual multiply what was normed without a weight by a vector (modeling_muse_spark.py:425),"
        " which makes one norm with a weight of it: three of nine; two others scale x before it is normed (line 138)"
        " and have no weight",
    ),
    Note(
        ("cohere2", "exaone4"),
        ("qkv:separate",),
        "the kind is a projection whose q and k are rotated; this model's global layers don't rotate them",
    ),
    Note(
        (
            *("bart", "bert", "clip_vision_model", "dinov2", "electra", "gpt2", "siglip_vision_model", "t5", "vit"),
            *("xlm-roberta", "diffusers_pixart", "diffusers_sd3"),
        ),
        ("qkv:separate", "qkv:fused"),
        "the kind is a projection whose q and k are rotated; this model rotates nothing",
    ),
    Note(
        ("bloom", "deberta-v2", "gemma2", "gpt_oss"),
        tuple(f"attention:{mask}" for mask in MASKS),
        "attention is written out in the layer, and the truth has no class for the masks of such",
        is_right=True,
    ),
    Note(
        ("lfm2", "lfm2_moe", "qwen3_next", "qwen3_5_text", "falcon_h1", "bamba"),
        ("attention:causal_offset", "attention:causal_static_cache"),
        "the length of the cache is read at run time; that it was empty, so that the offset was 0, only the call shows",
        phases=("prefill_cached",),
    ),
    Note(
        ("diffusers_ltx",),
        ("attention:all_true", "attention:bias"),
        "the mask is an input of the graph; that all of it was True only the call shows",
    ),
    Note(
        ("siglip_vision_model",),
        ("attention", "attention:none"),
        "the head that pools attends too, by nn.MultiheadAttention (modeling_siglip.py:621)",
        is_right=True,
    ),
    Note(
        ("longcat_flash",),
        ("attention", *(f"attention:{mask}" for mask in MASKS)),
        "graph breaks: the mask of a layer arrives as an input of its graph, and layers that are alike run one graph",
    ),
    Note(
        ("qwen2_vl_vision", "qwen2_5_vl_vision"),
        ("attention", *(f"attention:{mask}" for mask in MASKS)),
        "graph breaks: lengths.tolist() (modeling_qwen2_vl.py:403) splits each layer, and both layers run one graph",
    ),
    Note(
        ("dinov3_vit", "sapiens2"),
        ("qkv:separate",),
        "only the tokens of patches are rotated, and put together again with the others (apply_rotary_pos_emb)",
    ),
)


def note_on(model: str, phase: str, kind: str) -> Note | None:
    """The note on a row, if there is one."""
    for note in NOTES:
        if model in note.models and kind in note.kinds and (not note.phases or phase in note.phases):
            return note
    return None
