"""RMSNorm over the last axis:  y = x * (mean(x ** 2) + eps) ** -0.5 * (offset + weight) + bias.

Weight and bias may be missing, the axis may be normed in groups, and a gate may stand before or behind the norm. Every
order, cast and spelling of the root is one term; to the last bit, it is the `spelling` that says how it was written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..runtime.sizes import static_int
from . import values
from .canonical import Canonicaliser
from .captured import Captured, captured, narrowest
from .cone import Cone, computes, walk
from .linear import linear
from .match import Findings, Match, Miss
from .movement import ROW_MAJOR_VIEWS, is_movement, source, trace
from .rule import Argument, Bound, Capture, Function, Number, Optional, Rest
from .spelling import Spelling, spell, spell_cast
from .term import Call, Product, Sum, Term, TermPool

KIND = "rms_norm"
BARE = "rms_norm"
WEIGHTED = "rms_norm_weighted"


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """What one spelling of RMSNorm fixes.

    Args:
        eps: added to the mean of squares.
        hidden_size: length of the last axis.
        groups: into how many equal parts, each normed on its own, the last axis is cut.
        weight: whether there is a weight.
        offset: added to the weight: 1.0 for the Gemma family.
        bias: whether a bias is added.
        scaled_before: whether x is multiplied by a vector before it is normed.
        gate: the activation of the gate that multiplies x or the result; None without a gate.
        statistics_dtype: the narrowest type in which the squares are averaged.
        scale_dtype: the narrowest type that the inverse root takes before it scales.
        normed_dtype: the narrowest type that the normed x takes before the weight; the type of the result where the
            weight is multiplied in earlier.
        dtype: type of the result.
        steps: all types that something is computed in or rounded to.
        spelling: the formula, over x, weight, bias, gate and, of what is scaled before, scale.
    """

    eps: float
    hidden_size: int
    groups: int
    weight: bool
    offset: float
    bias: bool
    scaled_before: bool
    gate: str | None
    statistics_dtype: torch.dtype
    scale_dtype: torch.dtype
    normed_dtype: torch.dtype
    dtype: torch.dtype
    steps: frozenset[torch.dtype]
    spelling: Spelling

    @property
    def is_composite(self) -> bool:
        """Whether there is more to it than the norm and its weight: a smaller norm in it is that alone."""
        return self.bias or self.scaled_before or self.gate is not None

    def public(self) -> dict[str, Any]:
        return {
            "eps": self.eps,
            "hidden_size": self.hidden_size,
            "groups": self.groups,
            "weight": self.weight,
            "offset": self.offset,
            "bias": self.bias,
            "scaled_before": self.scaled_before,
            "dtype": self.dtype,
            "gated": self.gate is not None,
            "spelling": str(self.spelling),
        }


def term(pool: TermPool, match: Match, c: Canonicaliser) -> Term:
    """What larger rules see of a recognised norm: one opaque value, whose bare form still takes a weight."""
    p = match.params
    assert isinstance(p, RmsNorm)
    if p.is_composite:
        (inner,) = match.parts
        return term(pool, inner, c) if inner.node is match.node else c.terms[match.node]
    x = c.terms[match.inputs["x"]]
    if not p.weight:
        return pool.call(BARE, x, p.eps, p.groups)
    return pool.call(WEIGHTED, x, p.eps, p.groups, c.terms[match.inputs["weight"]], p.offset)


# The maths -----------------------------------------------------------------------------------------------------------

_x, _weight, _bias, _gate = Capture("x"), Capture("weight"), Capture("bias"), Capture("gate")
_WRITTEN_OUT = _x * (Function("mean", _x**2, (-1,)) + Number("eps")) ** -0.5
_KNOWN = Function(BARE, _x, Argument("eps"), Argument("groups"))
_KNOWN_WEIGHTED = Function(WEIGHTED, _x, Argument("eps"), Argument("groups"), _weight, Argument("offset"))
_WEIGHT = Optional(_weight + Number("offset"))
WRITTEN_OUT, KNOWN = _WRITTEN_OUT * _WEIGHT, _KNOWN * _WEIGHT
BIASED = _KNOWN_WEIGHTED + _bias | _KNOWN * (_weight + Number("offset")) + _bias

_ACTIVATIONS = ("silu", "sigmoid", "gelu", "gelu_tanh", "relu")
_NORMS, _GATES = frozenset({BARE, WEIGHTED}), frozenset(_ACTIVATIONS)
GATED = tuple(
    ((_KNOWN_WEIGHTED | _KNOWN * Optional(_weight + Number("offset"))) * Function(activation, _gate), activation)
    for activation in _ACTIVATIONS
)

# A root of a mean, whatever it scales.
_NEAR = (Rest("factor") * Function("mean", Capture("square"), Argument("axes")) + Rest("eps")) ** -0.5 * Rest("scaled")
_EPS_OUTSIDE = (Function("mean", _x**2, (-1,)) ** 0.5 + Number("eps")) ** -1 * Rest("scaled")
_CENTRED = Capture("value") - Function("mean", Capture("value"), (-1,))


def match(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | Miss | None:
    """Recognises a node as RMSNorm of something, or as the cast, the regrouping, the bias or the gate of one."""
    if values.is_float_cast(node):
        return _match_cast(node, c, findings)
    if node.target in ROW_MAJOR_VIEWS:
        return _match_grouped(node, c, findings)
    value = c.terms[node]
    if isinstance(value, Sum):
        return _match_biased(node, value, c, findings)
    if not isinstance(value, Product):
        return None
    names = value.calls
    if names & _NORMS and names & _GATES:
        gated = _match_gated(node, value, c, findings)
        if gated is not None:
            return gated
    if any(exponent == -0.5 for _, exponent in value.factors):
        if len(value.factors) == 1:
            return None  # a root that scales nothing yet
        bound = WRITTEN_OUT.find(value, c.pool) or KNOWN.find(value, c.pool)
        return _difference(node, value, bound, c) or _match_norm(node, bound, c, findings)
    if BARE in names:
        return _match_norm(node, KNOWN.find(value, c.pool), c, findings)
    if any(exponent == -1 and isinstance(factor, Sum) for factor, exponent in value.factors):
        outside = _EPS_OUTSIDE.find(value, c.pool)
        if outside is not None:
            message = "eps {:g} is added to the root of the mean of squares; an RMSNorm adds it under the root"
            return Miss(KIND, node, message, (outside["eps"],), place=outside["x"])
    return None


def _match_norm(node: fx.Node, bound: Bound | None, c: Canonicaliser, findings: Findings) -> Match | Miss | None:
    """The norm itself, with or without its weight."""
    if bound is None:
        return None
    eps = bound["eps"]
    assert isinstance(eps, float)
    if eps < 0:
        return None
    found = read(node, bound, ("x", "weight"), c)
    if isinstance(found, Miss) or found is None:
        return found
    return _with_scale_before(_with_gate_before(found, c, findings), c, findings)


def _difference(node: fx.Node, value: Product, bound: Bound | None, c: Canonicaliser) -> Miss | None:
    """In what a root of a mean, that scales something, differs from that of an RMSNorm; None where in nothing."""
    if bound is not None:
        x = bound["x"]
        if not isinstance(x, Sum) or not _has_mean(x) or _CENTRED.find(x, c.pool) is None:
            return None
        return Miss(KIND, node, _LAYER_NORM, place=c.pool.power(x, 2), matched=3)
    near = _NEAR.find(value, c.pool)
    told = _told(near, c.pool) if near is not None else None
    if near is None or told is None:
        return None
    message, matched = told
    return Miss(KIND, node, message, place=near["square"], matched=matched)


def _has_mean(value: Sum) -> bool:
    """Whether a mean is among the parts of a sum, of which a residual stream has many."""
    return any(isinstance(part, Call) and part.name == "mean" for part, _ in value.parts)


_LAYER_NORM = "the mean is subtracted before the squares are taken: a LayerNorm, not an RMSNorm"


def _told(near: Bound, pool: TermPool) -> tuple[str, int] | None:
    """The difference in words, and how much had matched."""
    square, factor, eps, axes, scaled = (near[name] for name in ("square", "factor", "eps", "axes", "scaled"))
    assert isinstance(square, Term)
    assert isinstance(scaled, Term)
    x = pool.root(square, 2)
    if x is None:
        return None
    if not (isinstance(eps, Product) and not eps.factors):
        return "what is added to the mean is no constant (a float that the caller passes is none)", 1
    if axes != (-1,):
        return f"the mean of squares is taken over axes {axes}; an RMSNorm takes it over (-1,)", 2
    if not (isinstance(factor, Product) and not factor.factors):
        return None
    if factor.coefficient != 1:
        times = f"{factor.coefficient:g} times the mean of squares"
        return f"eps is added to {times} (an L2 norm); an RMSNorm adds it to the mean", 2
    if _CENTRED.find(x, pool) is not None:
        return _LAYER_NORM, 3
    if pool.divide(scaled, x) is None:
        return "the value that is scaled is not the one whose squares are averaged", 2
    return None


def _match_cast(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | None:
    """A norm computed in a wide type and cast back is a norm with a narrow result."""
    below = source(node)
    inner = findings.at(KIND, below)
    if inner is None or not values.is_rounding(node) or values.is_float_cast(below):
        return None  # no cast, or the second one, whose roundings would add up
    return cast(node, inner, c)


def cast(node: fx.Node, inner: Match, c: Canonicaliser) -> Match:
    """The norm that a cast of one is."""
    dtype = values.dtype(node)
    p = inner.params
    assert isinstance(p, RmsNorm)
    params = replace(p, dtype=dtype, steps=p.steps | {dtype}, spelling=spell_cast(node, p.spelling, c))
    if not p.weight:
        params = replace(params, normed_dtype=dtype)
    parts = inner.parts
    if parts and parts[0].node is inner.node:  # what is scaled or gated before: the norm in it is cast likewise
        parts = (cast(node, parts[0], c),)
    return Match(KIND, node, inner.inputs, params, (*inner.claimed, node), parts, inner.replaces)


def _match_grouped(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | None:
    """A norm of groups of the last axis, put side by side again, is a grouped norm of the whole axis."""
    below, _ = trace(node, lambda n: findings.at(KIND, n) is None and (n.target in ROW_MAJOR_VIEWS or _is_cast(n)))
    inner = findings.at(KIND, below)
    if inner is None:
        return None
    p = inner.params
    assert isinstance(p, RmsNorm)
    whole, _ = trace(inner.inputs["x"], lambda n: n.target in ROW_MAJOR_VIEWS or _is_cast(n))
    shape = values.shape(node)
    split = values.shape(below)
    if p.weight or p.is_composite or p.groups != 1 or len(split) != len(shape) + 1:
        return None
    groups, width = static_int(split[-2]), values.last_dim(node)
    if groups is None or not values.same_shape(split[:-2], shape[:-1]) or groups * p.hidden_size != width:
        return None
    if not values.same_shape(values.shape(whole), shape):
        return None
    inputs = {"x": values.strip_widening(whole)}
    spelling = spell(node, inputs, c)
    cone = walk(node, lambda n: n is inputs["x"])
    if spelling is None or cone is None:
        return None
    params = replace(p, hidden_size=width, groups=groups, spelling=spelling, dtype=values.dtype(node))
    return _with_gate_before(Match(KIND, node, inputs, params, cone.nodes), c, findings)


def _is_cast(node: fx.Node) -> bool:
    return values.is_float_cast(node)


def _match_biased(node: fx.Node, value: Sum, c: Canonicaliser, findings: Findings) -> Match | None:
    """A norm and a bias."""
    if len(value.parts) != 2:
        return None
    bound = BIASED.find(value, c.pool)
    found = read(node, bound, ("x", "weight", "bias"), c) if bound is not None else None
    if not isinstance(found, Match):
        return None
    inner = _largest_within(found.claimed[:-1], findings)
    return None if inner is None else replace(found, parts=(inner,))


def _match_gated(node: fx.Node, value: Product, c: Canonicaliser, findings: Findings) -> Match | None:
    """A norm, times the activation of a gate of its own shape."""
    for pattern, activation in GATED:
        bound = pattern.find(value, c.pool)
        found = read(node, bound, ("x", "weight", "gate"), c) if bound is not None else None
        if isinstance(found, Match):
            assert isinstance(found.params, RmsNorm)
            inner = _largest_within(found.claimed[:-1], findings)
            if inner is not None and _written_together(inner.node, node):
                return replace(found, params=replace(found.params, gate=activation), parts=(inner,))
    return None


def _written_together(norm: fx.Node, product: fx.Node) -> bool:
    """Whether one module of the model wrote both: a gate outside the norm's own is a gated unit behind the norm."""
    return values.module_path(norm) == values.module_path(product)


def _with_gate_before(norm: Match, c: Canonicaliser, findings: Findings) -> Match:
    """The norm, with the gate that x has been multiplied by; a gated unit of an MLP before it is none of its own."""
    x, _ = trace(norm.inputs["x"], lambda n: _is_cast(n) and findings.at("glu", n) is None)
    unit = findings.at("glu", x)
    if unit is None or _is_pair(unit.inputs["gate"], unit.inputs["up"]):
        return norm
    inputs = {**norm.inputs, "x": unit.inputs["up"], "gate": unit.inputs["gate"]}
    spelling = spell(norm.node, inputs, c)
    p = norm.params
    assert isinstance(p, RmsNorm)
    if spelling is None:
        return norm
    activation = unit.params.public()["activation"]
    claimed = tuple(sorted({*norm.claimed, *unit.claimed}))
    return Match(KIND, norm.node, inputs, replace(p, gate=activation, spelling=spelling), claimed, (norm,), (unit,))


def _with_scale_before(norm: Match, c: Canonicaliser, findings: Findings) -> Match:
    """The norm, with the vector that x has been multiplied by for it alone; not with the weight of a norm before it."""
    p = norm.params
    assert isinstance(p, RmsNorm)
    product, casts = trace(norm.inputs["x"], _is_cast)
    above = {*norm.claimed, *casts}
    if p.is_composite or product.target is not torch.ops.aten.mul.Tensor or not product.users.keys() <= above:
        return norm
    if findings.at(KIND, product) is not None:
        return norm
    for x, factor in (product.args, product.args[::-1]):
        if not isinstance(x, fx.Node) or not isinstance(factor, fx.Node) or not values.is_vector(factor, p.hidden_size):
            continue
        inputs = {**norm.inputs, "x": values.strip_widening(x), "scale": values.strip_widening(factor)}
        spelling = spell(norm.node, inputs, c)
        if spelling is not None and values.same_shape(values.shape(x), values.shape(norm.node)):
            params = replace(p, scaled_before=True, spelling=spelling)
            return Match(KIND, norm.node, inputs, params, tuple(sorted({*above, product})), (norm,))
    return norm


def _is_pair(gate: fx.Node, up: fx.Node) -> bool:
    """True for two projections of one x, or two parts of one tensor: the gate and up of an MLP."""
    below = [trace(n, lambda n: is_movement(n) or _is_cast(n))[0] for n in (gate, up)]
    first, second = map(linear, below)
    return below[0] is below[1] or (first is not None and second is not None and first.x is second.x)


def _largest_within(nodes: Sequence[fx.Node], findings: Findings) -> Match | None:
    """The last norm among nodes."""
    return next((m for n in reversed(nodes) if (m := findings.at(KIND, n)) is not None), None)


# The nodes -----------------------------------------------------------------------------------------------------------


def read(node: fx.Node, bound: Bound, names: Sequence[str], c: Canonicaliser) -> Match | Miss | None:
    """Finds the nodes of the captured values, and what the terms don't say: types and the spelling.

    Args:
        node: the root.
        bound: what a pattern has bound: eps, x, and where they are there, weight, bias, gate, offset, groups.
        names: of those that are values.
        c: knows the terms of all nodes.
    """
    terms = {name: term for name in names if isinstance(term := bound.get(name), Term)}
    found = captured(KIND, node, terms, c, vectors=("weight", "bias"))
    if not isinstance(found, Captured):
        return found
    x = found.inputs["x"]
    hidden_size = values.last_dim(x)
    if hidden_size is None:
        return Miss(KIND, node, "the normalised axis has no static size", matched=4)
    vectors = [found.inputs[name] for name in ("weight", "bias") if name in found.inputs]
    if not all(values.is_vector(vector, hidden_size) for vector in vectors):
        return None  # no weight but a gate, or a factor per token: the norm below stands on its own
    if not values.same_shape(values.shape(x), values.shape(node)):
        return Miss(KIND, node, "the result has another shape than x", matched=4)
    gate = found.inputs.get("gate", x)
    if not values.same_shape(values.shape(gate), values.shape(x)):
        return None
    return Match(KIND, node, found.inputs, _params(node, bound, found, hidden_size, c), found.cone.nodes)


def _params(node: fx.Node, bound: Bound, found: Captured, hidden_size: int, c: Canonicaliser) -> RmsNorm:
    eps, groups, offset = bound["eps"], bound.get("groups", 1), bound.get("offset", 0.0)
    assert isinstance(eps, float)
    assert isinstance(groups, int)
    assert isinstance(offset, float)
    active = found.active
    averaged = _up_to([n for n in active if n.target in _REDUCTIONS], found.cone)
    shape = values.shape(found.inputs["x"])
    smaller = [n for n in active if n not in averaged and not values.same_shape(values.shape(n), shape)]
    scales = [n for n in smaller if averaged & _up_to([n], found.cone)]
    statistics = [n for n in active if n in averaged or (n in scales and computes(n))]
    normed = [n for n in active if isinstance(t := c.terms[n], Call) and t.name == BARE]
    dtype = values.dtype(node)
    # What is one op already takes the statistics in float32, and rounds the normed x but for the Gemma form.
    inner_dtype = dtype if averaged else torch.float32
    normed_dtype = dtype if averaged or not offset else torch.float32
    return RmsNorm(
        eps=eps,
        hidden_size=hidden_size,
        groups=groups,
        weight="weight" in found.inputs,
        offset=offset,
        bias="bias" in found.inputs,
        scaled_before=False,
        gate=None,
        statistics_dtype=narrowest(statistics, inner_dtype),
        scale_dtype=narrowest(scales, inner_dtype),
        normed_dtype=narrowest(normed, normed_dtype) if "weight" in found.inputs else dtype,
        dtype=dtype,
        steps=found.steps,
        spelling=found.spelling,
    )


_REDUCTIONS = frozenset({torch.ops.aten.mean.dim, torch.ops.aten.sum.dim_IntList})


def _up_to(nodes: Iterable[fx.Node], cone: Cone) -> set[fx.Node]:
    """Nodes of the cone, and all in it that compute something for one of them."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found and node in cone.nodes:
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found
