"""The doctor beside the real torch_npu: with an NPU and without one, with all packages, and without CANN."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def doctor(folder: Path, **changes: str | None) -> tuple[int, dict[str, str]]:
    """Its exit code, and what it found by subject, with changes to the environment."""
    environment = {**os.environ, "COLUMNS": "400", **changes}
    environment = {name: value for name, value in environment.items() if value is not None}
    command = [sys.executable, "-m", "npu_fuse", "doctor"]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=200)
    assert "Traceback" not in done.stderr
    found: dict[str, str] = {}
    subject = ""
    for line in done.stdout.split("\n"):
        if line.startswith("│"):
            _, level, name, text, _ = (cell.strip() for cell in line.split("│"))
            subject = name or subject  # without one, it goes on with the line before
            found[subject] = f"{found[subject]} {text}" if not name else f"{level}: {text}"
    return done.returncode, found


def test_an_npu_and_no_sgl_kernel_npu(tmp_path: Path) -> None:
    code, found = doctor(tmp_path, CANN_STUB_DEVICES="1")
    assert code == 0
    assert found["torch_npu"].startswith("ok: 2.13.")
    assert found["NPU"] == "ok: Ascend910B3: compiled for ascend910b"
    assert found["sgl_kernel_npu"].startswith("note: not installed: fused q, k and v (qkv)")
    assert found["fused ops"].startswith("ok")


def test_all_is_fine(tmp_path: Path) -> None:
    (tmp_path / "sgl_kernel_npu").mkdir()
    (tmp_path / "sgl_kernel_npu" / "__init__.py").touch()
    metadata = tmp_path / "sgl_kernel_npu-2026.5.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sgl_kernel_npu\nVersion: 2026.5.1\n")
    code, found = doctor(tmp_path, CANN_STUB_DEVICES="1", PYTHONPATH=str(tmp_path))
    assert code == 0
    assert found["sgl_kernel_npu"] == "ok: 2026.5.1"
    assert {subject for subject, text in found.items() if not text.startswith("ok")} <= {"CANN"}, "the stubs have none"


def test_torch_npu_and_no_npu(tmp_path: Path) -> None:
    code, found = doctor(tmp_path, CANN_STUB_DEVICES="0")
    assert code == 0
    assert found["NPU"].startswith("note: none is there: the fused ops run as reference implementations")


def test_an_soc_that_lacks_ops(tmp_path: Path) -> None:
    code, found = doctor(tmp_path, CANN_STUB_DEVICES="1", CANN_STUB_SOC="Ascend310P3")
    assert code == 0
    assert "ascend310p has no kernel for" in found["fused ops"]
    assert "npu::npu_fused_infer_attention_score" in found["fused ops"]


def test_an_soc_that_nothing_is_known_of(tmp_path: Path) -> None:
    code, found = doctor(tmp_path, CANN_STUB_DEVICES="1", CANN_STUB_SOC="Ascend910A")
    assert code == 1
    assert found["NPU"].startswith("wrong: unknown SoC of NPU 'Ascend910A'; known: Ascend910B* (ascend910b)")


@pytest.mark.parametrize("autoload", [None, "0"])
def test_no_cann(tmp_path: Path, autoload: str | None) -> None:
    code, found = doctor(tmp_path, LD_LIBRARY_PATH=None, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload)
    assert code == 1
    assert "can't be imported: libhccl.so" in found["torch_npu"]
    assert "source its set_env.sh" in found["torch_npu"]
