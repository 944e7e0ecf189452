"""Golden numbers of small public models, and a table of what differs from them.

    python benchmarks/golden.py            measure all, print what differs from what is recorded
    python benchmarks/golden.py --accept   and record what there is now

Of each model in a phase: launches and bytes of its graph before and after, sites that are found, sites that became an
op, and these ops. `tests/benchmarks/test_golden.py` asks for the same numbers. The share of the compilation that the
passes take, in seconds of the processor, is recorded beside them and told where it grew by more than half; as it is a
time, no test asks for it.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import npu_fuse
import npu_fuse.patterns
from kinds import KINDS, Kind
from measure import TARGETS
from models import MODELS
from results import Row, load, save
from timed import Timed

__all__ = ["ACCEPT", "GOLDEN", "Difference", "differences", "measured", "recorded", "table"]

_NAME = "golden"
ACCEPT = "If that is meant, `make golden` records it."

PROMPTS_AND_STEPS = [
    *("deepseek_v3", "gemma2", "gemma3_text", "gpt_oss", "lfm2", "llama", "olmo2", "phi3", "qwen3", "qwen3_moe"),
    "qwen3_next",
]
PROMPTS = [
    *("bert", "clip_vision_model", "cohere", "cohere2", "diffusers_sd3", "gemma", "glm", "gpt_neox", "granite"),
    *("hunyuan_v1_dense", "mamba2", "minicpm3", "modernbert", "nanochat", "qwen2", "t5", "vit"),
]

# The phases that are recorded of each model.
GOLDEN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(PROMPTS_AND_STEPS, ("prefill", "decode")),
    **dict.fromkeys(PROMPTS, ("prefill",)),
}

# All kinds there are; those that are told apart by what they have, as true_sites.json does.
_COUNTED = KINDS | {kind: Kind(kind) for kind in npu_fuse.patterns.KINDS if kind not in KINDS}

WIDTH = 120  # of the table
GREW = 1.5  # a share that grew by less is one of another day


def measured(model: str, phase: str) -> Row:
    """The numbers of one model in one phase, in bfloat16 on the CPU's graph, for an Ascend 910B."""
    torch._dynamo.reset()
    module = MODELS[model].build(torch.bfloat16)
    backend = Timed(strict=True, target=TARGETS["cpu"])
    with torch.no_grad():
        inputs = MODELS[model].inputs(module, phase)
        compiled = torch.compile(module, backend=backend)
        start = time.process_time()
        compiled(**inputs)
        whole = time.process_time() - start
    report = backend.report
    return {
        "model": model,
        "phase": phase,
        "launches": [report.launches_before, report.launches_after],
        "bytes": [report.bytes_before, report.bytes_after],
        "found": {label: count for label, kind in _COUNTED.items() if (count := kind.count(report))},
        "lowered": dict(sorted(Counter(site.kind for site in report.sites if site.status == "lowered").items())),
        "ops": dict(sorted(report.ops.items())),
        "share": round(backend.passes / whole, 2),
    }


@dataclass(frozen=True)
class Difference:
    """One number that is not what it was.

    Args:
        what: which one.
        old: what is recorded, None if nothing is.
        new: what there is now, None if nothing is.
        sign: 1 where more is better, -1 where less is, 0 where it says neither.
    """

    model: str
    phase: str
    what: str
    old: float | None
    new: float | None
    sign: int = 0

    @property
    def verdict(self) -> str:
        if not self.sign or self.old is None or self.new is None:
            return ""
        return "better" if (self.new - self.old) * self.sign > 0 else "worse"


def recorded() -> dict[tuple[str, str], Row]:
    """What is recorded, by model and phase."""
    return {(row["model"], row["phase"]): row for row in load(_NAME)}


def differences(old: Row, new: Row) -> list[Difference]:
    """What differs between two rows of one model in one phase, times aside; of a row that is new or gone, one line."""
    numbers, others = _numbers(old), _numbers(new)
    if not old or not new:
        numbers, others = ({what: row[what] for what in ("launches",) if row} for row in (numbers, others))
    place = new or old
    missing = (0 if old and new else None), 0
    found = []
    for what in {**numbers, **others}:
        before, after = numbers.get(what, missing), others.get(what, missing)
        if before[0] != after[0]:
            sign = before[1] or after[1]
            found.append(Difference(place["model"], place["phase"], what, before[0], after[0], sign))
    return found


def _numbers(row: Row) -> dict[str, tuple[float, int]]:
    """The numbers of a row, and which way is better, by what they are."""
    numbers: dict[str, tuple[float, int]] = {}
    for name in ("launches", "bytes") if row else ():
        before, after = row[name]
        numbers |= {f"{name} before": (before, 0), name: (after, -1)}
    for name, sign in (("found", 1), ("lowered", 1), ("ops", 0)) if row else ():
        numbers |= {f"{name.removesuffix('s')} {what}": (count, sign) for what, count in row[name].items()}
    return numbers


def grown(old: Row, new: Row) -> Iterator[Difference]:
    """The share of the passes, where it grew much."""
    if old and new["share"] > GREW * old["share"]:
        yield Difference(new["model"], new["phase"], "share of the compilation", old["share"], new["share"], -1)


def table(found: Iterable[Difference]) -> Table:
    """Differences as a table, one a line."""
    shown = Table(title="What differs from the golden numbers")
    for name in ("model", "phase", "what", "recorded", "now", ""):
        shown.add_column(name, justify="right" if name in ("recorded", "now") else "left", no_wrap=True)
    for difference in found:
        style = {"better": "green", "worse": "red"}.get(difference.verdict)
        old, new = ("-" if value is None else f"{value:,}" for value in (difference.old, difference.new))
        shown.add_row(difference.model, difference.phase, difference.what, old, new, difference.verdict, style=style)
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; returns 1 where a number that is no time differs and isn't accepted."""
    parser = argparse.ArgumentParser(description="Golden numbers of small public models.")
    parser.add_argument("--accept", action="store_true", help="record what there is now")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    console = Console(width=WIDTH)
    places = [(model, phase) for model, phases in sorted(GOLDEN.items()) for phase in phases]
    measured(*places[0])  # what is imported and made at first
    rows = {place: _undisturbed(*place) for place in track(places, "Measuring golden models", console=console)}
    kept = recorded()
    counts = [d for place in {**kept, **rows} for d in differences(kept.get(place, {}), rows.get(place, {}))]
    shares = [d for place, row in rows.items() for d in grown(kept.get(place, {}), row)]
    if counts or shares:
        console.print(table([*counts, *shares]))
    else:
        console.print(f"All {len(rows)} rows are as they are recorded.")
    if options.accept:
        save(_NAME, (row | {"share": _share(kept.get(place, {}), row)} for place, row in rows.items()))
        return 0
    if counts:
        console.print(ACCEPT)
    return int(bool(counts))


def _undisturbed(model: str, phase: str) -> Row:
    """As `measured`, and no garbage of earlier models is collected meanwhile, at the cost of whoever is at work."""
    gc.collect()
    gc.disable()
    try:
        return measured(model, phase)
    finally:
        gc.enable()


def _share(old: Row, new: Row) -> float:
    """The share to record: the old one, unless the new one is clearly another."""
    is_alike = bool(old) and new["share"] <= GREW * old["share"] and old["share"] <= GREW * new["share"]
    return float(old["share"] if is_alike else new["share"])


if __name__ == "__main__":
    sys.exit(main())
