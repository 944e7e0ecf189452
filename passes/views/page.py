"""A report as one HTML page that stands alone: no network, no other file."""

from __future__ import annotations

import importlib.resources
import json
import linecache
import re
from typing import Any

from ..report import Report
from .table import layer_of

_SOURCE = re.compile(r"(?P<file>.+):(?P<line>\d+) in .+")
_AROUND = 4


def page(report: Report) -> str:
    """The page. The model's own lines are read from its files, where these are on this machine."""
    content = json.loads(report.to_json())
    content["sources"] = {}
    for site in content["sites"]:
        site["layer"] = layer_of(site["module"])
        if site["source"] and site["source"] not in content["sources"]:
            content["sources"][site["source"]] = _lines_around(site["source"])
    content["sites"].sort(key=lambda site: _by_layer(site["layer"]))
    # A tag would end the script element that holds it, whatever it stands in.
    text = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
    template = importlib.resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return template.replace("__REPORT__", text)


def _lines_around(source: str) -> dict[str, Any] | None:
    """The line that `file:line in function` names, between its neighbours."""
    found = _SOURCE.fullmatch(source)
    if found is None:
        return None
    line = int(found["line"])
    first = max(line - _AROUND, 1)
    texts = [linecache.getline(found["file"], number) for number in range(first, line + _AROUND + 1)]
    if not any(texts):
        return None
    return {"first": first, "line": line, "lines": [text.rstrip("\n") for text in texts if text]}


def _by_layer(layer: str | None) -> tuple[Any, ...]:
    """Sites outside of layers come last; `layers.10` comes behind `layers.9`."""
    parts = re.split(r"(\d+)", layer or "")
    return (layer is None, [(part.isdigit(), int(part) if part.isdigit() else part) for part in parts])
