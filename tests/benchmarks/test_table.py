"""The printed tables, and the exit status that says whether anything is left to explain."""

import pytest

import results
import table
from kinds import HEADLINE, KINDS, Note, true_sites
from table import print_tables


def perfect(model: str, phase: str = "prefill", **content: object) -> dict[str, object]:
    found = {kind: true for kind in KINDS if (true := true_sites(model, phase, kind))}
    row = {"model": model, "phase": phase, "found": found, "lowered": dict(found), "refused": {}}
    return row | {"peers": {}, "peer_failures": {}} | content


def test_counts_peers_and_differences_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        perfect("chameleon", lowered={"rms_norm": 2}, peers={"torchair": {"rope": 5}}, difference=2.5e-7),
        perfect("chameleon", "decode", lowered={"rms_norm": 2}, peers={"torchair": {"rope": 5}}),
    ]
    assert print_tables({"cpu": rows, "npu": []}) == 0
    printed = capsys.readouterr().out
    assert "5/5→2" in printed
    assert "2/2→0" in printed
    assert "cpu: prefill " in printed
    assert "cpu: decode " in printed
    assert "5 rope" in printed
    assert "2e-07" in printed
    assert "100.0%" in printed


def test_phases_that_are_alike_share_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_tables({"cpu": [perfect("bloom"), perfect("bloom", "decode")]}) == 0
    assert "cpu: prefill decode" in capsys.readouterr().out


def test_a_peer_that_failed_is_told_from_one_that_found_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_tables({"npu": [perfect("llama", peer_failures={"npugraph_ex": "it crashed"})]}) == 0
    assert "failed" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "status"), [(HEADLINE[0], 1), ("qkv:separate", 0)])
def test_a_headline_row_that_differs_wants_a_note(
    kind: str, status: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = perfect("llama")
    row["found"][kind] += 1
    assert print_tables({"cpu": [row]}) == status
    assert "not explained" in capsys.readouterr().out
    note = Note(("llama",), (kind,), "the model has one more")
    monkeypatch.setattr(results, "note_on", lambda *place: note if place == ("llama", "prefill", kind) else None)
    assert print_tables({"cpu": [row]}) == 0
    assert "the model has one more" in capsys.readouterr().out


def test_a_row_that_could_not_be_measured_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_tables({"cpu": [{"model": "llama", "phase": "prefill", "error": "took longer than 1 s"}]}) == 1
    assert "llama prefill on cpu: took longer than 1 s" in capsys.readouterr().out


def test_the_reasons_of_refusals_are_added_up(capsys: pytest.CaptureFixture[str]) -> None:
    refused = {"glu": {f"reason {i}": 10 - i for i in range(table.REASONS + 2)}}
    print_tables({"cpu": [perfect("llama", refused=refused), perfect("llama", "decode", refused=refused)]})
    printed = capsys.readouterr().out
    assert "20    │ reason 0" in printed
    assert f"reason {table.REASONS} " not in printed
    assert "others" in printed
