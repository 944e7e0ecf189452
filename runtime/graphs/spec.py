"""What the inputs of a captured graph are: which dims are padded, with what, and how a value gets there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

Pad: TypeAlias = float | int | bool | Literal["edge"]
Sizes: TypeAlias = dict[str, int]


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input of a `GraphRunner`.

    Args:
        axes: the name of each dim that is padded, None for one that is not: `("batch", "tokens")`, `(None, "tokens")`;
            `"tokens"` is short for `("tokens",)`. A name may have an offset, as `"batch+1"` for `query_start_loc`. Dims
            behind the last are not padded; another size of a dim that isn't makes another graph. An input that is an
            int is the size of its one axis itself, and is padded as the axis is.
        pad: what fills the rows behind the real ones, on every replay; `"edge"` repeats the last real row.
        dtype: of the static buffer. By default that of the value, and another dtype makes another graph.
        convert: whether a value of another dtype (if `dtype` is set) or device is converted; else it is an error.
        static: the caller passes the same memory each time, such as a cache. It isn't copied; other memory is captured
            anew.
        host: for a list of ints on the host, such as lengths that an attention kernel's tiling wants: the argument of
            the op that takes it. The op gets the new list before each replay.
        keep_order: copy to memory whose dims lie in the order that they have in the value's, as after a transpose,
            instead of contiguous memory. Another order makes another graph.
        poison: what `debug_poison` fills pads with; by default NaN, and the pad itself if the input is an integer, as
            that may be an index.

    Raises:
        ValueError: the settings contradict each other.
    """

    axes: str | tuple[str | None, ...] = ()
    pad: Pad = 0
    dtype: torch.dtype | None = None
    convert: bool = True
    static: bool = False
    host: str | None = None
    keep_order: bool = False
    poison: float | int | None = None

    def __post_init__(self) -> None:
        axes = (self.axes,) if isinstance(self.axes, str) else self.axes
        if not isinstance(axes, (tuple, list)) or not all(name is None or isinstance(name, str) for name in axes):
            raise ValueError(
                f"InputSpec.axes: {axes!r} doesn't name dims as 'batch' or ('batch', None) does;"
                " leave it out where no dim is padded"
            )
        axes = tuple(axes)
        object.__setattr__(self, "axes", axes)
        if isinstance(self.pad, str) and self.pad != "edge":
            raise ValueError(f"InputSpec.pad: {self.pad!r} is no number, nor 'edge'")
        if self.static and (any(axes) or self.dtype is not None or self.host is not None):
            raise ValueError("InputSpec.static: memory that isn't copied can't be padded or converted")
        if self.host is not None and len(axes) > 1:
            raise ValueError(f"InputSpec.host: a list has one axis, not {len(axes)}")
        if self.host is not None and self.pad == "edge":
            raise ValueError("InputSpec.pad: a list on the host is padded with a number")
        for name in axes:
            if name is not None:
                Axis.of(name)

    @property
    def dims(self) -> tuple[Axis | None, ...]:
        """The axis of each dim that the spec speaks of."""
        return tuple(None if name is None else Axis.of(name) for name in self.axes)


@dataclass(frozen=True, slots=True)
class Axis:
    """A padded dim: its size is that of the axis, and `offset` more."""

    name: str
    offset: int = 0

    @classmethod
    def of(cls, text: str) -> Axis:
        """Reads `"batch"` or `"batch+1"`.

        Raises:
            ValueError: it is neither.
        """
        name, plus, offset = text.partition("+")
        if not name.isidentifier() or (plus and not offset.isdigit()):
            raise ValueError(f"InputSpec.axes: {text!r} is no name of an axis, such as 'batch' or 'batch+1'")
        return cls(name, int(offset or 0))


_PLAIN = InputSpec()


class Shapes:
    """Reads the sizes of the axes off a call's arguments, and says what shape an argument has at other sizes.

    Raises:
        ValueError: the specs are no dict of them.
    """

    def __init__(self, specs: Mapping[str, InputSpec]) -> None:
        if not isinstance(specs, Mapping):
            raise ValueError(f"GraphRunner.inputs: give a dict of an InputSpec for each name, not {specs!r}")
        for name, spec in specs.items():
            if not isinstance(spec, InputSpec):
                raise ValueError(f"GraphRunner.inputs: {name!r} is to be an InputSpec, not {spec!r}")
        self.specs = dict(specs)
        self._dims = {name: spec.dims for name, spec in specs.items()}
        self.axes = tuple(dict.fromkeys(axis.name for dims in self._dims.values() for axis in dims if axis is not None))

    def of(self, name: str) -> InputSpec:
        """The spec of an input; what isn't declared is copied as it is."""
        return self.specs.get(name, _PLAIN)

    def sizes(self, arguments: Mapping[str, Any]) -> Sizes:
        """The size of each axis that the arguments have.

        Raises:
            ValueError: two arguments disagree on an axis, or one has too few dims.
        """
        found: dict[str, tuple[int, str]] = {}
        for name, value in arguments.items():
            for axis, size in self._measured(name, value):
                size -= axis.offset
                known, by = found.setdefault(axis.name, (size, name))
                if known != size:
                    raise ValueError(f"GraphRunner: axis {axis.name!r} is {known} by {by!r} and {size} by {name!r}")
        return {axis: size for axis, (size, _) in found.items()}

    def _measured(self, name: str, value: Any) -> list[tuple[Axis, int]]:
        dims = self._dims.get(name, ())
        if isinstance(value, torch.Tensor):
            shape: Sequence[int] = value.shape
        elif isinstance(value, int):
            shape = (value,)
        elif isinstance(value, (list, tuple)):
            shape = (len(value),)
        else:
            return []
        if len(shape) < len(dims):
            raise ValueError(f"GraphRunner: {name!r} has the shape {list(shape)}, but axes {self.specs[name].axes}")
        return [(axis, size) for axis, size in zip(dims, shape, strict=False) if axis is not None]

    def order(self, name: str, value: torch.Tensor) -> tuple[int, ...] | None:
        """The dims of the static buffer of a value as they lie in memory, None if in their own order."""
        strides = value.stride()
        if not self.of(name).keep_order or value.is_contiguous() or 0 in strides:  # an expanded dim lies nowhere
            return None
        order = tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))
        return None if order == tuple(range(len(strides))) else order

    def padded(self, name: str, shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of an argument whose axes have these sizes."""
        padded = list(shape)
        for dim, axis in enumerate(self._dims.get(name, ())):
            if axis is not None:
                padded[dim] = sizes[axis.name] + axis.offset
        return tuple(padded)
