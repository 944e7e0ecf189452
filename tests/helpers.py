"""What tests of patterns and passes share: compile a call, and look at its graph before and after."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import fx

from npu_fuse import Backend, Report, Target
from npu_fuse.passes.edit import Refused
from npu_fuse.passes.lowering import LOWERINGS
from npu_fuse.passes.preserve import restore
from npu_fuse.passes.rewriter import Rewriter
from npu_fuse.patterns import recognise
from npu_fuse.patterns.match import Findings, Match
from npu_fuse.runtime.backend import Compilation


@dataclass(frozen=True)
class Compiled:
    """One call, compiled.

    Attributes:
        output: what the compiled call gave.
        report: on its one graph.
        before: AOTAutograd's graph as recognition sees it, preserved ops opaque.
        after: the graph that ran.
        function: the compiled function, for further calls.
        inputs: what the graph was called with, the model's tensors and symbolic sizes among them.
    """

    output: Any
    report: Report
    before: fx.GraphModule
    after: fx.GraphModule
    function: Callable[..., Any]
    inputs: tuple[Any, ...]

    def targets(self) -> list[str]:
        """The ops that ran, in order."""
        return [str(node.target) for node in self.after.graph.nodes if node.op == "call_function"]

    def findings(self) -> Findings:
        """What the patterns recognise in `before`."""
        return recognise(self.before.graph)

    def values(self) -> dict[fx.Node, Any]:
        """What each node of `before` is when the graph runs eagerly, op by op, as the model had it."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        graph.output(graph.graph_copy(self.before.graph, copies))
        restore(graph)
        interpreter = _Recorder(fx.GraphModule(self.before, graph))
        inputs = [_snapshot(given) if isinstance(given, torch.Tensor) else given for given in self.inputs]
        with torch.no_grad():
            interpreter.run(*inputs)
        return {node: interpreter.values[copy] for node, copy in copies.items()}


class _Recorder(fx.Interpreter):
    """Keeps the value of every node, as it was before later writes."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.values[n] = _snapshot(value) if isinstance(value, torch.Tensor) else value
        return value


def _snapshot(value: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of the original, by which kernels choose how they round."""
    storage = value.untyped_storage().clone()
    return torch.empty(0, dtype=value.dtype).set_(storage, value.storage_offset(), value.shape, value.stride())


class _RecordingBackend(Backend):
    """Keeps the graphs of its compilations."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(strict=True, **settings)
        self.graphs: list[tuple[fx.GraphModule, fx.GraphModule]] = []
        self.inputs: list[tuple[Any, ...]] = []

    def _optimised(self, module: fx.GraphModule, compilation: Compilation) -> fx.GraphModule:
        optimised = super()._optimised(module, compilation)
        self.graphs.append((compilation.before.restored(), optimised))
        forward = optimised.forward

        def recording(*inputs: Any) -> Any:
            self.inputs.append(inputs)
            return forward(*inputs)

        optimised.forward = recording
        return optimised


def compiled(function: Callable[..., Any], *inputs: Any, dynamic: bool | None = None, **settings: Any) -> Compiled:
    """Compiles one call without gradients, with internal failures raised; the call must give one graph."""
    torch._dynamo.reset()
    backend = _RecordingBackend(**settings)
    with torch.no_grad():
        through = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)
        output = through(*inputs)
    ((before, after),) = backend.graphs
    return Compiled(output, backend.reports[0], before, after, through, backend.inputs[0])


def capture(function: Callable[..., Any], *inputs: Any, dynamic: bool | None = None) -> fx.GraphModule:
    """AOTAutograd's graph of one call, as recognition sees it."""
    return compiled(function, *inputs, dynamic=dynamic).before


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit, in dtype and shape too; any NaN equals any other."""
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def repeats(match: Match, values: dict[fx.Node, Any]) -> bool:
    """Law 1: whether the spelling, fed with what the match says it reads, gives the value of its node bit for bit."""
    spelling = match.params.spelling
    return same(spelling(**{name: values[match.inputs[name]] for name in spelling.inputs}), values[match.node])


def refusal(
    found: Compiled, kind: str, changes: Mapping[str, Any] | None = None, target: Target | None = None, **settings: Any
) -> str:
    """Why no op stands for the first site of a kind, were that another in what `changes` names.

    Args:
        found: a compiled call.
        kind: of the site.
        changes: by path, such as "params.norm.groups"; a part of a mapping is named as an attribute is.
        target: the machine.
        settings: of the rewriter.
    """
    match = found.findings().of(kind)[0]
    for path, value in (changes or {}).items():
        match = _changed(match, path.split("."), value)
    before = str(found.before.graph)
    given = zip(found.before.graph.find_nodes(op="placeholder"), found.inputs, strict=True)
    parameters = {node: value for node, value in given if isinstance(value, torch.nn.Parameter)}
    rewriter = Rewriter(found.before, target or Target(), parameters, pack_weights=True, **settings)
    with pytest.raises(Refused) as refused, rewriter.edit(match.node, match.claimed) as edit:
        LOWERINGS[kind](match, edit)
    assert str(found.before.graph) == before
    return str(refused.value)


def _changed(whole: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    if isinstance(whole, Mapping):
        return {**whole, name: _changed(whole[name], rest, value) if rest else value}
    return replace(whole, **{name: _changed(getattr(whole, name), rest, value) if rest else value})


def graph_of_dynamo(function: Callable[..., Any], *inputs: Any) -> fx.GraphModule:
    """Dynamo's graph of one call, as AOTAutograd is given it."""
    graphs: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    (module,) = graphs
    return module
