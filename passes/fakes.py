"""Fake results of calls, worked out once for all calls that look alike.

The layers of a model are alike, and so are the calls that their rewriting makes. Asking torch what one gives takes many
times as long as making a fake tensor of a known form.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

_PLAIN = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)


class _Unlike(Exception):  # noqa: N818  # no error
    """A value that no form tells apart from others."""


@dataclass(frozen=True, slots=True)
class _Given:
    """A result that is an argument itself: the number of the tensor among the arguments."""

    place: int


@dataclass(frozen=True, slots=True)
class _Made:
    """A result that is a tensor.

    Args:
        shape: of it.
        stride: likewise.
        offset: in its memory.
        dtype: of it.
        device: that it is said to be on.
        view_of: the number of the tensor among the arguments whose memory it shares, or None.
    """

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device
    view_of: int | None

    @property
    def is_static(self) -> bool:
        return all(type(size) is int for size in (*self.shape, *self.stride, self.offset))


@dataclass(frozen=True, slots=True)
class _Several:
    """A list or tuple of results."""

    kind: Callable[[Iterable[Any]], Any]
    parts: tuple[_Recipe, ...]


_Recipe = _Given | _Made | _Several


class Fakes:
    """What functions give for fake values, within one compilation. No guard is installed.

    Args:
        mode: of the values.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._known: dict[Hashable, _Recipe] = {}

    def __call__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a function gives that asks no more of tensors than their form."""
        tensors: list[FakeTensor] = []
        told: list[Any] = [function]
        try:
            _form((args, kwargs), tensors, told)
        except _Unlike:
            return self._asked(function, args, kwargs)
        key = (*told, *_memories(tensors))
        known = self._known.get(key)
        if known is not None:
            return self._made(known, tensors)
        result = self._asked(function, args, kwargs)
        symbols = {symbol for part in key if isinstance(part, sympy.Basic) for symbol in part.free_symbols}
        with contextlib.suppress(_Unlike):
            self._known[key] = _recipe(result, tensors, symbols)
        return result

    def _asked(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self.mode, self._unguarded():
            return function(*args, **kwargs)

    def _unguarded(self) -> contextlib.AbstractContextManager[None]:
        guards = self.mode.shape_env
        return guards.suppress_guards() if guards is not None else contextlib.nullcontext()

    def _made(self, recipe: _Recipe, tensors: Sequence[FakeTensor]) -> Any:
        if isinstance(recipe, _Several):
            return recipe.kind(self._made(part, tensors) for part in recipe.parts)
        if isinstance(recipe, _Given):
            return tensors[recipe.place]
        if recipe.is_static:
            return self._tensor(recipe, tensors)
        with self._unguarded():
            return self._tensor(recipe, tensors)

    def _tensor(self, recipe: _Made, tensors: Sequence[FakeTensor]) -> FakeTensor:
        with in_kernel_invocation_manager(self.mode):
            if recipe.view_of is None:
                bare = torch.empty_strided(recipe.shape, recipe.stride, dtype=recipe.dtype, device="meta")
            else:
                bare = torch.as_strided(tensors[recipe.view_of], recipe.shape, recipe.stride, recipe.offset)
        return FakeTensor(self.mode, bare, recipe.device)


def _form(value: Any, tensors: list[FakeTensor], told: list[Any]) -> None:
    """Adds to `told` what tells arguments apart, and to `tensors` the tensors among them.

    Raises:
        _Unlike: nothing does.
    """
    kind = type(value)
    if kind is FakeTensor:
        _refuse_unusual(value)
        tensors.append(value)
        told += (kind, value.dtype, value.fake_device, value.dim())
        told += map(_number, (*value.shape, *value.stride(), value.storage_offset()))
    elif kind in _PLAIN:
        told += (kind, value)  # as 1, 1.0 and True are equal
    elif isinstance(value, (list, tuple)):
        told += (kind, len(value))
        for item in value:
            _form(item, tensors, told)
    elif isinstance(value, dict):
        told += (kind, *value)
        for item in value.values():
            _form(item, tensors, told)
    elif kind is torch.SymInt:
        told += (kind, _number(value))
    else:
        raise _Unlike


def _number(value: int | torch.SymInt) -> Hashable:
    return value.node.expr if isinstance(value, torch.SymInt) else value


def _memories(tensors: Sequence[torch.Tensor]) -> Iterator[int]:
    """For each tensor the first that lies in the same memory."""
    first: dict[int, int] = {}
    for place, tensor in enumerate(tensors):
        yield first.setdefault(tensor.untyped_storage()._cdata, place)


def _refuse_unusual(value: FakeTensor) -> None:
    """Raises _Unlike for a tensor that is more than shape, strides, type and device."""
    usual = value.layout is torch.strided and not value.is_conj() and not value.is_neg()
    if not usual or value.constant is not None or value.requires_grad:
        raise _Unlike


def _recipe(result: Any, tensors: Sequence[FakeTensor], symbols: set[sympy.Basic]) -> _Recipe:
    """How to make a result again of other tensors of the same form.

    Raises:
        _Unlike: there is no telling, or its sizes have symbols that its arguments don't have.
    """
    if isinstance(result, (list, tuple)):
        parts = tuple(_recipe(part, tensors, symbols) for part in result)
        own = [p for p, r in zip(result, parts, strict=True) if isinstance(r, _Made) and r.view_of is None]
        if len(set(_memories(own))) < len(own):  # views of one new tensor
            raise _Unlike
        return _Several(type(result), parts)
    if type(result) is not FakeTensor:
        raise _Unlike
    for place, tensor in enumerate(tensors):
        if result is tensor:
            return _Given(place)
    _refuse_unusual(result)
    sizes = (*result.shape, *result.stride(), result.storage_offset())
    if any(size.node.expr.free_symbols - symbols for size in sizes if isinstance(size, torch.SymInt)):
        raise _Unlike
    memory = result.untyped_storage()._cdata
    view_of = next((i for i, t in enumerate(tensors) if t.untyped_storage()._cdata == memory), None)
    if result.dtype != tensors[view_of].dtype if view_of is not None else result.storage_offset() != 0:
        raise _Unlike
    return _Made(
        tuple(result.shape), tuple(result.stride()), result.storage_offset(), result.dtype, result.fake_device, view_of
    )
