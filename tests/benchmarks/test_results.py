"""Results are kept and compared row by row."""

from pathlib import Path

import pytest

import results
from results import counts, load, phases_of, save


def row(model: str = "llama", phase: str = "prefill", **content: object) -> dict[str, object]:
    return {"model": model, "phase": phase, "found": {}, "lowered": {}, "peers": {}, "peer_failures": {}} | content


def test_rows_come_back_in_order_and_one_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_FOLDER", tmp_path)
    assert load("cpu") == []
    rows = [row("qwen3"), row(phase="decode"), row()]
    save("cpu", rows)
    assert load("cpu") == [rows[2], rows[1], rows[0]]
    assert sum('"model"' in line for line in (tmp_path / "cpu.json").read_text().splitlines()) == 3
    assert load("npu") == []


def test_kinds_that_are_there_or_were_found_are_counted() -> None:
    found = {"rms_norm": 5, "add_rms_norm": 3, "rope_then_norm": 1}
    of_llama = {c.kind: c for c in counts("cpu", [row(found=found, lowered={"rms_norm": 4})])}
    assert (of_llama["rms_norm"].found, of_llama["rms_norm"].lowered, of_llama["rms_norm"].true) == (5, 4, 5)
    assert (of_llama["add_rms_norm"].found, of_llama["add_rms_norm"].true) == (3, 4)
    assert (of_llama["rope"].found, of_llama["rope"].true) == (0, 4)
    assert (of_llama["rope_then_norm"].found, of_llama["rope_then_norm"].true) == (1, 0)
    assert "norm_rope_chain" not in of_llama
    assert of_llama["rms_norm"].is_headline
    assert not of_llama["qkv:separate"].is_headline


def test_what_is_unknown_or_was_not_measured_is_not_counted() -> None:
    decode = counts("cpu", [row(phase="decode", found={"qkv:separate": 2})])
    assert "qkv:separate" not in {count.kind for count in decode}
    assert list(counts("cpu", [{"model": "llama", "phase": "prefill", "error": "crashed"}])) == []


def test_float32_is_measured_where_there_are_numbers() -> None:
    assert phases_of("gemma", "cpu") == ["prefill", "prefill_fp32", "decode"]
    assert phases_of("gemma", "npu") == ["prefill", "decode"]


def test_what_reads_numbers_between_its_graphs_is_not_run_on_fake_tensors() -> None:
    assert phases_of("opt", "cpu") == ["prefill", "prefill_fp32", "decode"]
    assert phases_of("opt", "npu") == ["prefill"]
    assert phases_of("longcat_flash", "npu") == []
