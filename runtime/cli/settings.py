"""The settings of a compilation, as arguments of a command."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from ..options import Options
from ..target import SOCS, Target
from . import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that become `Options`."""
    group = parser.add_argument_group("how it is compiled")
    group.add_argument("--target", choices=SOCS, help="the SoC (default: this machine's, or ascend910b)")
    group.add_argument("--disable", action="append", default=[], metavar="KIND", help="leave a kind of fusion out")
    group.add_argument("--numerics", choices=("fused", "exact"), help="exact: no op that rounds elsewhere")


def options(given: argparse.Namespace) -> Options:
    """The options.

    Raises:
        UsageError: one of them is unknown.
    """
    settings: dict[str, Any] = {"disable": frozenset(given.disable)}
    if given.numerics is not None:
        settings["numerics"] = given.numerics
    if given.target is not None:
        settings["target"] = Target(given.target)
    try:
        return Options(**settings)
    except ValueError as error:
        raise UsageError(str(error)) from error


def kept(found: Options, **settings: Any) -> Options:
    """The same options with some that a command needs."""
    return replace(found, **settings)
