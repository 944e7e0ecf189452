"""The golden numbers: each small model fuses as it is recorded, and as is true; what differs is told as a table."""

from io import StringIO

import pytest
from rich.console import Console

import golden
from golden import ACCEPT, GOLDEN, Difference, differences, grown, measured, recorded, table
from results import Row, counts


def text(found: list[Difference]) -> str:
    console = Console(file=StringIO(), width=120)
    console.print(table(found))
    return console.file.getvalue()


@pytest.mark.parametrize("model", sorted(GOLDEN))
def test_launches_bytes_and_fused_sites_are_as_recorded(model: str) -> None:
    rows = {(model, phase): measured(model, phase) for phase in GOLDEN[model]}
    kept = recorded()
    found = [difference for place, row in rows.items() for difference in differences(kept.get(place, {}), row)]
    assert not found, f"\n{text(found)}{ACCEPT}"
    untrue = [count for count in counts("cpu", list(rows.values())) if count.found != count.true and not count.note]
    assert not untrue


def test_nothing_is_recorded_that_is_not_asked_for() -> None:
    assert set(recorded()) == {(model, phase) for model, phases in GOLDEN.items() for phase in phases}


def row(**content: object) -> Row:
    numbers = {"launches": [40, 10], "bytes": [4000, 1000], "found": {"glu": 2}, "lowered": {"glu": 2}}
    return {"model": "llama", "phase": "decode", **numbers, "ops": {"npu::npu_swiglu": 2}, "share": 0.1, **content}


def test_alike_rows_have_no_differences() -> None:
    assert differences(row(), row(share=0.4)) == []


@pytest.mark.parametrize(
    ("now", "what", "verdict"),
    [
        ({"launches": [40, 11]}, "launches", "worse"),
        ({"launches": [40, 9]}, "launches", "better"),
        ({"launches": [41, 10]}, "launches before", ""),
        ({"bytes": [4000, 1001]}, "bytes", "worse"),
        ({"lowered": {"glu": 1}}, "lowered glu", "worse"),
        ({"lowered": {}}, "lowered glu", "worse"),
        ({"found": {"glu": 2, "qkv": 1}}, "found qkv", "better"),
        ({"ops": {"npu::npu_swiglu": 1}}, "op npu::npu_swiglu", ""),
    ],
)
def test_one_number_that_differs_is_one_line_with_its_verdict(now: dict[str, object], what: str, verdict: str) -> None:
    (difference,) = differences(row(), row(**now))
    assert (difference.what, difference.verdict) == (what, verdict)
    assert what in text([difference])


def test_a_row_that_is_new_or_gone_is_one_line() -> None:
    (new,), (gone,) = differences({}, row()), differences(row(), {})
    assert (new.old, new.new, new.verdict) == (None, 10, "")
    assert (gone.old, gone.new, gone.verdict) == (10, None, "")


def test_a_share_is_told_where_it_grew_by_more_than_half() -> None:
    assert not list(grown(row(), row(share=0.15)))
    (difference,) = grown(row(), row(share=0.16))
    assert difference.verdict == "worse"
    assert not list(grown({}, row()))


def test_what_differs_is_printed_and_recorded_where_it_is_accepted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved: list[Row] = []
    monkeypatch.setattr(golden, "GOLDEN", {"llama": ("decode",)})
    monkeypatch.setattr(golden, "measured", lambda model, phase: row(launches=[40, 12], share=0.12))
    monkeypatch.setattr(golden, "load", lambda _: [row()])
    monkeypatch.setattr(golden, "save", lambda _, rows: saved.extend(rows))
    assert golden.main([]) == 1
    printed = capsys.readouterr().out
    assert "worse" in printed
    assert "make golden" in printed
    assert golden.main(["--accept"]) == 0
    assert saved == [row(launches=[40, 12])]  # the share is that of a like day
