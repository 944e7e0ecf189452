"""The tensors that can be reached from a callable, and the ways to them."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from .record import storage_key

_LEAVES = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)
# Whose objects and code hold no tensors of a model: loggers, locks, dispatchers.
_OPAQUE = (sys.stdlib_module_names - {"types", "collections", "__main__"}) | {"torch", "numpy"}
_SILENT = ("cell_contents", "__self__", "__func__", "__class__", "__wrapped__")
_TABLES = ("_parameters", "_buffers", "_modules")
# Who calls these doesn't name them.
_CALLED = frozenset({"forward", "__call__"})

Kind: TypeAlias = Literal["entry", "module", "attribute", "fixed"]


@dataclass(frozen=True, slots=True)
class Step:
    """From an object to another.

    Args:
        kind: an "entry" is `holder[key]`, that of a table of "modules" too; an "attribute" is asked for by its name;
            what is "fixed" can't change.
        holder, key: where the other object is.
        child: the other object.
    """

    kind: Kind
    holder: Any
    key: Any
    child: Any


class Reach:
    """All that can be reached: by attributes, containers, closures, and by what code names of globals and classes.

    Args:
        roots: where to begin.
        keys: the storages whose tensors are wanted.

    Attributes:
        tensors: those.
        modules: modules that are not part of another.
    """

    def __init__(self, roots: Sequence[Any], keys: Collection[int]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.modules: list[nn.Module] = []
        self._ways: dict[int, list[tuple[Any, Step]]] = {}
        self._alive: list[Any] = []  # ids stay unique
        self._names, self._new_names = set(_CALLED), set[str]()
        self._spaces: dict[int, Mapping[str, Any]] = {}
        self._new_spaces: dict[int, Mapping[str, Any]] = {}
        waiting: deque[tuple[Any, Step]] = deque((None, Step("fixed", None, "", root)) for root in roots)
        while waiting or (waiting := deque(self._newly_named())):
            parent, step = waiting.popleft()
            child = step.child
            if isinstance(child, _LEAVES):
                continue
            ways = self._ways.setdefault(id(child), [])
            ways.append((parent, step))
            if len(ways) > 1:
                continue
            self._alive.append(child)
            if isinstance(child, torch.Tensor):
                if has_storage(child) and storage_key(child) in keys:
                    self.tensors.append(child)
                continue
            if isinstance(child, nn.Module) and step.kind != "module":
                self.modules.append(child)
            waiting.extend((child, next_step) for next_step in self._steps(child))

    def steps(self) -> Iterator[Step]:
        """Every step on a way to one of the tensors."""
        waiting: list[Any] = list(self.tensors)
        seen = set(map(id, waiting))
        while waiting:
            for parent, step in self._ways[id(waiting.pop())]:
                yield step
                if parent is not None and id(parent) not in seen:
                    seen.add(id(parent))
                    waiting.append(parent)

    def path(self, tensor: torch.Tensor) -> str:
        """A way to one of the tensors, as Python writes it."""
        path, place = "", tensor
        while place is not None:
            parent, step = self._ways[id(place)][0]
            if step.key != "" and step.key not in _SILENT:
                path = (f"[{step.key!r}]" if step.holder is parent else f".{step.key}") + path
            place = parent
        return path

    def _steps(self, value: Any) -> Iterator[Step]:
        if isinstance(value, dict):
            yield from _entries("entry", value, value.items())
        elif isinstance(value, (list, deque)):
            yield from _entries("entry", value, enumerate(value))
        elif isinstance(value, (tuple, set, frozenset)):
            yield from _entries("fixed", value, enumerate(value))
        elif isinstance(value, types.FunctionType):
            yield from self._steps_of_function(value)
        elif isinstance(value, types.ModuleType):
            self._see(value, value.__name__)
        elif isinstance(value, type):
            for base in value.__mro__:
                self._see(base, base.__module__)
        else:
            for name in _FIXED.get(type(value), ()):
                yield Step("fixed", value, name, getattr(value, name))
            yield from self._steps_of_object(value)

    def _steps_of_function(self, function: types.FunctionType) -> Iterator[Step]:
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # a name that is not bound yet
                yield Step("attribute", cell, "cell_contents", cell.cell_contents)
        if not _is_opaque(function.__globals__.get("__name__", "")):
            names = _names(function.__code__)
            self._new_names |= names - self._names
            for name in names & function.__globals__.keys():
                yield Step("entry", function.__globals__, name, function.__globals__[name])
        yield Step("fixed", function, "__defaults__", function.__defaults__)
        yield Step("fixed", function, "__kwdefaults__", function.__kwdefaults__)
        if function.__dict__:
            yield Step("fixed", function, "__wrapped__", function.__dict__)

    def _steps_of_object(self, value: Any) -> Iterator[Step]:
        attributes = getattr(value, "__dict__", {})
        if isinstance(value, nn.Module):
            for table in (attributes[name] for name in _TABLES):
                kind: Kind = "module" if table is attributes["_modules"] else "entry"
                yield from _entries(kind, table, table.items())
        elif _is_opaque(type(value).__module__):
            yield Step("fixed", value, "__wrapped__", attributes.get("__wrapped__"))
            return
        for step in _entries("entry", attributes, attributes.items()):
            if step.key not in _TABLES:
                yield step
        for slot in _slots(type(value)):
            if hasattr(value, slot):
                yield Step("attribute", value, slot, getattr(value, slot))
        yield Step("fixed", value, "__class__", type(value))

    def _see(self, owner: Any, module: str) -> None:
        if id(owner) not in self._spaces and not _is_opaque(module):
            self._new_spaces[id(owner)] = owner.__dict__

    def _newly_named(self) -> list[tuple[None, Step]]:
        """What code names of the modules and classes that were seen, since this was asked last."""
        named = [(space, self._new_names) for space in self._spaces.values()]
        self._names |= self._new_names
        named += [(space, self._names) for space in self._new_spaces.values()]
        steps = [(None, Step("entry", space, name, space[name])) for space, names in named for name in names & {*space}]
        self._spaces |= self._new_spaces
        self._new_names, self._new_spaces = set(), {}
        return steps


_FIXED: Mapping[type, tuple[str, ...]] = {
    types.MethodType: ("__self__", "__func__"),
    functools.partial: ("func", "args", "keywords"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget",),
}


def reachable(roots: Sequence[Any], keys: Collection[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in these storages that are reachable from objects, with the way to each."""
    reach = Reach(roots, keys)
    return ((reach.path(tensor), tensor) for tensor in reach.tensors)


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own."""
    return tensor.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _is_opaque(module: str) -> bool:
    return module.partition(".")[0] in _OPAQUE or module.startswith(__package__)


def _names(code: types.CodeType) -> set[str]:
    """The globals and attributes that code names, that of functions inside it too."""
    inner = (_names(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*inner)


def _entries(kind: Kind, holder: Any, items: Iterable[tuple[Any, Any]]) -> list[Step]:
    return [Step(kind, holder, key, child) for key, child in list(items) if not isinstance(child, _LEAVES)]


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots
