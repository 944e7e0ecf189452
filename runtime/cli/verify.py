"""`npu-fuse verify`: each rewritten site of a model beside what the model has there."""

from __future__ import annotations

import argparse
import warnings
from collections import defaultdict
from typing import Any

from ...passes.report import Site
from . import FOUND, OK, calls, settings
from .console import console
from .explain import report_of


def add_to(commands: Any) -> None:
    """Makes the command known."""
    parser = commands.add_parser(
        "verify",
        help="each rewritten site of a model beside what the model has there",
        description="Compiles a model, runs each call once with Options(verify='first'), and says how far each kind is"
        " off. The exit code is 1 where a site is further off than its rounding allows.",
    )
    calls.add_arguments(parser)
    settings.add_arguments(parser)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Runs it.

    Raises:
        UsageError: the model can't be built, called or compiled.
    """
    options = settings.kept(settings.options(given), verify="first")
    out = console()
    code = OK
    for call in calls.calls(given, device="cpu"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            report = report_of(call, options)
        title = f"{call.phase}: " if call.phase else ""
        kinds: dict[str, list[Site]] = defaultdict(list)
        for site in report.sites:
            if site.verified is not None:
                kinds[site.kind].append(site)
        for kind, sites in kinds.items():
            out.print(f"{title}{len(sites)} {kind}: {sites[-1].verified}", soft_wrap=True)
        for warning in caught:
            if "verification failed" in str(warning.message):
                out.print(f"{title}{warning.message}", soft_wrap=True)
                code = FOUND
    return code
