"""How many sites of public models are recognised and fused, on the CPU's graphs and on an NPU's, and by whom.

    python benchmarks/coverage.py run cpu      measure on the CPU
    python benchmarks/coverage.py run npu      measure on a fake NPU; needs torch_npu, and stand-ins for CANN
    python benchmarks/coverage.py table        print what was measured

`make coverage` does all three. Each model has a process of its own, so one that crashes or hangs costs its own rows.
The results are in `results/`; see README.md.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from rich.console import Console
from rich.progress import track

import npu_fuse
from models import MODELS
from results import DEVICES, PHASES, Row, load, phases_of, save
from table import print_tables


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark or print its results; return the exit status."""
    options = parse(argv)
    if options.command == "run":
        return run(options)
    return print_tables({device: load(device) for device in DEVICES})


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Coverage of public models.")
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("run", help="measure")
    measuring.add_argument("device", choices=DEVICES)
    measuring.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    measuring.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES, metavar="PHASE")
    measuring.add_argument("--resume", action="store_true", help="keep what was measured with this very npu_fuse")
    measuring.add_argument("--jobs", type=int, default=2, help="models at a time")
    measuring.add_argument("--timeout", type=float, default=600, help="seconds for one model")
    commands.add_parser("table", help="print the results")
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> int:
    """Measure what was asked for, and keep each model's rows as soon as they are there."""
    rows = {(row["model"], row["phase"]): row for row in load(options.device)}
    source = fingerprint()
    todo = {}
    for model in options.models:
        phases = [phase for phase in phases_of(model, options.device) if phase in options.phases]
        if options.resume:
            phases = [phase for phase in phases if not is_kept(rows.get((model, phase)), source)]
        if phases:
            todo[model] = phases
    console = Console()
    with ThreadPoolExecutor(options.jobs) as pool:
        pending = [pool.submit(measured, options.device, *item, options.timeout) for item in todo.items()]
        for future in track(as_completed(pending), f"Measuring on {options.device}", len(pending), console=console):
            for row in future.result():
                rows[row["model"], row["phase"]] = row | {"source": source}
                if "error" in row:
                    console.print(f"[red]{row['model']} {row['phase']}[/]: {row['error']}", highlight=False)
            save(options.device, rows.values())
    return 0


def is_kept(row: Row | None, source: str) -> bool:
    """Whether a row need not be measured again."""
    return row is not None and row["source"] == source and "error" not in row


def measured(device: str, model: str, phases: Sequence[str], timeout: float) -> list[Row]:
    """The rows of one model, from a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("measure.py")), device, model, *phases]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        process = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=timeout,
            env=environment,
        )
        output, ending = process.stdout, f"its process ended with status {process.returncode}"
    except subprocess.TimeoutExpired as expired:
        output, ending = expired.stdout or b"", f"took longer than {timeout:g} s"
    rows = [json.loads(line) for line in output.decode().splitlines() if line.startswith("{") and line.endswith("}")]
    done = {row["phase"] for row in rows}
    return rows + [{"model": model, "phase": phase, "error": ending} for phase in phases if phase not in done]


def fingerprint() -> str:
    """Which npu_fuse this is: a hash of its source."""
    root = Path(npu_fuse.__file__).parent
    rooms = (root / room for room in ("patterns", "passes", "runtime"))
    content = hashlib.sha256()
    for file in sorted(file for room in rooms for file in room.rglob("*.py")):
        content.update(file.read_bytes())
    return content.hexdigest()[:12]


if __name__ == "__main__":
    sys.exit(main())
