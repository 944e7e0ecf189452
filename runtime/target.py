"""The machine a program is compiled for: which Ascend SoC, which device, which op packages."""

import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Literal, get_args

from torch.torch_version import TorchVersion

__all__ = [
    "SOCS",
    "Device",
    "Soc",
    "Target",
    "installed_version",
    "package_version",
    "probe_errors",
    "probe_packages",
    "soc_of_device",
]

# "host" is a machine without an NPU, where the ops are torch's own.
Soc = Literal["ascend910b", "ascend910_93", "ascend950", "ascend310p", "host"]
Device = Literal["npu", "cpu"]

SOCS: tuple[Soc, ...] = get_args(Soc)
_DEVICES: tuple[Device, ...] = get_args(Device)

# torch_npu comes first: sgl_kernel_npu registers its ops on the backend that torch_npu brings.
_PACKAGES = ("torch_npu", "sgl_kernel_npu")

# Device names as `torch.npu.get_device_name` gives them: Ascend910B3, Ascend910_9391, Ascend950PR_9589, Ascend310P3.
_SOC_OF_PREFIX: Mapping[str, Soc] = {
    "Ascend910B": "ascend910b",
    "Ascend910_93": "ascend910_93",
    "Ascend950": "ascend950",
    "Ascend310P": "ascend310p",
}

_logger = logging.getLogger("npu_fuse")


@dataclass(frozen=True, slots=True)
class Target:
    """What the contracts of fused ops are judged for.

    Args:
        soc: the SoC whose kernels' limits hold.
        device: "npu" when the kernels themselves run; "cpu" when their references stand in for them. What fuses depends
            on `soc` alone where it can, so a laptop shows what an NPU would do.
        packages: version of each op package that can be imported, by import name.

    Raises:
        ValueError: `soc` or `device` is unknown.
    """

    soc: Soc = "ascend910b"
    device: Device = "cpu"
    packages: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.soc not in SOCS:
            raise ValueError(f"Target.soc: unknown SoC {self.soc!r}; known: {', '.join(SOCS)}")
        if self.device not in _DEVICES:
            raise ValueError(f"Target.device: unknown device {self.device!r}; known: {', '.join(_DEVICES)}")

    @classmethod
    def detect(cls) -> "Target":
        """The machine this process runs on; without an NPU, an `ascend910b` whose kernels are the references.

        Loads torch_npu and sgl_kernel_npu where they are installed. One that is broken (torch_npu without CANN raises
        an ImportError) counts as missing and is logged once per process.

        Raises:
            ValueError: there is an NPU, of a SoC for which no contract is known.
        """
        findings = _probe()
        if findings.device_name is None:
            return cls(packages=dict(findings.packages))
        return cls(soc_of_device(findings.device_name), "npu", dict(findings.packages))

    def has_older(self, package: str, version: str) -> bool:
        """Whether `package` is here in a version before `version`; an unreadable version counts as new."""
        return package in self.packages and TorchVersion(self.packages[package]) < version


def soc_of_device(device_name: str) -> Soc:
    """The SoC of a device name such as "Ascend910B3".

    Raises:
        ValueError: no known SoC has such a name.
    """
    for prefix, soc in _SOC_OF_PREFIX.items():
        if device_name.startswith(prefix):
            return soc
    known = ", ".join(f"{prefix}* ({soc})" for prefix, soc in _SOC_OF_PREFIX.items())
    raise ValueError(f"unknown SoC of NPU {device_name!r}; known: {known}; or give the backend a Target of your own")


def probe_packages() -> Mapping[str, str]:
    """Versions of the op packages that can be imported, by import name; loads them on the first call."""
    return dict(_probe().packages)


def probe_errors() -> Mapping[str, Exception]:
    """What kept op packages that are installed from being imported, by import name; tries them on the first call."""
    return dict(_probe().errors)


def package_version(package: str) -> str:
    """The installed version of `package`, "unknown" when its metadata doesn't say."""
    return installed_version(package) or str(getattr(sys.modules.get(package), "__version__", "unknown"))


def installed_version(package: str) -> str | None:
    """The version of a distribution by its metadata, None where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True, slots=True)
class _Findings:
    packages: Mapping[str, str]
    device_name: str | None
    errors: Mapping[str, Exception]


@functools.cache
def _probe() -> _Findings:
    """Loads what is installed, once; whatever a broken package raises becomes one notice."""
    packages: dict[str, str] = {}
    device_name: str | None = None
    errors: dict[str, Exception] = {}
    for package in _PACKAGES:
        try:
            module = _load(package)
            if module is None:
                continue
            if package == "torch_npu":
                device_name = _device_name(module)
            packages[package] = package_version(package)
        except Exception as error:
            # A vendor package fails in many ways: ImportError, OSError, RuntimeError, AttributeError.
            errors[package] = error
    if errors:
        first, cause = next(iter(errors.items()))
        _logger.warning("%s is installed but can't be used, so its ops are missing: %s", first, cause)
    return _Findings(packages, device_name, errors)


def _load(package: str) -> ModuleType | None:
    # A module set in sys.modules by hand may have no __spec__, for which find_spec raises: look there first.
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        return None
    return importlib.import_module(package)


def _device_name(torch_npu: ModuleType) -> str | None:
    # After a failed import a half-initialised module may stay behind, without `npu`: an AttributeError for the caller.
    npu = torch_npu.npu
    return str(npu.get_device_name()) if npu.is_available() else None
