"""What a compilation found and did, and why it left alone what it left alone."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Console, RenderableType

from .kinds import ALL, check_kind

Status = Literal["lowered", "refused", "missed"]

_VERSION = 3


@dataclass(slots=True)
class Site:
    """One recognised place, or a near miss.

    Args:
        kind: what it is: "rms_norm", "qkv", …
        status: "lowered" to `op`; "refused": recognised, but no op may stand for it; "missed": nearly that kind.
        op: the fused op it became, on its own or as a part of a larger site.
        reason: why it was refused or missed; None if lowered.
        module: path of the module that wrote it, as in `model.named_modules()`; None if it's the model itself.
        source: the model's line, `file:line in function`.
        params: what the spelling fixed: eps, sizes, style.
        roundings: where the op rounds otherwise than the model.
        change: what is computed that the model's own graph doesn't say, and on whose word.
        before: with `Options.keep_graphs`, the nodes that spell it, a line each.
        after: likewise, what stands for them.
        is_lacking: whether it was refused because the machine has no op for any such site.
        verified: with `Options.verify`, how far it was from the model when it was last compared.
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
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    is_lacking: bool = False
    verified: str | None = None

    @property
    def where(self) -> str:
        """The module, as a person reads it."""
        return self.module or "the model itself"


@dataclass(slots=True, repr=False)
class Report:
    """All sites of one compilation, or of several merged.

    Args:
        sites: recognised places and near misses, in graph order.
        ops: how often each fused op is in the final graph.
        launches_before: calls of the model's graph that are no views.
        launches_after: likewise, of the final graph.
        bytes_before: what those calls read and write, at the sizes that the graph was compiled for.
        bytes_after: likewise, of the final graph.
        seconds: time taken, by pass.
        graphs: how many graphs it speaks of.
        remark: why nothing was tried at all, if so.
        failure: the traceback of an internal failure that left the graph unfused.
        cache: with `Options.cache`, whether it was "taken" from the cache or is "kept" there, or why it isn't.
        left_out: what raised and was left out of this compilation, by name, with its traceback.
        own_kinds: kinds that the backend was taught besides npu_fuse's.
    """

    sites: list[Site] = field(default_factory=list)
    ops: Counter[str] = field(default_factory=Counter)
    launches_before: int = 0
    launches_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    seconds_by_pass: dict[str, float] = field(default_factory=dict)
    graphs: int = 1
    remark: str | None = None
    failure: str | None = None
    cache: str | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    own_kinds: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Time that all passes took."""
        return sum(self.seconds_by_pass.values())

    def count(self, kind: str, **params: Any) -> int:
        """How many sites of a kind were recognised, lowered or not, with the given parameters.

        A parameter is compared with `site.params`; for a bool, `weight=True` asks whether there is one.

        Raises:
            ValueError: there is no such kind.
        """
        check_kind("Report.count", kind, (*ALL, *self.own_kinds))
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
        remarks, failures, cached = [], [], []
        for report in reports:
            total.sites += report.sites
            total.ops += report.ops
            total.launches_before += report.launches_before
            total.launches_after += report.launches_after
            total.bytes_before += report.bytes_before
            total.bytes_after += report.bytes_after
            total.graphs += report.graphs
            for name, seconds in report.seconds_by_pass.items():
                total.seconds_by_pass[name] = total.seconds_by_pass.get(name, 0.0) + seconds
            remarks += [report.remark] if report.remark else []
            failures += [report.failure] if report.failure else []
            cached += [report.cache] if report.cache else []
            total.left_out.update(report.left_out)
            total.own_kinds = tuple(dict.fromkeys((*total.own_kinds, *report.own_kinds)))
        total.remark = "\n".join(dict.fromkeys(remarks)) or None
        total.failure = "\n".join(failures) or None
        total.cache = ", ".join(f"{count} {what}" for what, count in Counter(cached).items()) or None
        return total

    def to_json(self) -> str:
        """The report as JSON; `"version"` is that of its form."""
        content = {
            "version": _VERSION,
            "graphs": self.graphs,
            "ops": self.ops,
            "launches_before": self.launches_before,
            "launches_after": self.launches_after,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "seconds": self.seconds,
            "seconds_by_pass": self.seconds_by_pass,
            "remark": self.remark,
            "failure": self.failure,
            "cache": self.cache,
            "left_out": self.left_out,
            "own_kinds": self.own_kinds,
            "sites": [asdict(site) for site in self.sites],
        }
        return json.dumps(content, default=lambda value: str(value).removeprefix("torch."), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that `to_json` wrote; types in its parameters come back as their names.

        Raises:
            ValueError: it is no JSON of a report, or one of another version.
        """
        content = json.loads(text)
        version = content.get("version") if isinstance(content, dict) else None
        if version != _VERSION:
            raise ValueError(f"Report.from_json: this reads version {_VERSION} of the report, and got {version!r}")
        del content["version"], content["seconds"]
        content["ops"] = Counter(content["ops"])
        content["own_kinds"] = tuple(content["own_kinds"])
        content["sites"] = [_site(site) for site in content["sites"]]
        return cls(**content)

    def to_html(self) -> str:
        """The report as one page that stands alone: layers, and for each site its lines before and after."""
        from .views.page import page

        return page(self)

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
        if self.bytes_before and self.bytes_after:
            launches += f", {_bytes(self.bytes_before)} moved became {_bytes(self.bytes_after)}"
        verified = sum(site.verified is not None for site in self.sites)
        changed = sum(site.change is not None for site in self.sites)
        declared = f"; {changed} changed as the model declares" if changed else ""
        left = f"{refused} sites refused, {missed} near misses{declared}"
        left += f"; {verified} verified" if verified else ""
        left += "".join(f"; {part} left out by an internal failure" for part in self.left_out)
        cache = f"; cache: {self.cache}" if self.cache else ""
        return f"{ops}; {launches}; {left}; {self.seconds * 1e3:.0f} ms{cache}"

    def __repr__(self) -> str:
        return f"<Report of {self.graphs} graph{'s' * (self.graphs != 1)}: {self.summary()}>"

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=120).print(self)
        return text.getvalue()

    def __rich__(self) -> RenderableType:
        from .views.table import table

        return table(self)


def _site(content: dict[str, Any]) -> Site:
    lists: dict[str, Any] = {key: tuple(value) for key, value in content.items() if isinstance(value, list)}
    return Site(**{**content, **lists})


def _bytes(count: float) -> str:
    """A number of bytes in three figures: `3.15 MB`."""
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if count < 999.5:
            break
        count, unit = count / 1000, larger
    return f"{count:.3g} {unit}"
