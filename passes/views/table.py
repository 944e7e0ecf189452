"""A report on a terminal: a line for each layer, then a line for all sites that are alike."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..report import Report, Site, Status

COLOURS: dict[Status, str] = {"lowered": "green", "refused": "yellow", "missed": "magenta"}

_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_OUTSIDE = "(outside of layers)"


def table(report: Report) -> RenderableType:
    """The whole report."""
    parts: list[RenderableType] = [Text(report.summary(), style="bold")]
    if any(map(layer_of, (site.module for site in report.sites))):
        parts.append(_layers(report.sites))
    if report.sites:
        parts.append(_alike(report.sites))
    if report.failure:
        parts.append(Text(f"Left unfused by an internal failure:\n{report.failure}", style="red"))
    return Group(*parts)


def layer_of(module: str | None) -> str | None:
    """The layer that a module is of: its path up to the first number, `model.layers.3`; None outside of layers."""
    number = _LAYER.search(module or "")
    return module[: number.end()] if module and number else None


def _layers(sites: Iterable[Site]) -> Table:
    """A row for each layer, or for neighbouring ones that are alike; a column for each kind."""
    kinds: dict[str, None] = {}
    layers: dict[str, dict[str, Counter[Status]]] = {}
    for site in sites:
        kinds[site.kind] = None
        layers.setdefault(layer_of(site.module) or _OUTSIDE, {}).setdefault(site.kind, Counter())[site.status] += 1
    rows: list[tuple[list[str], dict[str, Counter[Status]]]] = []
    for layer in sorted(layers, key=_by_number):
        found = layers[layer]
        if rows and rows[-1][1] == found and _LAYER.sub("", rows[-1][0][0]) == _LAYER.sub("", layer):
            rows[-1][0].append(layer)
        else:
            rows.append(([layer], found))
    shown = Table(pad_edge=False, caption="lowered / recognised, and near misses as +n", caption_justify="left")
    shown.add_column("layer", no_wrap=True)
    for kind in kinds:
        shown.add_column(kind.replace("_", "\n"), justify="right")
    for names, found in rows:
        shown.add_row(places(names), *(_cell(found.get(kind, Counter())) for kind in kinds))
    return shown


def _by_number(layer: str) -> tuple[bool, str, int]:
    number = _LAYER.search(layer)
    return (layer == _OUTSIDE, layer[: number.start()] if number else layer, int(number[0]) if number else 0)


def _cell(found: Counter[Status]) -> Text:
    recognised = found["lowered"] + found["refused"]
    text = Text()
    if recognised:
        colour = COLOURS["refused" if found["refused"] else "lowered"]
        text.append(str(recognised) if not found["refused"] else f"{found['lowered']}/{recognised}", colour)
    if found["missed"]:
        text.append(f"+{found['missed']}", COLOURS["missed"])
    return text


def _alike(sites: Iterable[Site]) -> Table:
    """A row for all sites that are alike."""
    shown = Table(pad_edge=False)
    shown.add_column("n", justify="right")
    shown.add_column("kind", no_wrap=True)
    shown.add_column("status", no_wrap=True)
    shown.add_column("fused op", overflow="fold")
    shown.add_column("where", overflow="fold")
    shown.add_column("why not, or what is otherwise", overflow="fold", ratio=1)
    rows: dict[tuple[str, Status, str, str], list[str]] = {}
    for site in sites:
        remark = site.reason or site.change or "; ".join(site.roundings)
        rows.setdefault((site.kind, site.status, site.op or "", remark), []).append(site.where)
    for (kind, status, op, remark), modules in rows.items():
        op = op.replace("::", "::\n")
        shown.add_row(str(len(modules)), kind, Text(status, COLOURS[status]), op, Text(places(modules)), Text(remark))
    return shown


def places(modules: Iterable[str]) -> str:
    """Modules that differ only in the number of their layer as one: `layers.0…5,7.self_attn`."""
    numbers: dict[str, list[int]] = {}
    for module in modules:
        number = _LAYER.search(module)
        template = _LAYER.sub("{}", module, count=1) if number else module
        numbers.setdefault(template, []).extend([int(number[0])] if number else [])
    return "\n".join(template.replace("{}", _ranges(found)) for template, found in numbers.items())


def _ranges(numbers: Iterable[int]) -> str:
    """`0…5,7` for the numbers from 0 to 5, and 7."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return ",".join(f"{r[0]}…{r[-1]}" if len(r) > 1 else str(r[0]) for r in ranges)
