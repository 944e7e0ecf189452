"""What was measured: rows of a model in a phase on one graph, kept as JSON; how they compare with the true counts."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinds import HEADLINE, KINDS, TRUE_SITES, Note, note_on, true_sites

__all__ = ["DEVICES", "PHASES", "READS_NUMBERS", "Count", "Row", "counts", "load", "phases_of", "save"]

DEVICES = ("cpu", "npu")
PHASES = ("prefill", "prefill_fp32", "decode", "prefill_cached", "chunk", "padded", "eager")

Row = Mapping[str, Any]  # as measure.py writes it

_FOLDER = Path(__file__).parent / "results"
_PACKAGES = ("torch", "torch_npu", "transformers", "diffusers")


# What fake tensors can't run: between its graphs, the model's code reads numbers out of tensors.
READS_NUMBERS = {
    ("longcat_flash", "prefill"),
    ("longcat_flash", "decode"),
    ("opt", "decode"),
    ("qwen2_vl_vision", "prefill"),
    ("qwen2_5_vl_vision", "prefill"),
}


def phases_of(model: str, device: str) -> list[str]:
    """The phases of a model; on a fake NPU no others than those that need no numbers."""
    if device == "npu":
        return [phase for phase in PHASES if phase in TRUE_SITES[model] and (model, phase) not in READS_NUMBERS]
    return [phase for phase in PHASES if phase in TRUE_SITES[model] or phase == "prefill_fp32"]


def load(name: str) -> list[Row]:
    """The rows that are kept by a name, that of a device for coverage; or none."""
    path = _FOLDER / f"{name}.json"
    rows: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []
    return rows


def save(name: str, rows: Iterable[Row]) -> None:
    """Keep rows, one a line and in an order of their own, so that two runs can be compared."""
    versions = {package: version for package in _PACKAGES if (version := _installed(package))}
    ordered = sorted(rows, key=lambda row: (row["model"], PHASES.index(row["phase"])))
    lines = ",\n".join(json.dumps(row) for row in ordered)
    _FOLDER.mkdir(exist_ok=True)
    (_FOLDER / f"{name}.json").write_text(f'{{"versions": {json.dumps(versions)},\n"rows": [\n{lines}\n]}}\n')


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Count:
    """Sites of one kind in one row: a model in a phase on one graph.

    Args:
        found: how many were recognised.
        lowered: how many of them became an op: those that the contracts allow.
        true: how many there are.
    """

    device: str
    model: str
    phase: str
    kind: str
    found: int
    lowered: int
    true: int

    @property
    def note(self) -> Note | None:
        return note_on(self.model, self.phase, self.kind)

    @property
    def is_headline(self) -> bool:
        return self.kind in HEADLINE


def counts(device: str, rows: Sequence[Row]) -> Iterator[Count]:
    """The kinds of each measured row that are there or were found, and whose true number is known."""
    for row in rows:
        for kind in KINDS if "error" not in row else ():
            true = true_sites(row["model"], row["phase"], kind)
            found = row["found"].get(kind, 0)
            if true is not None and (true or found):
                yield Count(device, row["model"], row["phase"], kind, found, row["lowered"].get(kind, 0), true)
