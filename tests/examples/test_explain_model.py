"""The example of a report: reasons lead to what is put right."""

from pathlib import Path

import explain_model
import pytest


def test_reasons_go_when_they_are_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    assert explain_model.main(["--html", str(page)]) == 0
    assert "an RMSNorm adds it under" in " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "soft-capping" in page.read_text(encoding="utf-8")


def test_another_reason_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain_model, "report", lambda is_right, real=explain_model.report: real(True))
    assert explain_model.main([]) == 1
