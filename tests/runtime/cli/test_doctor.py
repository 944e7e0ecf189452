"""The doctor, in environments that it is to tell apart; each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path


def doctor(folder: Path, **packages: tuple[str, str]) -> tuple[int, str]:
    """Its exit code and what it says, with packages of a name, a version and a source on the path."""
    for name, (version, source) in packages.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(source)
        metadata = folder / f"{name}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (metadata / "entry_points.txt").write_text(f"[torch.backends]\n{name} = {name}:_autoload\n")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "300"}
    environment.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    done = subprocess.run(
        [sys.executable, "-m", "npu_fuse", "doctor"], env=environment, cwd=folder, capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout


def row(text: str, subject: str) -> str:
    (found,) = (line for line in text.split("\n") if f"│ {subject} " in line)
    return found


def test_nothing_installed(tmp_path: Path) -> None:
    code, text = doctor(tmp_path)
    assert code == 0
    assert "│note │ torch_npu" in row(text, "torch_npu")
    assert "run as reference implementations on the CPU" in row(text, "torch_npu")
    assert "ok" in row(text, "fused ops")


def test_a_broken_torch_npu_with_which_torch_itself_could_not_be_imported(tmp_path: Path) -> None:
    broken = "raise ImportError('libhccl.so: cannot open shared object file')"
    code, text = doctor(tmp_path, torch_npu=("2.13.0", broken))
    assert code == 1
    assert "│wrong│" in row(text, "torch_npu").replace(" ", "")
    assert "libhccl.so: cannot open shared object file" in row(text, "torch_npu")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in row(text, "torch_npu")


def test_a_version_that_does_not_fit(tmp_path: Path) -> None:
    code, text = doctor(tmp_path, torch_npu=("2.9.0", "class npu:\n    is_available = staticmethod(lambda: False)\n"))
    assert code == 1
    assert "2.9.0 is installed, and npu_fuse 0.1.0 wants torch_npu<2.14,>=2.13" in row(text, "torch_npu")


def test_a_broken_sgl_kernel_npu(tmp_path: Path) -> None:
    code, text = doctor(tmp_path, sgl_kernel_npu=("2026.5.1", "raise OSError('libsgl_kernel_npu.so is missing')"))
    assert code == 1
    assert "libsgl_kernel_npu.so is missing" in row(text, "sgl_kernel_npu")
