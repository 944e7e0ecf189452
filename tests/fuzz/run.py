"""Runs many random programs, and writes a script for each that fails, made small.

    python tests/fuzz/run.py --programs 10000 --jobs 2 --into fuzz-failures
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from fuzz.compare import MismatchError, Unfit, run_program, told
from fuzz.draws import built, numbered, shrunk

SHARD_SIZE = 100


@dataclass
class Shard:
    """What some programs came to.

    Args:
        ran: how many ran, by how they were compiled.
        sites: by kind and status.
        torchs_own: what AOTAutograd alone gets wrong, by the number of the program.
        failures: by the number of the program, what differs and a script of it made small.
    """

    ran: Counter[str] = field(default_factory=Counter)
    sites: Counter[tuple[str, str]] = field(default_factory=Counter)
    torchs_own: dict[int, str] = field(default_factory=dict)
    failures: dict[int, tuple[str, str]] = field(default_factory=dict)


def run_shard(numbers: range) -> Shard:
    """Runs the programs of these numbers."""
    torch.set_num_threads(1)
    gc.set_threshold(200_000, 100, 100)
    logging.getLogger("npu_fuse").setLevel(logging.ERROR)
    shard = Shard()
    for number in numbers:
        draw = numbered(number)
        program = built(draw)
        try:
            outcome = run_program(program)
        except Unfit:
            continue
        except MismatchError:
            small = shrunk(draw, lambda program: bool(told(program)))
            shard.failures[number] = told(small), small.script()
            continue
        shard.ran[program.how] += 1
        if outcome.torchs_own:
            shard.torchs_own[number] = outcome.torchs_own[0].splitlines()[0]
        shard.sites.update((site.kind, site.status) for site in outcome.report.sites)
    return shard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=2000, help="how many")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many processes")
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    parser.add_argument("--into", type=Path, default=Path("fuzz-failures"), help="a folder for scripts that fail")
    options = parser.parse_args()
    start, total = time.time(), Shard()
    last = options.first + options.programs
    shards = [range(i, min(i + SHARD_SIZE, last)) for i in range(options.first, last, SHARD_SIZE)]
    with get_context("spawn").Pool(options.jobs, maxtasksperchild=8) as pool:  # a process that compiles more grows
        for numbers, shard in zip(shards, pool.imap(run_shard, shards), strict=True):
            total.ran += shard.ran
            total.sites += shard.sites
            total.torchs_own |= shard.torchs_own
            total.failures |= shard.failures
            seconds = time.time() - start
            print(f"{numbers.stop - options.first} drawn, {total.ran.total()} ran in {seconds:.0f} s", flush=True)
            for number, (failure, script) in shard.failures.items():
                options.into.mkdir(parents=True, exist_ok=True)
                path = options.into / f"program_{number}.py"
                path.write_text(f'{script}\n"""\n{failure}\n"""\n')
                print(f"    {path}: {failure.splitlines()[0]}", flush=True)
    how = ", ".join(f"{count} {name}" for name, count in sorted(total.ran.items()))
    print(f"\n{total.ran.total()} programs ran as in eager ({how}), {len(total.failures)} failed")
    print(f"{len(total.torchs_own)} of them as AOTAutograd alone has it, which is not as in eager:")
    for number, difference in total.torchs_own.items():
        print(f"    program {number}: {difference}")
    for kind in sorted({kind for kind, _ in total.sites}):
        counts = ", ".join(f"{total.sites[kind, status]} {status}" for status in ("lowered", "refused", "missed"))
        print(f"    {kind}: {counts}")
    sys.exit(bool(total.failures))


if __name__ == "__main__":
    main()
