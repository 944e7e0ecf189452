"""What an op writes, found by running it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor

from .effects import overload_of, writes


@dataclass(frozen=True, slots=True)
class Audit:
    """What one call did to its arguments.

    Args:
        op: the op's name.
        declared: the arguments that it writes by its schema, or as `register_side_effects` was told.
        mutated: those that it wrote.
        returned: results that are an argument, by position.
        views: results that lie in the memory of an argument in another way: a part of it, or its axes turned.
        outside: arguments of whose storage it wrote what they don't cover: gaps between rows, or beyond the end.
    """

    op: str
    declared: tuple[str, ...]
    mutated: tuple[str, ...]
    returned: Mapping[int, str]
    views: Mapping[int, str]
    outside: tuple[str, ...]

    @property
    def undeclared(self) -> tuple[str, ...]:
        """The arguments that it wrote and doesn't declare."""
        return tuple(name for name in self.mutated if name not in self.declared)

    def __str__(self) -> str:
        lines = [f"{self.op} wrote {', '.join(self.mutated) or 'none of its arguments'}."]
        if self.undeclared:
            said = f"It doesn't say so of {', '.join(self.undeclared)}"
            returns = f", returns={dict(self.returned)}" if self.returned else ""
            remedy = f"npu_fuse.register_side_effects({self.op!r}, mutates={list(self.mutated)}{returns})"
            lines.append(f"{said}: {remedy}" if "::" in self.op else f"{said}.")  # what is no op can't be registered
        unseen = [name for name in self.declared if name not in self.mutated]
        if unseen:
            lines.append(f"It declares to write {', '.join(unseen)}, and left it as it was in this call.")
        lines += [f"Result {place} is {name} itself." for place, name in self.returned.items()]
        lines += [
            f"Result {place} lies in the memory of {name}, and a graph takes it for a tensor of its own: give a copy."
            for place, name in self.views.items()
        ]
        lines += [f"It wrote beside {name}, into memory that the argument doesn't cover." for name in self.outside]
        return "\n".join(lines)


def audit(op: str | OpOverload | OpOverloadPacket | Callable[..., Any], /, *args: Any, **kwargs: Any) -> Audit:
    """Runs an op on copies of its arguments, and says which it writes.

    Each argument is copied with all of its storage, so that strides, offsets and gaps are as in the call; arguments
    that share memory are copied apart, so that it is known through which of them a write went. A write that changes
    nothing isn't seen: give values that the op would change.

    Args:
        op: an op, its name (`"mylib::store"`), or a Python function.
        args: the arguments of a call, tensors with values; lists of tensors are looked into.
        kwargs: likewise.

    Raises:
        ValueError: there is no such op, or an argument has no values (a fake or meta tensor).
    """
    call = overload_of(op) if isinstance(op, (str, OpOverload, OpOverloadPacket)) else op
    given = _named(call, args, kwargs)
    copies = {name: pytree.tree_map_only(torch.Tensor, _copy, value) for name, value in given.items()}
    before = {name: pytree.tree_map_only(torch.Tensor, _copy, value) for name, value in copies.items()}
    leaves = iter(copies.values())
    positional = [next(leaves) for _ in args]
    with torch.no_grad():
        results = call(*positional, **{name: copies[name] for name in kwargs})
    results = results if isinstance(results, tuple) else (results,)
    returned = {place: name for place, result in enumerate(results) if (name := _argument(result, copies)) is not None}
    owners = {t.untyped_storage().data_ptr(): name for name, value in copies.items() for t in _tensors(value)}
    pairs = {name: (_tensors(before[name]), _tensors(copies[name])) for name in given}
    return Audit(
        op=_name(call),
        declared=writes(call),
        mutated=tuple(name for name, (a, b) in pairs.items() if len(a) != len(b) or any(map(_changed, a, b))),
        returned=returned,
        views={
            place: owners[tensor.untyped_storage().data_ptr()]
            for place, result in enumerate(results)
            for tensor in _tensors(result)
            if place not in returned and tensor.numel() and tensor.untyped_storage().data_ptr() in owners
        },
        outside=tuple(name for name, found in pairs.items() if any(map(_changed_beside, *found))),
    )


def _argument(result: object, arguments: Mapping[str, object]) -> str | None:
    """The argument that a result is; one of the tensors in a list is none."""
    if not isinstance(result, torch.Tensor) or not result.numel():
        return None
    return next((name for name, given in arguments.items() if _is_same(result, given)), None)


def _is_same(result: torch.Tensor, given: object) -> bool:
    return isinstance(given, torch.Tensor) and result.dtype == given.dtype and _lies(result) == _lies(given)


def _lies(tensor: torch.Tensor) -> tuple[object, ...]:
    """Where a tensor lies."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes(), tensor.storage_offset(), tensor.size(), tensor.stride()


def _name(call: Callable[..., Any]) -> str:
    if not isinstance(call, OpOverload):
        return getattr(call, "__qualname__", repr(call))
    return call._schema.name + (f".{call._overloadname}" if call._overloadname != "default" else "")


def _named(call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name, those given by position first."""
    if isinstance(call, OpOverload):
        names = [argument.name for argument in call._schema.arguments]
    else:
        names = list(_parameters(call))
    names += [f"argument {i}" for i in range(len(names), len(args))]  # of *args
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _parameters(call: Callable[..., Any]) -> Iterable[str]:
    try:
        return inspect.signature(call).parameters
    except ValueError:  # a function of C has no signature
        return ()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that lies in a copy of the whole storage as the original does."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        raise ValueError("audit: an argument has no values (a fake or meta tensor)")
    storage = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]  # torch's own
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _changed(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether an element has other bits, or there are other elements."""
    a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (before, after))
    return not torch.equal(a, b)


def _changed_beside(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether memory of the storage that is no element has other bits; what is resized has another storage."""
    if _lies(before)[1:] != _lies(after)[1:]:
        return False
    a, b = (torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage()) for t in (before, after))
    changed = a != b
    count = len(changed) // after.itemsize
    changed_elements = changed[: count * after.itemsize].view(count, after.itemsize).any(-1)
    elements = torch.arange(count, device=after.device)
    elements = elements.as_strided(after.size(), after.stride(), after.storage_offset())
    changed_elements[elements.reshape(-1)] = False
    return bool(changed_elements.any())
