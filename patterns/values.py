"""What a node's value is: its fake tensor, dtype and shape, and where in the model it was written.

All shapes that rules, passes and reports look at come from here, and symbolic sizes are compared by `runtime.sizes`,
so that nothing here ever installs a guard.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from ..runtime.sizes import Size, known_same_shape, static_int

aten = torch.ops.aten


def tensor(node: object) -> torch.Tensor | None:
    """The fake tensor of a node with one tensor as its value, else None."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def storages(value: object) -> frozenset[int]:
    """What identifies the memory of fake tensors: of all in a node's value, or of a list of nodes."""
    found = value.meta.get("val") if isinstance(value, fx.Node) else value
    if isinstance(found, torch.Tensor):
        return frozenset({found.untyped_storage()._cdata})
    return frozenset().union(*map(storages, found)) if isinstance(found, (list, tuple)) else frozenset()


@cache
def name_of(target: Callable[..., Any] | str) -> str:
    """The name of what a node calls, such as "aten.add.Tensor"."""
    return str(target)


def arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments of a call of an op by name, defaults filled in."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]  # an OpOverload
    given = {**dict(zip((a.name for a in schema), node.args, strict=False)), **node.kwargs}
    return {a.name: given.get(a.name, a.default_value if a.has_default_value() else None) for a in schema}


def shape(node: fx.Node) -> tuple[Size, ...]:
    """Shape of a tensor-valued node."""
    value = tensor(node)
    assert value is not None, node
    return tuple(value.shape)


def dtype(node: fx.Node) -> torch.dtype:
    """Dtype of a tensor-valued node."""
    value = tensor(node)
    assert value is not None, node
    return value.dtype


def is_float(node: object) -> bool:
    value = tensor(node)
    return value is not None and value.dtype.is_floating_point


def same_shape(a: Sequence[Size], b: Sequence[Size]) -> bool:
    """True where two shapes are known to be equal under every binding of their symbols."""
    return known_same_shape(a, b)


def last_dim(node: fx.Node) -> int | None:
    """The static size of the last axis, or None."""
    sizes = shape(node)
    return static_int(sizes[-1]) if sizes else None


def is_vector(node: fx.Node, length: int) -> bool:
    """True for a tensor of `length` elements that broadcasts along the last axis: [length] or [1, …, length]."""
    sizes = shape(node)
    return bool(sizes) and static_int(sizes[-1]) == length and all(static_int(s) == 1 for s in sizes[:-1])


_MANTISSA = {torch.bfloat16: (8, 7), torch.float16: (5, 10), torch.float32: (8, 23), torch.float64: (11, 52)}


def is_widening(source: torch.dtype, target: torch.dtype) -> bool:
    """True where every value of `source` is a value of `target`, so that the cast rounds nothing."""
    if source not in _MANTISSA or target not in _MANTISSA:
        return source is target
    return all(a <= b for a, b in zip(_MANTISSA[source], _MANTISSA[target], strict=True))


_TO_COPY, _CONVERT = aten._to_copy.default, torch.ops.prims.convert_element_type.default
CASTS = frozenset({_TO_COPY, _CONVERT})


def is_float_cast(node: fx.Node) -> bool:
    """True for a cast between float types on one device."""
    if node.target is not _TO_COPY and node.target is not _CONVERT:  # quicker than to hash an op, and asked most often
        return False
    before, after = tensor(node.args[0]), tensor(node)
    return (
        before is not None
        and after is not None
        and before.dtype.is_floating_point
        and after.dtype.is_floating_point
        and before.device == after.device
    )


def is_rounding(node: fx.Node) -> bool:
    """True for a float cast that loses digits or range."""
    return is_float_cast(node) and not is_widening(dtype(node.all_input_nodes[0]), dtype(node))


def is_complex(node: object) -> bool:
    value = tensor(node)
    return value is not None and value.is_complex()


def strip_widening(node: fx.Node) -> fx.Node:
    """The node below all casts that round nothing: the same numbers, in their narrowest type."""
    while is_float_cast(node) and not is_rounding(node):
        (node,) = node.all_input_nodes
    return node


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


def source_line(node: fx.Node) -> str | None:
    """`file:line in function` of the innermost frame of the model's own code."""
    trace = node.meta.get("stack_trace") or ""
    frame = _FRAME.search(trace, max(trace.rfind('File "'), 0))
    return f"{frame['file']}:{frame['line']} in {frame['function']}" if frame is not None else None


def module_path(node: fx.Node) -> str | None:
    """The path of the innermost module that wrote the node, as in `model.named_modules()`: `layers.0.self_attn`."""
    stack = module_stack(node)
    return plain_path(stack[-1][1]) or None if stack else None


def module_stack(node: fx.Node) -> list[tuple[str, str, type]]:
    """Key, name and class of each module that wrote the node, as Dynamo has them, the innermost last."""
    return [(key, name, kind) for key, (name, kind) in (node.meta.get("nn_module_stack") or {}).items()]


def plain_path(name: str) -> str:
    """A module's path as in `model.named_modules()`, by its name in Dynamo; "" for the compiled module."""
    return _INDEX.sub(r".\1", _ROOT.sub("", name).replace("._modules", "")).strip(".")


# How Dynamo names the compiled module: a variable, or what a wrapper has in its closure.
_ROOT = re.compile(r"""^[LG]\['[^']+'\](\[\d+\]|\.__closure__\[\d+\]\.cell_contents|\.__self__|\.__wrapped__)*""")
_INDEX = re.compile(r"""\[['"]?([^'"\]]+)['"]?\]""")
