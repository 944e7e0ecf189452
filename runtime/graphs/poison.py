"""Fills memory with what no result may hold, and looks for it in results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .errors import PoisonError
from .spec import InputSpec


def poison(tensor: torch.Tensor, value: float | int | None = None) -> None:
    """Fills with a value; by default with `sentinel`."""
    tensor.fill_(sentinel(tensor.dtype) if value is None else value)


def sentinel(dtype: torch.dtype) -> float | int | bool:
    """What memory of a dtype is filled with: NaN, or the integer farthest from 0."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype is torch.bool:
        return False
    return torch.iinfo(dtype).min or torch.iinfo(dtype).max


def padding(spec: InputSpec, dtype: torch.dtype) -> float | int | None:
    """What padding is filled with; None leaves it, as an integer may be an index, which has to stay a valid one."""
    return float("nan") if spec.poison is None and dtype.is_floating_point else spec.poison


def check(outputs: Sequence[Any], function: Callable[[], Sequence[Any]]) -> None:
    """Looks for poison in outputs; what the function itself gives (a logarithm's NaN, the lowest integer) is none.

    Args:
        outputs: the leaves of a replay's outputs.
        function: gives those of the function without poison; asked only if there is something to explain.

    Raises:
        PoisonError: an output has some.
    """
    found = {i: places for i, output in enumerate(outputs) if (places := _poisoned(output)) is not None}
    if not found:
        return
    expected = function()
    for i, places in found.items():
        own = _poisoned(expected[i])
        if own is None or bool((places & ~own).any()):
            raise PoisonError(
                f"output {i} has {sentinel(outputs[i].dtype)} where the function gives a number: it depends on "
                "padding, or on memory that the replay doesn't write"
            )


def _poisoned(value: Any) -> torch.Tensor | None:
    """Where there is poison, if anywhere."""
    if not isinstance(value, torch.Tensor) or value.dtype is torch.bool:
        return None
    places = value.isnan() if value.is_floating_point() or value.is_complex() else value == sentinel(value.dtype)
    return places if bool(places.any()) else None
