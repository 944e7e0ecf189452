"""How far a fused op may be from what the model computes: what is a rounding, and what is an error.

Both round, in different places. What that may come to follows from the coarsest type on the way and from the length of
the longest sum; where that isn't enough, the model's own distance from exact maths, which is what its formula gives in
float64, tells how much of a difference is rounding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..patterns import values
from .sizes import number_of

aten = torch.ops.aten

# Roundings of the result's type that one site may add to those of the model, and of float32 in a sum.
_ROUNDINGS = 4
# The model's own error is taken for rounding up to this many times the rest of the tolerance.
_MOST_OWN = 8
# By this part of itself a number is changed to see whether the model's result hangs on it.
_NOISE = 1e-10


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What one site may differ by, as a part of the largest number in a row.

    Args:
        dtype: the coarsest float on the way; None where there is none.
        length: of the longest sum.
    """

    dtype: torch.dtype | None
    length: int

    @property
    def relative(self) -> float:
        if self.dtype is None:
            return 0.0
        unit = torch.finfo(self.dtype).eps / 2
        in_sums = torch.finfo(torch.float32).eps / 2 if self.dtype != torch.float64 else unit
        return _ROUNDINGS * (unit + in_sums * math.sqrt(self.length))

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}, sums of {self.length}"


@dataclass(frozen=True, slots=True)
class Difference:
    """The worst element of a result.

    Args:
        error: its distance.
        allowed: what it may be.
        tolerance: by which.
    """

    error: float
    allowed: float
    tolerance: Tolerance

    @property
    def is_rounding(self) -> bool:
        return self.error <= self.allowed

    def __str__(self) -> str:
        relation = "within" if self.is_rounding else ">"
        return f"max error {self.error:.3g} {relation} tolerance {self.allowed:.3g} ({self.tolerance})"


def tolerance(original: fx.GraphModule, fused: fx.GraphModule) -> Tolerance:
    """The tolerance of a program that stands for another: it may round as coarsely, and sum as much."""
    dtypes = {values.dtype(node) for node in original.graph.nodes if values.is_float(node)}
    coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)
    sums = (_summed(node) for program in (original, fused) for node in program.graph.nodes)
    return Tolerance(coarsest, max(sums, default=1))


def difference(
    found: torch.Tensor, wanted: torch.Tensor, exact: Sequence[torch.Tensor], tolerance: Tolerance
) -> Difference:
    """Compares what a fused op gives with what the model gives.

    Args:
        found: the op's.
        wanted: the model's, of the same shape and dtype.
        exact: what the model's formula gives in float64, as often as it was worked out.
        tolerance: of the site.
    """
    a, b, *exact = (_numbers(tensor) for tensor in (found, wanted, *exact))
    if not b.numel():
        return Difference(0.0, 0.0, tolerance)
    error = _distance(a, b)
    own = functools.reduce(torch.maximum, (_distance(b, of) for of in exact), torch.zeros_like(b))
    if wanted.dtype.is_floating_point or wanted.dtype.is_complex:
        allowed = (tolerance.relative * _in_row(b.abs().nan_to_num(0.0, 0.0, 0.0))).expand_as(b)
        error = functools.reduce(torch.minimum, (_distance(a, of) for of in exact), error)
        rounding = _in_row(own.where(own.isfinite(), 0.0)).minimum(_MOST_OWN * allowed)
        allowed = allowed + 2 * torch.maximum(rounding, own.where(own.isinf(), 0.0))
    else:
        steps = 1.0 if wanted.dtype == torch.int8 else 0.0  # a quantiser's, which may round to either side
        # A choice between equals, such as of two experts, may fall either way.
        allowed = torch.full_like(b, steps).masked_fill((_in_row(own) > steps).expand_as(b), math.inf)
    worst = torch.argmax((error - allowed).nan_to_num(0.0).flatten())  # of two infinite ones neither is an error
    return Difference(float(error.flatten()[worst]), float(allowed.flatten()[worst]), tolerance)


def in_order(results: Sequence[Any], program: fx.GraphModule) -> list[Any]:
    """Results by the places among them, where a program leaves their order open, as `topk(sorted=False)` does."""
    places = next((t for t in results if t.dtype == torch.int64 and t.dim()), None)
    if places is None or not any(map(_leaves_order_open, program.graph.nodes)):
        return list(results)
    order = places.argsort(-1)
    return [result.gather(-1, order) if result.shape == places.shape else result for result in results]


def _leaves_order_open(node: fx.Node) -> bool:
    is_sorted = node.args[4] if len(node.args) > 4 else node.kwargs.get("sorted", True)
    return node.target is aten.topk.default and not is_sorted


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    held = tensor.detach().cpu()
    return (torch.view_as_real(held.resolve_conj()) if held.is_complex() else held).double()


def _in_row(numbers: torch.Tensor) -> torch.Tensor:
    """The largest in each row."""
    return numbers.amax(-1, keepdim=True) if numbers.dim() else numbers


def _distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """|a - b|, zero where both are the same infinity or no number, infinite where only one is."""
    same = (a == b) | (a.isnan() & b.isnan())
    return (a - b).abs().nan_to_num(math.inf, math.inf).masked_fill(same, 0.0)


_MATMULS = frozenset({aten.mm, aten.bmm, aten.matmul, aten.linear, aten.addmm, aten.baddbmm})
_REDUCTIONS = frozenset({aten.mean, aten.sum, aten.var, aten.var_mean, aten.linalg_vector_norm, aten.cumsum})
_NORMALISED = frozenset({aten._softmax, aten.softmax, aten._safe_softmax, aten.logsumexp})


def _summed(node: fx.Node) -> int:
    """How many numbers a node adds up for one of its results."""
    packet = getattr(node.target, "overloadpacket", None)
    tensors = [t for n in node.all_input_nodes if (t := values.tensor(n)) is not None]
    if not tensors:
        return 1
    sizes = [list(map(number_of, t.shape)) for t in tensors]
    if packet in _MATMULS:
        place = 1 if packet in (aten.addmm, aten.baddbmm) else 0
        return int(sizes[min(place, len(sizes) - 1)][-1])
    if packet is aten.scaled_dot_product_attention:
        return int(max(sizes[0][-1], sizes[min(1, len(sizes) - 1)][-2]))
    if packet in _NORMALISED:
        return int(max(sizes[0], default=1))
    if packet in _REDUCTIONS:
        result = values.tensor(node)
        kept = math.prod(map(number_of, result.shape)) if result is not None else 1
        return max(int(math.prod(sizes[0]) // max(kept, 1)), max(sizes[0], default=1) if packet is aten.cumsum else 1)
    return 1


class InFloat64(fx.Interpreter):
    """Runs a program on the CPU with all its floats in float64, and no rounding to a narrower type."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls an op.

        Raises:
            TypeError: it looks at the bits of a number.
        """
        if target is aten.view.dtype:
            raise TypeError("the bits of a number in float64 are others")
        args, kwargs = fx.node.map_aggregate((args, kwargs), _widened)
        if target is aten._softmax.default:
            args = (*args[:2], False)
        return super().call_function(target, args, kwargs)

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _wide(super().get_attr(target, args, kwargs))


def in_float64(program: fx.GraphModule, inputs: Sequence[Any]) -> list[tuple[Any, ...]]:
    """What a program gives in float64, by result; nothing where one of its ops has no such form.

    It is run twice, on inputs that differ by far less than they are rounded: where that changes a result, such as a
    choice between two numbers that are equal, the model doesn't settle it.
    """
    try:
        runs = [
            in_order(InFloat64(program).run(*(_wide(value, sign) for value in inputs)), program) for sign in (1, -1)
        ]
    except Exception:  # whatever an op says: it is not to be had, and nothing is wrong
        return [() for _ in program.graph.output_node().args[0]]  # type: ignore[union-attr]  # a tuple
    return list(zip(*runs, strict=True))


_WIDE = {torch.bfloat16: torch.float64, torch.float16: torch.float64, torch.float32: torch.float64}
_WIDE |= {torch.complex32: torch.complex128, torch.complex64: torch.complex128}


def _widened(argument: Any) -> Any:
    if isinstance(argument, torch.dtype):
        return _WIDE.get(argument, argument)
    return torch.device("cpu") if isinstance(argument, torch.device) else argument


def _wide(value: Any, sign: int = 0) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    wide = value.detach().cpu().to(_WIDE.get(value.dtype, value.dtype))
    if not sign or not wide.is_floating_point():
        return wide
    noise = torch.rand(wide.shape, dtype=wide.dtype, generator=torch.Generator().manual_seed(0))
    return wide * (1 + sign * _NOISE * noise)
