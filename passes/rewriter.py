"""A graph under rewriting: all surgery on it is an `Edit`."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode

from ..patterns import values
from ..runtime.options import Numerics
from ..runtime.sizes import Size, static_int
from ..runtime.target import Target
from .edit import ORIGIN, Edit, Refused, value_of
from .effects import purity, regions
from .fakes import Fakes
from .rewrites import Rewrites

aten = torch.ops.aten


class Rewriter:
    """A graph under rewriting: what has replaced what, and what sites share.

    Args:
        module: its graph is changed in place.
        target: the machine that contracts are judged for.
        parameters: the placeholders that are parameters of the model, with what they hold.
        pack_weights: whether parameters may be packed.
        numerics: "exact" refuses an op that rounds elsewhere than the model.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        target: Target,
        parameters: Mapping[fx.Node, torch.Tensor],
        *,
        pack_weights: bool,
        numerics: Numerics = "fused",
    ) -> None:
        self.module = module
        self.graph = module.graph
        self.target = target
        self.parameters = parameters
        self.pack_weights = pack_weights
        self.numerics = numerics
        self.regions = regions(self.graph)
        self.is_pure = purity()
        self.effects: dict[int, list[fx.Node]] = {}  # by region
        for node, region in self.regions.items():
            if region % 2:
                self.effects.setdefault(region, []).append(node)
        self.has_convolutions = any(node.target is aten.convolution.default for node in self.graph.nodes)
        self.placeholders = list(self.graph.find_nodes(op="placeholder"))
        self.fake_mode = self._fake_mode()
        self._fakes = Fakes(self.fake_mode)
        self.shared: dict[Hashable, fx.Node] = {}
        self.rewrites: Rewrites | None = None  # where they are kept, to be verified
        self.packed: dict[fx.Node, Hashable] = {}  # the form that a parameter's memory is to have
        self._replaced: dict[fx.Node, fx.Node] = {}
        self._left: frozenset[int] = frozenset()  # memory that a replaced value lay in
        self._symbols = self._symbol_nodes()

    def _fake_mode(self) -> FakeTensorMode:
        found = [n.meta["val"] for n in self.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        mode = detect_fake_mode(found)
        return mode if mode is not None else FakeTensorMode(allow_non_fake_inputs=True)

    def _symbol_nodes(self) -> dict[Hashable, fx.Node]:
        """The first node that holds each symbolic size."""
        symbols: dict[Hashable, fx.Node] = {}
        for node in self.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt):
                symbols.setdefault(value.node.expr, node)
        return symbols

    def moved(self, old: fx.Node, new: fx.Node) -> None:
        """Notes that a node stands for another from now on, and holds its value."""
        self._replaced[old] = new
        self._left |= values.storages(old) - values.storages(new)

    def settle_views(self) -> None:
        """Ends a pass: views of what was replaced, which say the old memory so far, say that of what replaces it."""
        moved = set(self._replaced.values()) if self._left else set()
        for node in self.graph.nodes if moved else ():
            if self._left & values.storages(node) and moved.intersection(node.all_input_nodes) and self.is_pure(node):
                node.meta["val"] = self.fake(node.target, node.args, node.kwargs)
                moved.add(node)
        self._left = frozenset()

    def current(self, node: fx.Node) -> fx.Node:
        """The node that now stands for `node`."""
        while node in self._replaced:
            node = self._replaced[node]
        return node

    @staticmethod
    def is_alive(node: fx.Node) -> bool:
        """Whether a node is still in the graph."""
        return not node._erased

    def known_size(self, size: Size) -> int | fx.Node | None:
        """A size as an argument: its number, or the node that holds it; None where there is none yet."""
        static = static_int(size)
        if static is not None:
            return static
        assert isinstance(size, torch.SymInt)
        return self._symbols.get(size.node.expr)

    def size(self, size: Size, like: fx.Node, dim: int) -> int | fx.Node:
        """A size as an argument: its number, or the node that holds it (of axis `dim` of `like`)."""
        known = self.known_size(size)
        if known is not None:
            return known
        assert isinstance(size, torch.SymInt)
        with self.graph.inserting_after(like):
            node = self.graph.call_function(aten.sym_size.int, (like, dim))
        node.meta["val"] = size
        self.regions[node] = self.regions[like]
        self._symbols[size.node.expr] = node
        return node

    def forget_sizes(self, of: fx.Node) -> None:
        """Takes out the sizes that were read of a node, which is to be taken out itself."""
        for expression, node in [*self._symbols.items()]:
            if node.target is aten.sym_size.int and node.args[0] is of:
                self.graph.erase_node(node)
                del self.regions[node], self._symbols[expression]

    def fake(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a function gives for the fake values of nodes. No guard is installed."""
        if function is operator.getitem and isinstance(args[0], fx.Node):
            return args[0].meta["val"][args[1]]
        return self._fakes(function, *fx.map_arg((args, kwargs), value_of))

    def insert(
        self,
        before: fx.Node,
        function: Callable[..., Any],
        *args: Any,
        shaped_as: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> fx.Node:
        """A call right before a node, as a part of what that does."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(function, args, kwargs)
        node.meta.update({key: value for key, value in before.meta.items() if key in ORIGIN})
        node.meta["val"] = self.fake(shaped_as or function, args, kwargs)
        self.regions[node] = self.regions[before]
        return node

    @contextlib.contextmanager
    def edit(self, origin: fx.Node, claimed: Sequence[fx.Node]) -> Iterator[Edit]:
        """One rewrite. Committed when the block ends, undone when it is refused; else the graph is not to be used."""
        edit = Edit(self, origin, claimed)
        try:
            yield edit
            edit.commit()
        except Refused:
            edit.roll_back()
            raise
