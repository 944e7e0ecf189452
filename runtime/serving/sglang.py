"""SGLang: npu_fuse compiles what SGLang compiles for an NPU. Its entry point is in the group `sglang.srt.plugins`.

    NPU_FUSE=1 python -m sglang.launch_server --device npu --enable-torch-compile …

SGLang asks `get_compiler_backend("npugraph_ex")` for the backend of a model's forward, once a size that it captures; a
hook answers. Then the functions of sgl_kernel_npu that models call by hand are ops in the graphs, where they are one
node each, and not the Triton kernels that they launch.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.torch_version import TorchVersion

from ..backend import Backend
from ..ops import CONTRACTS
from ..ops.register import register
from ..ops.sgl_kernel import SglFunction
from ..target import Target, package_version
from .environment import enabled, options, told

__all__ = ["plug_in"]

# The releases whose hooks are known, from the first to before the last.
_SINCE, _BEFORE = "0.5.23", "0.6"

_SEAM = "sglang.srt.utils.common.get_compiler_backend"
_MODE = "npugraph_ex"  # what SGLang asks for where it compiles a model for an NPU, and nowhere else

_log = logging.getLogger("npu_fuse")

_Function = Callable[..., Any]


def plug_in() -> None:
    """Registers the hook where `NPU_FUSE` is 1. Where SGLang doesn't fit, one warning says why, and nothing is done."""
    if not enabled():
        return
    reason = _why_not()
    if reason is not None:
        _log.warning("npu_fuse is off in SGLang %s: %s", package_version("sglang"), reason)
        return
    hooks = _hooks()
    hooks.HookRegistry.register(_SEAM, _answer, hooks.HookType.AROUND)


def _why_not() -> str | None:
    """Why this release of SGLang has no place for the hook, or None."""
    version = package_version("sglang")
    if not _SINCE <= TorchVersion(version) < _BEFORE:
        return f"its hooks are known from {_SINCE} to before {_BEFORE}"
    try:
        _hooks()
        inspect.signature(pkgutil.resolve_name(_SEAM)).bind(_MODE)
    except (ImportError, AttributeError) as error:
        return f"{_SEAM} can't be hooked: {error}"
    except TypeError:
        return f"{_SEAM} takes no mode"
    return None


def _hooks() -> Any:
    return importlib.import_module("sglang.srt.plugins.hook_registry")


def _answer(original: _Function, mode: str | None = None) -> Any:
    """The backend that SGLang asks for: ours for a model on an NPU, otherwise SGLang's own."""
    if mode != _MODE:
        return original(mode)
    try:
        return _backend()
    except Exception as error:
        _log.warning("npu_fuse is off, SGLang compiles by itself: %s: %s", type(error).__name__, error)
        return original(mode)


@functools.cache
def _backend() -> Backend:
    """The one backend of this process; one line says that it is there."""
    settings, target = options(), Target.detect()
    if settings.graphs is not None:
        _log.warning("npu_fuse: Options.graphs is left out, as SGLang captures and replays what it compiles")
        settings = replace(settings, graphs=None)
    register(target)
    _call_ops()
    versions = f"npu_fuse {package_version('npu_fuse')} is on in SGLang {package_version('sglang')}"
    _log.info("%s, for %s (%s), with %s", versions, target.soc, target.device, told(settings))
    return Backend(settings)


def _call_ops() -> None:
    """Hooks the functions of sgl_kernel_npu that are imported, so that they are ops where a model is compiled."""
    hooks = _hooks()
    for contract in CONTRACTS.values():
        kernel = contract.device_kernel
        if not isinstance(kernel, SglFunction) or kernel.module not in sys.modules:
            continue
        function = getattr(sys.modules[kernel.module], kernel.name, None)
        # Models pass some arguments by place, and releases have had them in other orders.
        if function is not None and tuple(inspect.signature(function).parameters) == kernel.parameters:
            hook = functools.partial(_as_op, contract.op)
            hooks.HookRegistry.register(f"{kernel.module}.{kernel.name}", hook, hooks.HookType.AROUND)
    hooks.HookRegistry.apply_hooks()


def _as_op(op: _Function, original: _Function, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs) if torch.compiler.is_compiling() else original(*args, **kwargs)
