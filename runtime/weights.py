"""Weights in the form that a fused op wants, never stale.

A copy goes stale when a framework reloads a weight in place. So what the op reads becomes the storage and the
parameters become views of it: a write by anyone is seen at once, and no memory is spent twice.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# The storages that parameters were moved into, those that are still in use.
_PACKED: dict[int, StorageWeakRef] = {}


def pack(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """The weights stacked along their first axis, without a copy once they are packed.

    Called on every run: weights that lie behind one another in one storage are returned as one view of it. Otherwise
    they are moved into a new storage, and each parameter becomes a view of its rows; this is also what happens after a
    parameter was replaced (`p.data = …`, `load_state_dict(assign=True)`, `.to()`). Weights that can't be moved, because
    something else shares their storage, are concatenated anew on each call.

    Args:
        weights: tensors of one dtype and device, [n_i, …] with equal other axes; contiguous.

    Returns:
        A contiguous tensor [sum(n_i), …].
    """
    if _have_no_values(weights):
        return torch.cat(list(weights))
    if _adjacent(weights):
        return _joined(weights)
    with torch.inference_mode(False):  # parameters outlive the inference mode they are packed in
        packed = torch.cat([weight.detach() for weight in weights])
    views = torch.split(packed, [weight.shape[0] for weight in weights])
    _move(weights, views, "Options(pack_weights=False) leaves such projections apart.")
    return packed


def transposed(weight: torch.Tensor) -> torch.Tensor:
    """The weight of a depthwise convolution with the taps first, without a copy once it lies so.

    Called on every run, as `pack` is: the parameter keeps its shape, and its memory becomes that of the result. Its
    strides change with that, which Dynamo guards on: the call after the first one compiles once more.

    Args:
        weight: [channels, 1, width] or [channels, width].

    Returns:
        A contiguous tensor [width, channels].
    """
    taps_first = (weight if weight.dim() == 2 else weight.select(1, 0)).detach().t()
    if taps_first.is_contiguous():
        return taps_first
    if _have_no_values([weight]):
        return taps_first.contiguous()
    with torch.inference_mode(False):
        packed = taps_first.contiguous()
    del taps_first  # it uses the storage that the weight is to leave
    view = packed.t() if weight.dim() == 2 else packed.t().unsqueeze(1)
    _move([weight], [view], "Options(pack_weights=False) leaves such a convolution as it is.")
    return packed


def unpack(model: torch.nn.Module) -> None:
    """Gives each parameter of a model contiguous memory of its own again, as it had before it was packed.

    For what looks at the memory of parameters, such as safetensors, which refuses tensors that share a storage or are
    not contiguous, or `torch.save` of a single parameter, which saves the whole storage. The next compiled call packs
    them again.

    Args:
        model: its parameters keep their identity and values; those that weren't packed are left alone.
    """
    for parameter in model.parameters():
        if parameter.untyped_storage()._cdata in _known_storages():
            with torch.inference_mode(False):
                parameter.data = parameter.detach().clone(memory_format=torch.contiguous_format)


def _known_storages() -> dict[int, StorageWeakRef]:
    for key in [key for key, storage in _PACKED.items() if storage.expired()]:  # type: ignore[no-untyped-call]  # torch's own
        del _PACKED[key]
    return _PACKED


def _move(weights: Sequence[torch.Tensor], views: Sequence[torch.Tensor], advice: str) -> None:
    """Lets each parameter be a view of the new storage, or warns that it can't be."""
    if not can_pack(weights):
        warnings.warn(
            f"npu_fuse: weights of shapes {[tuple(w.shape) for w in weights]} can't be moved into one storage, as they "
            f"are no parameters or something else uses their storage; they are copied on each call. {advice}",
            stacklevel=3,
        )
        return
    for weight, view in zip(weights, views, strict=True):
        weight.data = view
    storage = views[0].untyped_storage()
    _known_storages()[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # torch's own


def _have_no_values(weights: Sequence[torch.Tensor]) -> bool:
    """True for shapes without storage: a program that is run to see what it would do."""
    return any(isinstance(weight, FakeTensor) or weight.is_meta for weight in weights)


def _adjacent(weights: Sequence[torch.Tensor]) -> bool:
    storage = weights[0].untyped_storage()._cdata
    offset = weights[0].storage_offset()
    for weight in weights:
        if weight.untyped_storage()._cdata != storage or weight.storage_offset() != offset:
            return False
        if not weight.is_contiguous():
            return False
        offset += weight.numel()
    return weights[0].numel() > 0


def _joined(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    first = weights[0].detach()
    rows = sum(w.shape[0] for w in weights)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def was_moved(weights: Sequence[torch.Tensor], form: Callable[..., torch.Tensor]) -> bool:
    """True for parameters that `form`, which is `pack` or `transposed`, has moved already: their memory is its result.

    Others may use that memory too, such as graphs that were captured with it.
    """
    known = _known_storages()
    if _have_no_values(weights) or any(weight.untyped_storage()._cdata not in known for weight in weights):
        return False
    if form is pack:
        return _adjacent(weights)
    return all((weight.stride(0), weight.stride(-1)) == (1, weight.shape[0]) for weight in weights)


def can_pack(weights: Sequence[torch.Tensor]) -> bool:
    """True for parameters that share no memory, with each other or anything else: no one is cut off when they move."""
    if _have_no_values(weights):
        return True  # they stand for parameters that have a storage each
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None or not all(map(_is_ordinary, weights)):
        return False
    storages = [weight.untyped_storage() for weight in weights]
    users = Counter(storage._cdata for storage in storages)
    # The count includes one for the Python object of each storage, which `storages` holds.
    return not _overlap(weights) and all(count(s._cdata) - 1 == users[s._cdata] for s in storages)


def memory_of(weights: Sequence[torch.Tensor]) -> list[str]:
    """All that `can_pack` and `was_moved` look at, of any of these weights, as text that is alike in each process."""
    if _have_no_values(weights):
        return ["no values"]
    count = getattr(torch._C, "_storage_Use_Count", None)
    storages = [weight.untyped_storage() for weight in weights]
    users = Counter(storage._cdata for storage in storages)
    known = _known_storages()
    order = {cdata: place for place, cdata in enumerate(users)}
    lines = []
    for weight, storage in zip(weights, storages, strict=True):
        alone = count is not None and count(storage._cdata) - 1 == users[storage._cdata]
        place = f"{order[storage._cdata]} at {weight.storage_offset()} {weight.stride()}"
        moved = storage._cdata in known
        lines.append(f"{place} {'alone' if alone else 'shared'} {'moved' if moved else ''} {_is_ordinary(weight)}")
    return lines


def _overlap(weights: Sequence[torch.Tensor]) -> bool:
    """Whether between the first and the last element of one weight another one lies."""
    spans = []
    for weight in weights:
        last = sum((size - 1) * stride for size, stride in zip(weight.shape, weight.stride(), strict=True))
        start = weight.storage_offset()
        spans.append((weight.untyped_storage()._cdata, start, start + last))
    spans.sort()
    return any(a[0] == b[0] and b[1] <= a[2] for a, b in itertools.pairwise(spans))


def _is_ordinary(weight: torch.Tensor) -> bool:
    """True for a parameter in memory of its own: not shared between processes, or mapped from a file."""
    storage = weight.untyped_storage()
    return (
        isinstance(weight, torch.nn.Parameter)
        and not is_traceable_wrapper_subclass(weight)
        and not weight.is_inference()  # has no version counter that a moved tensor could share
        and not storage.is_shared()
        and storage.filename is None
    )


# Calls that look at memory, and compute nothing.
IN_MEMORY = frozenset({pack, transposed})
