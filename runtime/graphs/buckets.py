"""The sizes that graphs are captured for."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

from .spec import Sizes


class Buckets:
    """Sizes of each padded axis.

    Args:
        buckets: for each axis its sizes, or sizes alone where there is one axis. An axis without sizes is not padded.
        axes: the axes that the inputs have.

    Raises:
        ValueError: an axis is unknown, a size is no positive int, or sizes alone are given for several axes.
    """

    def __init__(self, buckets: Mapping[str, Sequence[int]] | Sequence[int] | None, axes: Sequence[str]) -> None:
        if buckets is None:
            buckets = {}
        elif not isinstance(buckets, Mapping):
            if len(axes) != 1:
                known = f"the axes {', '.join(axes)}" if axes else "no axis"
                raise ValueError(f"GraphRunner.buckets: sizes {list(buckets)} of which axis? The inputs have {known}")
            buckets = {axes[0]: buckets}
        for axis, sizes in buckets.items():
            if axis not in axes:
                raise ValueError(f"GraphRunner.buckets: no input has the axis {axis!r}; known: {', '.join(axes)}")
            if not sizes or any(not isinstance(size, int) or size < 1 for size in sizes):
                raise ValueError(f"GraphRunner.buckets: sizes of {axis!r} must be positive ints, not {list(sizes)}")
        self._sizes = {axis: sorted(set(sizes)) for axis, sizes in buckets.items()}

    def fit(self, sizes: Mapping[str, int]) -> Sizes | None:
        """The smallest bucket that holds these sizes, None if the largest doesn't."""
        fitting = dict(sizes)
        for axis, size in sizes.items():
            if axis in self._sizes:
                larger = next((bucket for bucket in self._sizes[axis] if bucket >= size), None)
                if larger is None:
                    return None
                fitting[axis] = larger
        return fitting

    @property
    def axes(self) -> Collection[str]:
        """The axes that are padded."""
        return self._sizes.keys()

    def largest(self, sizes: Mapping[str, int]) -> Sizes:
        """The largest bucket; axes without buckets keep their sizes."""
        return {axis: self._sizes[axis][-1] if axis in self._sizes else size for axis, size in sizes.items()}

    def all(self, sizes: Mapping[str, int]) -> Iterator[Sizes]:
        """Every bucket of the axes in `sizes`, largest first; an axis without buckets keeps its size."""
        choices = [reversed(self._sizes.get(axis, [size])) for axis, size in sizes.items()]
        for chosen in itertools.product(*choices):
            yield dict(zip(sizes, chosen, strict=True))
