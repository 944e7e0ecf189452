"""Linalg on tensors, run on the CPU by MLIR's execution engine: what a text computes, apart from torch."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch_mlir import ir
from torch_mlir.dialects import torch as torch_dialect
from torch_mlir.execution_engine import ExecutionEngine
from torch_mlir.runtime import get_ranked_memref_descriptor

from .errors import MlirError
from .lower import parse, run_passes

__all__ = ["Jit"]

_TO_LOOPS = (
    "func.func(refback-generalize-tensor-pad,refback-generalize-tensor-concat)",
    "func.func(linalg-generalize-named-ops,canonicalize,linalg-fuse-elementwise-ops,canonicalize,cse)",
    "func.func(tm-tensor-bufferize)",
    "one-shot-bufferize{copy-before-write bufferize-function-boundaries"
    " function-boundary-type-conversion=identity-layout-map}",
    "refback-mlprogram-bufferize",
    # Without `modify-public-functions` a function gives nothing, and what it computes is lost.
    "buffer-results-to-out-params{hoist-static-allocs modify-public-functions}",
    "buffer-deallocation-pipeline",
    "func.func(tm-tensor-to-loops,refback-munge-memref-copy,convert-linalg-to-loops,lower-affine)",
    "convert-scf-to-cf",
    "func.func(refback-expand-ops-for-llvm)",
)
_TO_LLVM = (
    # There are no instructions for bfloat16, and no library that has them.
    "math-extend-to-supported-types{target-type=f32}",
    "func.func(arith-emulate-unsupported-floats{source-types=bf16 target-type=f32},arith-expand{include-bf16})",
    "func.func(llvm-request-c-wrappers,convert-math-to-llvm)",
    "convert-math-to-libm",
    "expand-strided-metadata",
    "lower-affine",
    "convert-bufferization-to-memref",
    "finalize-memref-to-llvm",
    "func.func(convert-arith-to-llvm)",
    "convert-vector-to-llvm",
    "convert-func-to-llvm",
    "convert-cf-to-llvm",
    "convert-complex-to-llvm",
    "convert-index-to-llvm",
    "reconcile-unrealized-casts",
)
_DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "i1": torch.bool,
}


class Jit:
    """A function in linalg on tensors, compiled for the CPU.

    Args:
        text: as `export_mlir(…, form="linalg", constants=True)` gives it; all its sizes are static.
        name: the function.

    Raises:
        MlirError: there is no such function, a size is dynamic, or it can't be compiled.
    """

    def __init__(self, text: str, name: str = "main") -> None:
        context = ir.Context()
        torch_dialect.register_dialect(context)
        with context:
            module = parse(text, context)
            found = [op for op in module.body.operations if op.attributes["sym_name"].value == name]
            if not found:
                raise MlirError(f"there is no function {name!r} in the text")
            self._results = [_described(kind) for kind in found[0].type.results]
            run_passes(module, _pipeline(_TO_LOOPS))
            _widen(module)
            run_passes(module, _pipeline(_TO_LLVM))
            self._engine = ExecutionEngine(module, opt_level=0)  # compiling takes longer than running does
        try:
            self._engine.lookup(name)
        except RuntimeError as error:
            raise MlirError(f"MLIR's execution engine can't compile {name!r}") from error
        self._name = name

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """The results of a call.

        Args:
            inputs: tensors on the CPU, of the function's types; none is written.
        """
        results = [torch.empty(shape, dtype=dtype) for shape, dtype in self._results]
        arrays = [_array(tensor.contiguous()) for tensor in (*inputs, *results)]
        memrefs = [ctypes.pointer(ctypes.pointer(get_ranked_memref_descriptor(array))) for array in arrays]
        self._engine.invoke(self._name, *memrefs)
        return results


def _pipeline(passes: tuple[str, ...]) -> str:
    return f"builtin.module({','.join(passes)})"


def _widen(module: ir.Module) -> None:
    """Makes bfloat16 numbers float32 where no pass does it.

    Between such numbers none is chosen, no integer becomes one, and none goes from one block to the next.
    """
    brain, wide = ir.BF16Type.get(), ir.F32Type.get()
    found: list[Any] = []

    def visit(op: Any) -> Any:
        if op.name == "arith.extf" and isinstance(op.operands[0].owner, (ir.Operation, ir.OpView)):
            op.move_after(op.operands[0].owner)
        if op.name in ("arith.select", "arith.sitofp", "arith.uitofp") and op.results[0].type == brain:
            found.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    for op in found:
        with ir.InsertionPoint(op), op.location:
            operands = [
                ir.Operation.create("arith.extf", results=[wide], operands=[value]).result
                if value.type == brain
                else value
                for value in op.operands
            ]
            result = ir.Operation.create(op.name, results=[wide], operands=operands).result
            narrow = ir.Operation.create("arith.truncf", results=[brain], operands=[result]).result
        op.results[0].replace_all_uses_with(narrow)
        op.erase()


def _described(kind: Any) -> tuple[list[int], torch.dtype]:
    tensor = ir.RankedTensorType(kind)
    if not tensor.has_static_shape:
        raise MlirError(f"a result has sizes that are not static: {tensor}")
    return list(tensor.shape), _DTYPES[str(tensor.element_type)]


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor's memory, as numpy knows it: it has no bfloat16."""
    array: np.ndarray[Any, Any] = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array
