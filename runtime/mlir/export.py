"""`export_mlir`: graphs as text in MLIR."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, get_args

from torch import fx

from ..backend import Backend
from ..explain import compile_once
from ..options import Options
from .errors import MlirError, need_torch_mlir
from .functional import functional

__all__ = ["Form", "export_mlir"]

Form = Literal["torch", "calls", "linalg"]

# More numbers than these are not printed.
_SHOWN = 16
_CLEAN = "builtin.module(inline,func.func(canonicalize,cse))"


def export_mlir(
    model: Callable[..., Any],
    *args: Any,
    form: Form = "torch",
    constants: bool = False,
    locations: bool = False,
    options: Options | None = None,
    **kwargs: Any,
) -> str:
    """A graph, or all graphs of a model, as MLIR.

    Args:
        model: a graph of `Backend.graphs`, which becomes the function `main`; or a module or function as it would be
            given to torch.compile, which is compiled for one call: its graphs become `graph_0`, `graph_1`, …
        *args: one call of the model.
        form: "torch" is torch's dialect, with fused ops as `torch.operator`. "calls" is the same with fused ops as
            calls of functions that are declared, each argument by its name. "linalg" is linalg on tensors, with fused
            ops taken apart as their references are.
        constants: write out tensors that a graph holds, which the text leaves out where they are long.
        locations: say of each op which line of the model it comes from.
        options: settings of the backend.
        **kwargs: the model's keyword arguments.

    Returns:
        One module. An input that is written is a `!torch.tensor` that is overwritten; in linalg, where tensors are
        values, the new values are the last results, and an attribute of the function says whose they are.

    Raises:
        MlirError: torch-mlir is missing, or a graph has no such form.
        ValueError: the form is unknown.
        RuntimeError: Dynamo found nothing to compile in the call.
    """
    if form not in get_args(Form):
        raise ValueError(f"export_mlir: unknown form {form!r}; known: {', '.join(get_args(Form))}")
    need_torch_mlir()
    if isinstance(model, fx.GraphModule) and _is_ours(model) and not args and not kwargs:
        return _text({"main": model}, form, constants, locations)
    backend = Backend(replace(options if options is not None else Options(), keep_graphs=True))
    compile_once(model, backend, *args, **kwargs)
    if not backend.graphs:
        raise MlirError(f"there is no graph to write: {backend.report.summary()}")
    graphs = {f"graph_{i}": after for i, (_, after) in enumerate(backend.graphs)}
    return _text(graphs, form, constants, locations)


def _is_ours(module: fx.GraphModule) -> bool:
    """Whether a graph is AOTAutograd's, not one that is to be compiled."""
    inputs = module.graph.find_nodes(op="placeholder")
    return bool(inputs) and all("val" in node.meta for node in inputs)


def _text(graphs: dict[str, fx.GraphModule], form: Form, constants: bool, locations: bool) -> str:
    from .importer import Importer
    from .lower import check, decompositions, run_passes, to_linalg

    table = decompositions() if form == "linalg" else None
    importer = Importer(as_calls=form == "calls")
    for name, graph in graphs.items():
        without_writes = functional(graph, table)
        if form == "linalg":
            check(without_writes.module.graph)
        importer.add(without_writes, name, overwrites=form != "linalg")
    module = importer.module
    if form == "linalg":
        module = to_linalg(module)
    else:
        run_passes(module, _CLEAN)
    limits = {} if constants else {"large_elements_limit": _SHOWN, "large_resource_limit": _SHOWN}
    text: str = module.operation.get_asm(enable_debug_info=locations, **limits)
    return text
