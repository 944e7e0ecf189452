"""Small parts of which contracts build their refusals.

A contract writes its rules as a generator of sentences, the most basic first. Only the first sentence is ever asked
for, so a rule may rely on all rules above it. The reference raises what the refusal says, so both can't drift apart.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import ParamSpec

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ..sizes import Size, is_contiguous, known_equal, known_true

__all__ = [
    "FLOATS",
    "NO_VALUES",
    "contiguity",
    "dtype_among",
    "dtype_name",
    "emptiness",
    "first_reason",
    "raise_first",
    "rank_between",
    "shape_text",
]

# What torch raises where a number of a fake tensor is asked for.
NO_VALUES = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)

FLOATS = (torch.float16, torch.bfloat16, torch.float32)

_P = ParamSpec("_P")


def first_reason(reasons: Callable[_P, Iterator[str]]) -> Callable[_P, str | None]:
    """Makes a generator of reasons a function that returns the first one, or None."""

    @functools.wraps(reasons)
    def first(*args: _P.args, **kwargs: _P.kwargs) -> str | None:
        return next(reasons(*args, **kwargs), None)

    return first


def raise_first(name: str, reasons: Iterator[str]) -> None:
    """Raises the first reason, if there is one, as a ValueError about the op `name`.

    Reasons that ask for values are none where tensors are fake and have no values, as in a trace.
    """
    try:
        reason = next(reasons, None)
    except NO_VALUES:
        return
    if reason is not None:
        raise ValueError(f"{name}: {reason}")


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype without its module, "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def shape_text(shape: Sequence[Size]) -> str:
    """The shape in brackets, "[s0, 128]"; a symbol is written by its name."""
    return f"[{', '.join(map(str, shape))}]"


def dtype_among(name: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype] = FLOATS) -> Iterator[str]:
    """The tensor's dtype is one of `allowed`."""
    if tensor.dtype not in allowed:
        yield f"{name} is {dtype_name(tensor.dtype)} (the kernel takes {', '.join(map(dtype_name, allowed))})"


def rank_between(name: str, tensor: torch.Tensor, low: int, high: int) -> Iterator[str]:
    """The tensor has `low` to `high` dims."""
    if not low <= tensor.dim() <= high:
        allowed = str(low) if low == high else f"{low} to {high}"
        yield f"{name} has {tensor.dim()} dims {shape_text(tensor.shape)} (the kernel takes {allowed})"


def emptiness(name: str, tensor: torch.Tensor) -> Iterator[str]:
    """The tensor is known to have elements; an unbacked size may always turn out to be 0."""
    if any(known_equal(size, 0) for size in tensor.shape):
        yield f"{name} {shape_text(tensor.shape)} is empty, which the kernel does not take"
    elif not all(known_true(size > 0) for size in tensor.shape):
        yield f"{name} {shape_text(tensor.shape)} may be empty, which the kernel does not take"


def contiguity(name: str, tensor: torch.Tensor) -> Iterator[str]:
    """The tensor is row-major without gaps."""
    if not is_contiguous(tensor):
        yield (
            f"{name} {shape_text(tensor.shape)} with strides {shape_text(tensor.stride())} is not contiguous"
            " (the kernel reads it as if it were)"
        )
