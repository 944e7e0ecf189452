"""What the environment says to plug-ins."""

import logging

import pytest

from npu_fuse import Options, Target
from npu_fuse.runtime.serving import environment


@pytest.mark.parametrize(("value", "on"), [(None, False), ("", False), ("0", False), ("1", True), (" 1 ", True)])
def test_off_unless_asked(monkeypatch: pytest.MonkeyPatch, value: str | None, on: bool) -> None:
    monkeypatch.delenv("NPU_FUSE", raising=False)
    if value is not None:
        monkeypatch.setenv("NPU_FUSE", value)
    assert environment.enabled() is on


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NPU_FUSE_OPTIONS", raising=False)
    assert environment.options() == Options()
    monkeypatch.setenv("NPU_FUSE_OPTIONS", '{"disable": ["qkv"], "target": "ascend310p", "encoder_only": ["a.*"]}')
    wanted = Options(disable=frozenset({"qkv"}), target=Target("ascend310p"), encoder_only=("a.*",))
    assert environment.options() == wanted


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"disabled": ["qkv"]}', "did you mean 'disable'?"),
        ('{"disable": "qkv"}', "give a set of kinds"),
        ('{"disable": 3}', "int"),
        ('{"target": "ascend42"}', "unknown SoC 'ascend42'"),
        ("[]", "give a JSON object"),
        ("{disable}", "NPU_FUSE_OPTIONS: Expecting property name"),
    ],
)
def test_settings_that_cannot_be_read_leave_it_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str, said: str
) -> None:
    monkeypatch.setenv("NPU_FUSE", "1")
    monkeypatch.setenv("NPU_FUSE_OPTIONS", text)
    with caplog.at_level(logging.WARNING, logger="npu_fuse"):
        assert not environment.enabled()
    (record,) = caplog.records
    assert record.getMessage().startswith("npu_fuse is off: NPU_FUSE_OPTIONS: ")
    assert said in record.getMessage()


def test_a_switch_that_is_neither_on_nor_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NPU_FUSE", "yes")
    with caplog.at_level(logging.WARNING, logger="npu_fuse"):
        assert not environment.enabled()
    assert "NPU_FUSE: give 1 or 0, not 'yes'" in caplog.text
