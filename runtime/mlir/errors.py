"""What can't be done, told to the user."""

from __future__ import annotations

import importlib.util

__all__ = ["MlirError", "need_torch_mlir"]


class MlirError(RuntimeError):
    """A graph can't be written in the form that was asked for, or a package is missing; its text says why."""


def need_torch_mlir() -> None:
    """Checks that torch-mlir is there.

    Raises:
        MlirError: it isn't.
    """
    # It is a namespace package: a folder that an uninstallation has left counts for nothing.
    if importlib.util.find_spec("torch_mlir") is None or importlib.util.find_spec("torch_mlir.ir") is None:
        raise MlirError('torch-mlir is not installed; it comes with the extra `mlir`: pip install "npu_fuse[mlir]"')
