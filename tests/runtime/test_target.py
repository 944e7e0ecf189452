"""Targets: what may be said of a machine, and what is found on one, sound or broken."""

import json
import logging
import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from npu_fuse.runtime import target as module
from npu_fuse.runtime.target import SOCS, Target, probe_packages, soc_of_device


@pytest.fixture
def vendor(monkeypatch):
    """Puts modules in the place of vendor packages; None stands for a package that is not there."""
    monkeypatch.setattr(module, "_PACKAGES", ("torch_npu",))
    module._probe.cache_clear()

    def put(**packages):
        monkeypatch.setattr(module, "_PACKAGES", tuple(packages))
        for name, package in packages.items():
            monkeypatch.setitem(sys.modules, name, package)

    yield put
    module._probe.cache_clear()


def torch_npu(device_name=None, version="2.13.0"):
    package = ModuleType("torch_npu")
    package.__version__ = version
    package.npu = SimpleNamespace(is_available=lambda: device_name is not None, get_device_name=lambda: device_name)
    return package


def test_default_is_an_ascend910b_with_references():
    assert Target() == Target("ascend910b", "cpu", {})


def test_targets_are_values():
    left, right = (Target("ascend950", "npu", {"torch_npu": "2.13.0"}) for _ in range(2))
    assert left == right
    assert len({left, right}) == 1


def test_unknown_names_are_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown SoC 'ascend910c'; known: ascend910b, ascend910_93, ascend950, asc"):
        Target("ascend910c")
    with pytest.raises(ValueError, match=r"unknown device 'cuda'; known: npu, cpu"):
        Target("ascend910b", "cuda")


@pytest.mark.parametrize(
    ("device_name", "soc"),
    [
        ("Ascend910B", "ascend910b"),
        ("Ascend910B3", "ascend910b"),
        ("Ascend910B4-1", "ascend910b"),
        ("Ascend910_9391", "ascend910_93"),
        ("Ascend950PR_9589", "ascend950"),
        ("Ascend310P3", "ascend310p"),
    ],
)
def test_soc_of_device(device_name, soc):
    assert soc_of_device(device_name) == soc


@pytest.mark.parametrize("device_name", ["Ascend910A", "Ascend910ProB", "Ascend310B", ""])
def test_an_unknown_device_is_answered_with_all_socs(device_name):
    with pytest.raises(ValueError, match=f"NPU '{device_name}'") as raised:
        soc_of_device(device_name)
    assert all(soc in str(raised.value) for soc in SOCS if soc != "host")


@pytest.mark.parametrize(
    ("version", "older"),
    [("2026.5.1.post2", True), ("2026.05.01.post3", False), ("2026.5.1.post3", False), ("2026.6.0", False)],
)
def test_has_older(version, older):
    assert Target(packages={"sgl_kernel_npu": version}).has_older("sgl_kernel_npu", "2026.05.01.post3") is older


def test_neither_a_missing_package_nor_an_unreadable_version_is_older():
    assert not Target().has_older("sgl_kernel_npu", "2026.05.01.post3")
    assert not Target(packages={"sgl_kernel_npu": "unknown"}).has_older("sgl_kernel_npu", "2026.05.01.post3")


def test_an_npu_is_detected(vendor):
    vendor(torch_npu=torch_npu("Ascend910_9391"))
    assert Target.detect() == Target("ascend910_93", "npu", {"torch_npu": "2.13.0"})


def test_torch_npu_without_an_npu_means_references(vendor, caplog):
    vendor(torch_npu=torch_npu())
    assert Target.detect() == Target("ascend910b", "cpu", {"torch_npu": "2.13.0"})
    assert not caplog.records


def test_an_npu_of_an_unknown_soc_is_an_error(vendor):
    vendor(torch_npu=torch_npu("Ascend910A"))
    with pytest.raises(ValueError, match="unknown SoC of NPU 'Ascend910A'"):
        Target.detect()


def test_all_packages_are_listed_with_their_versions(vendor):
    kernels = ModuleType("sgl_kernel_npu")
    vendor(torch_npu=torch_npu(), sgl_kernel_npu=kernels)
    assert probe_packages() == {"torch_npu": "2.13.0", "sgl_kernel_npu": "unknown"}


def test_a_half_initialised_package_counts_as_missing(vendor, caplog):
    vendor(torch_npu=ModuleType("torch_npu"))
    assert Target.detect() == Target()
    assert [record.getMessage() for record in caplog.records] == [
        "torch_npu is installed but can't be used, so its ops are missing: module 'torch_npu' has no attribute 'npu'"
    ]


def test_only_the_first_of_several_errors_is_told_once(vendor, caplog):
    vendor(torch_npu=None, sgl_kernel_npu=None)
    assert Target.detect() == Target.detect() == Target()
    assert len(caplog.records) == 1
    assert caplog.records[0].name == "npu_fuse"
    assert caplog.records[0].levelno == logging.WARNING
    assert "import of torch_npu halted" in caplog.records[0].getMessage()


def test_a_device_that_does_not_answer_counts_as_missing(vendor, caplog):
    package = torch_npu("Ascend910B3")

    def refuse():
        raise RuntimeError("Cannot re-initialize NPU in forked subprocess")

    package.npu.get_device_name = refuse
    vendor(torch_npu=package)
    assert Target.detect() == Target()
    assert "forked subprocess" in caplog.text


def test_torch_npu_without_cann_is_one_notice_and_the_references_run(tmp_path):
    stub = tmp_path / "torch_npu"
    (stub / "npu").mkdir(parents=True)
    # As the real package does: some submodules are in sys.modules by the time the import fails.
    (stub / "__init__.py").write_text("import torch_npu.npu\n")
    failure = "libhccl.so: cannot open shared object file: No such file or directory"
    (stub / "npu" / "__init__.py").write_text(f"raise ImportError({failure!r})\n")
    program = """
import json, torch
from npu_fuse.runtime.ops import CONTRACTS
from npu_fuse.runtime.ops.register import register
from npu_fuse.runtime.target import Target
for _ in range(2):
    target = Target.detect()
    register(target)
y = CONTRACTS["npu::npu_swiglu"].op(torch.zeros(2, 4))
print(json.dumps([target.soc, target.device, dict(target.packages), list(y.shape)]))
"""
    search_path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": search_path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(result.stdout) == ["ascend910b", "cpu", {}, [2, 2]]
    assert result.stderr.count("libhccl.so: cannot open shared object file") == 1
    assert "torch_npu is installed but can't be used" in result.stderr
