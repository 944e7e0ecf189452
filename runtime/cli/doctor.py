"""`npu-fuse doctor`: whether this machine is fit, and what would be refused on it."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from packaging.requirements import Requirement
from rich.table import Table
from rich.text import Text

from ..ops import CONTRACTS
from ..ops.register import register
from ..target import Target, installed_version, probe_errors
from . import FOUND, OK
from .console import console

Level = Literal["ok", "note", "wrong"]
_COLOURS: dict[Level, str] = {"ok": "green", "note": "yellow", "wrong": "red"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Args:
        level: "ok"; "note": it works, with less; "wrong": it doesn't.
        subject: what was looked at.
        text: what was found, and what to do about it.
    """

    level: Level
    subject: str
    text: str


def add_to(commands: Any) -> None:
    """Makes the command known."""
    parser = commands.add_parser(
        "doctor",
        help="whether this machine is fit, and what would be refused on it",
        description="Looks at torch, torch_npu, CANN, sgl_kernel_npu and the NPU. Exits with 1 if something is wrong.",
    )
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Runs it."""
    found = list(findings())
    table = Table(pad_edge=False)
    for column in ("", "looked at", "found"):
        table.add_column(column, overflow="fold")
    for finding in found:
        table.add_row(Text(finding.level, _COLOURS[finding.level]), finding.subject, finding.text)
    console().print(table)
    return FOUND if any(finding.level == "wrong" for finding in found) else OK


def findings() -> Iterator[Finding]:
    """All that was looked at, in the order in which one thing needs another."""
    yield Finding("ok", "python", platform.python_version())
    yield _package("torch")
    torch_npu = installed_version("torch_npu")
    strange = None
    try:
        target = Target.detect()
    except ValueError as error:
        strange, target = Finding("wrong", "NPU", str(error)), Target()
    errors = probe_errors()
    if torch_npu is None:
        yield Finding("note", "torch_npu", "not installed: the fused ops run as reference implementations on the CPU")
    elif "torch_npu" in errors:
        yield Finding(
            "wrong",
            "torch_npu",
            f"{torch_npu} is installed and can't be imported: {_first_line(errors['torch_npu'])}. Install CANN and"
            " source its set_env.sh; or set TORCH_DEVICE_BACKEND_AUTOLOAD=0: torch itself can't be imported without it",
        )
    else:
        yield _package("torch_npu")
        yield from _cann()
        yield strange or _device(target)
    yield _sgl_kernel(target, errors)
    yield from _ops(target)
    for name, used_for in (("transformers", "generate"), ("sglang", "its plug-in"), ("vllm", "its plug-in")):
        version = installed_version(name)
        yield Finding("ok", name, f"{version}; {used_for}" if version else "not installed")
    for name in ("NPU_FUSE", "NPU_FUSE_OPTIONS", "NPU_FUSE_DUMP"):
        if name in os.environ:
            yield Finding("ok", name, os.environ[name])


def _package(name: str) -> Finding:
    """A package, against the version that npu_fuse wants of it."""
    version = installed_version(name)
    wanted = _wanted(name)
    if version is None:
        return Finding("wrong", name, f"not installed; npu_fuse wants {wanted}")
    if wanted and not wanted.specifier.contains(version, prereleases=True):
        return Finding("wrong", name, f"{version} is installed, and npu_fuse {_own_version()} wants {wanted}")
    return Finding("ok", name, version)


def _wanted(name: str) -> Requirement | None:
    for text in importlib.metadata.requires("npu_fuse") or ():
        requirement = Requirement(text)
        if requirement.name.replace("-", "_") == name:
            return requirement
    return None


def _own_version() -> str:
    return importlib.metadata.version("npu_fuse")


def _cann() -> Iterator[Finding]:
    try:
        from torch_npu.npu.utils import get_cann_version  # type: ignore[import-not-found, unused-ignore]

        version = get_cann_version()
    except Exception as error:
        yield Finding("note", "CANN", f"its version can't be told: {_first_line(error)}")
    else:
        unknown = "its version can't be told: is ASCEND_HOME_PATH set?"
        yield Finding("ok" if version else "note", "CANN", version or unknown)


def _device(target: Target) -> Finding:
    if target.device == "cpu":
        return Finding("note", "NPU", "none is there: the fused ops run as reference implementations on the CPU")
    return Finding("ok", "NPU", f"{torch.npu.get_device_name()}: compiled for {target.soc}")  # type: ignore[attr-defined]


def _sgl_kernel(target: Target, errors: Mapping[str, Exception]) -> Finding:
    version = installed_version("sgl_kernel_npu")
    if "sgl_kernel_npu" in errors:
        text = f"{version or 'it'} is installed and can't be imported: {_first_line(errors['sgl_kernel_npu'])}"
        return Finding("wrong", "sgl_kernel_npu", text)
    if version is not None or "sgl_kernel_npu" in target.packages:
        return Finding("ok", "sgl_kernel_npu", version or target.packages["sgl_kernel_npu"])
    if target.device == "npu":
        text = "not installed: fused q, k and v (qkv), qk_rope and causal_conv1d are refused on this machine"
        return Finding("note", "sgl_kernel_npu", text)
    return Finding("ok", "sgl_kernel_npu", "not installed, and not needed without an NPU")


def _ops(target: Target) -> Iterator[Finding]:
    """Whether the ops are those that npu_fuse was written for, and which have no kernel on this SoC."""
    strange = []
    for contract in CONTRACTS.values():
        try:
            register(target, [contract])
        except RuntimeError as error:
            strange.append(f"{contract.name}: {error}")
    for text in strange:
        yield Finding("wrong", "op", text)
    missing = [contract.name for contract in CONTRACTS.values() if target.soc not in contract.socs]
    text = f"{len(CONTRACTS) - len(strange)} of {len(CONTRACTS)} are as npu_fuse knows them"
    if missing:
        text += f"; {target.soc} has no kernel for {', '.join(missing)}: what would become these is refused"
    yield Finding("wrong" if strange else "ok", "fused ops", text)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
