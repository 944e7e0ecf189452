"""Compilers as processes of their own: where one lacks a check, it ends the process that it runs in."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .errors import MlirError

__all__ = ["run_tool"]


def run_tool(program: Path, passes: Sequence[str], text: str, patience: float) -> str:
    """What a program makes of a text.

    Args:
        program: reads its standard input and writes its standard output.
        passes: its other arguments.
        text: a module.
        patience: how long it may take, in seconds.

    Raises:
        MlirError: it fails, dies or takes too long.
    """
    try:
        run = subprocess.run(
            [program, "-", *passes], input=text, capture_output=True, text=True, timeout=patience, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise MlirError(f"{program.name} takes longer than {patience:g} s") from error
    if run.returncode < 0:
        raise MlirError(f"{program.name} dies of it, by {signal.Signals(-run.returncode).name}")
    if run.returncode:
        told = [line.partition("error: ")[2] for line in run.stderr.splitlines() if "error: " in line]
        raise MlirError(f"{program.name}: {told[0] if told else 'it fails and does not say why'}")
    return run.stdout
