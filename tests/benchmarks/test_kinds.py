"""The table of kinds, and the true counts that it is compared with."""

import pytest

import npu_fuse
from kinds import HEADLINE, KINDS, NOTES, TRUE_SITES, Kind, note_on, true_sites
from models import MODELS
from results import PHASES

# Counted, and not yet compared with anything; the last one says what is not known.
UNUSED = ("attention:other", "qkv:unknown")


def test_every_model_has_true_counts_and_the_other_way_round() -> None:
    assert set(TRUE_SITES) == set(MODELS)
    assert len(MODELS) >= 96


def test_phases_are_known_and_each_model_has_a_prefill() -> None:
    assert all("prefill" in phases for phases in TRUE_SITES.values())
    assert {phase for phases in TRUE_SITES.values() for phase in phases} <= set(PHASES)


def test_kinds_are_spelled_as_in_the_true_counts() -> None:
    counted = {kind for phases in TRUE_SITES.values() for sites in phases.values() for kind in sites}
    assert all(kind in KINDS or kind.startswith(UNUSED) for kind in counted)
    assert set(KINDS) <= counted
    assert set(HEADLINE) <= set(KINDS)


def test_what_is_told_apart_adds_up() -> None:
    for phases in TRUE_SITES.values():
        for sites in phases.values():
            for kind in ("glu", "norm_rope_chain"):
                assert sites.get(kind, 0) == sum(n for name, n in sites.items() if name.startswith(f"{kind}:"))


def test_true_sites_of_known_unknown_and_absent_kinds() -> None:
    assert true_sites("llama", "prefill", "rms_norm") == 5
    assert true_sites("llama", "prefill_fp32", "rms_norm") == 5
    assert true_sites("llama", "prefill", "norm_rope_chain") == 0
    assert true_sites("llama", "decode", "qkv:separate") is None
    with pytest.raises(KeyError):
        true_sites("llama", "prefil", "rms_norm")


def test_a_kind_counts_by_its_parameters_and_by_status() -> None:
    sites = [
        npu_fuse.Site("glu", "lowered", params={"activation": "silu"}),
        npu_fuse.Site("glu", "refused", params={"activation": "silu"}),
        npu_fuse.Site("glu", "refused", params={"activation": "gelu"}),
        npu_fuse.Site("glu", "missed"),
        npu_fuse.Site("rope", "lowered"),
    ]
    report = npu_fuse.Report(sites=sites)
    assert Kind("glu").count(report) == 3
    silu = Kind("glu", {"activation": "silu"})
    assert (silu.count(report), silu.count_lowered(report)) == (2, 1)


def test_notes_speak_of_rows_that_exist() -> None:
    for note in NOTES:
        assert set(note.models) <= set(MODELS)
        assert set(note.kinds) <= set(KINDS)
        assert set(note.phases) <= set(PHASES)
        assert all(note_on(m, p, k) for m in note.models for p in note.phases or PHASES for k in note.kinds)
