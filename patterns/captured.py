"""From the terms that a pattern has bound to the nodes of the graph that hold them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from . import values
from .canonical import Canonicaliser
from .cone import Cone, computes, walk
from .match import Miss
from .movement import is_movement, source
from .spelling import Spelling, spell
from .term import Term


@dataclass(frozen=True, slots=True)
class Captured:
    """The subgraph between a recognised value and the captured ones.

    Args:
        inputs: the nodes of the captured values, by name, in their narrowest type.
        cone: the nodes between them and the recognised value.
        active: of these nodes those that compute something, or round.
        spelling: how it is computed from them.
    """

    inputs: dict[str, fx.Node]
    cone: Cone
    active: tuple[fx.Node, ...]
    spelling: Spelling

    @property
    def steps(self) -> frozenset[torch.dtype]:
        """All types that something is computed in or rounded to."""
        return frozenset(map(values.dtype, self.active))


def captured(
    kind: str, root: fx.Node, terms: Mapping[str, Term], c: Canonicaliser, vectors: Collection[str] = ()
) -> Captured | Miss | None:
    """Finds the nodes behind the terms of a match.

    Args:
        kind: for a miss.
        root: the node that is recognised.
        terms: what was captured, by name.
        c: knows the terms of all nodes.
        vectors: names of those that are broadcast along all axes but the last: they are followed below views.

    Returns:
        None where `root` doesn't compute its value from nodes of these terms; a miss where it does, but one of them is
        computed in two ways that may differ in the last bits.
    """
    stops = set(terms.values())
    cone = walk(root, lambda n: c.terms[n] in stops)
    if cone is None or any(c.terms[n] not in stops for n in cone.inputs):
        return None
    inputs: dict[str, fx.Node] = {}
    for name, term in terms.items():
        nodes = [n for n in cone.inputs if c.terms[n] is term]
        if not nodes:
            return None
        inputs[name] = min(_origin(n, c) if name in vectors else values.strip_widening(n) for n in nodes)
    spelling = spell(root, inputs, c)
    numbers = {c.numbers[n] for n in inputs.values()}
    whole = walk(root, lambda n: c.numbers[n] in numbers)
    if spelling is None or whole is None:
        return Miss(kind, root, "{} computed twice, and not alike", (" or ".join(inputs) + " is",), matched=4)
    tensors = (n for n in whole.nodes if values.tensor(n) is not None)
    active = tuple(n for n in tensors if computes(n) or values.is_rounding(n))
    return Captured(inputs, whole, active, spelling)


def _origin(node: fx.Node, c: Canonicaliser) -> fx.Node:
    """The narrowest and smallest tensor that holds a value: below casts that round nothing, and views of it."""
    while node.op == "call_function":
        below = values.strip_widening(node)
        if below is node and is_movement(node) and c.terms.get(source(node)) is c.terms[node]:
            below = source(node)
        if below is node:
            break
        node = below
    return node


def narrowest(nodes: Collection[fx.Node], default: torch.dtype) -> torch.dtype:
    """The type with the fewest bits among those of `nodes`."""
    return min(map(values.dtype, nodes), key=lambda dtype: dtype.itemsize, default=default)
