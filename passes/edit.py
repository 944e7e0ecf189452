"""One rewrite of a graph, which is committed whole or leaves no trace."""

from __future__ import annotations

import contextlib
import itertools
import operator
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.traceback import NodeSource, NodeSourceAction

from ..patterns import values
from ..patterns.movement import permutation, source
from ..patterns.preserved import original
from ..runtime.effects import declared_writes
from ..runtime.ops.contract import Lacking, OpContract
from ..runtime.sizes import is_contiguous
from .layout import inverse, is_laid_by_convolution, laid_alike, physical_order, same_layout
from .rewrites import Rewrite

if TYPE_CHECKING:
    from .rewriter import Rewriter

aten = torch.ops.aten

# What has made a constant, for who wants it on another device.
MADE_BY = "npu_fuse_made_by"

# What a node's metadata say of where the model wrote it.
ORIGIN = ("nn_module_stack", "stack_trace", "source_fn_stack")

# Ops of torch, and Python's of their results.
_NAMESPACES = re.compile(r"(aten|prims)\.|<built-in function getitem>")
_MOST_RELAID = 64


class Refused(Exception):  # noqa: N818  # a refusal is no error
    """A site that may not be rewritten; its text is the reason that the report gives."""

    @property
    def is_lacking(self) -> bool:
        """Whether it is the machine that has no op for any such site."""
        return isinstance(self.args[0], Lacking)


class Edit:
    """New nodes for one site. Each is placed behind the last of its inputs."""

    def __init__(self, rewriter: Rewriter, origin: fx.Node, claimed: Sequence[fx.Node]) -> None:
        self.rewriter = rewriter
        self.notes: list[str] = []
        self.rewrite: Rewrite | None = None  # once it is committed, if rewrites are kept
        self._origin = origin
        self._claimed = claimed
        self._region = rewriter.regions[origin]
        self._barrier = [node for node in rewriter.effects.get(self._region - 1, ()) if not node._erased]
        self._created: list[fx.Node] = []
        self._shared: list[Hashable] = []
        self._replacements: list[tuple[fx.Node, fx.Node]] = []
        self._absorbed: set[fx.Node] = set()
        self._relaid: dict[fx.Node, Any] = {}

    @cached_property
    def _written(self) -> dict[str, Any]:
        """Where the model wrote the site."""
        return {key: value for key, value in self._origin.meta.items() if key in ORIGIN}

    @cached_property
    def _source(self) -> NodeSource:
        origin = self._origin
        source = NodeSource(None, "npu_fuse", NodeSourceAction.REPLACE)
        source.node_info = NodeSource.NodeInfo(origin.name, str(origin.target), id(origin.graph))
        source.from_node = origin.meta.get("from_node", [])  # given the node, it would copy all of them
        return source

    def is_claimed(self, node: fx.Node) -> bool:
        """Whether a node is part of the site."""
        return node in self._claimed

    @property
    def created(self) -> frozenset[fx.Node]:
        """The nodes that are new."""
        return frozenset(self._created)

    def current(self, node: fx.Node) -> fx.Node:
        return self.rewriter.current(node)

    def is_within_reach(self, node: fx.Node) -> bool:
        """Whether no effect stands between a node and the site, so that what the node reads can be read again."""
        return self.rewriter.regions.get(node) == self._region

    def note(self, rounding: str) -> None:
        """Notes a rounding in which the op differs from the model.

        Raises:
            Refused: only exact numerics are wanted.
        """
        if self.rewriter.numerics == "exact":
            raise Refused(f"Options.numerics is 'exact', and {rounding}")
        self.notes.append(rounding)

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """A part of the edit that is undone alone where it is refused, so that another can be tried in its place."""
        created, shared = len(self._created), len(self._shared)
        notes, replacements, relaid = len(self.notes), len(self._replacements), dict(self._relaid)
        absorbed = set(self._absorbed)
        try:
            yield
        except Refused:
            self._undo(created, shared)
            del self.notes[notes:], self._replacements[replacements:]
            self._relaid, self._absorbed = relaid, absorbed
            raise

    # New nodes ---------------------------------------------------------------------------------------------------

    def op(self, contract: OpContract, /, **arguments: Any) -> fx.Node:
        """A call of a fused op, by the op's own argument names.

        Raises:
            Refused: its contract doesn't allow this call.
        """
        reason = contract.refusal(self.rewriter.target, **fx.map_arg(arguments, value_of))
        if reason is not None:
            raise Refused(reason)
        # By position as far as they go, as a trace of the op would have it.
        positional = list(
            itertools.takewhile(lambda a: a.name in arguments and not a.kwarg_only, contract.parsed_schema.arguments)
        )
        args = [arguments.pop(argument.name) for argument in positional]
        # The strides are the contract's: a vendor's shape function may promise others than its kernel gives.
        return self.call(contract.op, *args, shaped_as=contract.fake, **arguments)

    def functional(self, contract: OpContract, /, **arguments: Any) -> tuple[list[fx.Node], dict[str, fx.Node]]:
        """A call of a fused op that writes, as a function of its arguments.

        Where nothing reads the old values any more, `in_place` lets the op write itself, without a copy; else it gets
        copies of what it writes.

        Returns:
            Its results, and the new value of each argument that it writes, by name.

        Raises:
            Refused: its contract doesn't allow this call, or one node is given as two arguments that it writes.
        """
        fakes = {name: value_of(argument) for name, argument in arguments.items()}
        reason = contract.refusal(self.rewriter.target, **fakes)
        if reason is not None:
            raise Refused(reason)
        given = {name: arguments.pop(name, None) for name in declared_writes(contract.op)}
        written = [name for name, base in given.items() if base is not None]
        bases = [given[name] for name in written]
        if len(set(bases)) < len(bases):
            raise Refused(f"{contract.name} would write one tensor through two of {', '.join(written)}")
        places = {f"_{name}_base_index": written.index(name) if name in written else None for name in given}

        def shapes(*_: Any, **__: Any) -> tuple[Any, ...]:
            results = contract.fake(**fakes)
            new_values = [fakes[name].new_empty_strided(fakes[name].shape, fakes[name].stride()) for name in written]
            return (*(results if isinstance(results, tuple) else (results,)), *new_values)

        functionalised = torch.ops.higher_order.auto_functionalized_v2
        call = self.call(
            functionalised, contract.op, shaped_as=shapes, at_site=True, **arguments, **places, _all_bases=bases
        )
        count = len(contract.parsed_schema.returns)
        first = max(count, 1)  # what a call gives that gives nothing is None
        results = [self.item(call, place) for place in range(count)]
        return results, {name: self.item(call, first + place) for place, name in enumerate(written)}

    def call(
        self,
        function: Callable[..., Any],
        *args: Any,
        shaped_as: Callable[..., Any] | None = None,
        at_site: bool = False,
        **kwargs: Any,
    ) -> fx.Node:
        """A call of any function, with the fake value that it, or `shaped_as` in its place, gives.

        It stands behind its last input or, `at_site`, not before the site: what reads a buffer before the site writes
        it, does so still.
        """
        graph = self.rewriter.graph
        inputs = [self._origin] if at_site else []
        fx.map_arg((args, kwargs), inputs.append)
        with graph.inserting_after(self._anchor(inputs)):
            node = graph.call_function(function, args, kwargs)
        self._created.append(node)
        node.meta.update(self._written)
        node.meta["npu_fuse"] = self._origin.name
        node.meta["from_node"] = [self._source]
        node.meta["val"] = self.rewriter.fake(shaped_as or function, args, kwargs)
        self.rewriter.regions[node] = self._region
        return node

    def _anchor(self, inputs: Sequence[fx.Node]) -> fx.Node:
        """The node behind which a call stands: the last input, placeholder, or effect before the site."""
        return max((*inputs, *self.rewriter.placeholders[-1:], *self._barrier), default=self.rewriter.graph._root)

    def constant(self, name: str, device: torch.device, make: Callable[[torch.device], torch.Tensor]) -> fx.Node:
        """A constant tensor, made once a graph and device, and kept as an attribute of the module."""
        name = f"{name}_{device.type}{'' if device.index is None else device.index}"
        known = self.rewriter.shared.get(name)
        if known is not None:
            return known
        module, graph = self.rewriter.module, self.rewriter.graph
        with unset_fake_temporarily():
            value = make(torch.device("cpu")).to(device)  # a compilation launches no kernel on the device
        module.register_buffer(name, value, persistent=False)
        with graph.inserting_after(self._anchor([])):
            node = graph.get_attr(name)
        node.meta["val"] = self.rewriter.fake_mode.from_tensor(value, static_shapes=True)
        node.meta[MADE_BY] = make
        self.rewriter.regions[node] = 0
        self.rewriter.shared[name] = node
        self._shared.append(name)
        self._created.append(node)
        return node

    def filled(self, number: float, size: int, dtype: torch.dtype, like: fx.Node) -> fx.Node:
        """A constant [size] of one number, on the device of `like`."""
        value = values.tensor(like)
        assert value is not None
        name = f"_filled_{number!r}_{size}_{str(dtype).removeprefix('torch.')}"
        for sign, letter in ((".", "p"), ("-", "m"), ("+", "")):
            name = name.replace(sign, letter)
        return self.constant(name, value.device, lambda device: torch.full((size,), number, dtype=dtype, device=device))

    def share(self, key: Hashable, make: Callable[[], fx.Node]) -> fx.Node:
        """What `make` builds, built once for all sites between two effects."""
        key = (self._region, key)
        if key not in self.rewriter.shared:
            self.rewriter.shared[key] = make()
            self._shared.append(key)
        return self.rewriter.shared[key]

    def item(self, node: fx.Node, index: int) -> fx.Node:
        """One result of a call that gives several."""
        return self.call(operator.getitem, node, index)

    def view(self, node: fx.Node, sizes: Sequence[int | fx.Node]) -> fx.Node:
        return self.call(aten.view.default, node, list(sizes))

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return node if values.dtype(node) == dtype else self.call(aten._to_copy.default, node, dtype=dtype)

    def contiguous(self, node: fx.Node) -> fx.Node:
        """The node, or a contiguous copy of it."""
        value = values.tensor(node)
        assert value is not None
        if is_contiguous(value):
            unsure = self.rewriter.has_convolutions and is_laid_by_convolution(node)
            return self.call(aten.contiguous.default, node) if unsure else node
        return self.call(aten.clone.default, node, memory_format=torch.contiguous_format)

    def permuted(self, node: fx.Node, order: Sequence[int]) -> fx.Node:
        """The axes of a node in an order; of what is permuted already, in one step or none."""
        before = permutation(node)
        if before is not None:
            node, order = source(node), [before[axis] for axis in order]
        return node if list(order) == sorted(order) else self.call(aten.permute.default, node, list(order))

    def sizes(self, node: fx.Node) -> list[int | fx.Node]:
        """The shape of a node as arguments for a view."""
        return [self.rewriter.size(size, node, dim) for dim, size in enumerate(values.shape(node))]

    def known_sizes(self, node: fx.Node) -> list[int | fx.Node]:
        """The shape of a node as arguments for a view, without reading the node: one unknown size is -1.

        Raises:
            Refused: more than one is unknown.
        """
        found = [self.rewriter.known_size(size) for size in values.shape(node)]
        if found.count(None) > 1:
            raise Refused(f"of the shape {tuple(values.shape(node))} more than one size can't be told beforehand")
        return [-1 if size is None else size for size in found]

    # Replacing ---------------------------------------------------------------------------------------------------

    def replace(self, old: fx.Node, new: fx.Node, *, any_layout: bool = False) -> None:
        """Lets `new` stand for `old`, in the layout that `old` had.

        Args:
            old: what is replaced.
            new: what replaces it.
            any_layout: whether `new` may keep its own layout where nothing outside of the graph would see it.

        Raises:
            Refused: `new` has another shape or dtype, or a layout that can't be restored.
        """
        before, after = values.tensor(old), values.tensor(new)
        assert before is not None
        assert after is not None
        if before.dtype != after.dtype:
            raise Refused(f"the result is {after.dtype}, the model's is {before.dtype}")
        if not values.same_shape(before.shape, after.shape):
            raise Refused(f"the result has shape {tuple(after.shape)}, the model's has {tuple(before.shape)}")
        if not same_layout(before, after) and not (any_layout and self._relay(old, after)):
            new = self._restore_layout(new, before)
            restored = values.tensor(new)
            assert restored is not None
            if not same_layout(before, restored) and not (any_layout and self._relay(old, restored)):
                raise Refused(f"the model's result has strides {tuple(before.stride())}, which can't be kept")
        self._replacements.append((old, new))

    def absorb(self, collectives: Iterable[fx.Node]) -> None:
        """Takes out collectives of the site, which a new node does in their place.

        Raises:
            Refused: what one gives is used outside of the site too.
        """
        found = set(collectives)
        for node in found - {self._origin}:  # which is replaced
            if node.users.keys() - set(self._claimed):
                raise Refused(f"what {node.target} gives is used elsewhere too, so that it would be done twice")
        self._absorbed |= found

    def _relay(self, old: fx.Node, value: torch.Tensor) -> bool:
        """Settles what all that reads `old` gives where it is laid out as `value`; False where that is not to be told.

        Ops of torch take any layout, and what they give is followed until it is laid out as before. A result of the
        graph has to be, and a view has to be possible.
        """
        known = self._relaid
        changed: dict[fx.Node, Any] = {old: value}
        pending = set(old.users) - self.created
        while pending:
            node = min(pending)
            pending.remove(node)
            if original(node.target) is node.target and not _NAMESPACES.match(values.name_of(node.target)):
                return False
            try:
                args, kwargs = fx.map_arg(
                    (node.args, node.kwargs), lambda n: changed.get(n, known.get(n, n.meta["val"]))
                )
                found = self.rewriter.fake(node.target, args, kwargs)  # type: ignore[arg-type]
            except (RuntimeError, ValueError):
                return False
            if not laid_alike(found, known.get(node, node.meta["val"])):
                changed[node] = found
                pending |= set(node.users) - self.created
            if len(changed) > _MOST_RELAID:
                return False
        del changed[old]
        known.update(changed)
        return True

    def _restore_layout(self, new: fx.Node, wanted: torch.Tensor) -> fx.Node:
        """A copy of `new` with its axes in memory in the order of `wanted`: where that is dense, with its strides."""
        order = physical_order(wanted)
        dense = self.permuted(new, order)
        dense = self.call(aten.clone.default, dense, memory_format=torch.contiguous_format)
        return self.permuted(dense, inverse(order))

    def commit(self) -> None:
        """Puts the replacements in force.

        Raises:
            Refused: an input of the new nodes depends on what they replace, or an effect stands between.
        """
        olds = {old for old, _ in self._replacements}
        if len({self.rewriter.regions[n] for n in (*olds, *self._claimed)}) > 1:
            raise Refused("an op with side effects stands between its nodes")
        for old, new in self._replacements:
            self._make_room(old, new)
        rewriter = self.rewriter
        if rewriter.rewrites is not None:
            self.rewrite = rewriter.rewrites.add(
                rewriter.module, self._origin, self._claimed, self.created, self._replacements
            )
        for old, new in self._replacements:
            own = set(self._created)
            old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in own)  # noqa: B023  # used at once
            self.rewriter.moved(old, new)
        for node, value in self._relaid.items():
            node.meta["val"] = value
        for node in sorted({*self._claimed, *olds}, reverse=True):
            if not node._erased and not node.users and (self.rewriter.is_pure(node) or node in self._absorbed):
                self.rewriter.graph.erase_node(node)

    def _make_room(self, old: fx.Node, new: fx.Node) -> None:
        """Moves the users of `old` that stand before `new`, and all that depends on them, behind it."""
        own = set(self._created)
        movers: set[fx.Node] = set()
        pending = [user for user in old.users if user < new and user not in own]
        while pending:
            node = pending.pop()
            if node in own:
                raise Refused("an input of the fused op depends on its result")
            if not self.rewriter.is_pure(node):
                raise Refused(f"{node.target}, which has side effects, uses its result before that could be computed")
            movers.add(node)
            pending.extend(user for user in node.users if user not in movers and (user < new or user in own))
        last = new
        for node in sorted(movers):
            last.append(node)
            last = node

    def roll_back(self) -> None:
        """Takes all new nodes out again."""
        self._undo(0, 0)

    def _undo(self, created: int, shared: int) -> None:
        """Takes out all nodes but the first `created`, and forgets what has been shared but the first `shared`."""
        for key in self._shared[shared:]:
            self.rewriter.shared.pop(key, None)
        for node in reversed(self._created[created:]):
            if not node._erased:
                self.rewriter.forget_sizes(node)
                self.rewriter.graph.erase_node(node)
            if node.op == "get_attr":
                delattr(self.rewriter.module, str(node.target))
            self.rewriter.regions.pop(node, None)
        del self._shared[shared:], self._created[created:]


def value_of(argument: Any) -> Any:
    """The fake value of a node; of what is no node, itself."""
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument
