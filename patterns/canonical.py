"""From ATen node to Term: one small function an op, in one table.

An op that is not in the table is an opaque `Call`, never an error. Only ops between float tensors take part in the
algebra; integers (indices, lengths) stay opaque.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from typing import Any

import torch
from torch import fx

from ..runtime import ranks
from ..runtime.effects import writes
from ..runtime.sizes import static_int
from . import values
from .functional import OncePerOp, is_functional, may_draw
from .mask import Masks
from .term import Call, Product, Sum, Term, TermPool

aten = torch.ops.aten


class Canonicaliser:
    """What the nodes of one graph are, filled in graph order by `visit`.

    Attributes:
        terms: the term of each node: equal for values that are equal but for rounding and for axes of one in front.
        numbers: the number of each node: equal only for nodes that compute the same value by the same ops, bit for bit.
        cuts: by number, what `tables` has found out of a value; it is costly, and all layers ask for the same.
        readings: what rules have read, and would read again: by their own keys.
        masks: the masks of the graph, likewise.
        is_functional: of nodes of the graph.
        convolutions: the sums over windows that are known.
        no_convolutions: nodes that are known to be none, nor what is done to one.
    """

    def __init__(self, pool: TermPool) -> None:
        self.pool = pool
        self.terms: dict[fx.Node, Term] = {}
        self.numbers: dict[fx.Node, int] = {}
        self.cuts: dict[int, object] = {}
        self.readings: dict[Hashable, Any] = {}
        self.masks = Masks(self.numbers)
        self.is_functional = OncePerOp(is_functional, lambda op: not may_draw(op))
        self.convolutions: set[fx.Node] = set()
        self.no_convolutions: set[fx.Node] = set()
        self._known: dict[Hashable, int] = {}
        self._first: dict[int, fx.Node] = {}

    def visit(self, node: fx.Node) -> Term:
        """Computes and keeps the term and the number of a node whose inputs have been visited."""
        is_functional = node.op == "call_function" and self.is_functional(node)
        number = self.numbers[node] = self._number(node, is_functional)
        self._first.setdefault(number, node)
        term = self.terms[node] = self._term(node, is_functional)
        if not is_functional:
            self._forget_written(node)
        return term

    def first(self, node: fx.Node) -> fx.Node:
        """The first node that computes the same as one: for all that read it to be made of one tensor."""
        return self._first.get(self.numbers[node], node)

    def _forget_written(self, node: fx.Node) -> None:
        """After a write into a tensor, whatever shares its storage is another value than before."""
        names = writes(node.target)
        if not names:
            return
        arguments = node.target._schema.arguments  # type: ignore[union-attr]  # what writes is an op
        given = {**dict(zip((a.name for a in arguments), node.args, strict=False)), **node.kwargs}
        written = {storage for name in names for storage in values.storages(given.get(name))}
        for other in self.terms:
            if written & values.storages(other):
                self.terms[other] = self.pool.call("written", self.pool.leaf(node), self.pool.leaf(other))
                self.numbers[other] = self._known.setdefault((node, other), len(self._known))

    def _number(self, node: fx.Node, is_functional: bool) -> int:
        key: Hashable = (node.target, _hashable((node.args, node.kwargs), self.numbers)) if is_functional else node
        return self._known.setdefault(key, len(self._known))

    def of(self, value: object) -> Term:
        """The term of an argument: a visited node or a number."""
        if isinstance(value, fx.Node):
            return self.terms[value]
        if isinstance(value, (int, float)):
            return self.pool.number(value)
        return self.pool.call("argument", _hashable(value, self.numbers))

    def _term(self, node: fx.Node, is_functional: bool) -> Term:
        if node.op != "call_function":
            return self.pool.leaf(node)
        rule = _rule(node.target)
        if rule is not None and values.is_float(node):
            term = rule(self, node)
            if term is not None:
                return term
        if not is_functional:
            return self.pool.leaf(node)
        return self.pool.call(values.name_of(node.target), self.numbers[node])


def _hashable(value: object, numbers: Mapping[fx.Node, int]) -> Hashable:
    if isinstance(value, fx.Node):
        return numbers[value]  # which no number of the model's is: they have their type beside them
    if isinstance(value, (list, tuple)):
        return tuple([_hashable(v, numbers) for v in value])
    if isinstance(value, dict):
        return tuple([(k, _hashable(v, numbers)) for k, v in sorted(value.items())])
    if isinstance(value, slice):
        return ("slice", *(_hashable(v, numbers) for v in (value.start, value.stop, value.step)))
    if isinstance(value, (bool, int, float)):
        return (type(value), value)  # 1, 1.0 and True are equal in Python, and are different arguments
    return value if isinstance(value, Hashable) else repr(value)


# One function an op: (canonicaliser, node) -> Term, or None where the op's arguments are beyond it -----------------

OpRule = Callable[[Canonicaliser, fx.Node], Term | None]


def _argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def _float_operands(node: fx.Node) -> bool:
    return all(values.is_float(n) for n in node.all_input_nodes)


def _same(c: Canonicaliser, node: fx.Node) -> Term | None:
    return c.of(node.args[0]) if values.is_float(node.args[0]) else None


def _cast(c: Canonicaliser, node: fx.Node) -> Term | None:
    return c.of(node.args[0]) if values.is_float_cast(node) else None


def _scaled_add(sign: float) -> OpRule:
    def rule(c: Canonicaliser, node: fx.Node) -> Term | None:
        alpha = _argument(node, 2, "alpha", 1)
        if not _float_operands(node) or not isinstance(alpha, (int, float)):
            return None
        return c.pool.add(c.of(node.args[0]), c.of(node.args[1]), sign * alpha)

    return rule


def _rsub(c: Canonicaliser, node: fx.Node) -> Term | None:
    if not _float_operands(node) or _argument(node, 2, "alpha", 1) != 1:
        return None
    return c.pool.add(c.of(node.args[1]), c.of(node.args[0]), -1.0)


def _addcmul(c: Canonicaliser, node: fx.Node) -> Term | None:
    if not _float_operands(node):
        return None
    product = c.pool.mul(c.of(node.args[1]), c.of(node.args[2]))
    return c.pool.add(c.of(node.args[0]), product, node.kwargs.get("value", 1))  # type: ignore[arg-type]  # a number


def _getitem(c: Canonicaliser, node: fx.Node) -> Term | None:
    """Of a norm that is an op already: what it computes."""
    op, index = node.args
    offset = _NORM_OPS.get(values.name_of(op.target)) if isinstance(op, fx.Node) else None
    if offset is None or index != 0 or not isinstance(op, fx.Node):
        return None
    x, gamma = (_argument(op, place, name) for place, name in enumerate(("input", "gamma")))
    if not values.is_float(x) or not values.is_float(gamma) or len(values.shape(gamma)) != 1:
        return None
    normed = _normed(c, x, _argument(op, 2, "epsilon", 1e-6))
    return c.pool.mul(normed, c.pool.add(c.of(gamma), c.pool.number(offset)))


def _normed(c: Canonicaliser, x: fx.Node, eps: float) -> Term:
    mean = c.pool.call("mean", c.pool.power(c.of(x), 2), (-1,))
    return c.pool.mul(c.of(x), c.pool.power(c.pool.add(mean, c.pool.number(eps)), -0.5))


def _vllm_norm(c: Canonicaliser, node: fx.Node) -> Term | None:
    """vLLM's op for a norm: in float32, rounded to the weight's type before the weight. Of a part of an axis, none."""
    x, weight, eps, variance_size = (
        _argument(node, place, name) for place, name in enumerate(("x", "weight", "epsilon", "variance_size"))
    )
    if variance_size is not None or not isinstance(eps, float):
        return None
    if weight is None:
        return _normed(c, x, eps)
    if len(values.shape(weight)) != 1 or values.dtype(weight) != values.dtype(x):
        return None  # with a type of its own it is rounded elsewhere than the NPU's
    return c.pool.mul(_normed(c, x, eps), c.of(weight))


# By what is added to the weight. Models and libraries that know the NPU call them themselves.
_NORM_OPS = {"npu.npu_rms_norm.default": 0.0, "npu.npu_gemma_rms_norm.default": 1.0}


def _mul(c: Canonicaliser, node: fx.Node) -> Term | None:
    return c.pool.mul(c.of(node.args[0]), c.of(node.args[1])) if _float_operands(node) else None


def _div(c: Canonicaliser, node: fx.Node) -> Term | None:
    if not _float_operands(node) or node.kwargs.get("rounding_mode") is not None:
        return None
    dividend, divisor = node.args[0], node.args[1]
    if isinstance(divisor, (int, float)):
        return c.pool.mul(c.of(dividend), c.pool.number(1 / divisor)) if divisor else None
    return c.pool.mul(c.of(dividend), c.pool.power(c.of(divisor), -1))


def _neg(c: Canonicaliser, node: fx.Node) -> Term | None:
    return c.pool.mul(c.of(node.args[0]), c.pool.number(-1))


def _pow(c: Canonicaliser, node: fx.Node) -> Term | None:
    exponent = node.args[1]
    return c.pool.power(c.of(node.args[0]), float(exponent)) if isinstance(exponent, (int, float)) else None


def _fixed_power(exponent: float) -> OpRule:
    return lambda c, node: c.pool.power(c.of(node.args[0]), exponent)


def _reduced_dims(node: fx.Node) -> tuple[int, ...] | None:
    """Reduced axes counted from the end (-1 is the last), or None where all or unknown ones are reduced."""
    rank = len(values.shape(node.args[0])) if isinstance(node.args[0], fx.Node) else 0
    dims = _argument(node, 1, "dim")
    if isinstance(dims, int):
        dims = [dims]
    if not dims or not all(isinstance(d, int) for d in dims):
        return None
    return tuple(sorted(d if d < 0 else d - rank for d in dims))


def _mean(c: Canonicaliser, node: fx.Node) -> Term | None:
    dims = _reduced_dims(node)
    if dims is None or not _float_operands(node):
        return None
    name = "mean" if _argument(node, 2, "keepdim", False) else "mean_squeezed"
    return c.pool.call(name, c.of(node.args[0]), dims)


def _sum(c: Canonicaliser, node: fx.Node) -> Term | None:
    """A sum over axes of known size is that many times the mean."""
    mean = _mean(c, node)
    if mean is None:
        return None
    count = 1
    for dim in mean.args[1]:  # type: ignore[attr-defined]  # a mean is a Call
        size = static_int(values.shape(node.args[0])[dim])  # type: ignore[arg-type]  # checked by _mean
        if size is None:
            return None
        count *= size
    return c.pool.mul(mean, c.pool.number(count))


def _unsqueeze(c: Canonicaliser, node: fx.Node) -> Term | None:
    """Undoes the squeezing of a reduced axis; a new first axis changes nothing under broadcasting."""
    source, dim = node.args
    if not isinstance(source, fx.Node) or not isinstance(dim, int):
        return None
    rank = len(values.shape(node))
    dim = dim if dim < 0 else dim - rank
    if dim == -rank and values.is_float(source):
        return c.of(source)
    return _unsqueezed(c.pool, c.of(source), dim)


def _unsqueezed(pool: TermPool, term: Term, dim: int) -> Term | None:
    """The term with its squeezed means along `dim` kept as an axis of size one; None if anything else is in it."""
    if isinstance(term, Call):
        return pool.call("mean", *term.args) if term.name == "mean_squeezed" and term.args[1] == (dim,) else None
    if isinstance(term, Sum):
        total = pool.number(term.constant)
        for part, coefficient in term.parts:
            restored = _unsqueezed(pool, part, dim)
            if restored is None:
                return None
            total = pool.add(total, restored, coefficient)
        return total
    if isinstance(term, Product):
        result = pool.number(term.coefficient)
        for factor, exponent in term.factors:
            restored = _unsqueezed(pool, factor, dim)
            if restored is None:
                return None
            result = pool.mul(result, pool.power(restored, exponent))
        return result
    return None


def _view(c: Canonicaliser, node: fx.Node) -> Term | None:
    """A view that keeps the shape, or adds axes of size one, keeps the value under broadcasting."""
    source = node.args[0]
    if not isinstance(source, fx.Node) or not values.is_float(source):
        return None
    before, after = values.shape(source), values.shape(node)
    added = len(after) - len(before)
    if added < 0:
        return None
    if values.same_shape(before, after[added:]) and all(static_int(size) == 1 for size in after[:added]):
        return c.of(source)
    for axis in range(1, len(after)) if added == 1 else ():
        if static_int(after[axis]) == 1 and values.same_shape(before, (*after[:axis], *after[axis + 1 :])):
            return _unsqueezed(c.pool, c.of(source), axis - len(after))
    return None


def _waited(c: Canonicaliser, node: fx.Node) -> Term | None:
    """A sum or a mean over ranks, which is linear: numbers stand before it."""
    (reduced,) = node.args
    if not isinstance(reduced, fx.Node) or values.name_of(reduced.target) != ALL_REDUCE or reduced.kwargs:
        return None
    x, how, group = reduced.args
    count = ranks.size(group)
    if count is None or not isinstance(group, str) or how not in ("sum", "avg") or not values.is_float(x):
        return None
    coefficient = c.pool.factors(c.of(x))[1]
    rest = c.pool.divide(c.of(x), c.pool.number(coefficient)) if coefficient else None
    if rest is None:
        return None
    share = coefficient / count if how == "avg" else coefficient
    return c.pool.mul(c.pool.call("all_reduce", rest, group), c.pool.number(share))


ALL_REDUCE, WAIT = "_c10d_functional.all_reduce.default", "_c10d_functional.wait_tensor.default"


def _clamp(low: tuple[int, str] | None, high: tuple[int, str] | None) -> OpRule:
    """A bound on either side, at the given arguments; bounds of bounds are merged."""

    def rule(c: Canonicaliser, node: fx.Node) -> Term | None:
        bounds = [
            infinity if given is None or (bound := _argument(node, *given)) is None else bound
            for given, infinity in ((low, -math.inf), (high, math.inf))
        ]
        if not _float_operands(node) or not all(isinstance(bound, (int, float)) for bound in bounds):
            return None
        least, most = map(float, bounds)
        x = c.of(node.args[0])
        if isinstance(x, Call) and x.name == "clamp":
            x, *inner = x.args  # type: ignore[assignment]  # as made below
            least, most = (max(least, min(float(bound), most)) for bound in inner)  # type: ignore[arg-type]  # likewise
        return c.pool.call("clamp", x, least, most)

    return rule


def _activation(name: str) -> OpRule:
    return lambda c, node: c.pool.call(name, c.of(node.args[0])) if len(node.args) == 1 and not node.kwargs else None


def _gelu(c: Canonicaliser, node: fx.Node) -> Term | None:
    approximate = node.kwargs.get("approximate", "none")
    return c.pool.call("gelu" if approximate == "none" else f"gelu_{approximate}", c.of(node.args[0]))


# Ops of frameworks, and of torch.distributed, which may not be there.
_BY_NAME: Mapping[str, OpRule] = {"vllm_ir.rms_norm.default": _vllm_norm, WAIT: _waited}
RULES: Mapping[Any, OpRule] = {
    aten._to_copy.default: _cast,
    torch.ops.prims.convert_element_type.default: _cast,
    aten.clone.default: _same,
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.contiguous.default: _same,
    aten.lift_fresh_copy.default: _same,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten.expand.default: _same,
    aten.unsqueeze.default: _unsqueeze,
    operator.getitem: _getitem,
    aten.add.Tensor: _scaled_add(1.0),
    aten.add.Scalar: _scaled_add(1.0),
    aten.sub.Tensor: _scaled_add(-1.0),
    aten.sub.Scalar: _scaled_add(-1.0),
    aten.rsub.Scalar: _rsub,
    aten.rsub.Tensor: _rsub,
    aten.addcmul.default: _addcmul,
    aten.mul.Tensor: _mul,
    aten.mul.Scalar: _mul,
    aten.div.Tensor: _div,
    aten.div.Scalar: _div,
    aten.neg.default: _neg,
    aten.pow.Tensor_Scalar: _pow,
    aten.square.default: _fixed_power(2),
    aten.sqrt.default: _fixed_power(0.5),
    aten.rsqrt.default: _fixed_power(-0.5),
    aten.reciprocal.default: _fixed_power(-1),
    aten.mean.dim: _mean,
    aten.sum.dim_IntList: _sum,
    aten.clamp.default: _clamp((1, "min"), (2, "max")),
    aten.clamp_min.default: _clamp((1, "min"), None),
    aten.clamp_max.default: _clamp(None, (1, "max")),
    aten.exp.default: _activation("exp"),
    aten.tanh.default: _activation("tanh"),
    aten.sigmoid.default: _activation("sigmoid"),
    aten.silu.default: _activation("silu"),
    aten.relu.default: _activation("relu"),
    aten.gelu.default: _gelu,
}


@cache
def _rule(target: Callable[..., Any] | str) -> OpRule | None:
    return RULES.get(target) or _BY_NAME.get(values.name_of(target))


def has_rule(target: Callable[..., Any] | str) -> bool:
    """Whether calls of an op may be anything but opaque."""
    return _rule(target) is not None
