"""The stages of a compilation, as files in a folder and as artifacts of torch's structured trace (TORCH_TRACE)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from torch import fx
from torch._logging._internal import trace_structured

from ..report import Report, Site
from .code import script, write


class Dump:
    """One graph on its way: after each stage as a Python file that runs alone, in the end with its report.

    With no folder, only a structured trace gets them: nothing is made where none is written.

    Args:
        folder: where to write; `graph_0`, `graph_1`, … are made in it, and none that is there is written to.

    Raises:
        OSError: the folder can't be made.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = None if folder is None else _new_folder(Path(folder))
        self._count = 0

    def stage(self, name: str, module: fx.GraphModule) -> None:
        """Writes the graph as it is after a stage."""
        number, self._count = self._count, self._count + 1
        title = f"The graph after {name!r}."
        _trace(f"npu_fuse_{number}_{name}", "string", lambda: script(module, title))
        if self.folder is not None:
            write(self.folder / f"{number}_{name}.py", module, title)

    def report(self, report: Report) -> None:
        """Writes the report in all its forms, and a file for each site."""
        _trace("npu_fuse_report", "json", report.to_json)
        _trace("npu_fuse_report_page", "string", report.to_html)
        if self.folder is None:
            return
        _write(self.folder / "report.json", report.to_json())
        _write(self.folder / "report.html", report.to_html())
        _write(self.folder / "report.txt", str(report))
        width = len(str(max(len(report.sites) - 1, 0)))
        for number, site in enumerate(report.sites):
            name = re.sub(r"[^\w.-]", "_", f"{number:0{width}}_{site.status}_{site.kind}_{site.module or ''}")
            _write(self.folder / "sites" / f"{name[:150]}.txt", _told(site))


def _new_folder(parent: Path) -> Path:
    """The first `graph_N` that is not there yet; other processes may be making theirs."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        folder = parent / f"graph_{number}"
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            (folder / "sites").mkdir()
            return folder


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _trace(name: str, encoding: str, payload: Callable[[], str]) -> None:
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=payload)


def _told(site: Site) -> str:
    facts = {
        "module": site.module,
        "source": site.source,
        "op": site.op,
        "reason": site.reason,
        "change": site.change,
        **site.params,
    }
    parts = [f"{site.kind}: {site.status}"]
    parts += [f"{name}: {value}" for name, value in facts.items() if value is not None]
    parts += [f"rounds otherwise: {rounding}" for rounding in site.roundings]
    for name, lines in (("before", site.before), ("after", site.after)):
        if lines:
            parts += ["", f"{name}:", *(f"    {line}" for line in lines)]
    return "\n".join([*parts, ""])
