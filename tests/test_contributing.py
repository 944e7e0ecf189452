"""The kind that CONTRIBUTING.md adds is one file of less than 150 lines, and works as it says."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from helpers import compiled, repeats
from npu_fuse.patterns import RULES, Rule, recognise

RULE_FILE, TEST_FILE = re.findall(
    r"^```python\n(.*?)^```", (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(), re.DOTALL | re.MULTILINE
)


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The functions of the test file, with the new rule last in `RULES`."""
    (tmp_path / "soft_cap.py").write_text(RULE_FILE)
    spec = importlib.util.spec_from_file_location("npu_fuse.patterns.soft_cap", tmp_path / "soft_cap.py")
    soft_cap = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, soft_cap)
    spec.loader.exec_module(soft_cap)
    names = {
        "torch": torch,
        "pytest": pytest,
        "compiled": compiled,
        "repeats": repeats,
        "recognise": recognise,
        "RULES": (*RULES, Rule(soft_cap.KIND, soft_cap.match)),
    }
    exec(compile(TEST_FILE, "CONTRIBUTING.md", "exec"), names)
    return names


def test_a_kind_is_one_small_file() -> None:
    assert RULE_FILE.count("\n") < 150


@pytest.mark.parametrize("name", re.findall(r"^def (test_\w+)", TEST_FILE, re.MULTILINE))
def test_what_it_shows_holds(name: str, shown: dict[str, object]) -> None:
    shown[name]()
