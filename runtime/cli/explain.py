"""`npu-fuse explain`: what fuses in a model, and why not the rest."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from ...passes.report import Report
from ..backend import Backend
from ..explain import compile_once
from ..options import Options
from . import OK, UsageError, calls, settings

_EXAMPLES = """examples:
  npu-fuse explain qwen3 --layers 4              the first layers of a transformers model, at its full size
  npu-fuse explain checkpoints/my-model          the model of a config.json; its weights are not read
  npu-fuse explain model.py:build                your own: def build(): return model, (input_ids,)
  npu-fuse explain program.pt2 --html page.html  an exported program, as a page to click through
"""


def add_to(commands: Any) -> None:
    """Makes the command known."""
    parser = commands.add_parser(
        "explain",
        help="what fuses in a model, and why not the rest",
        description="Compiles a model for one call and shows the report. Nothing is downloaded.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    calls.add_arguments(parser)
    settings.add_arguments(parser)
    output = parser.add_argument_group("what is written")
    output.add_argument("--html", type=Path, metavar="FILE", help="the report as a page")
    output.add_argument("--json", type=Path, metavar="FILE", help="the report as JSON, for `npu-fuse diff`")
    output.add_argument("--quiet", action="store_true", help="one line a call")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Runs it.

    Raises:
        UsageError: the model can't be built, called or compiled.
    """
    options = settings.options(given)
    console = Console()
    reports = []
    for call in calls.calls(given):
        report = report_of(call, options)
        reports.append(report)
        title = f"{call.phase}: " if call.phase else ""
        console.print(f"{title}{report.summary()}" if given.quiet else report)
    for path, form in ((given.html, Report.to_html), (given.json, Report.to_json)):
        if path is not None:
            write(path, form(Report.merged(reports)))
            console.print(f"written: {path}")
    return OK


def report_of(call: calls.Call, options: Options) -> Report:
    """The report of one call.

    Raises:
        UsageError: the call fails.
    """
    return backend_of(call, options).report


def backend_of(call: calls.Call, options: Options) -> Backend:
    """What has compiled one call, with its graphs and reports.

    Raises:
        UsageError: the call fails.
    """
    backend = Backend(settings.kept(options, keep_graphs=True))
    try:
        compile_once(call.model, backend, *call.args, **call.kwargs)
    except Exception as error:
        phase = f" in {call.phase}" if call.phase else ""
        first = str(error).strip().split("\n")[0]
        raise UsageError(f"the model can't be called{phase}: {type(error).__name__}: {first}") from error
    return backend


def write(path: Path, text: str) -> None:
    """Writes a file.

    Raises:
        UsageError: it can't be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} can't be written: {error.strerror}") from error
