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


NOTES: tuple[Note, ...] = ()


def note_on(model: str, phase: str, kind: str) -> Note | None:
    """The note on a row, if there is one."""
    for note in NOTES:
        if model in note.models and kind in note.kinds and (not note.phases or phase in note.phases):
            return note
    return None
