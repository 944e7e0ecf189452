"""What tells one graph, or one plan, from another."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch

from .record import address
from .spec import Shapes

_VALUES = (int, str, bytes, type(None), range, torch.dtype, torch.device, torch.memory_format)


def plan_key(shapes: Shapes, arguments: Mapping[str, Any], surroundings: Hashable) -> Hashable:
    """Equal for calls that are served alike: what its spec asks of a tensor, the values of all else."""
    parts: list[Any] = [surroundings]
    specs = shapes.specs
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            spec = specs.get(name)
            parts += (name, value.shape, value.dtype)
            if spec is None:
                continue
            if spec.static:
                parts += (address(value), value.stride())
            if spec.static or not spec.convert:
                parts.append(value.device)
            if spec.keep_order:
                parts.append(shapes.order(name, value))
        elif name in specs and specs[name].host is not None and value is not None:
            parts += (name, len(value))
        else:
            parts += (name, constant(value))
    return tuple(parts)


def graph_variant(shapes: Shapes, arguments: Mapping[str, Any], surroundings: Hashable) -> Hashable:
    """Equal for calls that one graph could serve, but for the sizes of padded axes."""
    parts: list[Any] = [surroundings]
    zero = dict.fromkeys(shapes.axes, 0)
    for name, value in sorted(arguments.items()):
        spec = shapes.of(name)
        if isinstance(value, torch.Tensor):
            shape = shapes.padded(name, value.shape, zero)
            parts.append((name, shape, spec.dtype or value.dtype, shapes.order(name, value)))
        elif spec.axes and isinstance(value, (int, list, tuple)):
            parts.append((name, type(value)))
        else:
            parts.append((name, constant(value)))
    return tuple(parts)


def constant(value: Any) -> Hashable:
    """Numbers, strings, buffers and containers of them are known by type and value, other objects by identity."""
    kind = type(value)
    if isinstance(value, (float, complex)):
        return kind, repr(value)  # zeros have a sign, and what is no number equals itself
    if isinstance(value, _VALUES):
        return kind, value
    if isinstance(value, (list, tuple)):
        return kind, tuple(map(constant, value))
    if kind is dict:
        return kind, tuple((constant(key), constant(item)) for key, item in value.items())
    if kind is slice:
        return kind, constant((value.start, value.stop, value.step))
    if hasattr(value, "tobytes"):  # arrays, and numbers of numpy's
        return kind, str(getattr(value, "dtype", "")), getattr(value, "shape", ()), value.tobytes()
    return kind, id(value)


def identified(value: Any) -> Iterator[Any]:
    """The objects in a value that `constant` knows by their identity, which they have only as long as they live."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from identified(item)
    elif type(value) is dict:
        for item in (*value.keys(), *value.values()):
            yield from identified(item)
    elif not isinstance(value, (torch.Tensor, float, complex, *_VALUES)):
        yield value


def surroundings(kind: str) -> Hashable:
    """What a function's result depends on beside its arguments, on a kind of device."""
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return torch.is_inference_mode_enabled(), autocast
