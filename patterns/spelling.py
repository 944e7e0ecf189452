"""How a model wrote a recognised value: the ops from its inputs to its result, as a formula that can be read and run.

A kind says what a value *is*; its spelling says to the last bit how it was computed: every cast, in which order the
factors are multiplied, how a root is taken. Run on the site's inputs, a spelling gives the value that the graph gives.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx

from . import values
from .canonical import Canonicaliser
from .masks.creation import lifted
from .preserved import original

aten = torch.ops.aten

# A subgraph of more nodes is no spelling of one thing.
_LIMIT = 96


@dataclass(frozen=True, slots=True)
class Slot:
    """A value of a spelling: of input `index`, and behind the inputs, of a step."""

    index: int


@dataclass(frozen=True, slots=True)
class Size:
    """A size that is an expression in the sizes of the inputs."""

    expression: sympy.Expr


class Step(NamedTuple):
    """One op. In its arguments a value is a `Slot`, and a symbolic size a `Size`."""

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Spelling:
    """The ops of one recognised value. Spellings that are alike are equal.

    Args:
        inputs: their names.
        shapes: their shapes; symbolic sizes as expressions.
        steps: in an order in which they can be run; the last gives the result.
    """

    inputs: tuple[str, ...]
    shapes: tuple[tuple[Any, ...], ...]
    steps: tuple[Step, ...]

    def __call__(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Computes the value from its inputs, op by op: bit for bit what the model computes in eager execution.

        Args:
            inputs: by name; tensors of the shapes and dtypes that the site has.

        Raises:
            ValueError: an input is missing or unknown, or a size can't be told from those of the inputs.
        """
        if set(inputs) != set(self.inputs):
            raise ValueError(f"this spelling takes {', '.join(self.inputs)}; given: {', '.join(inputs)}")
        known: list[Any] = [inputs[name] for name in self.inputs]
        sizes = self._sizes(known)
        for step in self.steps:
            args = _filled(step.args, known, sizes)
            known.append(step.op(*args, **{name: _filled(value, known, sizes) for name, value in step.kwargs}))
        result: torch.Tensor = known[-1]
        return result

    def _sizes(self, tensors: list[torch.Tensor]) -> dict[sympy.Symbol, int]:
        return {
            expected: size
            for tensor, shape in zip(tensors, self.shapes, strict=True)
            for expected, size in zip(shape, tensor.shape, strict=True)
            if isinstance(expected, sympy.Symbol)
        }

    def __str__(self) -> str:
        """The formula as a person would write it, views left out: `weight * bf16(f32(x) * rsqrt(…))`."""
        texts: list[_Text] = [_Text(name, _ATOM) for name in self.inputs]
        for step in self.steps:
            texts.append(_written(step, texts))
        return texts[-1].text


def spell(root: fx.Node, inputs: Mapping[str, fx.Node], c: Canonicaliser) -> Spelling | None:
    """The spelling of `root` over `inputs`.

    Args:
        root: a node whose value is recognised.
        inputs: by name. A node that computes the same bits as an input is that input.
        c: knows which values are the same.

    Returns:
        None where `root` reads something else, or its subgraph has an effect or is too large.
    """
    slots = {c.numbers[node]: Slot(index) for index, node in reversed(list(enumerate(inputs.values())))}
    order = _sorted_subgraph(root, slots, c)
    if order is None:
        return None
    steps = []
    for node in order:
        steps.append(_step(node, slots, c))
        slots[c.numbers[node]] = Slot(len(inputs) + len(steps) - 1)
    shapes = tuple(tuple(map(_stored_size, values.shape(node))) for node in inputs.values())
    return Spelling(tuple(inputs), shapes, tuple(steps))


def spell_cast(node: fx.Node, below: Spelling, c: Canonicaliser) -> Spelling:
    """The spelling of a cast of a value that has one."""
    (source,) = node.all_input_nodes
    slots = {c.numbers[source]: Slot(len(below.inputs) + len(below.steps) - 1)}
    return replace(below, steps=(*below.steps, _step(node, slots, c)))


def _step(node: fx.Node, slots: Mapping[int, Slot], c: Canonicaliser) -> Step:
    number = _lifted_number(node)
    if number is not None:
        return Step(aten.scalar_tensor.default, (number.item(),), (("dtype", number.dtype),))
    return Step(original(node.target), _stored(tuple(node.args), slots, c), _stored(node.kwargs, slots, c))


def _sorted_subgraph(root: fx.Node, known: Mapping[int, Slot], c: Canonicaliser) -> list[fx.Node] | None:
    """The nodes to compute, inputs first, each value once; None where one of them can't be a step."""
    found: dict[int, fx.Node] = {}
    entered: set[fx.Node] = set()
    pending = [root]
    while pending:
        node = pending[-1]
        number = c.numbers[node]
        if number in known or number in found or isinstance(node.meta.get("val"), torch.SymInt):
            pending.pop()
        elif node in entered or _lifted_number(node) is not None:  # all that it reads is found
            found[number] = pending.pop()
        elif node.op != "call_function" or not c.is_functional(node) or len(entered) >= _LIMIT:
            return None
        else:
            entered.add(node)
            pending.extend(node.all_input_nodes)
    return list(found.values())


def _lifted_number(node: fx.Node) -> torch.Tensor | None:
    """A number of the model's code that is a tensor in the graph."""
    value = lifted(node)
    return value if value is not None and not value.dim() else None


def _stored(value: Any, slots: Mapping[int, Slot], c: Canonicaliser) -> Any:
    """An argument with nodes as slots and sizes, and lists and dicts as tuples."""
    if isinstance(value, fx.Node):
        return slots[c.numbers[value]] if c.numbers[value] in slots else _stored_size(value.meta["val"])
    if isinstance(value, torch.SymInt):
        return _stored_size(value)
    if isinstance(value, (list, tuple)):
        return tuple([_stored(v, slots, c) for v in value])
    if isinstance(value, dict):
        return tuple([(name, _stored(v, slots, c)) for name, v in value.items()])
    return value


def _stored_size(size: int | torch.SymInt) -> Any:
    if not isinstance(size, torch.SymInt):
        return size
    expression = size.node.expr
    return expression if isinstance(expression, sympy.Symbol) else Size(expression)


def _filled(value: Any, known: list[Any], sizes: Mapping[sympy.Symbol, int]) -> Any:
    """An argument with the slots and sizes in it filled in."""
    if isinstance(value, Slot):
        return known[value.index]
    if isinstance(value, (Size, sympy.Symbol)):
        expression = value.expression if isinstance(value, Size) else value
        if missing := expression.free_symbols - sizes.keys():
            raise ValueError(f"size {expression}: {', '.join(map(str, missing))} is no size of an input")
        return int(expression.subs(sizes))
    if isinstance(value, tuple):
        return [_filled(v, known, sizes) for v in value]
    return value


# As text -------------------------------------------------------------------------------------------------------------

# How tightly an expression binds.
_SUM, _PRODUCT, _SIGN, _POWER, _ATOM = range(5)


@dataclass(frozen=True, slots=True)
class _Text:
    text: str
    binds: int

    def within(self, binds: int) -> str:
        """In parentheses where it binds less tightly than what it stands in."""
        return self.text if self.binds >= binds else f"({self.text})"


_INFIX: Mapping[object, tuple[str, int]] = {
    aten.add.Tensor: ("+", _SUM),
    aten.add.Scalar: ("+", _SUM),
    aten.sub.Tensor: ("-", _SUM),
    aten.sub.Scalar: ("-", _SUM),
    aten.mul.Tensor: ("*", _PRODUCT),
    aten.mul.Scalar: ("*", _PRODUCT),
    aten.div.Tensor: ("/", _PRODUCT),
    aten.div.Scalar: ("/", _PRODUCT),
    aten.pow.Tensor_Scalar: ("**", _POWER),
}
_UNSAID = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.unsqueeze.default,
        aten.expand.default,
        aten.clone.default,
        aten.alias.default,
        aten.detach.default,
        aten.transpose.int,
        aten.permute.default,
        operator.getitem,
    }
)
_SHORT = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float64: "f64"}


def _written(step: Step, texts: list[_Text]) -> _Text:
    def text(value: Any) -> _Text:
        if isinstance(value, Slot):
            return texts[value.index]
        written = f"{value:g}" if isinstance(value, float) else str(value)
        return _Text(written, _SIGN if written.startswith("-") else _ATOM)

    if step.op in _UNSAID:
        return text(step.args[0])
    if step.op in values.CASTS:
        dtype = dict(step.kwargs).get("dtype") or step.args[-1]
        return _Text(f"{_SHORT.get(dtype, str(dtype).removeprefix('torch.'))}({text(step.args[0]).text})", _ATOM)
    if step.op in _INFIX and len(step.args) == 2 and not step.kwargs:
        sign, binds = _INFIX[step.op]
        left, right = map(text, step.args)
        return _Text(f"{left.within(binds)} {sign} {right.within(binds + 1)}", binds)
    if step.op is aten.neg.default:
        return _Text(f"-{text(step.args[0]).within(_SIGN + 1)}", _SIGN)
    name = getattr(step.op, "_opname", getattr(step.op, "__name__", str(step.op)))
    operands = ", ".join(text(slot).text for slot in _slots(step.args))
    return _Text(f"{name.removeprefix('_')}({operands})", _ATOM)


def _slots(value: Any) -> Iterator[Slot]:
    if isinstance(value, Slot):
        yield value
    elif isinstance(value, tuple):
        for v in value:
            yield from _slots(v)
