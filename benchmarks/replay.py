"""What a replay costs beside the graph itself: `python benchmarks/replay.py` prints a table, and keeps it as JSON.

Three ways to call the same tiny layers are measured side by side, in turns, in one process:

- `GraphRunner`, whose graph does nothing: names, the watch over parameters, copies of the inputs, outputs;
- the function compiled by torch.compile, whose graph does nothing: Dynamo's guards;
- the model as it is.

What the graph itself takes is the same for the first two, and left out.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from npu_fuse import GraphRunner, InputSpec
from npu_fuse.runtime.graphs.capture import Captured
from npu_fuse.runtime.graphs.host import HostBackend

RESULTS = Path(__file__).parent / "results" / "replay.json"
WIDTH = 16


class Layer(nn.Module):
    """The parameters of a decoder's layer, and little to compute."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH, bias=False))
        for name in ("before", "after", "q_norm", "k_norm"):
            self.add_module(name, nn.RMSNorm(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        x = x + self.o(self.q_norm(self.q(y)) + self.k_norm(self.k(y)) + self.v(y))
        y = self.after(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    """Layers over the sum of some inputs."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(  # type: ignore[no-untyped-def] # (names, not *args: as models have it)
        self, x0, x1, x2=None, x3=None, x4=None, x5=None, x6=None, x7=None, x8=None, x9=None, x10=None, x11=None
    ):
        x = x0 + x1
        for other in (x2, x3, x4, x5, x6, x7, x8, x9, x10, x11):
            if other is not None:
                x = x + other
        for layer in self.layers:
            x = layer(x)
        return x


class Hollow(HostBackend):
    """Captures, but its graphs do nothing."""

    def capture(self, run: Callable[[], Any], host_lists: Mapping[str, Sequence[int]]) -> Captured:
        captured = super().capture(run, host_lists)
        captured.graph.replay = lambda: None  # type: ignore[method-assign] # (of this one graph)
        return captured


def hollow_compile(model: nn.Module, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """The model compiled, with a graph that returns the same tensor again."""

    def backend(module: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        output = (torch.empty_like(inputs[0]),)
        return lambda *_: output

    torch._dynamo.reset()
    compiled: Callable[..., Any] = torch.compile(model, backend=backend, fullgraph=True)
    compiled(*inputs)
    return compiled


def microseconds(call: Callable[[], Any], repeats: int) -> float:
    call()  # what the others have put out of the caches is there again
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats * 1e6


def measure(layers: int, inputs: int, rounds: int = 150) -> dict[str, float]:
    """The best of many short rounds, in which each way takes its turn: what else the machine does only adds."""
    model = Model(layers).eval()
    tensors = [torch.randn(4, WIDTH) for _ in range(inputs)]
    padded = [tensor[:3] for tensor in tensors]
    names = [f"x{i}" for i in range(inputs)]
    with torch.no_grad():
        runner = GraphRunner(model, buckets=[4], inputs={name: InputSpec("batch") for name in names}, backend=Hollow())
        runner(*tensors)
        runner(*padded)
        targets = [torch.empty_like(tensor) for tensor in tensors]
        compiled = hollow_compile(model, tensors)
        ways: dict[str, tuple[Callable[[], Any], int]] = {
            "replay": (lambda: runner(*tensors), 8),
            "padded": (lambda: runner(*padded), 8),
            "copies": (lambda: torch._foreach_copy_(targets, tensors), 8),
            "guards": (lambda: compiled(*tensors), 8),
            "eager": (lambda: model(*tensors), 1),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, (call, repeats) in ways.items():
                times[name].append(microseconds(call, repeats))
    result = {name: min(values) for name, values in times.items()}
    result["own"] = result["replay"] - result["copies"]
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 28, 64])
    parser.add_argument("--inputs", type=int, nargs="+", default=[2, 6, 12])
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--json", type=Path, default=RESULTS, help="a file to keep the times in")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    table = Table("layers", "inputs", "own (us)", "copies (us)", "own / guards", "replay / guards", "replay / eager")
    rows = []
    for layers in options.layers:
        for inputs in options.inputs:
            row = measure(layers, inputs, options.rounds)
            rows.append({"layers": layers, "inputs": inputs, **{name: round(value, 2) for name, value in row.items()}})
            ratios = (row["own"] / row["guards"], row["replay"] / row["guards"], row["replay"] / row["eager"])
            table.add_row(str(layers), str(inputs), f"{row['own']:.1f}", f"{row['copies']:.1f}",
                          *(f"{ratio:.3f}" for ratio in ratios))  # fmt: skip
    Console().print(table)
    machine = f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    options.json.write_text(json.dumps({"machine": machine, "microseconds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
