"""The example of a kind of one's own."""

import custom_pattern
import pytest


def test_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    custom_pattern.main()
    assert "2 my_npu::soft_cap" in capsys.readouterr().out


def test_it_is_as_short_as_it_says() -> None:
    with open(custom_pattern.__file__, encoding="utf-8") as file:
        text = file.read().partition("# A kind of one's own")[2].partition("\n# ---")[0]
    assert len(text.strip().splitlines()) < 40
