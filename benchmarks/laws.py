"""The two laws, on every site of public models, and how near to the truth what is fused comes.

    python benchmarks/laws.py [MODEL …]

For each model's prompt, in bfloat16 and float32:

    exact      sites whose spelling, run on what the site reads, gives the bits that the graph has there
    untouched  whether a graph in which every kind is turned off runs node for node as AOTAutograd gave it
    error      the fused outputs' root mean square distance from those in float64, as a multiple of eager's; in float32
               where the model's ops know no float64

The results are kept in `results/laws.json`.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import fx, nn
from torch.utils._pytree import tree_leaves, tree_map

import npu_fuse
from models import MODELS
from npu_fuse.passes.preserve import restore
from npu_fuse.patterns import KINDS, recognise
from npu_fuse.runtime.backend import Compilation

RESULTS = Path(__file__).parent / "results" / "laws.json"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

Row = dict[str, Any]


class Keeping(npu_fuse.Backend):
    """Keeps each graph as it came, as it was left, and what it was called with."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(strict=True, **settings)
        self.graphs: list[tuple[fx.GraphModule, fx.GraphModule]] = []
        self.calls: list[tuple[Any, ...] | None] = []

    def _optimised(self, module: fx.GraphModule, compilation: Compilation) -> fx.GraphModule:
        optimised = super()._optimised(module, compilation)
        index = len(self.graphs)
        assert compilation.before is not None
        self.graphs.append((compilation.before.restored(), optimised))
        self.calls.append(None)
        forward = optimised.forward

        def keeping(*inputs: Any) -> Any:
            if self.calls[index] is None:
                self.calls[index] = tuple(i.clone() if isinstance(i, torch.Tensor) else i for i in inputs)
            return forward(*inputs)

        optimised.forward = keeping
        return optimised


class Recorder(fx.Interpreter):
    """Keeps the value of every node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.values[n] = value
        return value


def restored(module: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """A copy of a graph with the model's own ops for the preserved ones, and the copy of each node."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(module.graph, copies))
    restore(graph)
    return fx.GraphModule(module, graph), copies


def exact(backend: Keeping) -> tuple[int, list[str]]:
    """How many sites there are, and those that their spelling does not repeat."""
    count, different = 0, []
    for (before, _), inputs in zip(backend.graphs, backend.calls, strict=True):
        if inputs is None:
            continue
        module, copies = restored(before)
        recorder = Recorder(module)
        recorder.run(*inputs)
        for match in recognise(before.graph).all():
            spelling = getattr(match.params, "spelling", None)
            if spelling is None:
                continue  # a larger kind: all that it computes is in its parts
            count += 1
            value = recorder.values[copies[match.node]]
            repeated = spelling(**{name: recorder.values[copies[match.inputs[name]]] for name in spelling.inputs})
            if not same(repeated, value):
                different.append(f"{match.kind} {match.node}: {spelling}")
    return count, different


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit."""
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())


def untouched(backend: Keeping) -> bool:
    """Whether what ran is node for node what came."""
    return all(as_text(restored(before)[0].graph) == as_text(after.graph) for before, after in backend.graphs)


def as_text(graph: fx.Graph) -> list[tuple[str, ...]]:
    """The nodes of a graph as text, numbered, so that names don't matter."""
    number = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    listed = []
    for node in graph.nodes:
        target = "" if node.op == "placeholder" else str(node.target)
        listed.append((node.op, target, *(str(fx.map_arg(a, number.get)) for a in (node.args, node.kwargs))))
    return listed


def distance(outputs: Any, truth: Any) -> float:
    """Root mean square of the differences of all float outputs, each as a part of its tensor's largest value."""
    squares = [
        ((a.double() - b.double()) / (b.double().abs().max() + 1e-30)).pow(2).mean()
        for a, b in zip(floats(outputs), floats(truth), strict=True)
    ]
    return float(torch.stack(squares).mean().sqrt())


def floats(outputs: Any) -> list[torch.Tensor]:
    leaves = tree_leaves(dict(outputs) if isinstance(outputs, Mapping) else outputs)
    return [t for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point() and t.numel()]


def true_outputs(module: nn.Module, inputs: dict[str, Any]) -> Any:
    """What the module gives in the widest type that its ops know."""
    for dtype in (torch.float64, torch.float32):
        try:
            return copy.deepcopy(module).to(dtype)(**in_type(inputs, dtype))
        except RuntimeError as error:
            if "got Double" not in str(error):
                raise
    raise AssertionError("a module that runs in no type")


def in_type(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return tree_map(lambda t: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t, inputs)


def measured(name: str, dtype: torch.dtype) -> Row:
    """One row of the results."""
    torch.manual_seed(0)
    module = MODELS[name].build(dtype)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    inputs = MODELS[name].inputs(module, "prefill")
    with torch.no_grad():
        eager = module(**inputs)
        truth = true_outputs(module, inputs)
        torch._dynamo.reset()
        fused = Keeping()
        outputs = torch.compile(module, backend=fused)(**inputs)
        count, different = exact(fused)
        torch._dynamo.reset()
        off = Keeping(disable=frozenset(KINDS))
        torch.compile(module, backend=off)(**inputs)
    errors = distance(outputs, truth), distance(eager, truth)
    return {
        "sites": count,
        "not exact": different,
        "untouched": untouched(off),
        "error": round(errors[0] / errors[1], 3) if errors[1] else None,  # where eager itself is the truth
    }


def main(names: Iterable[str]) -> int:
    """Measures models, keeps and prints the results; returns the exit status."""
    rows: dict[str, Row] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in track(list(names), "Checking the laws"):
        for label, dtype in DTYPES.items():
            try:
                rows[f"{name} {label}"] = measured(name, dtype)
            except Exception as error:
                rows[f"{name} {label}"] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")
    return report(rows)


def report(rows: Mapping[str, Row]) -> int:
    """Prints the results; the status is 1 where a law is broken."""
    table = Table("model", "sites", "exact", "untouched", "error")
    broken = 0
    for name, row in rows.items():
        if "failed" in row:
            table.add_row(name, f"[red]{row['failed']}[/]")
            continue
        exactly = row["sites"] - len(row["not exact"])
        broken += bool(row["not exact"]) + (not row["untouched"])
        error = "-" if row["error"] is None else f"{row['error']:.2f}"
        table.add_row(name, str(row["sites"]), str(exactly), str(row["untouched"]), error)
    Console().print(table)
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or MODELS))
