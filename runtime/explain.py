"""What would fuse, and why not the rest: a compilation for its report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..passes.report import Report
from .backend import Backend
from .options import Options


def explain(model: Callable[..., Any], *args: Any, options: Options | None = None, **kwargs: Any) -> Report:
    """Compiles `model` for the given call, runs it once, and returns the report on all its graphs.

    Args:
        model: a module or function, as it would be given to torch.compile.
        *args: one call of it.
        options: settings of the backend.
        **kwargs: its keyword arguments.

    Raises:
        RuntimeError: Dynamo found nothing to compile in the call.
    """
    backend = Backend(replace(options if options is not None else Options(), keep_graphs=True))
    compile_once(model, backend, *args, **kwargs)
    return backend.report


def compile_once(model: Callable[..., Any], backend: Backend, *args: Any, **kwargs: Any) -> None:
    """Compiles `model` for the given call by a backend that keeps what it makes of it, and runs it once.

    Raises:
        RuntimeError: Dynamo found nothing to compile in the call.
    """
    # A model that has been compiled often may have used up its recompilations: this one is for its report only.
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1 << 16, accumulated_recompile_limit=1 << 16):
        torch.compile(model, backend=backend)(*args, **kwargs)
    if not backend.reports:
        raise RuntimeError("npu_fuse: the call compiled no graph; does torch.compile skip the model?")
