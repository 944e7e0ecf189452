"""How far a fused op may be from what the model computes: what is a rounding, and what is an error.

Both round, in different places. What that may come to follows from the coarsest type on the way and from the length of
the longest sum; where that isn't enough, the model's own distance from exact maths, which is what its formula gives in
float64, tells how much of a difference is rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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


def tolerance(programs: Iterable[fx.GraphModule]) -> Tolerance:
    """The tolerance of programs that compute one thing."""
    nodes = [node for program in programs for node in program.graph.nodes]
    dtypes = {values.dtype(node) for node in nodes if values.is_float(node)}
    coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)
    return Tolerance(coarsest, max((_summed(node) for node in nodes), default=1))


def difference(
    found: torch.Tensor, wanted: torch.Tensor, exact: torch.Tensor | None, tolerance: Tolerance
) -> Difference:
    """Compares what a fused op gives with what the model gives.

    Args:
        found: the op's.
        wanted: the model's, of the same shape and dtype.
        exact: what the model's formula gives in float64, where it is known.
        tolerance: of the site.
    """
    a, b = (t.detach().cpu() for t in (found, wanted))
    steps = 1.0 if wanted.dtype == torch.int8 else 0.0  # a quantiser's, which may round to either side
    if b.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
        exact = None if exact is None else torch.view_as_real(exact.resolve_conj())
    a, b = a.double(), b.double()
    if not b.numel():
        return Difference(0.0, 0.0, tolerance)
    is_float = wanted.dtype.is_floating_point or wanted.dtype.is_complex
    allowed = torch.full_like(b, steps)
    if is_float:
        finite = b.abs().nan_to_num(0.0, 0.0, 0.0)
        scale = finite.amax(-1, keepdim=True) if b.dim() else finite
        allowed = (tolerance.relative * scale).expand_as(b).clone()
    error = _distance(a, b)
    if exact is not None:
        own = _distance(b, exact.detach().cpu().double())
        if is_float:
            in_row = own.where(own.isfinite(), 0.0)
            in_row = in_row.amax(-1, keepdim=True) if b.dim() else in_row
            own = torch.maximum(own.where(own.isinf(), 0.0), in_row.minimum(_MOST_OWN * allowed))
            error = torch.minimum(error, _distance(a, exact.detach().cpu().double()))
        allowed = allowed + 2 * own
    worst = torch.argmax((error - allowed).nan_to_num(0.0).flatten())  # of two infinite ones neither is an error
    return Difference(float(error.flatten()[worst]), float(allowed.flatten()[worst]), tolerance)


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


def in_float64(program: fx.GraphModule, inputs: Sequence[Any]) -> list[Any] | None:
    """What a program gives in float64; None where one of its ops has no such form."""
    try:
        results = InFloat64(program).run(*map(_wide, inputs))
    except Exception:  # whatever an op says: it is not to be had, and nothing is wrong
        return None
    return list(results)


_WIDE = {torch.bfloat16: torch.float64, torch.float16: torch.float64, torch.float32: torch.float64}
_WIDE |= {torch.complex32: torch.complex128, torch.complex64: torch.complex128}


def _widened(argument: Any) -> Any:
    if isinstance(argument, torch.dtype):
        return _WIDE.get(argument, argument)
    return torch.device("cpu") if isinstance(argument, torch.device) else argument


def _wide(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().cpu().to(_WIDE.get(value.dtype, value.dtype))
