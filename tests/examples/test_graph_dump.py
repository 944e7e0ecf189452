"""The example of a dump: the files are there, run, and agree."""

from pathlib import Path

import graph_dump
import pytest


def test_it_prints_both_and_keeps_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert graph_dump.main(["--to", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "aten.rsqrt" in text
    assert "split_qkv_rmsnorm_rope" in text
    assert (tmp_path / "graph_0" / "report.html").is_file()


def test_numbers_that_differ_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_dump, "BOUND", 1e-6)
    assert graph_dump.main([]) == 1
