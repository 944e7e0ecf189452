"""Whether a callable may be padded, and what of its outputs is padding.

Both are found by running it, since a shape alone tells neither: a dim of an output may equal a bucket by chance, and an
output may depend on rows that are padding (a sum over the batch). The runs, from which nothing stays: at the sizes of
the call; padded; padded with copies of real rows instead, so that what they write is written twice; and padded as
before, but floats with multiples of real rows. The first two tell the shapes; if any of the others differs from the
second in what is kept, or the first by more than rounding, rows mix and padding would change the result. What is kept
are outputs, inputs that are written, and state where the first run writes to it.

That is a test on one call's numbers, not a proof: a maximum over integers may have escaped it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves

from .copies import resized
from .outputs import Shape
from .spec import Shapes

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


@dataclass(frozen=True, slots=True)
class Run:
    """What came out of a run of which nothing stays.

    Args:
        result: what the callable returned.
        written: the inputs that it wrote to, as they were afterwards.
        reads: for each of its writes to state, what gives the numbers in that place.
        state: these numbers afterwards; in a run that is compared with another, of that other's places. Where padding
            alone writes is not among them: a pad value that is an index says which place is free.
    """

    result: Any
    written: Mapping[str, torch.Tensor]
    reads: Sequence[Callable[[], torch.Tensor]]
    state: Sequence[torch.Tensor]

    def leaves(self) -> dict[str, torch.Tensor]:
        """The tensors that came out, each with what to call it."""
        outputs = {f"output {i}": leaf for i, leaf in enumerate(tree_leaves(self.result))}
        inputs = {f"input {name!r}": value for name, value in self.written.items()}
        return {name: leaf for name, leaf in (outputs | inputs).items() if isinstance(leaf, torch.Tensor)}


NO_RUN = Run(None, {}, (), ())


def other_arguments(shapes: Shapes, arguments: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The arguments; and with all that are bools true, and false, as one false among many hides what others do."""
    yield arguments
    masks = [name for name, value in arguments.items() if _is_mask(value) and not shapes.of(name).static]
    for value in (True, False) if masks else ():
        yield {**arguments, **{name: torch.full_like(arguments[name], value) for name in masks}}


def other_paddings(shapes: Shapes, arguments: Mapping[str, Any], bucket: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """The arguments with real rows as padding, and with multiples of real rows as padding of floats alone."""
    copied = {
        name: value if shapes.of(name).pad == "edge" else resized(shapes, name, value, bucket)
        for name, value in arguments.items()
    }
    yield copied
    floats = {name: value for name, value in copied.items() if _is_float(value)}
    for factor in (8, -8) if floats else ():
        scaled = dict(arguments)
        for name, value in floats.items():
            real = tuple(map(slice, arguments[name].shape))
            scaled[name] = value * factor
            scaled[name][real] = value[real]
        yield scaled


def _is_mask(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


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


def compare_runs(exact: Run, padded: Run, others: Iterable[Run]) -> None:
    """Compares runs: at the sizes of the call, padded, and with other rows as padding.

    Raises:
        Mixing: padding changes the result.
    """
    small, large = exact.leaves(), padded.leaves()
    for other in others:
        for name, different in other.leaves().items():
            rows = tuple(map(slice, small[name].shape))
            if not torch.equal(_numbers(large[name][rows]), _numbers(different[rows])):
                raise Mixing(f"{name} depends on what the padding holds")
    for name, expected in small.items():
        # A count has no rounding; but which of two equal scores is the best may differ, and then a row's index.
        if expected.is_floating_point() or expected.shape == large[name].shape:
            _compare(name, expected, large[name][tuple(map(slice, expected.shape))])
    for expected, result in zip(exact.state, padded.state, strict=True):
        _compare(f"state {list(expected.shape)}", expected, result)


def _compare(name: str, expected: torch.Tensor, result: torch.Tensor) -> None:
    if expected.is_floating_point() and expected.numel():
        off = _distance(expected, result)
        if off > _TOLERANCE.get(expected.dtype, 1e-1):
            raise Mixing(f"{name} is off by {off:.3g} of its largest number when padded")
    elif not torch.equal(expected, result):
        raise Mixing(f"{name} differs when padded")


def _distance(expected: torch.Tensor, result: torch.Tensor) -> float:
    """The largest difference, as a part of the largest number."""
    a, b = _numbers(expected).double(), _numbers(result).double()
    off = (a - b).abs().where(a != b, 0).amax()  # infinities that are equal have no difference
    largest = a.abs().where(a.isfinite(), 0).amax()
    return float(off / largest) if off else 0.0


def _readings(axis: str, n: int, m: int, size: int, padded: int) -> list[tuple[str, int, int]]:
    factor, rest = divmod(m - n, padded - size)
    return [(axis, factor, m - factor * padded)] if rest == 0 and factor > 0 else []


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """What isn't a number equals itself here."""
    return tensor.nan_to_num(nan=7.0e3, posinf=torch.inf, neginf=-torch.inf) if tensor.is_floating_point() else tensor
