"""The command `npu-fuse`, also `python -m npu_fuse`: a module for each of its commands."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

# Exit codes: all is well, something was found that isn't (a difference, a refusal that was asked for), wrong usage.
OK, FOUND, USAGE = 0, 1, 2


class UsageError(Exception):
    """What the user can put right; its text says how."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        The exit code: 0 if all is well, 1 if the command found what it is to warn of, 2 if it can't do what was asked.
    """
    # A torch_npu that is broken must not keep torch from being imported: what is wrong with it, `doctor` tells.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    from . import diff, doctor, dump, explain, ops, verify

    parser = argparse.ArgumentParser(
        prog="npu-fuse",
        description="See what npu_fuse makes of a model, and whether this machine is fit for it.",
        epilog="npu-fuse COMMAND --help says more.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (explain, verify, dump, diff, ops, doctor):
        command.add_to(commands)
    given = parser.parse_args(arguments)
    torchs = logging.getLogger("torch")
    level = torchs.level
    torchs.setLevel(logging.CRITICAL)  # what fails is told in one line
    try:
        code: int = given.run(given)
    except UsageError as error:
        print(f"npu-fuse: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # who reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    finally:
        torchs.setLevel(level)
    return code
