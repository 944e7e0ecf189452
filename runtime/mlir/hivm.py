"""What AscendNPU-IR's compiler makes of a fused op: the HIVM of what the op is made of (the extra `hivm`).

It says what a compiler would have to beat, or would spare: nothing of it runs here. `bishengir-opt` is a program of the
package ascendnpu-ir; it needs neither CANN nor an NPU. It may fail or die of a graph: each op has a process of its own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from ...passes.views.code import kind_of
from ..ops import OpContract
from ..sizes import number_of
from .decomposition import decomposition
from .errors import MlirError, need_torch_mlir
from .functional import contract_of
from .tool import run_tool

__all__ = ["Lowered", "compiler", "lowered_ops"]

DEVICE = "Ascend910B1"
# In seconds. What is lowered at all takes about one.
_PATIENCE = 60
_CLEAN = (
    "builtin.module(func.func(canonicalize,torch-decompose-complex-ops,torch-recompose-complex-ops,canonicalize,cse))"
)
_PIPELINES = (
    f"--hacc-append-device-spec=target={DEVICE}",
    "-torch-backend-to-named-op-backend-pipeline",
    "-lower-hfusion-pipeline",
    "-convert-to-hivm-pipeline",
    "-optimize-hivm-pipeline",
)


@dataclass(frozen=True, slots=True)
class Lowered:
    """One op of a graph.

    Args:
        call: the op and what it is called with, as `npu::npu_swiglu(input: f16[4, 64])`.
        op: the op's name.
        text: its HIVM, or None.
        reason: why there is none, or None.
    """

    call: str
    op: str
    text: str | None
    reason: str | None


def compiler() -> Path:
    """The program `bishengir-opt`.

    Raises:
        MlirError: the package that has it is missing.
    """
    found = importlib.util.find_spec("ascendnpuir")
    path = Path(found.origin).parent / "bin" / "bishengir-opt" if found is not None and found.origin else None
    if path is None or not path.is_file():
        raise MlirError('ascendnpu-ir is not installed; it comes with the extra `hivm`: pip install "npu_fuse[hivm]"')
    return path


def lowered_ops(module: fx.GraphModule) -> Iterator[Lowered]:
    """Each fused op of a graph, lowered; one of several calls with the same shapes and dtypes.

    Sizes that vary are those that they were when the graph was compiled.

    Raises:
        MlirError: a package is missing.
    """
    need_torch_mlir()
    program = compiler()
    told = set()
    for node in module.graph.nodes:
        contract = contract_of(node.target)
        if contract is None:
            continue
        given = _given(node, contract)
        tensors = ", ".join(f"{k}: {kind_of(v)}" for k, v in given.items() if isinstance(v, torch.Tensor))
        call = f"{contract.name}({tensors})"
        if call in told:
            continue
        told.add(call)
        try:
            yield Lowered(call, contract.name, _hivm(program, contract, given), None)
        except (MlirError, ValueError, TypeError) as error:
            yield Lowered(call, contract.name, None, str(error))


def _given(node: fx.Node, contract: OpContract) -> dict[str, Any]:
    """The arguments of a call, with tensors that have neither values nor sizes that vary."""
    mode = FakeTensorMode()

    def fixed(value: Any) -> Any:
        value = value.meta["val"] if isinstance(value, fx.Node) else value
        if isinstance(value, torch.Tensor):
            sizes, strides = (tuple(map(number_of, numbers)) for numbers in (value.shape, value.stride()))
            with mode:
                return torch.empty_strided(sizes, strides, dtype=value.dtype)
        return number_of(value) if isinstance(value, torch.SymInt) else value

    args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), fixed)
    return contract.bind(*args, **kwargs)


def _hivm(program: Path, contract: OpContract, given: dict[str, Any]) -> str:
    from torch_mlir import ir

    from .importer import Importer
    from .lower import check, run_passes

    graph = decomposition(contract, given, {})
    check(graph.module.graph)
    importer = Importer()
    function = importer.add(graph, "main", overwrites=False)
    importer.module.context.allow_unregistered_dialects = True  # torch-mlir doesn't know theirs
    with importer.module.context:
        function.attributes["hacc.entry"] = ir.UnitAttr.get()
        function.attributes["hacc.function_kind"] = ir.Attribute.parse("#hacc.function_kind<DEVICE>")
    run_passes(importer.module, _CLEAN)
    return run_tool(program, _PIPELINES, str(importer.module), _PATIENCE)
