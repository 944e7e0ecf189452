"""The guides: links lead somewhere, options and examples are all there, the support matrix is that of the contracts."""

import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from npu_fuse import Options

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(page for folder in (".", "docs", "examples", "benchmarks") for page in ROOT.glob(f"{folder}/*.md"))

sys.path.append(str(ROOT / "docs"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_readme_has_every_option() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [field.name for field in fields(Options) if f"`{field.name}`" not in text and field.name != "disable"] == []


def test_every_example_is_listed_and_tested() -> None:
    names = {path.stem for path in ROOT.glob("examples/*.py")}
    listed = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert {name for name in names if f"`{name}.py`" not in listed} == set()
    assert {name for name in names if not (ROOT / "tests" / "examples" / f"test_{name}.py").exists()} == set()


def test_the_support_matrix_is_that_of_the_contracts() -> None:
    import support_matrix

    written = (ROOT / "docs" / "support_matrix.md").read_text(encoding="utf-8")
    assert written == support_matrix.text(), "run python docs/support_matrix.py"
