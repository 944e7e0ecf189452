"""The guides: links lead somewhere, options and examples are all there, the support matrix is that of the contracts."""

import ast
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


def test_every_public_bug_report_has_a_test_that_exists() -> None:
    text = (ROOT / "docs" / "public_bugs.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| [")]
    assert [row for row in rows if not re.search(r"`tests/\S+\.py::test_\w+`", row)] == []
    named = re.findall(r"`(tests/\S+?)::(\w+)`", text)
    defined = {path: _functions(ROOT / path) for path, _ in named}
    assert [f"{path}::{name}" for path, name in named if name not in defined[path]] == []


def test_every_public_bug_report_is_listed_once_with_its_link() -> None:
    text = (ROOT / "docs" / "public_bugs.md").read_text(encoding="utf-8")
    links = re.findall(r"\[(\S+)#(\d+)\]\((\S+)\)", text)
    assert [link for name, number, link in links if link != f"https://github.com/{name}/issues/{number}"] == []
    listed = [f"{name}#{number}" for name, number, _ in links]
    assert len(set(listed)) == len(listed)
    tested = {
        report
        for path in ROOT.glob("tests/**/*.py")
        for report in re.findall(r"\b[\w-]+/[\w-]+#\d+", path.read_text(encoding="utf-8"))
    }
    assert tested - set(listed) == set()


def _functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
