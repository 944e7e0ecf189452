"""`npu-fuse explain`: what fuses in a model, and why not the rest."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from ...passes.report import Report
from ..backend import Backend
from ..explain import compile_once
from ..options import Options
from . import OK, UsageError, calls, settings
from .console import console

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
    output.add_argument("--html", type=Path, metavar="FILE", help="the report as a page, one for each phase")
    output.add_argument("--json", type=Path, metavar="FILE", help="the report as JSON, for `npu-fuse diff`")
    output.add_argument("--quiet", action="store_true", help="one line a call")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Runs it.

    Raises:
        UsageError: the model can't be built, called or compiled.
    """
    options = settings.options(given)
    out = console()
    reports = {}
    for call in calls.calls(given):
        report = reports[call.phase] = report_of(call, options)
        if given.quiet:
            out.print(f"{call.phase}: {report.summary()}" if call.phase else report.summary(), soft_wrap=True)
            continue
        if call.phase:
            out.rule(f"[bold]{call.phase}")
        out.print(report)
    if given.json is not None:
        write(given.json, Report.merged(reports.values()).to_json())
        out.print(f"written: {given.json}", soft_wrap=True)
    for phase, report in reports.items() if given.html is not None else ():
        path = given.html if len(reports) == 1 else given.html.with_stem(f"{given.html.stem}.{phase}")
        write(path, report.to_html())
        out.print(f"written: {path}", soft_wrap=True)
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
        raise UsageError(f"the model can't be called{phase}: {told(error)}") from error
    return backend


def told(error: BaseException) -> str:
    """An error in one line: of one that torch has wrapped, the first cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip()
    found = _FOUND.search(text)  # Dynamo's words around what an op has raised
    if found is not None:
        return f"{found[1]}: {found[3]}"
    first = text.split("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


_FOUND = re.compile(r"""\bgot (\w+)\((['"])(.*?)\2\)""")


def write(path: Path, text: str) -> None:
    """Writes a file.

    Raises:
        UsageError: it can't be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} can't be written: {error.strerror}") from error
