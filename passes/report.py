"""What a compilation found and did, and why it left alone what it left alone."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

Status = Literal["lowered", "refused", "missed"]


@dataclass(slots=True)
class Site:
    """One recognised place, or a near miss.

    Args:
        kind: what it is: "rms_norm", "qkv", …
        status: "lowered" to `op`; "refused": recognised, but no op may stand for it; "missed": nearly that kind.
        op: the fused op it became, on its own or as a part of a larger site.
        reason: why it was refused or missed; None if lowered.
        module: path of the module that wrote it, as in `model.named_modules()`.
        source: the model's line, `file:line in function`.
        params: what the spelling fixed: eps, sizes, style.
        roundings: where the op rounds otherwise than the model.
        change: what is computed that the model's own graph doesn't say, and on whose word.
    """

    kind: str
    status: Status
    op: str | None = None
    reason: str | None = None
    module: str | None = None
    source: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    roundings: tuple[str, ...] = ()
    change: str | None = None


@dataclass(slots=True, repr=False)
class Report:
    """All sites of one compilation, or of several merged.

    Args:
        sites: recognised places and near misses, in graph order.
        ops: how often each fused op is in the final graph.
        launches_before: calls of the model's graph that are no views.
        launches_after: likewise, of the final graph.
        seconds: time taken, by pass.
        graphs: how many graphs it speaks of.
        remark: why nothing was tried at all, if so.
        failure: the traceback of an internal failure that left the graph unfused.
    """

    sites: list[Site] = field(default_factory=list)
    ops: Counter[str] = field(default_factory=Counter)
    launches_before: int = 0
    launches_after: int = 0
    seconds_by_pass: dict[str, float] = field(default_factory=dict)
    graphs: int = 1
    remark: str | None = None
    failure: str | None = None

    @property
    def seconds(self) -> float:
        """Time that all passes took."""
        return sum(self.seconds_by_pass.values())

    def count(self, kind: str, **params: Any) -> int:
        """How many sites of a kind were recognised, lowered or not, with the given parameters.

        A parameter is compared with `site.params`; for a bool, `weight=True` asks whether there is one.
        """
        return sum(
            site.kind == kind
            and site.status != "missed"
            and all(name in site.params and site.params[name] == value for name, value in params.items())
            for site in self.sites
        )

    @classmethod
    def merged(cls, reports: Iterable[Report]) -> Report:
        """One report of several graphs."""
        total = cls(graphs=0)
        remarks, failures = [], []
        for report in reports:
            total.sites += report.sites
            total.ops += report.ops
            total.launches_before += report.launches_before
            total.launches_after += report.launches_after
            total.graphs += report.graphs
            for name, seconds in report.seconds_by_pass.items():
                total.seconds_by_pass[name] = total.seconds_by_pass.get(name, 0.0) + seconds
            remarks += [report.remark] if report.remark else []
            failures += [report.failure] if report.failure else []
        total.remark = "\n".join(dict.fromkeys(remarks)) or None
        total.failure = "\n".join(failures) or None
        return total

    def to_json(self) -> str:
        """The report as JSON; `"version"` is that of its form."""
        content = {
            "version": 1,
            "graphs": self.graphs,
            "ops": self.ops,
            "launches_before": self.launches_before,
            "launches_after": self.launches_after,
            "seconds": self.seconds,
            "seconds_by_pass": self.seconds_by_pass,
            "remark": self.remark,
            "failure": self.failure,
            "sites": [asdict(site) for site in self.sites],
        }
        return json.dumps(content, default=lambda value: str(value).removeprefix("torch."), indent=2)

    def summary(self) -> str:
        """One line: what became what, and what is left."""
        if self.remark:
            return f"nothing fused: {self.remark}"
        if self.failure:
            return f"nothing fused, by an internal failure: {self.failure.strip().splitlines()[-1]}"
        refused = sum(site.status == "refused" for site in self.sites)
        missed = sum(site.status == "missed" for site in self.sites)
        ops = ", ".join(f"{count} {name}" for name, count in self.ops.most_common()) or "no fused ops"
        launches = f"{self.launches_before} launches became {self.launches_after}"
        changed = sum(site.change is not None for site in self.sites)
        declared = f"; {changed} changed as the model declares" if changed else ""
        left = f"{refused} sites refused, {missed} near misses{declared}"
        return f"{ops}; {launches}; {left}; {self.seconds * 1e3:.0f} ms"

    def __repr__(self) -> str:
        return f"<Report of {self.graphs} graph{'s' * (self.graphs != 1)}: {self.summary()}>"

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=120).print(self)
        return text.getvalue()

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = [Text(self.summary(), style="bold")]
        if self.sites:
            parts.append(_table(self.sites))
        if self.failure:
            parts.append(Text(f"Left unfused by an internal failure:\n{self.failure}", style="red"))
        return Group(*parts)


_COLOURS: dict[Status, str] = {"lowered": "green", "refused": "yellow", "missed": "magenta"}


def _table(sites: Iterable[Site]) -> Table:
    """A row for all sites that are alike."""
    table = Table(pad_edge=False)
    table.add_column("n", justify="right")
    table.add_column("kind", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("fused op", overflow="fold")
    table.add_column("where", overflow="fold")
    table.add_column("why not, or what is otherwise", overflow="fold", ratio=1)
    rows: dict[tuple[str, Status, str, str], list[str]] = {}
    for site in sites:
        remark = site.reason or site.change or "; ".join(site.roundings)
        rows.setdefault((site.kind, site.status, site.op or "", remark), []).append(site.module or "?")
    for (kind, status, op, remark), modules in rows.items():
        colour = _COLOURS[status]
        op = op.replace("::", "::\n")
        table.add_row(str(len(modules)), kind, Text(status, colour), op, Text(_places(modules)), Text(remark))
    return table


_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def _places(modules: Iterable[str]) -> str:
    """Modules that differ only in the number of their layer as one: `layers.0…17.self_attn`."""
    numbers: dict[str, list[int]] = {}
    for module in modules:
        number = _LAYER.search(module)
        template = _LAYER.sub("{}", module, count=1) if number else module
        numbers.setdefault(template, []).extend([int(number[0])] if number else [])
    return "\n".join(
        template.replace("{}", f"{min(found)}…{max(found)}" if min(found) != max(found) else str(found[0]))
        if found
        else template
        for template, found in numbers.items()
    )
