"""A call's graph as Dynamo gives it, recorded from a run of the call: of fixed sizes, and in half the time."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

Tensor = torch.Tensor
_OPERATORS = {name: getattr(operator, name) for name in ("__getitem__", "__setitem__", "__matmul__")}


class _Recorder(TorchFunctionMode):
    """Keeps each function of torch that is called as a node."""

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.nodes: dict[int, fx.Node] = {}
        self._alive: list[Tensor] = []
        for name, value in inputs.items():
            node = self.graph.placeholder(name)
            node.meta["grapharg"] = SimpleNamespace(example=value, source=None)
            self._know(value, node)

    def _know(self, value: Tensor, node: fx.Node) -> None:
        self.nodes.setdefault(id(value), node)
        self._alive.append(value)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        found = [t for t in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(t, Tensor)]
        if not found and name != "__setitem__":
            return result
        given, named = tree_map(lambda a: self.nodes[id(a)] if isinstance(a, Tensor) else a, (tuple(args), kwargs))
        if name == "__get__":
            node = self.graph.call_function(getattr, (given[0], func.__self__.__name__))
        elif name in _OPERATORS:
            node = self.graph.call_function(_OPERATORS[name], given, named)
        elif getattr(torch.Tensor, name, None) is func:
            node = self.graph.call_method(name, given, named)
        else:
            node = self.graph.call_function(func, given, named)
        if isinstance(result, Tensor):
            self._know(result, node)
        elif isinstance(result, (tuple, list)):
            for place, value in enumerate(result):
                if isinstance(value, Tensor):
                    self._know(value, self.graph.call_function(operator.getitem, (node, place)))
        return result


def recorded(model: Any, example: Sequence[Tensor]) -> tuple[fx.GraphModule, Callable[..., list[Tensor]]]:
    """The graph of one call of a module, and what gives the graph's inputs for a call.

    Args:
        model: the module; its tensors are written.
        example: the arguments; they are written.
    """
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    named = {f"l_{i}_": t for i, t in enumerate(example)} | {f"l_self_{name}": t for name, t in held.items()}
    firsts = {id(t): name for name, t in reversed(named.items())}  # one tensor given twice is one input
    places = [i for i, t in enumerate(named.values()) if firsts[id(t)] == list(named)[i]]
    mode = _Recorder({name: t for name, t in named.items() if firsts[id(t)] == name})
    with mode:
        results = model(*example)
    mode.graph.output(tuple(mode.nodes[id(t)] for t in results))

    def inputs(arguments: Sequence[Tensor], model: Any) -> list[Tensor]:
        everything = [*arguments, *model.parameters(), *model.buffers()]
        return [everything[i] for i in places]

    return fx.GraphModule({}, mode.graph), inputs
