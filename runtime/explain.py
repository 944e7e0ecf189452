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
    # A model that has been compiled often may have used up its recompilations: this one is for its report only.
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1 << 16, accumulated_recompile_limit=1 << 16):
        torch.compile(model, backend=backend)(*args, **kwargs)
    if not backend.reports:
        raise RuntimeError("npu_fuse.explain: the call compiled no graph; does torch.compile skip the model?")
    return backend.report
