"""How one set of shapes gets into the static inputs of a graph: rows to copy, rows to pad, lists to hand over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import poison
from .spec import InputSpec, Shapes


class Copies:
    """Copies arguments of these shapes to static inputs, and refreshes their padding.

    Args:
        shapes: the specs of the inputs.
        arguments: a call's arguments, for their shapes.
        statics: what the graph was captured with, by name.
        poisoned: fill static inputs and their padding with poison first.
    """

    def __init__(
        self, shapes: Shapes, arguments: Mapping[str, Any], statics: Mapping[str, Any], poisoned: bool = False
    ) -> None:
        self.names: list[str] = []
        self.targets: list[torch.Tensor] = []
        self._pads: list[torch.Tensor] = []
        self._pad_targets: list[torch.Tensor] = []
        self._edges: list[torch.Tensor] = []
        self._edge_targets: list[torch.Tensor] = []
        self._lists: list[tuple[str, str, int, int]] = []
        self._poison: list[tuple[torch.Tensor, Any]] = []
        self._buffers: list[torch.Tensor] = []
        for name, value in arguments.items():
            spec = shapes.of(name)
            if isinstance(value, torch.Tensor) and not spec.static:
                buffer = statics[name]
                self.names.append(name)
                self.targets.append(buffer[tuple(map(slice, value.shape))])
                if poisoned:
                    self._buffers.append(buffer)
                self._add_pads(spec, buffer, value.shape, poisoned)
            elif spec.host is not None and value is not None:
                self._lists.append((name, spec.host, int(spec.pad), len(statics[name])))
        self.has_lists = bool(self._lists)
        self._all_targets = self.targets + self._pad_targets

    def _add_pads(self, spec: InputSpec, buffer: torch.Tensor, shape: Sequence[int], poisoned: bool) -> None:
        for dim, (size, padded) in enumerate(zip(shape, buffer.shape, strict=True)):
            if size == padded:
                continue
            before = tuple(map(slice, shape[:dim]))
            tail = buffer[(*before, slice(size, None))]
            if spec.pad == "edge":
                self._edges.append(buffer[(*before, slice(size - 1, size))].expand_as(tail))
                self._edge_targets.append(tail)
            else:
                one = torch.full((), spec.pad, dtype=buffer.dtype, device=buffer.device)
                self._pads.append(one.expand_as(tail))
                self._pad_targets.append(tail)
            if poisoned and (value := poison.padding(spec, buffer.dtype)) is not None:
                self._poison.append((tail, value))

    def load(self, arguments: Mapping[str, Any]) -> None:
        """Copies the arguments, and fills all that lies behind them."""
        for buffer in self._buffers:
            poison.poison(buffer)
        if self._all_targets:
            torch._foreach_copy_(self._all_targets, [arguments[name] for name in self.names] + self._pads)
        if self._edges:
            torch._foreach_copy_(self._edge_targets, self._edges)
        for tail, value in self._poison:
            tail.fill_(value)

    def lists(self, arguments: Mapping[str, Any]) -> dict[str, list[int]]:
        """The lists on the host, padded, by the names that ops have for them."""
        return {key: pad_list(arguments[name], pad, size) for name, key, pad, size in self._lists}


def pad_list(values: Sequence[int], pad: int, size: int) -> list[int]:
    """A list of this size."""
    return [*values, *([pad] * (size - len(values)))]


def resized(shapes: Shapes, name: str, value: Any, bucket: Mapping[str, int]) -> Any:
    """An argument with its rows repeated to the sizes of a bucket."""
    spec = shapes.of(name)
    if isinstance(value, torch.Tensor):
        sizes = shapes.padded(name, value.shape, bucket)
        for dim, (size, old) in enumerate(zip(sizes, value.shape, strict=True)):
            if size != old:
                value = value.index_select(dim, torch.arange(size, device=value.device) % old)
        return value
    if spec.host is not None and value is not None:
        return [value[i % len(value)] for i in range(shapes.padded(name, (len(value),), bucket)[0])]
    return shapes.padded(name, (value,), bucket)[0] if spec.axes and isinstance(value, int) else value
