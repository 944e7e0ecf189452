"""`npu-fuse ops`: the fused ops and their contracts."""

from __future__ import annotations

import argparse
import fnmatch
import inspect
from typing import Any

from rich.table import Table

from ..ops import CONTRACTS, OpContract
from ..target import SOCS
from . import OK, UsageError
from .console import console


def add_to(commands: Any) -> None:
    """Makes the command known."""
    parser = commands.add_parser(
        "ops",
        help="the fused ops and their contracts",
        description="Lists the fused ops; of one, its schema, where it exists, what it writes and what is known of it.",
    )
    parser.add_argument("name", nargs="?", help="an op, or a pattern such as '*rms_norm*'")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Runs it.

    Raises:
        UsageError: no op has such a name.
    """
    out = console()
    found = [contract for name, contract in sorted(CONTRACTS.items()) if _fits(name, given.name)]
    if not found:
        raise UsageError(f"no op is called {given.name!r}; `npu-fuse ops` lists all {len(CONTRACTS)}")
    if len(found) == 1:
        for name, value in facts(found[0]).items():
            out.print(f"[bold]{name}[/]: ", end="")
            out.print(value, markup=False, highlight=False, soft_wrap=True)
        return OK
    table = Table(pad_edge=False)
    table.add_column("op", no_wrap=True)
    for column in (*SOCS[:-1], "writes"):
        table.add_column(column.replace("ascend", ""), overflow="fold")
    for contract in found:
        exists = ("✓" if soc in contract.socs else "" for soc in SOCS[:-1])
        table.add_row(contract.name, *exists, ", ".join(contract.mutates))
    out.print(table)
    return OK


def _fits(name: str, wanted: str | None) -> bool:
    return wanted is None or fnmatch.fnmatch(name, wanted) or wanted in (name, name.partition("::")[2])


def facts(contract: OpContract) -> dict[str, str]:
    """What there is to know of an op, by name."""
    return {
        "op": contract.name,
        "schema": contract.schema,
        "exists on": ", ".join(sorted(contract.socs)),
        "writes": ", ".join(contract.mutates) or "nothing",
        "known from": contract.source,
        "in detail": inspect.cleandoc(contract.reference.__doc__ or "see its reference"),
    }
