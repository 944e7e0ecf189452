"""Pages in a Chromium without a window: what is in them in the end, and how they look."""

import shutil
import subprocess
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find() -> str:
    """The program.

    Raises:
        FileNotFoundError: there is none.
    """
    for name in NAMES:
        path = shutil.which(name)
        if path is not None:
            return path
    raise FileNotFoundError(f"no {' or '.join(NAMES)} on the PATH: the pages can't be looked at")


def run(url: str, *arguments: str) -> str:
    """What it prints for a page."""
    quiet = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000")
    done = subprocess.run([find(), *quiet, *arguments, url], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def picture(page: Path, at: str, to: Path, size: str = "1400,900") -> None:
    """Writes what a page looks like at a place in it."""
    run(f"{page.as_uri()}#{at}", f"--window-size={size}", f"--screenshot={to}")
