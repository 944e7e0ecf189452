"""Several weights as one, never stale.

A packed copy goes stale when a framework reloads a weight in place. So the packed tensor becomes the storage and the
parameters become views of it: a write by anyone is seen at once, and no memory is spent twice.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor


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
    if any(isinstance(weight, FakeTensor) for weight in weights):
        return torch.cat(list(weights))  # shapes without storage: a program that is run to see what it would do
    if _adjacent(weights):
        return _joined(weights)
    with torch.inference_mode(False):  # parameters outlive the inference mode they are packed in
        packed = torch.cat([weight.detach() for weight in weights])
    if not can_pack(weights):
        warnings.warn(
            f"npu_fuse: weights of shapes {[tuple(w.shape) for w in weights]} can't be moved into one storage, as they "
            "are no parameters or something else uses their storage; they are copied on each call. "
            "Options(pack_weights=False) leaves such projections apart.",
            stacklevel=2,
        )
        return packed
    start = 0
    for weight in weights:
        rows = weight.shape[0]
        weight.data = packed[start : start + rows]
        start += rows
    return packed


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


def can_pack(weights: Sequence[torch.Tensor]) -> bool:
    """True for parameters that share no memory, with each other or anything else: no one is cut off when they move."""
    if any(isinstance(weight, FakeTensor) for weight in weights):
        return True  # they have no storage, and stand for parameters that have one each
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None or not all(map(_is_ordinary, weights)):
        return False
    storages = [weight.untyped_storage() for weight in weights]
    users = Counter(storage._cdata for storage in storages)
    # The count includes one for the Python object of each storage, which `storages` holds.
    return not _overlap(weights) and all(count(s._cdata) - 1 == users[s._cdata] for s in storages)


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
        and not weight.is_inference()  # has no version counter that a moved tensor could share
        and not storage.is_shared()
        and storage.filename is None
    )
