"""What tests of patterns and passes share: compile a call, and look at its graph before and after."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from npu_fuse import Backend, Report
from npu_fuse.runtime.target import Target


@dataclass(frozen=True)
class Compiled:
    """One call, compiled.

    Attributes:
        output: what the compiled call gave.
        report: on its one graph.
        before: AOTAutograd's graph as recognition sees it, preserved ops opaque.
        after: the graph that ran.
        function: the compiled function, for further calls.
    """

    output: Any
    report: Report
    before: fx.GraphModule
    after: fx.GraphModule
    function: Callable[..., Any]

    def targets(self) -> list[str]:
        """The ops that ran, in order."""
        return [str(node.target) for node in self.after.graph.nodes if node.op == "call_function"]


class _RecordingBackend(Backend):
    """Keeps the graphs of its compilations."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(strict=True, **settings)
        self.graphs: list[tuple[fx.GraphModule, fx.GraphModule]] = []

    def _optimised(self, module: fx.GraphModule, positions: Collection[int], target: Target) -> fx.GraphModule:
        optimised = super()._optimised(module, positions, target)
        self.graphs.append((module, optimised))
        return optimised


def compiled(
    function: Callable[..., Any], *inputs: Any, dynamic: bool | None = None, **settings: Any
) -> Compiled:
    """Compiles one call without gradients, with internal failures raised; the call must give one graph."""
    torch._dynamo.reset()
    backend = _RecordingBackend(**settings)
    with torch.no_grad():
        through = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)
        output = through(*inputs)
    ((before, after),) = backend.graphs
    return Compiled(output, backend.reports[0], before, after, through)


def capture(function: Callable[..., Any], *inputs: Any, dynamic: bool | None = None) -> fx.GraphModule:
    """AOTAutograd's graph of one call, as recognition sees it."""
    return compiled(function, *inputs, dynamic=dynamic).before
