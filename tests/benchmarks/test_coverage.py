"""The driver: one process a model, and what it says when one ends badly."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def coverage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, loaded by its path as a well-known package has its name; it writes into a folder of its own."""
    path = Path(__file__).parents[2] / "benchmarks" / "coverage.py"
    spec = importlib.util.spec_from_file_location("coverage_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "coverage.py"))
    monkeypatch.setattr(sys.modules["results"], "_FOLDER", tmp_path)
    return module


def child(tmp_path: Path, ending: str) -> None:
    """A measure.py that measures one phase, and then does something else."""
    (tmp_path / "measure.py").write_text(
        "import json, sys, time\n"
        "print('a warning on stdout')\n"
        "print(json.dumps({'model': sys.argv[2], 'phase': sys.argv[3], 'found': {}}), flush=True)\n" + ending
    )


@pytest.mark.parametrize(
    ("ending", "error"),
    [
        ("sys.exit(3)", "its process ended with status 3"),
        ("print('{\"model\": ', end='', flush=True); time.sleep(60)", "took longer than 5 s"),
    ],
    ids=["crash", "hang"],
)
def test_rows_before_a_crash_or_a_hang_are_kept(coverage: ModuleType, tmp_path: Path, ending: str, error: str) -> None:
    child(tmp_path, ending)
    rows = coverage.measured("cpu", "llama", ["prefill", "decode"], timeout=5)
    assert rows == [
        {"model": "llama", "phase": "prefill", "found": {}},
        {"model": "llama", "phase": "decode", "error": error},
    ]


def test_a_run_keeps_the_rows_of_others_and_resumes_what_is_missing(coverage: ModuleType, tmp_path: Path) -> None:
    child(tmp_path, "")
    arguments = ["run", "cpu", "--models", "llama", "gpt2", "--phases", "prefill", "decode"]
    assert coverage.main(arguments) == 0
    rows = {(row["model"], row["phase"]): row for row in coverage.load("cpu")}
    assert {place for place, row in rows.items() if "error" in row} == {("llama", "decode"), ("gpt2", "decode")}

    child(tmp_path, "print(json.dumps({'model': 'llama', 'phase': 'decode', 'found': {}, 'again': sys.argv[3:]}))")
    assert coverage.main([*arguments[:3], "llama", "--phases", "prefill", "decode", "--resume"]) == 0
    again = {(row["model"], row["phase"]): row for row in coverage.load("cpu")}
    assert again["llama", "decode"]["found"] == {}
    assert "error" in again["gpt2", "decode"]


def test_only_a_row_of_the_same_source_without_error_is_kept(coverage: ModuleType) -> None:
    assert coverage.is_kept({"source": "abc"}, "abc")
    assert not coverage.is_kept({"source": "abc"}, "abd")
    assert not coverage.is_kept({"source": "abc", "error": "crashed"}, "abc")
    assert not coverage.is_kept(None, "abc")


def test_unknown_models_are_refused(coverage: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        coverage.main(["run", "cpu", "--models", "llamma"])
    assert "llamma" in capsys.readouterr().err
