"""What each site computed before it was rewritten, and what it computes now: two programs of the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from torch import fx

from .preserve import restore
from .report import Site

# A site by its kind and the name of its node, which are the same each time that a graph is optimised.
SiteKey = tuple[str, str]

# Of paths between what the fused ops read and what they replace, not more than these are the site's own.
_LARGEST = 256


@dataclass(slots=True)
class Rewrite:
    """One site.

    Args:
        model: the graph before all rewrites, as it can be run; the nodes below are of it.
        root: the node at which the site was recognised.
        claimed: the nodes that were taken for it.
        inputs: what the new nodes read, in the order of the placeholders of `fused`.
        outputs: what is replaced, in the order of the results of `fused`.
        fused: the new nodes. What they write is copied first.
        site: of the report.
    """

    model: fx.GraphModule
    root: fx.Node
    claimed: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    fused: fx.GraphModule
    site: Site = field(default_factory=lambda: Site("?", "lowered"))

    @property
    def key(self) -> SiteKey:
        return self.site.kind, self.root.name

    def original(self) -> Program:
        """What the model computes there, of the inputs and of whatever else it reads."""
        inside = _between(self.inputs, self.outputs)
        if len(inside) > _LARGEST:
            inside = {*self.claimed, *self.outputs} - set(self.inputs)
        return program(self.model, self.outputs, lambda node: node if node not in inside else None)


@dataclass(frozen=True, slots=True)
class Program:
    """A part of a graph that runs by itself.

    Args:
        module: its placeholders are the inputs, its results a tuple.
        inputs: the nodes whose values it takes.
    """

    module: fx.GraphModule
    inputs: tuple[fx.Node, ...]


class Rewrites:
    """Keeps the rewrites of a graph.

    Args:
        module: the graph before the first of them.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._of_the_model: dict[fx.Node, fx.Node] = {}
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, self._of_the_model))
        restore(graph)
        self.model = fx.GraphModule(module, graph)
        self.all: list[Rewrite] = []

    def add(
        self,
        module: fx.GraphModule,
        root: fx.Node,
        claimed: Iterable[fx.Node],
        created: Collection[fx.Node],
        replacements: Sequence[tuple[fx.Node, fx.Node]],
    ) -> Rewrite | None:
        """Keeps one that is about to be put in force; None where it replaces nothing that the model had.

        Args:
            module: the graph as it is now.
            root: see `Rewrite`.
            claimed: likewise.
            created: the nodes that are new.
            replacements: what is replaced, and by what.
        """
        known = self._of_the_model
        pairs = {known[old]: new for old, new in replacements if old in known}
        if not pairs:
            return None
        # What an earlier site left is that site's business: this one is given what the model has there.
        fused = program(module, list(pairs.values()), lambda node: None if node in created else known.get(node))
        known.update({new: known[old] for old, new in replacements if old in known})
        nodes = tuple(known[node] for node in claimed if node in known)
        rewrite = Rewrite(self.model, known[root], nodes, fused.inputs, tuple(pairs), fused.module)
        self.all.append(rewrite)
        return rewrite


def program(
    module: fx.GraphModule, outputs: Sequence[fx.Node], given: Callable[[fx.Node], fx.Node | None]
) -> Program:
    """The part of a graph that computes some nodes.

    Args:
        module: the graph.
        outputs: what it is to give.
        given: what a node is given as, None where it is to be computed.
    """
    order = _ancestors(outputs, lambda node: given(node) is not None)
    inputs = list(dict.fromkeys(found for node in order if (found := given(node)) is not None))
    graph = fx.Graph()
    placeholders = {node: graph.placeholder(node.name) for node in inputs}
    for node, placeholder in placeholders.items():
        placeholder.meta.update(node.meta)
    copies: dict[fx.Node, fx.Node] = {}
    for node in order:
        found = given(node)
        copies[node] = placeholders[found] if found is not None else graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    restore(graph)
    return Program(fx.GraphModule(module, graph), tuple(inputs))


def _ancestors(nodes: Sequence[fx.Node], is_input: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """The nodes and all that they are computed from, inputs before what they are inputs of."""
    order: dict[fx.Node, None] = {}
    pending = list(reversed(nodes))
    while pending:
        node = pending[-1]
        ahead = [] if is_input(node) else [n for n in node.all_input_nodes if n not in order]
        if ahead and node not in order:
            pending.extend(reversed(ahead))
        else:
            order.setdefault(pending.pop())
    return list(order)


def _between(inputs: Collection[fx.Node], outputs: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes on the way from inputs to outputs, the latter included."""
    tells: dict[fx.Node, bool] = dict.fromkeys(inputs, True)
    for node in _ancestors(outputs, tells.__contains__):
        if node not in tells:
            tells[node] = any(tells[n] for n in node.all_input_nodes)
    return {node for node, told in tells.items() if told} - set(inputs) | set(outputs)
