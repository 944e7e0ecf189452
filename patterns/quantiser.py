"""Quantisers to int8, read off the nodes:  q = int8(clamp(round(y / scale + zero_point))).

The scale is given (static), or it is max|y| / 127 of each row (dynamic). Either is the NPU op that does it, or spelled
out. Which values y may be, the rule that asks says.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from ..runtime.ops.quantize import INT8_MAX, NPU_DYNAMIC_QUANT, NPU_QUANTIZE
from ..runtime.sizes import static_int
from . import values
from .canonical import Canonicaliser
from .row_scale import FLOORS, arguments, bounds, inverted, row_scale

aten = torch.ops.aten
IsValue = Callable[[fx.Node], bool]
Operand = fx.Node | float


@dataclass(frozen=True, slots=True)
class Static:
    """A quantiser whose scale is given, one for all or one for each of the last axis.

    Args:
        scale: the scale where it is a number; None where it is a tensor.
        zero_point: the zero point where it is a number; None where it is a tensor, or nothing is added.
        divides: whether the value is divided by the scale, or multiplied.
        rounds_last: whether the zero point is added before the rounding, or after it.
        limits: what the result is clamped to.
        steps: the types of all that is computed.
    """

    scale: float | None
    zero_point: float | None
    divides: bool
    rounds_last: bool
    limits: tuple[float, float]
    steps: frozenset[torch.dtype]


@dataclass(frozen=True, slots=True)
class Dynamic:
    """A quantiser that takes the scale of each row from its largest magnitude.

    Args:
        floor: what the scale or the magnitude is kept above; None for nothing.
        clamps: whether the result is clamped, to what a row reaches or more.
        steps: the types of all that is computed.
    """

    floor: float | None
    clamps: bool
    steps: frozenset[torch.dtype]


@dataclass(frozen=True, slots=True)
class Reading:
    """A quantiser in a graph.

    Args:
        quantiser: what it does.
        y: the node that it quantises.
        given: nodes that it reads besides: "scale", "zero_point"; "smooth", which multiplies y before.
        row_scale: the node that gives the scales of a dynamic one, if there is such a node.
        claimed: the nodes between y and the result, which is included. Casts and views of `row_scale` are none.
    """

    quantiser: Static | Dynamic
    y: fx.Node
    given: Mapping[str, fx.Node]
    row_scale: fx.Node | None
    claimed: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class Unlike:
    """Nearly a quantiser of `y`, and how it differs: a message with its details."""

    y: fx.Node
    message: str
    details: tuple[object, ...] = ()


def read(root: fx.Node, is_value: IsValue, c: Canonicaliser) -> Reading | Unlike | None:
    """The quantiser with the int8 result `root`, of the first node below it for which `is_value` holds.

    Returns:
        None where `root` is not in int8, or what leads to it from such a node is no quantiser at all.
    """
    result = values.tensor(root)
    if result is None or result.dtype != torch.int8:
        return None
    if _is_call(root, NPU_QUANTIZE.name):
        return _read_quantize(root, is_value)
    if root.target is operator.getitem and root.args[1] == 0 and _is_call(root.args[0], NPU_DYNAMIC_QUANT.name):
        return _read_dynamic_quant(root.all_input_nodes[0], is_value)
    return _read_spelled(root, is_value, c) if root.target in values.CASTS else None


# The ops -------------------------------------------------------------------------------------------------------------


def _is_call(node: object, name: str) -> bool:
    return isinstance(node, fx.Node) and getattr(getattr(node.target, "_schema", None), "name", None) == name


def _read_quantize(op: fx.Node, is_value: IsValue) -> Reading | Unlike | None:
    given = arguments(op)
    y, casts = _below_casts(given["input"])
    if not is_value(y):
        return None
    scale, zero_point, axis = given["scales"], given["zero_points"], given["axis"]
    last = len(values.shape(op)) - 1
    if not _is_single(scale) and axis not in (-1, last):
        return Unlike(y, "it is quantised along axis {}, and normed along axis {}", (axis, last))
    steps = frozenset({torch.float32, *map(values.dtype, casts)})
    quantiser = Static(None, None, given["div_mode"], True, (-INT8_MAX - 1, INT8_MAX), steps)
    tensors = {"scale": scale} if zero_point is None else {"scale": scale, "zero_point": zero_point}
    return Reading(quantiser, y, tensors, None, (*casts, op))


def _read_dynamic_quant(op: fx.Node, is_value: IsValue) -> Reading | Unlike | None:
    given = arguments(op)
    y, casts = _below_casts(given["input"])
    if not is_value(y):
        return None
    if given["group_index"] is not None or given["quant_mode"] != "pertoken" or given["dst_type_max"]:
        return Unlike(y, "its rows are quantised in groups, or not each on its own")
    results = [user for user in op.users if user.target is operator.getitem]
    scale = next((user for user in results if user.args[1] == 1), None)
    smooth = given["smooth_scales"]
    quantiser = Dynamic(None, True, frozenset({torch.float32, *map(values.dtype, casts)}))
    return Reading(quantiser, y, {} if smooth is None else {"smooth": smooth}, scale, (*casts, op, *results))


def _below_casts(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    casts = []
    while values.is_float_cast(node):
        casts.append(node)
        (node,) = node.all_input_nodes
    return node, casts


# Spelled out ---------------------------------------------------------------------------------------------------------

# A chain of steps is a word, read from y up: "m" a product and "d" a quotient with a number or vector, "M" and "D" one
# with a value for each row, "z" and "Z" likewise a sum, "r" a rounding, "c" a clamp. Casts have no letter.
_STATIC = re.compile(r"[md](z?rc+|z?c+r|rzc+)")
_DYNAMIC = re.compile(r"m?[MD](rc*|c+r)")
_UNCLAMPED = re.compile(r"[md](z?r|rz)")
_ASYMMETRIC = re.compile(r"m?[MD]([zZ]rc*|[zZ]c+r|r[zZ]c*)")
_LONGEST = 12


@dataclass(frozen=True, slots=True)
class _Step:
    letter: str
    node: fx.Node
    operand: Operand = 0.0


def _read_spelled(root: fx.Node, is_value: IsValue, c: Canonicaliser) -> Reading | Unlike | None:
    (below,) = root.all_input_nodes
    if not values.is_float(below):
        return None
    nearly: Unlike | None = None
    for y, steps in _chains(below, is_value, _LONGEST):
        found = _read_chain(root, y, steps, c)
        if isinstance(found, Reading):
            return found
        nearly = nearly or found
    return nearly


def _read_chain(root: fx.Node, y: fx.Node, steps: list[_Step], c: Canonicaliser) -> Reading | Unlike | None:
    word = "".join(step.letter for step in steps)
    if _DYNAMIC.fullmatch(word):
        return _dynamic(root, y, steps, c)
    if _STATIC.fullmatch(word):
        return _static(root, y, steps)
    if _UNCLAMPED.fullmatch(word):
        return Unlike(y, "what is rounded is not clamped to int8, and wraps round beyond it")
    if _ASYMMETRIC.fullmatch(word):
        return Unlike(y, "each row has a scale and a zero point: an asymmetric quantiser")
    return None


def _chains(node: fx.Node, is_value: IsValue, longest: int) -> Iterator[tuple[fx.Node, list[_Step]]]:
    """All chains of steps up to `node`, with the value that each begins at."""
    if is_value(node):
        yield node, []
    elif longest and node.op == "call_function":
        for letter, below, operand in _readings(node):
            for y, steps in _chains(below, is_value, longest - 1):
                yield y, [*steps, _Step(letter, node, operand)]


def _readings(node: fx.Node) -> Iterator[tuple[str, fx.Node, Operand]]:
    """What step a node may be: its letter, the value that it goes on from, and its other operand."""
    if values.is_float_cast(node):
        yield "", node.all_input_nodes[0], 0.0
    elif node.target is aten.round.default:
        yield "r", node.all_input_nodes[0], 0.0
    elif node.target in _CLAMPS and len(node.all_input_nodes) == 1:
        yield "c", node.all_input_nodes[0], 0.0
    elif node.target in _BINARY and len(node.args) == 2 and not node.kwargs:
        letter, (first, second) = _BINARY[node.target], node.args
        for value, operand in ((first, second), (second, first))[: 1 if letter == "d" else 2]:
            if _is_chained(value, node):
                for found in _operand_letters(letter, operand, node):
                    yield found, value, operand  # type: ignore[misc]  # a node, and a node or number


def _is_chained(value: object, node: fx.Node) -> bool:
    return (
        isinstance(value, fx.Node)
        and values.is_float(value)
        and values.same_shape(values.shape(value), values.shape(node))
    )


_BINARY = {
    aten.mul.Tensor: "m",
    aten.mul.Scalar: "m",
    aten.div.Tensor: "d",
    aten.div.Scalar: "d",
    aten.add.Tensor: "z",
    aten.add.Scalar: "z",
}
_CLAMPS = FLOORS | {aten.clamp_max.default}


def _operand_letters(letter: str, operand: object, node: fx.Node) -> Iterator[str]:
    """What the operation with `operand` that gives `node` may be: of a lone row, its scale looks like any."""
    value = values.tensor(operand)
    if value is not None and values.same_shape(value.shape, (*values.shape(node)[:-1], 1)):
        yield letter.upper()
    if _is_single(operand) or _is_vector(operand, node):
        yield letter


def _is_single(operand: object) -> bool:
    """Whether this is one value for all: a number, or a tensor with one element."""
    if isinstance(operand, (int, float)):
        return True
    value = values.tensor(operand)
    return value is not None and all(static_int(size) == 1 for size in value.shape)


def _is_vector(operand: object, node: fx.Node) -> bool:
    size = values.last_dim(node)
    return (
        isinstance(operand, fx.Node)
        and values.tensor(operand) is not None
        and size is not None
        and values.is_vector(operand, size)
    )


def _limits(steps: list[_Step]) -> tuple[float, float]:
    """The tightest limits of all clamps."""
    found = [bounds(step.node) for step in steps if step.letter == "c"]
    return max((low for low, _ in found), default=-math.inf), min((high for _, high in found), default=math.inf)


def _static(root: fx.Node, y: fx.Node, steps: list[_Step]) -> Reading | Unlike:
    by_letter = {step.letter: step for step in steps}
    scaling, zero = by_letter.get("d") or by_letter["m"], by_letter.get("z")
    low, high = _limits(steps)
    if not (-INT8_MAX - 1 <= low <= high <= INT8_MAX and low.is_integer() and high.is_integer()):
        return Unlike(y, "what is rounded is clamped to {:g} to {:g}, not to int8's -128 to 127", (low, high))
    operands = {"scale": scaling.operand} if zero is None else {"scale": scaling.operand, "zero_point": zero.operand}
    numbers = {name: float(value) for name, value in operands.items() if not isinstance(value, fx.Node)}
    letters = [step.letter for step in steps]
    quantiser = Static(
        scale=numbers.get("scale"),
        zero_point=numbers.get("zero_point"),
        divides=scaling.letter == "d",
        rounds_last=zero is None or letters.index("z") < letters.index("r"),
        limits=(low, high),
        steps=frozenset(values.dtype(step.node) for step in steps),
    )
    given = {name: values.strip_widening(value) for name, value in operands.items() if isinstance(value, fx.Node)}
    return Reading(quantiser, y, given, None, (*(step.node for step in steps), root))


def _dynamic(root: fx.Node, y: fx.Node, steps: list[_Step], c: Canonicaliser) -> Reading | Unlike:
    low, high = _limits(steps)
    if not (low <= -INT8_MAX and high >= INT8_MAX):
        return Unlike(y, "what is rounded is clamped to {:g} to {:g}; its rows reach from -127 to 127", (low, high))
    index = next(index for index, step in enumerate(steps) if step.letter in ("M", "D"))
    scaling, before = steps[index], steps[:index]
    smooth = next((step.operand for step in before if step.letter == "m"), None)
    if smooth is not None and not (isinstance(smooth, fx.Node) and _is_vector(smooth, root)):
        return Unlike(y, "what multiplies it before is no vector over the last axis")
    scaled_by = scaling.operand
    assert isinstance(scaled_by, fx.Node)
    divisor, inverting = inverted(scaled_by) if scaling.letter == "M" else (scaled_by, [])
    scale = row_scale(divisor, before[-1].node if before else y, c) if divisor is not None else None
    if scale is None:
        return Unlike(y, "the scale of a row is not its largest magnitude, divided by 127")
    computing = (*(step.node for step in steps), *inverting, *scale.claimed)
    types = frozenset(values.dtype(node) for node in computing if values.is_float(node))
    return Reading(
        quantiser=Dynamic(scale.floor, any(step.letter == "c" for step in steps), types),
        y=y,
        given={} if smooth is None else {"smooth": values.strip_widening(smooth)},
        row_scale=scale.node,
        claimed=(*computing, root),
    )
