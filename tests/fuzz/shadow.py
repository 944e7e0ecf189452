"""What a program means in exact maths, and how far rounding may take it from that.

While a program runs, every tensor's memory has twins in float64. Each op that torch runs is run on the twins too, and a
view of memory is the same view of its twins, so that writes and aliases are those of the program itself. One twin is
exact; to the results of each op on the others noise is added, as large as a rounding. How far the noisy twins end up
from the exact one is how far rounding may take the program, cancellation and overflow included.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

aten = torch.ops.aten
Tensor = torch.Tensor

NOISY = 12
# These give numbers that were there before.
_MOVES = frozenset(
    {
        *(aten.clone, aten.copy_, aten.cat, aten.stack, aten.index, aten.index_select, aten.gather, aten.embedding),
        *(aten.zeros, aten.ones, aten.full, aten.arange, aten.zeros_like, aten.ones_like, aten.full_like, aten.empty),
        *(aten.new_zeros, aten.new_ones, aten.new_empty, aten.empty_like, aten.scalar_tensor, aten.lift_fresh),
        *(aten.fill_, aten.zero_, aten.masked_fill, aten.masked_fill_, aten.where, aten.tril, aten.triu),
        *(aten.index_put_, aten._index_put_impl_, aten.index_copy_, aten.index_fill_, aten.scatter_),
        *(aten.constant_pad_nd, aten.flip, aten.roll, aten.repeat, aten.unfold),
        *(aten.neg, aten.abs, aten.relu, aten.max, aten.amax, aten.maximum, aten.minimum, aten.clamp, aten.round),
    }
)


@dataclass(frozen=True)
class Shadow:
    """The twins of one tensor: the exact one, and the noisy ones."""

    exact: Tensor
    noisy: tuple[Tensor, ...]


class Shadows(TorchDispatchMode):
    """Runs each op on the twins of its arguments too.

    Args:
        coarsest: the float type by whose rounding noise is as large.
    """

    def __init__(self, coarsest: torch.dtype) -> None:
        super().__init__()
        self.unit = torch.finfo(coarsest).eps
        self._generator = torch.Generator().manual_seed(0)
        self._twins: dict[int, tuple[Any, list[Tensor]]] = {}

    def of(self, tensor: Tensor) -> Shadow:
        """Copies of the twins of a tensor, as they are now."""
        exact, *noisy = (self._view(tensor, place).clone() for place in range(NOISY + 1))
        return Shadow(exact, tuple(noisy))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = [
            argument
            for schema, argument in zip(func._schema.arguments, args, strict=False)
            if schema.alias_info is not None and schema.alias_info.is_write and isinstance(argument, Tensor)
        ]
        twins = [tree_map(lambda a, place=place: self._twin(a, place), (args, kwargs)) for place in range(NOISY + 1)]
        is_view = not written and any(schema.alias_info is not None for schema in func._schema.arguments)
        if is_view or func is aten._local_scalar_dense.default:
            return func(*args, **kwargs)  # the twins of its memory are there
        result = func(*args, **kwargs)
        results = [func(*given, **named) for given, named in twins]
        is_noisy = func.overloadpacket not in _MOVES
        for tensor in written:
            for place in range(1, NOISY + 1):
                if is_noisy:
                    self._shake(self._view(tensor, place))
        if not written:
            for place, found in enumerate(results):
                self._keep(result, found, place, is_noisy)
        return result

    def _twin(self, argument: Any, place: int) -> Any:
        if isinstance(argument, Tensor):
            return self._view(argument, place)
        return torch.float64 if isinstance(argument, torch.dtype) and argument.is_floating_point else argument

    def _view(self, tensor: Tensor, place: int) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._twins:
            flat = torch.empty(0, dtype=tensor.dtype).set_(storage)
            wide = flat.double() if tensor.is_floating_point() else flat
            self._twins[storage._cdata] = (storage, [wide.clone() for _ in range(NOISY + 1)])
        memory = self._twins[storage._cdata][1][place]
        return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _keep(self, result: Any, found: Any, place: int, is_noisy: bool) -> None:
        if isinstance(result, (tuple, list)):
            for one, twin in zip(result, found, strict=True):
                self._keep(one, twin, place, is_noisy)
            return
        if not isinstance(result, Tensor):
            return
        if place and is_noisy and found.is_floating_point():
            found = self._shake(found.clone())
        storage = result.untyped_storage()
        if storage._cdata not in self._twins:
            length = storage.nbytes() // result.element_size()
            memories = [torch.zeros(length, dtype=found.dtype) for _ in range(NOISY + 1)]
            self._twins[storage._cdata] = (storage, memories)
        self._view(result, place).copy_(found)

    def _shake(self, twin: Tensor) -> Tensor:
        if twin.is_floating_point() and twin.numel():
            noise = torch.rand(twin.shape, dtype=torch.float64, generator=self._generator) * 2 - 1
            twin.mul_(1 + self.unit * noise)
        return twin


def coarsest(tensors: Iterable[Tensor]) -> torch.dtype:
    """The float type with the fewest digits."""
    types = {t.dtype for t in tensors if t.is_floating_point()} | {torch.float32}
    return max(types, key=lambda dtype: torch.finfo(dtype).eps)
