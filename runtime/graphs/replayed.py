"""A compiled graph behind a `GraphRunner`: what `torch.compile(options={"graphs": …})` runs.

Inputs that belong to the model (parameters, buffers, caches it holds) stay where they are, all others are copied.
Dynamo passes the model's tensors on each call, having checked their shapes; here only their addresses are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, is_symbolic

from .errors import CaptureError
from .numbers import Apart
from .record import address
from .runner import GraphRunner
from .spec import InputSpec

_MOST_MOVES = 8

_SETTINGS = ("buckets", "outputs", "max_graphs", "warm_ups", "check_padding", "debug_poison")


def graph_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Checks the settings of graphs.

    Raises:
        ValueError: a key is unknown, or buckets are no sizes.
    """
    if not isinstance(settings, Mapping):
        raise ValueError(f"Options.graphs: give a dict of settings, {{}} for none, not {settings!r}")
    for key in settings:
        if key not in _SETTINGS:
            raise ValueError(f"Options.graphs: unknown setting {key!r}; known: {', '.join(_SETTINGS)}")
    if isinstance(settings.get("buckets"), Mapping):
        raise ValueError("Options.graphs: 'buckets' are sizes of the one dim that Dynamo finds to vary, without a name")
    return dict(settings)


class Replayed:
    """Calls a graph of AOTAutograd's by replays.

    A graph that can't be captured runs as it is, with one warning; so does one whose static inputs lie elsewhere in
    each call, as those of a cache do that beam search reorders. Buckets are for a graph with one varying size; others
    are captured for each of their sizes.

    Args:
        module: the graph.
        static: positions of the inputs that belong to the model.
        settings: arguments of `GraphRunner`, and `buckets` for the one symbolic size there is.
        strict: raise instead of warning.
        compile: makes of a graph what runs it, and is captured.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        static: Collection[int],
        settings: Mapping[str, Any],
        strict: bool = False,
        compile: Callable[[fx.GraphModule], Callable[..., Any]] = lambda module: module.forward,
    ) -> None:
        placeholders = module.graph.find_nodes(op="placeholder")
        self._module = module
        self._apart = Apart(module)
        self._tensors = compile(self._apart.tensors)
        self._static = sorted(static)
        self._dynamic = [i for i in self._apart.inputs if i not in static]
        self._fixed: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._moves = 0
        self._refused = False
        self._strict = strict
        others = dict(settings)
        buckets, specs = _padding([placeholders[i].meta.get("val") for i in self._dynamic], others.pop("buckets", ()))
        fixed = self._fixed

        def run(*inputs: Any) -> Any:
            return self._run(fixed, inputs)  # found from here: an output may be a view of one

        self.runner = GraphRunner(run, buckets=buckets, inputs=specs, **others)

    def __call__(self, *inputs: Any) -> Any:
        """Runs the graph.

        Raises:
            CaptureError: it can't be captured, under `strict`.
        """
        if self._refused:
            return self._module.forward(*inputs)
        fixed = [inputs[i] for i in self._static]
        if list(map(address, fixed)) != self._addresses:
            self._moves += 1
            if self._moves > _MOST_MOVES:
                return self._refuse(f"its caches or weights moved before each of {_MOST_MOVES} calls", inputs)
            self.runner.invalidate()
            self._settle(fixed)
        else:
            self._moves = 0
        captures = self.runner.stats.captures
        try:
            outputs = self.runner(*(inputs[i] for i in self._dynamic))
        except CaptureError as error:
            if self._strict:
                raise
            return self._refuse(str(error), inputs)
        if self.runner.stats.captures != captures:
            before = self._addresses
            self._settle(fixed)  # the first run may have moved weights into one storage
            if before != self._addresses and self.runner.memory().graphs > 1:  # from under the graphs of earlier calls
                self.runner.invalidate()
        return self._apart.whole(inputs, outputs)

    def _refuse(self, reason: str, inputs: Sequence[Any]) -> Any:
        self._refused = True
        self.runner.clear()
        warnings.warn(f"npu_fuse: a graph runs without capture: {reason}", stacklevel=3)
        return self._module.forward(*inputs)

    def _settle(self, fixed: list[torch.Tensor]) -> None:
        self._fixed[:] = fixed
        self._addresses = list(map(address, fixed))

    def _run(self, fixed: Sequence[torch.Tensor], inputs: Sequence[Any]) -> Any:
        merged: dict[int, Any] = dict(zip(self._static, fixed, strict=True))
        merged.update(zip(self._dynamic, inputs, strict=True))
        return self._tensors(*(merged[i] for i in sorted(merged)))


def _padding(values: Sequence[Any], buckets: Iterable[int]) -> tuple[dict[str, list[int]] | None, dict[str, InputSpec]]:
    """Buckets and specs; padded, if all sizes that vary are one, or it and a number more.

    The graph was made for inputs in memory of a certain order: a view of another may be impossible.
    """
    plain = {f"arg{i}": InputSpec(keep_order=True) for i in range(len(values))}
    sizes = [size for value in values for size in _sizes(value) if is_symbolic(size)]
    symbols = {symbol for size in sizes for symbol in size.node.expr.free_symbols}
    if len(symbols) != 1:
        return None, plain
    (symbol,) = symbols
    allowed = [bucket for bucket in buckets if _allows(sizes[0].node.shape_env, symbol, bucket)]
    specs: dict[str, InputSpec] = {}
    for i, value in enumerate(values):
        axes: list[str | None] = []
        for size in _sizes(value):
            offset = size.node.expr - symbol if is_symbolic(size) else None
            if offset is not None and not (offset.is_Integer and offset >= 0):
                return None, plain
            axes.append(None if offset is None else f"size+{offset}" if offset else "size")
        specs[f"arg{i}"] = InputSpec(tuple(axes), keep_order=True)
    return ({"size": allowed}, specs) if allowed else (None, plain)


def _sizes(value: Any) -> Sequence[Any]:
    return value.shape if isinstance(value, torch.Tensor) else (value,) if is_symbolic(value) else ()


def _allows(shapes: ShapeEnv, symbol: Any, size: int) -> bool:
    """Whether the graph was made for this size too."""
    bounds = shapes.var_to_range.get(symbol)
    if bounds is not None and not bounds.lower <= size <= bounds.upper:
        return False
    return all(guard.expr.subs(symbol, size) != False for guard in shapes.guards)  # noqa: E712 (sympy's)
