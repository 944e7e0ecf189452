"""Notices when memory that a graph reads belongs to another tensor now.

A graph knows addresses, a model knows names. Three things make them differ: a tensor gets other memory (`p.data = new`,
`module.to()`), a name gets another tensor (`load_state_dict(assign=True)`, `module.weight = new`), a container another
module or cache. None of them leaves a mark that could be asked for once (`p.data = new` doesn't even bump the version
counter; a weak reference to the old memory tells nothing while somebody keeps it as a backup), so on each replay every
name and every address is compared. That is linear in the number of tensors, about 0.1 us each: dicts of modules are
compared as wholes, which stops at identity for each entry, and addresses are asked for without a line of Python in
between. (torch_npu's own comparison of addresses, for its graph trees, was tried and takes as long.)

Not noticed: other shapes or strides over the very same memory, a number or a branch in the model's Python that changed,
and tensors that can't be reached from the callable through attributes, containers, closures and its own globals.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import types
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .record import storage_key

_SILENT = ("cell_contents", "__self__", "__func__", "forward")
_TABLES = ("_parameters", "_buffers", "_modules")
# Whose objects hold no tensors of a model in attributes: loggers, locks, dispatchers.
_OPAQUE = (sys.stdlib_module_names - {"types"}) | {"torch"}
_address = torch.Tensor.const_data_ptr  # type: ignore[attr-defined]  # (not in the stub) data_ptr makes a lazy copy real
_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, torch.dtype, torch.device)


class Watch:
    """The names and addresses behind the storages that graphs use."""

    def __init__(self) -> None:
        self._keys: set[int] = set()
        self._roots: list[int] = []
        self._forget()

    def _forget(self) -> None:
        self._tables: list[Any] = []
        self._were: list[Any] = []
        self._items: list[tuple[Any, Any, Any]] = []
        self._attributes: list[tuple[Any, str, Any]] = []
        self._tensors: list[torch.Tensor] = []
        self._addresses: list[int] = []

    def add(self, roots: Sequence[Any], keys: Collection[int]) -> None:
        """Watches these storages too.

        Args:
            roots: the callable, and what else tensors are looked for in.
            keys: the storages.
        """
        if not self._keys.issuperset(keys) or self._roots != list(map(id, roots)):
            self._keys |= set(keys)
            self.look(roots)

    def look(self, roots: Sequence[Any]) -> None:
        """Looks for the storages anew, and from these objects alone."""
        self._forget()
        self._roots = list(map(id, roots))
        search = _Search(self, self._keys)
        for root in roots:
            search.visit(root)
        self._addresses = list(map(_address, self._tensors))

    def watched(self) -> set[int]:
        """The storages that were found."""
        return set(map(storage_key, self._tensors))

    def clear(self) -> None:
        """Watches nothing."""
        self._keys = set()
        self._roots = []
        self._forget()

    def moved(self) -> bool:
        """Whether anything is not what and where it was."""
        try:
            if self._tables != self._were:
                return True
            for container, key, value in self._items:
                if container[key] is not value:
                    return True
            for holder, name, value in self._attributes:
                if getattr(holder, name) is not value:
                    return True
        except (
            Exception
        ):  # a name is gone; or another tensor was compared with the one before, which has no truth value
            return True
        return list(map(_address, self._tensors)) != self._addresses


class _Search:
    """Walks from the callable to the tensors in question, and notes each step of the ways that lead to one."""

    def __init__(self, watch: Watch, keys: Collection[int]) -> None:
        self._watch, self._keys = watch, keys
        self._leads: dict[int, bool] = {}
        self._alive: list[Any] = []  # ids stay unique

    def visit(self, value: Any) -> bool:
        if isinstance(value, _LEAVES):
            return False
        if id(value) in self._leads:
            return self._leads[id(value)]
        self._leads[id(value)] = False  # a cycle leads nowhere by itself
        self._alive.append(value)
        if isinstance(value, torch.Tensor):
            leads = _has_storage(value) and storage_key(value) in self._keys
            if leads:
                self._watch._tensors.append(value)
        else:
            leads = False
            tables: dict[int, Any] = {}
            for kind, holder, key, child in _steps(value):
                if self.visit(child):
                    leads = True
                    # Two tensors of one number each are compared by it, not by identity.
                    if kind == "entry" and not (isinstance(child, torch.Tensor) and child.numel() == 1):
                        tables[id(holder)] = holder
                    elif kind in ("entry", "item"):
                        self._watch._items.append((holder, key, child))
                    elif kind == "attribute":
                        self._watch._attributes.append((holder, key, child))
            self._watch._tables.extend(tables.values())
            self._watch._were.extend(map(copy.copy, tables.values()))
        self._leads[id(value)] = leads
        return leads


def reachable(root: Any, keys: Collection[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in these storages that are reachable from an object, with the way to each."""
    seen: set[int] = set()
    alive: list[Any] = []

    def walk(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(value, _LEAVES) or id(value) in seen:
            return
        seen.add(id(value))
        alive.append(value)
        if isinstance(value, torch.Tensor):
            if _has_storage(value) and storage_key(value) in keys:
                yield path, value
            return
        for _, holder, key, child in _steps(value):
            step = "" if key in _SILENT else f"[{key!r}]" if holder is value else f".{key}"
            yield from walk(child, path + step)

    yield from walk(root, "")


def _steps(value: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    """The ways from an object to others: kind, holder, key, child.

    An "entry" is one of a dict or list that holds nothing else, and can be compared as a whole; an "item" is one of
    others, an "attribute" is asked for by its name, and what is "fixed" can't change.
    """
    if isinstance(value, dict):
        yield from (("item", value, key, child) for key, child in list(value.items()))
    elif isinstance(value, (list, tuple)):
        kind = "entry" if all(isinstance(child, torch.Tensor) for child in value) else "item"
        yield from ((kind, value, i, child) for i, child in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from (("fixed", value, "member", child) for child in value)
    elif isinstance(value, types.MethodType):
        yield "fixed", value, "__self__", value.__self__
        yield "fixed", value, "__func__", value.__func__
    elif isinstance(value, functools.partial):
        yield "fixed", value, "func", value.func
        yield "fixed", value, "args", value.args
        yield "fixed", value, "keywords", value.keywords
    elif hasattr(value, "_torchdynamo_orig_callable"):
        yield "fixed", value, "_torchdynamo_orig_callable", value._torchdynamo_orig_callable
    elif isinstance(value, types.FunctionType):
        yield from _steps_of_function(value)
    elif isinstance(value, nn.Module):
        for table in (value.__dict__[name] for name in _TABLES):
            yield from (("entry", table, key, child) for key, child in list(table.items()))
        attributes = value.__dict__
        yield from (("item", attributes, name, child) for name, child in attributes.items() if name not in _TABLES)
        yield "fixed", value, "forward", type(value).forward
    elif type(value).__module__.partition(".")[0] not in _OPAQUE and not type(value).__module__.startswith(__package__):
        attributes = getattr(value, "__dict__", {})
        yield from (("item", attributes, name, child) for name, child in list(attributes.items()))
        for slot in _slots(type(value)):
            if hasattr(value, slot):
                yield "attribute", value, slot, getattr(value, slot)


def _steps_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any, Any, Any]]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a name that is not bound yet
            yield "attribute", cell, "cell_contents", cell.cell_contents
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield "item", function.__globals__, name, function.__globals__[name]
    yield "fixed", function, "__defaults__", function.__defaults__
    yield "fixed", function, "__kwdefaults__", function.__kwdefaults__
    yield "fixed", function, "__wrapped__", getattr(function, "__wrapped__", None)


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
