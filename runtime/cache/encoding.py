"""Arguments of nodes and entries of reports as JSON and back: nothing that is read is run.

What JSON has no word for is a dict of one item, the kind and the value.
"""

from __future__ import annotations

import builtins
import importlib
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload


class NotKept(Exception):  # noqa: N818  # a reason, no error
    """A graph that can't be kept; its text says why."""


class Unreadable(Exception):  # noqa: N818  # likewise
    """An entry that can't be used; its text says why."""


_NAMED = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}
# Ops of ops that hold no graph of their own.
_HIGHER_ORDER = ("auto_functionalized", "auto_functionalized_v2")
# Functions of numbers, sizes and tuples; of torch the symbolic ones alone.
_PYTHON: Mapping[str, Any] = {"operator": operator, "math": math, "builtins": builtins}
_BUILTINS = ("getattr", "max", "min", "abs", "round", "int", "float", "bool")


def encode(value: Any) -> Any:
    """A value as JSON.

    Raises:
        NotKept: there is no form for it.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if type(value) is list or isinstance(value, fx.immutable_collections.immutable_list):
        return [encode(item) for item in value]
    if type(value) is tuple:
        return {"tuple": [encode(item) for item in value]}
    if type(value) is slice:
        return {"slice": [encode(item) for item in (value.start, value.stop, value.step)]}
    if isinstance(value, Counter):
        return {"counter": [[encode(k), encode(v)] for k, v in value.items()]}
    if isinstance(value, dict):
        return {"dict": [[encode(k), encode(v)] for k, v in value.items()]}
    if type(value) is torch.device:
        return {"device": str(value)}
    for kind, of in _NAMED.items():
        if type(value) is of:
            return {kind: str(value).removeprefix("torch.")}
    if isinstance(value, (OpOverload, HigherOrderOperator)):
        return {"function": encode_function(value)}
    raise NotKept(f"{value!r} is a {type(value).__name__}, for which there is no form in a file")


def decode(value: Any, nodes: Mapping[str, fx.Node]) -> Any:
    """The value that `encode` wrote.

    Args:
        value: as JSON gives it.
        nodes: by their names.

    Raises:
        Unreadable: it is none.
    """
    if isinstance(value, list):
        return [decode(item, nodes) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, given),) = value.items()
    if kind == "node":
        return nodes[given]
    if kind == "tuple":
        return tuple(decode(item, nodes) for item in given)
    if kind == "slice":
        return slice(*(decode(item, nodes) for item in given))
    if kind in ("dict", "counter"):
        pairs = {decode(k, nodes): decode(v, nodes) for k, v in given}
        return Counter(pairs) if kind == "counter" else pairs
    if kind == "device":
        return torch.device(given)
    if kind in _NAMED and isinstance(found := getattr(torch, given, None), _NAMED[kind]):
        return found
    if kind == "function":
        return decode_function(given)
    raise Unreadable(f"it has a {kind} {given!r}, which is unknown")


def encode_function(function: Any) -> str:
    """What a node calls, by its name.

    Raises:
        NotKept: it is no op, and no function that is known.
    """
    if isinstance(function, OpOverload):
        return f"op {function._schema.name} {function._overloadname}"
    if isinstance(function, HigherOrderOperator):
        if function._name in _HIGHER_ORDER:
            return f"higher {function._name}"
        raise NotKept(f"{function._name} has graphs of its own")
    name, module = getattr(function, "__name__", ""), getattr(function, "__module__", "") or ""
    for known, of in _PYTHON.items():
        if getattr(of, name, None) is function and (of is not builtins or name in _BUILTINS):
            return f"python {known} {name}"
    if name.startswith("sym_") and getattr(torch, name, None) is function:
        return f"torch {name}"
    if module.startswith(f"{_PACKAGE}.runtime.") and getattr(importlib.import_module(module), name, None) is function:
        return f"own {module.removeprefix(f'{_PACKAGE}.')} {name}"
    raise NotKept(f"{function!r} is a function that can't be told by its name")


def decode_function(text: str) -> Callable[..., Any]:
    """The function that `encode_function` named.

    Raises:
        Unreadable: there is no such function.
    """
    kind, *names = text.split(" ")
    found: Any = None
    if kind == "op":
        namespace, _, name = names[0].partition("::")
        packet = getattr(getattr(torch.ops, namespace), name, None)
        found = getattr(packet, names[1], None)
    elif kind == "higher" and names[0] in _HIGHER_ORDER:
        found = getattr(torch.ops.higher_order, names[0])
    elif kind == "python" and (names[0] != "builtins" or names[1] in _BUILTINS):
        found = getattr(_PYTHON.get(names[0]), names[1], None)
    elif kind == "torch" and names[0].startswith("sym_"):
        found = getattr(torch, names[0], None)
    elif kind == "own" and names[0].startswith("runtime."):
        found = getattr(importlib.import_module(f"{_PACKAGE}.{names[0]}"), names[1], None)
    if not callable(found):
        raise Unreadable(f"it calls {text!r}, which is not there")
    function: Callable[..., Any] = found
    return function


_PACKAGE = __name__.removesuffix(".runtime.cache.encoding")
