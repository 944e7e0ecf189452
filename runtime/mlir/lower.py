"""Graphs of torch's own ops as linalg on tensors, by torch-mlir's passes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._decomp import get_decompositions
from torch._ops import OpOverload
from torch_mlir import _mlir_libs, ir
from torch_mlir.extras.fx_decomp_util import get_decomposition_table
from torch_mlir.passmanager import PassManager

from .errors import MlirError
from .functional import is_empty, written_by
from .tool import run_tool

__all__ = ["check", "decompositions", "parse", "run_passes", "to_linalg"]

aten = torch.ops.aten

_TO_LINALG = (
    "builtin.module(func.func(torch-match-quantized-custom-ops),"
    "torchdynamo-export-to-torch-backend-pipeline{extra-library=},torch-backend-to-linalg-on-tensors-backend-pipeline)"
)
# In seconds. A layer of a model takes less than one.
_PATIENCE = 600


@functools.cache
def decompositions() -> Mapping[Any, Any]:
    """How ops are taken apart that torch-mlir doesn't lower itself."""
    return {**get_decomposition_table(), **_OURS}


def _sorted(x: torch.Tensor, *, stable: bool | None, dim: int = -1, descending: bool = False) -> Any:
    # torch-mlir lowers no sort that is said to be stable; the loops that it makes of any sort are.
    return aten.sort.default(x, dim, descending)


def _scattered(x: torch.Tensor, dim: int, index: torch.Tensor, value: float) -> Any:
    # torch-mlir 20261001 dies of a scatter.
    last = index.movedim(dim, -1)
    if last.shape[:-1] != x.movedim(dim, -1).shape[:-1]:
        return NotImplemented
    is_hit = (last.unsqueeze(-1) == torch.arange(x.shape[dim], device=x.device)).any(-2)
    return torch.where(is_hit.movedim(-1, dim), torch.scalar_tensor(value, dtype=x.dtype), x)


_OURS: Mapping[Any, Any] = {
    aten.sort.stable: _sorted,
    aten.scatter.value: _scattered,
    # torch-mlir's own tanh form is off by 5e-5.
    **get_decompositions([aten.gelu]),
}


def check(graph: fx.Graph) -> None:
    """Checks that torch-mlir may lower a graph: that it has torch's own ops only, and computes no empty tensor.

    Raises:
        MlirError: it has others.
    """
    for node in graph.nodes:
        written = written_by(node.target)
        op = node.target if written is None else written.op
        if isinstance(op, OpOverload) and op.namespace not in ("aten", "prims"):
            raise MlirError(f"{op} is no op of torch's own, and nothing is known of what it is made of")
        if is_empty(node.meta.get("val")) and node.all_input_nodes and op is not aten.new_empty.default:
            raise MlirError(f"{op} gives a tensor without elements, {list(node.meta['val'].shape)}, which has no form")


def to_linalg(module: ir.Module) -> ir.Module:
    """A module of torch's ops, lowered.

    Raises:
        MlirError: torch-mlir has no lowering of an op.
    """
    tool = next(Path(folder) / "torch-mlir-opt" for folder in _mlir_libs.__path__)
    given = module.operation.get_asm(enable_debug_info=True)
    text = run_tool(tool, (f"--pass-pipeline={_TO_LINALG}", "--mlir-print-debuginfo"), given, _PATIENCE)
    return parse(text, module.context)


def parse(text: str, context: ir.Context) -> ir.Module:
    """A module of linalg on tensors from its text."""
    # torch-mlir's own dialects are known once a pass that makes use of them has been made.
    run_passes(ir.Module.parse("", context), "builtin.module(torch-backend-to-linalg-on-tensors-backend-pipeline)")
    return ir.Module.parse(text, context)


def run_passes(module: ir.Module, passes: str) -> None:
    """Runs a pipeline.

    Raises:
        MlirError: a pass fails.
    """
    try:
        PassManager.parse(passes, context=module.context).run(module.operation)
    except ir.MLIRError as error:
        first = next((str(of.message) for of in error.error_diagnostics), str(error).strip().split("\n")[0])
        raise MlirError(f"torch-mlir: {first}") from error
