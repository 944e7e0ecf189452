"""What is otherwise in one report than in another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..report import Report, Site, Status
from .table import COLOURS, places


def changes(before: Report, after: Report) -> RenderableType | None:
    """The differences as a table; None where there are none.

    A site is known by its kind and the module that wrote it. Times and line numbers make no difference.
    """
    parts: list[RenderableType] = []
    figures = Table(pad_edge=False)
    for name in ("", "before", "after"):
        figures.add_column(name, justify="right" if name else "left")
    rows = [
        ("launches", before.launches_before, after.launches_before),
        ("launches when fused", before.launches_after, after.launches_after),
        ("bytes", before.bytes_before, after.bytes_before),
        ("bytes when fused", before.bytes_after, after.bytes_after),
        *((name, before.ops[name], after.ops[name]) for name in sorted(before.ops | after.ops)),
    ]
    for name, *counts in rows:
        if counts[0] != counts[1]:
            figures.add_row(name, *map(str, counts))
    if figures.row_count:
        parts.append(figures)
    sites = Table(pad_edge=False)
    for name in ("n", "kind", "where", "before", "after"):
        sites.add_column(name, overflow="fold", justify="right" if name == "n" else "left")
    for (kind, old, new), modules in _changed(before.sites, after.sites).items():
        sites.add_row(str(len(modules)), kind, places(modules), _told(old), _told(new))
    if sites.row_count:
        parts.append(sites)
    return Group(*parts) if parts else None


_Outcome = tuple[Status, str] | None  # and the op or the reason


def _changed(before: Iterable[Site], after: Iterable[Site]) -> dict[tuple[str, _Outcome, _Outcome], list[str]]:
    old, new = _outcomes(before), _outcomes(after)
    found: dict[tuple[str, _Outcome, _Outcome], list[str]] = {}
    for kind, module in dict.fromkeys([*old, *new]):
        had, has = old.get((kind, module), Counter()), new.get((kind, module), Counter())
        gone, came = list((had - has).elements()), list((has - had).elements())
        for number in range(max(len(gone), len(came))):
            pair = (gone[number] if number < len(gone) else None, came[number] if number < len(came) else None)
            found.setdefault((kind, *pair), []).append(module)
    return found


def _outcomes(sites: Iterable[Site]) -> dict[tuple[str, str], Counter[tuple[Status, str]]]:
    found: dict[tuple[str, str], Counter[tuple[Status, str]]] = {}
    for site in sites:
        outcome = (site.status, site.op or site.reason or "")
        found.setdefault((site.kind, site.where), Counter())[outcome] += 1
    return found


def _told(outcome: _Outcome) -> Text:
    if outcome is None:
        return Text("not there", "dim")
    status, detail = outcome
    return Text.assemble((status, COLOURS[status]), f": {detail}" if detail else "")
