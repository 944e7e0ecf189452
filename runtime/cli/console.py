"""Where commands print."""

from __future__ import annotations

import os
import sys

from rich.console import Console


def console() -> Console:
    """A console as wide as the terminal; where there is none, so wide that names stay whole."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 200
    return Console(width=width)
