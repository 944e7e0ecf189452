"""Whether a callable may be padded, and what of its outputs is padding.

Both are found by running it, since a shape alone tells neither: a dim of an output may equal a bucket by chance, and an
output may depend on rows that are padding (a sum over the batch). Three runs, from which nothing stays: at the sizes of
the call, padded, and padded with copies of a real row instead. The first two tell the shapes; if the last two differ
in what is kept, or the first from the second by more than rounding, rows mix and padding would change the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from .outputs import Shape

# How far a number may be from that of another batch size, whose kernels sum in another order, as a part of the largest.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True, slots=True)
class Trims:
    """Which dims of the outputs are padded.

    Args:
        dims: for each leaf and dim that is, its axis, its factor and its offset: the size is factor x axis + offset.
        unique: whether no other reading of the shapes was possible.
    """

    dims: Mapping[tuple[int, int], tuple[str, int, int]]
    unique: bool

    def shapes(self, leaves: Sequence[Any], sizes: Mapping[str, int]) -> dict[int, Shape]:
        """The shapes of the padded leaves without their padding."""
        shapes: dict[int, list[int]] = {}
        for (i, dim), (axis, factor, offset) in self.dims.items():
            shapes.setdefault(i, list(leaves[i].shape))[dim] = factor * sizes[axis] + offset
        return {i: tuple(shape) for i, shape in shapes.items()}


class Mixing(Exception):  # noqa: N818 (no error: it decides how a call is served)
    """Padding would change the result; says where."""


def read_shapes(exact: Any, padded: Any, sizes: Mapping[str, int], bucket: Mapping[str, int]) -> Trims:
    """Reads off two runs which dims of the outputs are padded.

    Args:
        exact: what the callable returned at the sizes of the call.
        padded: what it returned at the sizes of the bucket.
        sizes: the sizes of the axes in the call.
        bucket: the sizes of the axes when padded.

    Raises:
        Mixing: the outputs differ in a way that no axis explains.
    """
    leaves, structure = tree_flatten(exact)
    padded_leaves, padded_structure = tree_flatten(padded)
    if structure != padded_structure:
        raise Mixing("the structure of the outputs depends on the size")
    axes = [axis for axis in sizes if bucket[axis] != sizes[axis]]
    dims: dict[tuple[int, int], tuple[str, int, int]] = {}
    unique = True
    for i, (small, large) in enumerate(zip(leaves, padded_leaves, strict=True)):
        if not isinstance(small, torch.Tensor):
            if small is not large and small != large:
                raise Mixing(f"output {i} is {small!r} at the size of the call, {large!r} when padded")
            continue
        for dim, (n, m) in enumerate(zip(small.shape, large.shape, strict=True)):
            if n != m:
                readings = [reading for axis in axes for reading in _readings(axis, n, m, sizes[axis], bucket[axis])]
                if not readings:
                    raise Mixing(f"dim {dim} of output {i} is {n} at the size of the call and {m} when padded")
                dims[i, dim] = min(readings, key=lambda reading: (reading[1] != 1, reading[2] != 0))
                unique = unique and len(readings) == 1
    return Trims(dims, unique)


def compare_runs(exact: Any, padded: Any, copied: Any) -> None:
    """Compares three runs: at the sizes of the call, padded, and padded with copies of real rows.

    Raises:
        Mixing: padding changes the result.
    """
    runs = (tree_flatten(run)[0] for run in (exact, padded, copied))
    for i, (small, large, other) in enumerate(zip(*runs, strict=True)):
        if isinstance(small, torch.Tensor):
            kept = tuple(map(slice, small.shape))
            _compare(i, small, large[kept], other[kept])


def _readings(axis: str, n: int, m: int, size: int, padded: int) -> list[tuple[str, int, int]]:
    factor, rest = divmod(m - n, padded - size)
    return [(axis, factor, m - factor * padded)] if rest == 0 and factor > 0 else []


def _compare(i: int, exact: torch.Tensor, padded: torch.Tensor, copied: torch.Tensor) -> None:
    if not torch.equal(_numbers(padded), _numbers(copied)):
        raise Mixing(f"output {i} depends on what the padding holds")
    if exact.is_floating_point() and exact.numel():
        a, b = _numbers(exact).double(), _numbers(padded).double()
        off = (a - b).abs()
        largest = a.abs().where(a.isfinite(), 0).amax()
        off = off.where(a != b, 0)  # equal infinities
        bound = _TOLERANCE.get(exact.dtype, 1e-1) * largest
        if not bool((off <= bound).all()):
            raise Mixing(f"output {i} is off by {float(off.amax()):.3g} when padded")


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """What isn't a number equals itself here."""
    return tensor.nan_to_num(nan=7.0e3, posinf=torch.inf, neginf=-torch.inf) if tensor.is_floating_point() else tensor
