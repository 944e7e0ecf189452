"""What one fused op is made of: its reference, traced for one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..ops import OpContract
from .functional import Functional, computed, traced

__all__ = ["decomposition"]


def decomposition(contract: OpContract, call: Mapping[str, Any], decompositions: Mapping[Any, Any]) -> Functional:
    """The ops of a reference.

    Args:
        contract: the fused op.
        call: its arguments. Where the reference reads values of tensors, what it makes of them is part of the graph.
        decompositions: take these ops apart too.

    Returns:
        A graph of the tensors among the arguments, in the schema's order; it gives the op's results, then the new
        values of what the op writes.

    Raises:
        TypeError, ValueError: the call doesn't fit the contract.
        MlirError: the reference reads values, and the tensors are fake ones, which have none.
    """
    bound = contract.bind(**call)
    names = [name for name, value in bound.items() if isinstance(value, torch.Tensor)]

    def run(*tensors: torch.Tensor) -> Any:
        return computed(contract, {**bound, **dict(zip(names, tensors, strict=True))})

    return traced(run, [bound[name] for name in names], decompositions)
