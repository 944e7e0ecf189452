"""`npu-fuse dump` writes MLIR, and what a compiler of others makes of each op: a program in its place, here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from npu_fuse.runtime.cli import FOUND, OK, USAGE, main
from npu_fuse.runtime.mlir import hivm

MODEL = """
import torch
from torch.nn import functional

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.RMSNorm(32, dtype=torch.bfloat16)

    def forward(self, x):
        gate, value = self.norm(self.norm(x)).chunk(2, -1)
        return functional.silu(gate) * value

class Sorted(torch.nn.Module):
    def forward(self, x):
        return torch.linalg.qr(x)[0]

def build():
    return Model(), (torch.ones(2, 32, dtype=torch.bfloat16),)

def hard():
    return Sorted(), (torch.ones(2, 2),)
"""

# Lowers a norm, and fails, dies or hangs where it sees a sigmoid.
PROGRAM = """#!{python}
import os, signal, sys, time
text = sys.stdin.read()
assert "hacc.function_kind = #hacc.function_kind<DEVICE>" in text and "hacc.entry" in text
assert "torch.operator" not in text and "-convert-to-hivm-pipeline" in sys.argv
if "sigmoid" in text or "silu" in text:
    {of_a_unit}
print("hivm.hir.of " + ("bf16" if "bf16" in text else "?"))
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "a_model.py"
    path.write_text(MODEL)
    return path


def packaged(folder: Path, of_a_unit: str) -> None:
    """Makes the package that has the program."""
    (folder / "ascendnpuir" / "bin").mkdir(parents=True)
    (folder / "ascendnpuir" / "__init__.py").touch()
    program = folder / "ascendnpuir" / "bin" / "bishengir-opt"
    program.write_text(PROGRAM.format(python=sys.executable, of_a_unit=of_a_unit))
    program.chmod(0o755)


def test_final_mlir_is_beside_the_other_files(model: Path, tmp_path: Path) -> None:
    assert main(["dump", f"{model}:build", "--to", str(tmp_path / "dump"), "--mlir", "calls"]) == OK
    text = (tmp_path / "dump" / "graph_0" / "final.mlir").read_text()
    assert "call @npu.npu_rms_norm" in text
    assert "a_model.py" in text


def test_a_graph_that_has_no_such_form(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", f"{model}:hard", "--to", str(tmp_path / "dump"), "--mlir", "linalg"]) == FOUND
    text = capsys.readouterr().out
    assert "graph_0: not written as linalg: " in text
    assert "linalg_qr" in text
    assert "report.html" in text, "the rest is written"


@pytest.mark.parametrize(
    ("of_a_unit", "reason"),
    [
        ("sys.exit('a.mlir:3:7: error: no such op')", "bishengir-opt: no such op"),
        ("sys.exit(1)", "bishengir-opt: it fails and does not say why"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "bishengir-opt dies of it, by SIGSEGV"),
        ("time.sleep(60)", "bishengir-opt takes longer than 2 s"),
    ],
)
def test_each_op_is_lowered_or_there_is_a_reason(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_a_unit: str, reason: str
) -> None:
    packaged(tmp_path, of_a_unit)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(hivm, "_PATIENCE", 2)
    assert main(["dump", f"{model}:build", "--to", str(tmp_path / "dump"), "--hivm"]) == OK
    folder = tmp_path / "dump" / "graph_0" / "hivm"
    norm, unit = (folder / "ops.txt").read_text().splitlines()  # the second norm is like the first
    name = "0_npu.npu_rms_norm.mlir"
    assert norm == f"npu::npu_rms_norm(input: bf16[2, 32], gamma: bf16[32]): {name}"
    assert unit == f"npu::npu_swiglu(input: bf16[2, 32]): not lowered: {reason}"
    assert (folder / name).read_text() == "hivm.hir.of bf16\n"
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize(("option", "package"), [("--mlir=torch", "torch-mlir"), ("--hivm", "ascendnpu-ir")])
def test_a_package_that_is_missing_is_told_in_one_line(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    option: str,
    package: str,
) -> None:
    there = importlib.util.find_spec
    missing = package.replace("-", "_") if option != "--hivm" else "ascendnpuir"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if missing in name else there(name))
    assert main(["dump", f"{model}:build", "--to", str(tmp_path / "dump"), option]) == USAGE
    error = capsys.readouterr().err
    assert error.startswith(f"npu-fuse: {package} is not installed")
    assert error.count("\n") == 1
    assert not (tmp_path / "dump").exists()
