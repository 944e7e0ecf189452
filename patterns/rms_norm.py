"""RMSNorm over the last axis:  y = x * (mean(x ** 2) + eps) ** -0.5 * (offset + weight).

The weight may be missing, and every order, cast and spelling of the root is one term. What decides the last bits, the
order of the multiplications and the casts between them, is read off the nodes and kept in `RmsNorm`, so that
`reference` repeats the spelling bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx

from . import values
from .canonical import Canonicaliser
from .cone import Cone, Operand, computes, operand, walk
from .match import Findings, Match, Miss
from .movement import source
from .term import Call, Leaf, Product, Sum, Term, TermPool

KIND = "rms_norm"
BARE = "rms_norm"
WEIGHTED = "rms_norm_weighted"
aten = torch.ops.aten

Order = Literal["normed * weight", "(x * weight) * scale", "x * (scale * weight)"]
Root = Literal["rsqrt", "pow", "1 / sqrt", "x / sqrt"]


_ROOTS: dict[Root, Callable[[torch.Tensor], torch.Tensor]] = {
    "rsqrt": torch.rsqrt,
    "pow": lambda v: torch.pow(v, -0.5),
    "1 / sqrt": lambda v: 1 / torch.sqrt(v),
    "x / sqrt": torch.sqrt,
}


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """What one spelling of RMSNorm fixes.

    Args:
        eps: added to the mean of squares.
        hidden_size: length of the normalised (last) axis.
        weight: whether there is a weight.
        offset: added to the weight: 1.0 for the Gemma family.
        offset_dtype: type of that sum.
        statistics_dtype: type in which the squares are averaged.
        scale_dtype: type to which the inverse root is rounded before it scales.
        scaled_dtype: type of the product with x and the scale in it.
        normed_dtype: type to which the normalised x is rounded before the weight multiplies it.
        weighted_dtype: type of the product of the weight and the first other factor.
        dtype: type of the result.
        order: which product is taken first.
        root: how the inverse root is spelled.
        mean: whether the mean is a mean, or a sum divided by the length.
    """

    eps: float
    hidden_size: int
    weight: bool
    offset: float
    offset_dtype: torch.dtype
    statistics_dtype: torch.dtype
    scale_dtype: torch.dtype
    scaled_dtype: torch.dtype
    normed_dtype: torch.dtype
    weighted_dtype: torch.dtype
    dtype: torch.dtype
    order: Order
    root: Root
    mean: bool

    def public(self) -> dict[str, Any]:
        return {
            "eps": self.eps,
            "hidden_size": self.hidden_size,
            "weight": self.weight,
            "offset": self.offset,
            "dtype": self.dtype,
            "gated": False,
        }


def reference(x: torch.Tensor, weight: torch.Tensor | None, p: RmsNorm) -> torch.Tensor:
    """The spelling that `p` was read from, in plain torch: equal to it bit for bit in eager execution.

    Args:
        x: [..., hidden_size].
        weight: [hidden_size], or None where `p.weight` is False.
        p: a recognised spelling.
    """
    wide = x.to(p.statistics_dtype)
    square = wide * wide
    mean = square.mean(-1, keepdim=True) if p.mean else square.sum(-1, keepdim=True) / p.hidden_size
    variance = mean + p.eps
    root = _ROOTS[p.root](variance).to(p.scale_dtype)

    def scaled(value: torch.Tensor) -> torch.Tensor:
        return value / root if p.root == "x / sqrt" else value * root

    if weight is None:
        return scaled(x.to(p.scaled_dtype)).to(p.dtype)
    if p.offset:
        weight = p.offset + weight.to(p.offset_dtype)
    weight = weight.to(p.weighted_dtype)
    if p.order == "normed * weight":
        product = scaled(x.to(p.scaled_dtype)).to(p.normed_dtype).to(p.weighted_dtype) * weight
    elif p.order == "(x * weight) * scale":
        product = scaled((x.to(p.weighted_dtype) * weight).to(p.scaled_dtype))
    else:
        product = x.to(p.scaled_dtype) * scaled(weight)
    return product.to(p.dtype)


def term(pool: TermPool, match: Match, c: Canonicaliser) -> Term:
    """What larger rules see of a recognised norm: one opaque value, whose bare form still takes a weight."""
    params = match.params
    assert isinstance(params, RmsNorm)
    x = c.terms[match.inputs["x"]]
    if not params.weight:
        return pool.call(BARE, x, params.eps)
    return pool.call(WEIGHTED, x, params.eps, c.terms[match.inputs["weight"]], params.offset)


def match(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | Miss | None:
    """Recognises a node as RMSNorm of something: the bare norm, the norm times its weight, or the cast of either."""
    if values.is_float_cast(node):
        return _match_cast(node, findings)
    value = c.terms[node]
    if not isinstance(value, Product):
        return None
    near: Miss | None = None
    for factor, exponent in value.factors:
        found: Match | Miss | None = None
        if isinstance(factor, Call) and factor.name == BARE and exponent == 1:
            found = _match_weight(node, value, factor, c)
        elif exponent == -0.5:
            found = _match_scale(node, value, factor, c)
        if isinstance(found, Match):
            return found
        near = found or near
    return near


def _match_cast(node: fx.Node, findings: Findings) -> Match | None:
    """A norm computed in a wide type and cast back is a norm with a narrow result."""
    below = source(node)
    inner = findings.at(KIND, below)
    if inner is None or not values.is_rounding(node) or values.is_float_cast(below):
        return None  # no cast, or the second one, whose roundings would add up
    assert isinstance(inner.params, RmsNorm)
    params = replace(inner.params, dtype=values.dtype(node))
    if not params.weight:
        params = replace(params, normed_dtype=values.dtype(node))
    return Match(KIND, node, inner.inputs, params, (*inner.claimed, node))


@dataclass(frozen=True, slots=True)
class _Formula:
    """The terms of one norm: x * scale ** -0.5 * (offset + weight), where scale = mean + eps."""

    x: Term
    scale: Term
    mean: Call
    eps: float
    weight: Term | None
    offset: float


def _match_scale(node: fx.Node, value: Product, scale: Term, c: Canonicaliser) -> Match | Miss | None:
    """x * (mean(x ** 2) + eps) ** -0.5 [* weight], written out."""
    pool = c.pool
    parts, eps = pool.addends(scale)
    if len(parts) == 2 and any(isinstance(part, Call) and part.name == "mean" for part in parts):
        message = "what is added to the mean is no constant (under dynamic=True a float that is passed in is none)"
        return Miss(KIND, node, message, place=scale, matched=1)
    if len(parts) != 1:
        return None
    ((mean, factor),) = parts.items()
    if not (isinstance(mean, Call) and mean.name == "mean" and eps >= 0):
        return None
    square, dims = mean.args
    assert isinstance(square, Term)
    x = pool.square_root(square)
    if x is None:
        return None

    def miss(message: str, *details: object, matched: int) -> Miss:
        return Miss(KIND, node, message, details, place=scale, matched=matched)

    if dims != (-1,):
        return miss("the mean of squares is taken over axes {}; an RMSNorm takes it over (-1,)", dims, matched=2)
    if factor != 1:
        message = "eps is added to {:g} times the mean of squares (an L2 norm); an RMSNorm adds it to the mean"
        return miss(message, factor, matched=2)
    if isinstance(x, Sum) and any(isinstance(p, Call) and p.name == "mean" and k == -1 for p, k in x.parts):
        return miss("the mean is subtracted before the squares are taken: a LayerNorm, not an RMSNorm", matched=3)
    scaled = pool.divide(value, pool.power(scale, -0.5))
    rest = pool.divide(scaled, x) if scaled is not None else None
    if rest is None:
        return miss("the value that is scaled is not the one whose squares are averaged", matched=2)
    weight, offset = _weight(rest)
    if weight is None and rest is not pool.number(1):
        return None
    return _read(node, _Formula(x, scale, mean, eps, weight, offset), c)


def _match_weight(node: fx.Node, value: Product, bare: Call, c: Canonicaliser) -> Match | None:
    """A recognised norm without weight, times its weight."""
    pool = c.pool
    x, eps = bare.args
    assert isinstance(x, Term)
    assert isinstance(eps, float)
    rest = pool.divide(value, bare)
    weight, offset = _weight(rest) if rest is not None else (None, 0.0)
    if weight is None:
        return None
    mean = pool.call("mean", pool.power(x, 2), (-1,))
    assert isinstance(mean, Call)
    found = _read(node, _Formula(x, pool.add(mean, pool.number(eps)), mean, eps, weight, offset), c)
    return found if isinstance(found, Match) else None


def _weight(rest: Term) -> tuple[Term | None, float]:
    """(weight, offset) of a factor `offset + weight`; (None, 0) where the factor is no lone value."""
    if isinstance(rest, Sum) and len(rest.parts) == 1 and rest.parts[0][1] == 1:
        return rest.parts[0][0], rest.constant
    return (rest, 0.0) if isinstance(rest, (Leaf, Call)) else (None, 0.0)


def _read(node: fx.Node, formula: _Formula, c: Canonicaliser) -> Match | Miss | None:
    """Walks the nodes of the norm, and reads off them what the terms don't say."""

    def miss(message: str) -> Miss:
        return Miss(KIND, node, message, place=formula.scale, matched=4)

    cone = walk(node, lambda n: c.terms[n] in (formula.x, formula.weight))
    if cone is None or any(c.terms[n] not in (formula.x, formula.weight) for n in cone.inputs):
        return None
    x_nodes = _distinct((n for n in cone.inputs if c.terms[n] is formula.x), c)
    if len(x_nodes) != 1:
        return miss("x is rounded between the statistics and the scaling")
    (x,) = x_nodes
    hidden_size = values.last_dim(x)
    if hidden_size is None:
        return miss("the normalised axis has no static size")
    if not values.same_shape(values.shape(x), values.shape(node)):
        return miss("the result has another shape than x")
    inputs = {"x": x}
    if formula.weight is not None:
        weights = _distinct((n for n in cone.inputs if c.terms[n] is formula.weight), c)
        if len(weights) != 1 or not values.is_vector(weights[0], hidden_size):
            return None  # no weight but a gate, or a factor per token: the norm below stands on its own
        (inputs["weight"],) = weights
    params = _params(node, formula, cone, hidden_size, c)
    if params is None:
        return miss("its roundings, or the order of its products, are not known")
    return Match(KIND, node, inputs, params, cone.nodes)


def _distinct(nodes: Iterable[fx.Node], c: Canonicaliser) -> list[fx.Node]:
    """The values of nodes in their narrowest type, each once, at the first node that computes it."""
    first: dict[int, fx.Node] = {}
    for node in sorted(map(values.strip_widening, nodes)):
        first.setdefault(c.numbers[node], node)
    return list(first.values())


def _params(node: fx.Node, formula: _Formula, cone: Cone, hidden_size: int, c: Canonicaliser) -> RmsNorm | None:
    """The roundings and the order of one spelling, or None where `reference` could not repeat it.

    Every node that computes something must be one that the reference has, and every rounding one that it repeats.
    """
    order, product = _order(formula, cone, c)
    if order is None or product is None:
        return None
    scaling, weighting = (product, node) if order == "normed * weight" else (node, product)
    scale_terms = (c.pool.power(formula.scale, -0.5), c.pool.power(formula.scale, 0.5))
    scaled_at = product if order == "x * (scale * weight)" else scaling
    scale = next((operand(n) for n in scaled_at.all_input_nodes if c.terms[n] in scale_terms), None)
    root = _root(scale.node) if scale is not None else None
    if scale is None or root is None or (root == "x / sqrt") != (scaled_at.target is aten.div.Tensor):
        return None
    statistics = _statistics(scale.node, cone, hidden_size)
    offsets = [n for n in cone.nodes if computes(n) and formula.offset and c.terms[n] is _factor(formula, c.pool)]
    operands = [operand(n) for n in node.all_input_nodes]
    normed = next((o for o in operands if o.node is product), None) if node is not product else Operand(node, ())
    if statistics is None or normed is None or len(offsets) != bool(formula.offset):
        return None
    roundings = (*scale.roundings, *(normed.roundings if order == "normed * weight" else ()))
    known = {*statistics, *offsets, product, node, *roundings}
    unknown = any(computes(n) or values.is_rounding(n) for n in cone.nodes if n not in known)
    if unknown or len(scale.roundings) > 1 or len(normed.roundings) > 1:
        return None
    return RmsNorm(
        eps=formula.eps,
        hidden_size=hidden_size,
        weight=formula.weight is not None,
        offset=formula.offset,
        offset_dtype=values.dtype(offsets[0] if offsets else node),
        statistics_dtype=values.dtype(scale.node),
        scale_dtype=scale.dtype,
        scaled_dtype=values.dtype(scaling),
        normed_dtype=normed.dtype,
        weighted_dtype=values.dtype(weighting),
        dtype=values.dtype(node),
        order=order,
        root=root,
        mean=any(n.target is aten.mean.dim for n in statistics),
    )


def _factor(formula: _Formula, pool: TermPool) -> Term:
    assert formula.weight is not None
    return pool.add(formula.weight, pool.number(formula.offset))


def _order(formula: _Formula, cone: Cone, c: Canonicaliser) -> tuple[Order | None, fx.Node | None]:
    """Which two factors are multiplied first, and the node that does it."""
    pool = c.pool
    inverse, bare = pool.power(formula.scale, -0.5), pool.call(BARE, formula.x, formula.eps)
    orders: dict[Term, Order] = {bare: "normed * weight", pool.mul(formula.x, inverse): "normed * weight"}
    if formula.weight is not None:
        weight = _factor(formula, pool)
        orders[pool.mul(formula.x, weight)] = "(x * weight) * scale"
        orders[pool.mul(weight, inverse)] = "x * (scale * weight)"
    for n in cone.nodes:
        if n.target in _PRODUCTS and c.terms[n] in orders:
            return orders[c.terms[n]], n
    return None, None


def _root(node: fx.Node) -> Root | None:
    """How the scale is spelled, by the node that computes it."""
    if node.target is aten.reciprocal.default:
        below = operand(source(node))
        return "1 / sqrt" if not below.roundings and _root(below.node) == "x / sqrt" else None
    exponent = node.args[1] if node.target is aten.pow.Tensor_Scalar else None
    if node.target is aten.sqrt.default or exponent == 0.5:
        return "x / sqrt"
    return "rsqrt" if node.target is aten.rsqrt.default else "pow" if exponent == -0.5 else None


def _statistics(root: fx.Node, cone: Cone, hidden_size: int) -> tuple[fx.Node, ...] | None:
    """The nodes that compute the scale, from the square up to `root`; None where they are not those of `reference`."""
    below = walk(root, lambda n: n not in cone.nodes)
    assert below is not None  # it is a part of the cone
    computing = tuple(n for n in below.nodes if computes(n))
    steps = Counter(_step(n) for n in computing)
    divided = all(n.args[1] == hidden_size for n in computing if _step(n) == "division")
    known = steps["square"] == steps["mean"] + steps["sum"] == 1 and steps["sum"] == steps["division"] and divided
    one_dtype = len({values.dtype(n) for n in computing}) == 1
    return computing if known and one_dtype and steps["eps"] <= 1 and not steps["other"] else None


def _step(node: fx.Node) -> str:
    if node.target is aten.pow.Tensor_Scalar:
        return "square" if node.args[1] == 2 else "root"
    return _STEPS.get(node.target, "other")


_STEPS: Mapping[object, str] = {
    aten.mul.Tensor: "square",
    aten.square.default: "square",
    aten.mean.dim: "mean",
    aten.sum.dim_IntList: "sum",
    aten.div.Tensor: "division",
    aten.div.Scalar: "division",
    aten.add.Tensor: "eps",
    aten.add.Scalar: "eps",
    aten.sub.Tensor: "eps",
    aten.sqrt.default: "root",
    aten.rsqrt.default: "root",
    aten.reciprocal.default: "root",
}
_PRODUCTS = frozenset({aten.mul.Tensor, aten.div.Tensor})
