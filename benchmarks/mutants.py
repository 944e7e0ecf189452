"""Whether some test fails for each legality check that is left out of the package.

    python benchmarks/mutants.py run [TESTS]     leave out each check that has no such test yet; --all for all of them
    python benchmarks/mutants.py table           print what was found

All is done in a copy of the package with a switch at each check (`checks.py`, `switches.py`). The tests run once with
all switches on, which tells where each check refuses anything. Then each check is off in a process of its own, and only
the tests where it refused run, the fastest first, until one fails. Without TESTS these are all that can matter.
The results are in `results/mutants.json`; see README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from checks import ROOT, Check, all_numbered, checks

RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
TESTS = ("tests/passes", "tests/patterns", "tests/runtime/ops", "tests/runtime/test_audit.py")

_SWITCHES = Path(__file__).with_name("switches.py")
_LEFT_OUT = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__")
_NONE = -1
_MOST_TESTS = 20
_MOST_SECONDS = 300


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for; return the exit status, 1 where a check of legality survived."""
    parser = argparse.ArgumentParser(description="Leaves out one check after the other.")
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="leave out checks")
    running.add_argument("tests", nargs="*", default=TESTS)
    running.add_argument("--all", action="store_true", help="those too that a test is known for")
    running.add_argument("--recognisers", action="store_true", help="the guards of recognisers too")
    running.add_argument("--jobs", type=int, default=2)
    running.add_argument("--reached", type=Path, help="keep what the first run tells there, or use what it told")
    commands.add_parser("table", help="print the results")
    options = parser.parse_args(argv)
    if options.command == "run":
        run(options)
    return table()


def load() -> dict[str, str]:
    """The test that fails without it, by the key of each check; "" for one that survived."""
    found: dict[str, str] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return found


def save(killers: Mapping[str, str], known: Iterable[Check]) -> None:
    """Keeps the results of checks that are still there."""
    kept = {check.key: killers[check.key] for check in known if check.key in killers}
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


def table() -> int:
    """Prints how many checks there are, and which survived."""
    killers = load()
    left = 0
    for name, of in (("checks of legality", False), ("guards of recognisers", True)):
        found = [check for check in checks(recognisers=True) if check.recognises is of]
        survivors = [check for check in found if not killers.get(check.key)]
        unknown = sum(check.key not in killers for check in survivors)
        print(f"{len(found)} {name}, {len(survivors)} survive" + (f", {unknown} not tried" if unknown else ""))
        for check in survivors:
            print(f"  {check.path}:{check.line} {check.function}: {check.text}")
        left += 0 if of else len(survivors)
    return 1 if left else 0


def run(options: argparse.Namespace) -> None:
    """Leave out each check that is to be, and keep what is found as soon as it is."""
    killers = load()
    with tempfile.TemporaryDirectory() as folder:
        numbered = copy_to(Path(folder))
        reached = options.reached or Path(folder) / "reached"
        if not reached.exists():
            reached.mkdir()
            (reached / "checks.json").write_text(json.dumps([check.key for check in numbered]))
            record(Path(folder), options.tests, options.jobs, reached)
        runs = Runs.read(reached)
        wanted = {
            number: check.key
            for number, check in enumerate(numbered)
            if (options.recognisers or not check.recognises) and (options.all or not killers.get(check.key))
        }
        for key in wanted.values():
            killers.setdefault(key, "")
        pending = {number: runs.tests(key) for number, key in wanted.items() if runs.reaches(key)}
        shown = os.fdopen(os.dup(1), "w")

        def tell(number: int, killer: str) -> None:
            killers[wanted[number]] = killer.partition("[")[0]
            save(killers, numbered)
            print(f"{wanted[number]}: {killer or 'SURVIVES'}", file=shown, flush=True)

        leave_out(Path(folder), pending, options.jobs, tell)
    save(killers, numbered)


def copy_to(folder: Path) -> list[Check]:
    """Put the package with switches into a folder; return the checks by number."""
    package = folder / "npu_fuse"
    shutil.copytree(ROOT, package, ignore=_LEFT_OUT)
    shutil.copy(_SWITCHES, folder)
    numbered = []
    for path, source, found in all_numbered():
        (package / path).write_text(source)
        numbered += found
    return numbered


# Which tests reach a check -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Runs:
    """What the run with all checks told.

    Args:
        of_check: the tests in which each check refused, by its key.
        noted: those in which it only noted a rounding.
        seconds: of each test that passed.
    """

    of_check: Mapping[str, frozenset[str]]
    noted: Mapping[str, frozenset[str]]
    seconds: Mapping[str, float]

    def reaches(self, key: str) -> bool:
        """Whether a test reaches a check."""
        return key in self.of_check or key in self.noted

    @functools.cached_property
    def _checks_of(self) -> Counter[str]:
        """How many checks refused in each test."""
        return Counter(test for tests in self.of_check.values() for test in tests)

    def _cost(self, test: str) -> tuple[int, float]:
        return self._checks_of[test], self.seconds[test]

    @classmethod
    def read(cls, reached: Path) -> Runs:
        keys = json.loads((reached / "checks.json").read_text())
        told: dict[str, dict[str, set[str]]] = {how: defaultdict(set) for how in ("refused", "noted")}
        for file in reached.glob("*.txt"):
            for line in file.read_text().splitlines():
                number, how, phase = line.split("\t")
                told[how][keys[int(number)]].add(phase.rpartition(" (")[0])
        refused, noted = ({key: frozenset(tests) for key, tests in of.items()} for of in told.values())
        return cls(refused, noted, json.loads((reached / "seconds.json").read_text()))

    def tests(self, key: str) -> list[str]:
        """What to run: tests that reach a check, those first that reach few others, or else are fast."""
        refused, noted = (of.get(key, frozenset()) & self.seconds.keys() for of in (self.of_check, self.noted))
        return [t for of in (refused, noted - refused) for t in sorted(of, key=self._cost)][:_MOST_TESTS]


class Recorder:
    """What became of tests."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.when == "call":
            self.seconds[report.nodeid] = report.duration


def record(folder: Path, tests: Iterable[str], jobs: int, reached: Path) -> None:
    """Run tests with all checks, in a process of its own."""
    recorder = f"import sys, os; sys.path.append({str(Path(__file__).parent)!r}); import mutants; mutants.record_here()"
    env = environment(folder) | {"NPU_FUSE_REACHED": str(reached.absolute())}
    command = [sys.executable, "-c", recorder, "-q", "-p", "no:cacheprovider", "-n", str(jobs), *tests]
    subprocess.run(command, cwd=folder / "npu_fuse", env=env, check=False)


def record_here() -> None:
    """Run the tests of the command line, and keep how long each took."""
    recorder = Recorder()
    pytest.main(sys.argv[1:], plugins=[recorder])
    found = {test: seconds for test, seconds in recorder.seconds.items() if test not in recorder.failed}
    (Path(os.environ["NPU_FUSE_REACHED"]) / "seconds.json").write_text(json.dumps(found))


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(folder)}


# Whether one of them fails --------------------------------------------------------------------------------------------


class Mutants:
    """A plug-in of pytest that runs, in place of all tests, those that reach a check without it, check after check.

    Each check has a process of its own, forked when all tests are collected, which takes longer than most. A test
    that fails there with all checks, too, tells nothing.
    """

    def __init__(self, pending: Mapping[int, list[str]], jobs: int, tell: Callable[[int, str], None]) -> None:
        self.pending = pending
        self.jobs = jobs
        self.tell = tell
        self.sound: dict[str, bool] = {}
        self.failed: list[str] = []
        self.error: BaseException | None = None  # within pytest, which shows nothing

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self.error = excinfo.value

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        gc.freeze()  # so that processes share what there is
        left = list(self.pending)
        running: dict[int, tuple[int, int]] = {}
        while left or running:
            while left and len(running) < self.jobs:
                number = left.pop(0)
                process, reading = self.fork(number, self.items(session, self.pending[number]))
                running[process] = number, reading
            process, status = os.wait()
            if process not in running:
                continue  # a test had begun it
            number, reading = running.pop(process)
            killer = first_failure(reading, status)
            if killer and killer not in self.sound:
                process, reading = self.fork(_NONE, self.items(session, [killer]))
                self.sound[killer] = not first_failure(reading, os.waitpid(process, 0)[1])
            if self.sound.get(killer, True):
                self.tell(number, killer)
            else:
                left.insert(0, number)
        return True

    def items(self, session: pytest.Session, tests: Iterable[str]) -> list[pytest.Item]:
        """Tests in this order, but for those that tell nothing."""
        by_name = {item.nodeid: item for item in session.items}
        return [by_name[test] for test in tests if test in by_name and self.sound.get(test, True)]

    def fork(self, number: int, items: Sequence[pytest.Item]) -> tuple[int, int]:
        """Run tests without one check, until one fails, in a process of its own.

        Returns:
            The process, and where the test that failed is to be read.
        """
        reading, writing = os.pipe()
        process = os.fork()
        if process:
            os.close(writing)
            return process, reading
        import switches

        switches.off = number
        os.environ["NPU_FUSE_MUTANT"] = str(number)
        signal.alarm(_MOST_SECONDS)
        self.run(items)
        os.write(writing, "".join(self.failed).encode())
        os._exit(0)

    def run(self, items: Sequence[pytest.Item]) -> None:
        """Run tests, until one fails."""
        self.failed = []
        for item, after in zip(items, [*items[1:], *items[:1]], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if self.failed:
                break


def first_failure(reading: int, status: int) -> str:
    with os.fdopen(reading) as file:
        return file.read() or (f"a process that ends with status {status}" if status else "")


def leave_out(folder: Path, pending: Mapping[int, list[str]], jobs: int, tell: Callable[[int, str], None]) -> None:
    """Look for a test that fails without each check, and tell its name, or "" where there is none."""
    os.chdir(folder / "npu_fuse")
    os.environ |= environment(folder)
    sys.path.insert(0, str(folder))
    torch.set_num_threads(1)  # threads don't survive a fork
    warm_up()
    files = sorted({test.partition("::")[0] for tests in pending.values() for test in tests})
    mutants = Mutants(pending, jobs, tell)
    with silence():
        pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files], plugins=[mutants])
    if mutants.error is not None:
        raise mutants.error


def warm_up() -> None:
    """Import and register what a compilation needs, so that each process finds it there."""
    import npu_fuse

    with torch.no_grad():
        torch.compile(torch.sin, backend=npu_fuse.Backend())(torch.ones(1))
    torch._dynamo.reset()


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Nothing of tests is shown."""
    sys.stdout.flush()
    kept = os.dup(1), os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    yield
    for of, at in zip(kept, (1, 2), strict=True):
        os.dup2(of, at)


if __name__ == "__main__":
    sys.exit(main())
