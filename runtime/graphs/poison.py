"""Fills memory with what no result may hold, and looks for it in results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .errors import PoisonError
from .spec import InputSpec


def poison(tensor: torch.Tensor, value: float | int | None = None) -> None:
    """Fills with a value; by default with NaN, and integers with the lowest one."""
    tensor.fill_(sentinel(tensor.dtype) if value is None else value)


def sentinel(dtype: torch.dtype) -> float | int | bool:
    """What memory of a dtype is filled with."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype is torch.bool else torch.iinfo(dtype).min


def padding(spec: InputSpec, dtype: torch.dtype) -> float | int | None:
    """What padding is filled with; None leaves it, as an integer may be an index, which has to stay a valid one."""
    return float("nan") if spec.poison is None and dtype.is_floating_point else spec.poison


def check(outputs: Iterable[Any], inputs: Iterable[Any]) -> None:
    """Looks for poison in outputs.

    Raises:
        PoisonError: an output has some, and no input has.
    """
    if any(isinstance(value, torch.Tensor) and _is_poisoned(value) for value in inputs):
        return
    for i, output in enumerate(outputs):
        if isinstance(output, torch.Tensor) and _is_poisoned(output):
            raise PoisonError(
                f"output {i} has {sentinel(output.dtype)} though no input has: it depends on padding, or on "
                "memory that the replay doesn't write"
            )


def _is_poisoned(tensor: torch.Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return tensor.dtype is not torch.bool and bool((tensor == sentinel(tensor.dtype)).any())
