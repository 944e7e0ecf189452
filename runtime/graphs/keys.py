"""What tells one graph, or one plan, from another."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from .spec import Shapes

VALUES = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.memory_format)


def plan_key(shapes: Shapes, arguments: Mapping[str, Any], surroundings: Hashable) -> Hashable:
    """Equal for calls that are served alike: the shapes, types and devices of tensors, the values of all else."""
    parts: list[Any] = [surroundings]
    specs = shapes.specs
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            spec = specs.get(name)
            if spec is not None and spec.static:
                parts.append((name, value.data_ptr(), value.shape, value.stride(), value.dtype))
            else:
                parts.append((name, value.shape, value.dtype, value.device))
        elif name in specs and specs[name].host is not None:
            parts.append((name, len(value)))
        else:
            parts.append((name, type(value), constant(value)))
    return tuple(parts)


def graph_variant(shapes: Shapes, arguments: Mapping[str, Any], surroundings: Hashable) -> Hashable:
    """Equal for calls that one graph could serve, but for the sizes of padded axes."""
    parts: list[Any] = [surroundings]
    zero = dict.fromkeys(shapes.axes, 0)
    for name, value in sorted(arguments.items()):
        spec = shapes.of(name)
        if isinstance(value, torch.Tensor):
            parts.append((name, shapes.padded(name, value.shape, zero), spec.dtype or value.dtype))
        elif spec.axes:
            parts.append((name, type(value)))
        else:
            parts.append((name, type(value), constant(value)))
    return tuple(parts)


def constant(value: Any) -> Hashable:
    """A number, string or tuple of them is known by its value, any other object by its identity."""
    if isinstance(value, VALUES):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(constant, value))
    return id(value)


def surroundings(function: Callable[..., Any], device: torch.device) -> Hashable:
    """What the function's result depends on beside its arguments."""
    kind = device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return torch.is_inference_mode_enabled(), getattr(function, "training", None), autocast
