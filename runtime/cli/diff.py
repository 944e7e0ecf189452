"""`npu-fuse diff`: what changed from one report to another."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...passes.report import Report
from ...passes.views.changes import changes
from . import FOUND, OK, UsageError
from .console import console


def add_to(commands: Any) -> None:
    """Makes the command known."""
    parser = commands.add_parser(
        "diff",
        help="what changed from one report to another",
        description="Compares two reports of `npu-fuse explain --json` or Report.to_json. Exits with 1 if they differ.",
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Runs it.

    Raises:
        UsageError: a file is no report.
    """
    found = changes(_read(given.before), _read(given.after))
    out = console()
    if found is None:
        out.print("No difference.")
        return OK
    out.print(found)
    return FOUND


def _read(path: Path) -> Report:
    try:
        return Report.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path} is no report: {error}") from error
