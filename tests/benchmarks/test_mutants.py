"""A check is what can be left out, and the tests that are known to fail without one are there."""

import ast
from pathlib import Path

import pytest

import checks
import switches
from checks import ROOT
from mutants import load

RULES = '''
def judge(size, dtype, parts):
    """Raises where it is refused."""
    if size % 2 or not (dtype == "half" and 1 <= size <= 8):
        reason = f"{size} of {dtype}"
        raise Refused(reason)
    if parts and size > 4:
        raise Refused("too many")
    refuse_others(parts)
    return "fused"


def refuse_others(parts):
    for part in parts:
        if part is None:
            raise Refused("a part is missing")
'''
FOUND = [
    ("judge", "size % 2"),
    ("judge", "not dtype == 'half'"),
    ("judge", "not 1 <= size"),
    ("judge", "not size <= 8"),
    ("judge", "parts and size > 4"),
    ("judge", "refuse_others(parts)"),
    ("refuse_others", "part is None"),
]


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The function above with switches: judged without the check of a number."""
    (tmp_path / "passes" / "lowering").mkdir(parents=True)
    (tmp_path / "passes" / "lowering" / "rules.py").write_text(RULES)
    monkeypatch.setattr(checks, "ROOT", tmp_path)
    found, source = checks.switched("passes/lowering/rules.py")
    assert [(check.function, check.text) for check in found] == FOUND
    names = {"Refused": ValueError}
    exec(source, names)

    def judged(off: int | None, *arguments: object) -> str:
        monkeypatch.setattr(switches, "off", off)
        try:
            return names["judge"](*arguments)
        except ValueError as refusal:
            return str(refusal)

    return judged


def test_with_all_checks_on_nothing_changes(judge) -> None:
    assert judge(None, 2, "half", []) == "fused"
    assert judge(None, 3, "half", []) == "3 of half"
    assert judge(None, 10, "half", []) == "10 of half"
    assert judge(None, 6, "half", [1]) == "too many"
    assert judge(None, 2, "half", [None]) == "a part is missing"


@pytest.mark.parametrize(
    ("off", "arguments"),
    [
        (0, (3, "half", [])),
        (1, (2, "float", [])),
        (2, (0, "half", [])),
        (3, (10, "half", [])),
        (4, (6, "half", [1])),
        (5, (2, "half", [None])),
        (6, (2, "half", [None])),
    ],
)
def test_a_check_that_is_off_refuses_nothing_and_the_others_do(judge, off: int, arguments: tuple) -> None:
    for other in range(len(FOUND)):
        refuses = other != off and (off, other) not in ((5, 6), (6, 5))  # one is the call of the other
        assert (judge(other, *arguments) == "fused") is not refuses


def test_each_check_has_a_test_that_fails_without_it() -> None:
    known = load()
    without = [check.key for check in checks.checks() if not known.get(check.key)]
    assert not without, 'say `make mutants`, or `make mutants ARGS="tests/…"` of the tests that are meant to'


def test_these_tests_are_there() -> None:
    named: dict[str, set[str]] = {}
    for test in filter(None, load().values()):
        path, _, name = test.partition("::")
        named.setdefault(path, set()).add(name.partition("[")[0])
    for path, names in named.items():
        functions = {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if hasattr(node, "name")}
        assert names <= functions, f"say `make mutants`: not in {path}"
