"""`npu-fuse dump`: a model's graphs after each pass, as Python files that run alone."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from . import OK, UsageError, calls, settings
from .explain import report_of


def add_to(commands: Any) -> None:
    """Makes the command known."""
    parser = commands.add_parser(
        "dump",
        help="a model's graphs after each pass, as Python files that run alone",
        description="Compiles a model and writes, for each graph, a file after each pass, its report and its sites.",
    )
    calls.add_arguments(parser)
    settings.add_arguments(parser)
    parser.add_argument("--to", type=Path, default=Path("npu_fuse_dump"), metavar="FOLDER", help="default: %(default)s")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Runs it.

    Raises:
        UsageError: the model can't be built, called or compiled, or the folder can't be written.
    """
    options = settings.kept(settings.options(given), dump=given.to)
    console = Console()
    try:
        given.to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{given.to} can't be made: {error.strerror}") from error
    known = set(given.to.iterdir())
    for call in calls.calls(given):
        report = report_of(call, options)
        for folder in sorted(set(given.to.iterdir()) - known):
            known.add(folder)
            files = sorted(path.name for path in folder.glob("*.*"))
            console.print(f"{folder}: {', '.join(files)}; {len(report.sites)} sites in sites/", soft_wrap=True)
    return OK
