"""One run of a callable, seen op by op: what it touches, what it writes, and what no replay could repeat.

Every run of the callable that serves a capture (warm-ups, the captured run itself) goes through a `Recorder`. It works
below autograd and compilers, on the ops that really run, so a compiled function is seen as well as an eager one; only
kernels that a compiler calls past the dispatcher (Inductor's on the CPU) are not.
"""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ..effects import writes
from .errors import CaptureError
from .host_lists import taken_lists

# The arguments that switch chance off, with the value that does: a kernel of attention is no random op without dropout.
_NO_CHANCE = {"dropout_p": 0.0, "p": 0.0, "dropout": 0.0, "train": False, "training": False}

# Ops of torch that write undeclared; others are known to `effects`.
_UNDECLARED = dict.fromkeys(
    ("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"), ("running_mean", "running_var")
)

# Whose frames are not the model's.
_NOT_THE_MODEL = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)


address = torch.Tensor.const_data_ptr  # type: ignore[attr-defined]  # (not in the stub) data_ptr makes a lazy copy real

Place: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...], int | torch.SymInt]


def storage_key(tensor: torch.Tensor) -> int:
    """Names the storage that a tensor lies in, as long as it lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


def place(tensor: torch.Tensor) -> Place:
    """Where a tensor lies: its storage, size, stride and offset."""
    return storage_key(tensor), tensor.size(), tensor.stride(), tensor.storage_offset()


@dataclass(frozen=True, slots=True)
class Call:
    """One op that ran.

    Attributes:
        op: the op.
        args, kwargs: its arguments; tensors are aliases, whose shapes and strides stay as they were then.
        results: the leaves of what it returned, aliases too.
        fresh: for each result, whether it lies in memory that the op allocated.
        writes: whether the op writes to its arguments.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Any, ...]
    fresh: tuple[bool, ...]
    writes: bool


@dataclass(slots=True)
class Trace:
    """What was seen of a run.

    Attributes:
        calls: the ops in their order, if they were kept.
        outside: the storages used that the run didn't make: inputs, parameters, state. Nobody is kept from moving them.
        written: keys of those that were written.
        made: the storages that the run made.
        lists: lists from the host that ops took and that can be renewed: the op, the argument, the value.
        reshaped: tensors outside, or views of them, whose shape an op changed in place, with what to say of that.
    """

    calls: list[Call] = field(default_factory=list)
    outside: dict[int, StorageWeakRef] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    made: dict[int, StorageWeakRef] = field(default_factory=dict)
    lists: list[tuple[str, str, Sequence[int]]] = field(default_factory=list)
    reshaped: list[tuple[torch.Tensor, CaptureError]] = field(default_factory=list)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call] # (torch has no types there, nor below)
    """Sees the ops that run inside it.

    Args:
        keep: keep the ops and their tensors alive, for a replay on the host.
        undo: save what ops overwrite, for `restore`.
        refuse: refuse what can't be replayed. A first run may do more than those after it, such as make a table.

    Raises:
        CaptureError: (inside) an op can't be replayed; see `_refuse`.
    """

    def __init__(self, *, keep: bool = False, undo: bool = False, refuse: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self._keep, self._refuse = keep, refuse
        self._undo: list[Callable[[], Any]] | None = [] if undo else None
        self._saved: set[tuple[Any, ...]] = set()
        self._reads: list[tuple[int, Callable[[], torch.Tensor]]] = []

    supports_higher_order_operators = True  # to refuse them in our words

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled function runs compiled in here."""
        return True

    def reads(self, inputs: Collection[int]) -> list[Callable[[], torch.Tensor]]:
        """For each write to state, what gives the numbers in its place.

        Args:
            inputs: keys of storages that are none.
        """
        return [read for key, read in self._reads if key in self.trace.outside and key not in inputs]

    def restore(self) -> None:
        """Puts back what was overwritten, last write first."""
        with torch.inference_mode():
            for undo in reversed(self._undo or ()):
                undo()
        self._undo = []
        self._saved.clear()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if any(isinstance(value, FakeTensor) for value in _tensors((args, kwargs))):
            return func(*args, **kwargs)  # a compilation that goes on inside the run
        if self._refuse or not isinstance(func, torch._ops.OpOverload):
            _refuse(func, args, kwargs)
        for name, value in taken_lists(func, args, kwargs):
            self.trace.lists.append((func._schema.name, name, value))
        _refuse_layouts(func, (args, kwargs))
        before = [storage_key(tensor) for tensor in _tensors((args, kwargs))]
        for tensor in _tensors((args, kwargs)):
            self._see(tensor)
        written = list(_written(func, args, kwargs))
        self.trace.written.update(map(storage_key, written))
        if self._undo is not None:
            self._save(func, args, written)
        if func is torch.ops.aten.lift_fresh.default:
            func = torch.ops.aten.clone.default  # the model may write to what it gets, and a constant must stay
        if self._keep:
            seen_args, seen_kwargs = tree_map(_alias, (args, kwargs))
        before_it = [(tensor, place(tensor)) for tensor in written] if torch.Tag.inplace_view in func.tags else []
        result = func(*args, **kwargs)
        _refuse_layouts(func, result)
        self._note_reshaped(func, before_it)
        leaves = tree_leaves(result)
        fresh = tuple(isinstance(leaf, torch.Tensor) and storage_key(leaf) not in before for leaf in leaves)
        for leaf, new in zip(leaves, fresh, strict=True):
            if new and storage_key(leaf) not in self.trace.outside:
                self.trace.made[storage_key(leaf)] = _weak(leaf)
        if self._keep:
            results = tuple(tree_map(_alias, leaves))
            self.trace.calls.append(Call(func, seen_args, seen_kwargs, results, fresh, bool(written)))
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        key = storage_key(tensor)
        made = self.trace.made.get(key)
        if (made is None or made.expired()) and key not in self.trace.outside:  # type: ignore[no-untyped-call]
            self.trace.outside[key] = _weak(tensor)

    def _note_reshaped(self, func: Any, places: Sequence[tuple[torch.Tensor, Place]]) -> None:
        for tensor, (key, size, stride, offset) in places:
            if place(tensor) != (key, size, stride, offset) and key in self.trace.outside:
                if self._undo is not None:
                    self._undo.append(functools.partial(tensor.as_strided_, size, stride, offset))
                error = _error(func, "changes the shape of a tensor that was there before the call; a replay would not")
                self.trace.reshaped.append((tensor, error))

    def _save(self, func: Any, args: tuple[Any, ...], written: Sequence[torch.Tensor]) -> None:
        assert self._undo is not None
        if func in _ROWS:  # of a cache, the rows alone
            read, write = _ROWS[func](args[0].detach(), *args[1:])
            self._note_write(args[0], read, write)
            return
        for tensor in written:
            saved = (place(tensor), tensor.dtype)
            if saved not in self._saved:
                self._saved.add(saved)
                alias = tensor.detach()
                self._note_write(tensor, alias.clone, alias.copy_)

    def _note_write(
        self, tensor: torch.Tensor, read: Callable[[], torch.Tensor], write: Callable[[torch.Tensor], Any]
    ) -> None:
        assert self._undo is not None
        self._undo.append(functools.partial(write, read()))
        self._reads.append((storage_key(tensor), read))


_Access: TypeAlias = tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], Any]]


def _indexed_rows(target: torch.Tensor, indices: Sequence[torch.Tensor | None], *_: Any) -> _Access:
    indices = [index if index is None else index.clone() for index in indices]
    return (
        functools.partial(torch.ops.aten.index.Tensor, target, indices),
        functools.partial(torch.ops.aten.index_put_.default, target, indices),
    )


def _selected_rows(target: torch.Tensor, dim: int, index: torch.Tensor, *_: Any) -> _Access:
    index = index.clone()
    return (
        functools.partial(target.index_select, dim, index),
        functools.partial(target.index_copy_, dim, index),
    )


# Ops that write few rows of a large tensor, and how those are read, and put back.
_ROWS: dict[Any, Callable[..., _Access]] = {
    torch.ops.aten.index_put_.default: _indexed_rows,
    torch.ops.aten.index_copy_.default: _selected_rows,
}


def _weak(tensor: torch.Tensor) -> StorageWeakRef:
    """Keeps the name of a storage from being given to another, not its memory."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _refuse_layouts(func: Any, tree: Any) -> None:
    for tensor in _tensors(tree):
        if tensor.layout is not torch.strided:
            raise _error(func, f"works on a tensor of layout {tensor.layout}, which has no memory of its own to be "
                               "read again")  # fmt: skip


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _alias(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The arguments that the op writes, by its schema or by registration."""
    names = _UNDECLARED.get(func._schema.name) or writes(func)
    if names:
        for argument, value in _arguments(func, args, kwargs):
            if argument.name in names:
                yield from _tensors(value)


def _arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The op's arguments with their values; those left out have their defaults."""
    for i, argument in enumerate(func._schema.arguments):
        if i < len(args) and not argument.kwarg_only:
            yield argument, args[i]
        else:
            yield argument, kwargs.get(argument.name, argument.default_value)


def _refuse(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuses what a replay would do otherwise than the callable.

    Raises:
        CaptureError: the op draws random numbers, gives the host a number that the device computed, makes a tensor
            whose shape depends on one, moves numbers between host and device, or replaces a tensor's memory.
    """
    if not isinstance(func, torch._ops.OpOverload):
        raise _error(func, "is a higher-order op, whose branches only the data choose")
    tags = func.tags
    if torch.Tag.data_dependent_output in tags:
        raise _error(func, "reads a number back to the host, which has no value during a capture: replace .item(), "
                           "bool() or a Python `if` on a tensor by ops on the device")  # fmt: skip
    if torch.Tag.dynamic_output_shape in tags and not _is_plain_index(func, args):
        raise _error(func, "makes a tensor whose shape depends on the data, and a graph's shapes are fixed: pad to a "
                           "largest size, or use torch.where")  # fmt: skip
    if torch.Tag.nondeterministic_seeded in tags and not _is_certain(func, args, kwargs):
        raise _error(func, "draws random numbers, and a replay would draw the same: call .eval(), or pass them in")
    name = func._schema.name
    if name in ("aten::index_put_", "aten::index_put", "aten::_index_put_impl_") and _counts_mask(args):
        raise _error(func, "writes to places that a mask selects, whose number depends on the data: use torch.where")
    if name in ("aten::set_", "aten::resize_", "aten::resize_as_", "aten::_resize_output_"):
        raise _error(func, "replaces a tensor's memory, and a graph's addresses are fixed")
    if name in ("aten::copy_", "aten::_to_copy"):
        devices = {tensor.device.type for tensor in _tensors((args, kwargs))}
        devices |= {torch.device(kwargs["device"]).type} if kwargs.get("device") is not None else set()
        if len(devices) > 1:
            raise _error(func, f"copies between {' and '.join(sorted(devices))}, and the host would have to wait: "
                               "keep the tensor on one device, or make it an input")  # fmt: skip


def _is_plain_index(func: Any, args: tuple[Any, ...]) -> bool:
    return func is torch.ops.aten.index.Tensor and not any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )


def _counts_mask(args: tuple[Any, ...]) -> bool:
    by_mask = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return by_mask and bool(args[2].numel() != 1)  # one value for all is a masked_fill


def _is_certain(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return any(
        argument.name in _NO_CHANCE and value is not None and value == _NO_CHANCE[argument.name]
        for argument, value in _arguments(func, args, kwargs)
    )


def _error(func: Any, reason: str) -> CaptureError:
    return CaptureError(f"{func} {reason}\n{source_line()}")


def source_line() -> str:
    """The line of the model that is running, as a traceback writes it."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_NOT_THE_MODEL):
            return f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}\n    {frame.line}'
    return "  (no Python line called it)"
