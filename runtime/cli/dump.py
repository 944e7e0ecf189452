"""`npu-fuse dump`: a model's graphs after each pass, as Python files that run alone, and as MLIR."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from torch import fx

from ..mlir.errors import MlirError, need_torch_mlir
from ..mlir.export import Form, export_mlir
from ..mlir.hivm import compiler, lowered_ops
from . import FOUND, OK, UsageError, calls, settings
from .console import console
from .explain import backend_of, write


def add_to(commands: Any) -> None:
    """Makes the command known."""
    parser = commands.add_parser(
        "dump",
        help="a model's graphs after each pass, as Python files that run alone",
        description="Compiles a model and writes, for each graph, a file after each pass, its report and its sites.",
    )
    calls.add_arguments(parser)
    settings.add_arguments(parser)
    parser.add_argument("--to", type=Path, default=Path("npu_fuse_dump"), metavar="FOLDER", help="default: %(default)s")
    mlir = parser.add_argument_group("as MLIR too")
    mlir.add_argument("--mlir", choices=get_args(Form), help="the graph as it runs, in final.mlir (extra: mlir)")
    mlir.add_argument(
        "--hivm",
        action="store_true",
        help="what AscendNPU-IR makes of each fused op for Ascend910B, in hivm/ (extra: hivm)",
    )
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Runs it.

    Returns:
        1 where a graph has no such form in MLIR.

    Raises:
        UsageError: the model can't be built, called or compiled, a package is missing, or the folder can't be written.
    """
    out = console()
    try:
        if given.mlir or given.hivm:
            need_torch_mlir()
        if given.hivm:
            compiler()
    except MlirError as error:
        raise UsageError(str(error)) from error
    try:
        given.to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{given.to} can't be made: {error.strerror}") from error
    options = settings.kept(settings.options(given), dump=given.to)
    known = set(given.to.iterdir())
    code = OK
    for call in calls.calls(given):
        backend = backend_of(call, options)
        folders = sorted(set(given.to.iterdir()) - known, key=_number)
        known.update(folders)
        reported = [folder for folder in folders if (folder / "report.json").exists()]
        for folder, (_, graph) in zip(reported, backend.graphs, strict=True):
            for told in _as_mlir(graph, folder, given):
                out.print(told, markup=False, highlight=False, soft_wrap=True)
                code = FOUND
        for folder in folders:
            files = sorted(path.name for path in folder.glob("*.*"))
            sites = len(list(folder.glob("sites/*")))
            out.print(f"{folder}: {', '.join(files)}; {sites} sites in sites/", soft_wrap=True)
    return code


def _number(folder: Path) -> int:
    found = re.search(r"\d+$", folder.name)
    return int(found[0]) if found else -1


def _as_mlir(graph: fx.GraphModule, folder: Path, given: argparse.Namespace) -> Iterator[str]:
    """Writes a graph as MLIR; yields what has no such form."""
    if given.mlir:
        try:
            write(folder / "final.mlir", export_mlir(graph, form=given.mlir, locations=True))
        except MlirError as error:
            yield f"{folder}: not written as {given.mlir}: {error}"
    if given.hivm:
        (folder / "hivm").mkdir()
        lines = []
        for number, op in enumerate(lowered_ops(graph)):
            name = f"{number}_{op.op.replace('::', '.')}.mlir"
            if op.text is not None:
                write(folder / "hivm" / name, op.text)
            lines.append(f"{op.call}: {f'not lowered: {op.reason}' if op.text is None else name}")
        write(folder / "hivm" / "ops.txt", "\n".join([*lines, ""]))
