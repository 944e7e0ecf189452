"""What a node of a functional graph would write, were it called in place.

AOTAutograd makes each write of the model a function: `index_put_(cache, …)` a copy of the whole cache with some rows
changed. A `Write` is such a node, and knows the call that it was.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._higher_order_ops import auto_functionalize
from torch._ops import OpOverload

from ..runtime.effects import declared_writes, told_by
from ..runtime.sizes import is_contiguous, known_equal
from .effects import is_pure
from .rewriter import Rewriter

aten = torch.ops.aten

# Functions of (base, part, …) that give the base with a view of it replaced, and the view of (base, …).
SCATTERS: Mapping[Any, OpOverload] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
    aten.as_strided_scatter.default: aten.as_strided.default,
}
# All functions of (base, part, …) that give the base with the part put in. What `copy` replaces is all of it.
PUTS = frozenset({*SCATTERS, aten.copy.default})
# Functions that copy all of their base, and then write a part of it.
_COPYING = frozenset(
    {
        aten.index_put,
        aten.index_copy,
        aten.index_add,
        aten.index_fill,
        aten.index_reduce,
        aten.scatter,
        aten.scatter_add,
        aten.scatter_reduce,
        aten.masked_scatter,
        aten.put,
    }
)


@dataclass(frozen=True, slots=True)
class Write:
    """A function that has a form in place.

    Args:
        node: the call.
        op: what it becomes.
        bases: the nodes whose memory it would write.
        results: the new value of each base; None where nothing reads it.
        reads: the other nodes that it reads.
        copies: whether the function begins with a copy of its bases, so that it costs more than the write.
        apply: puts the call in place, with the graph as it is then.
    """

    node: fx.Node
    op: OpOverload
    bases: tuple[fx.Node, ...]
    results: tuple[fx.Node | None, ...]
    reads: tuple[fx.Node, ...]
    copies: bool
    apply: Callable[[Rewriter], None]


def write(node: fx.Node) -> Write | None:
    """The node as a write, or None where it has no form in place."""
    if node.op != "call_function":
        return None
    if node.target in SCATTERS:
        return _scatter(node)
    if node.target is torch.ops.higher_order.auto_functionalized_v2:
        return _functionalised(node)
    if not isinstance(node.target, OpOverload) or not is_pure(node):
        return None
    in_place = _in_place(node.target)
    if in_place is not None and isinstance(node.args[0], fx.Node):
        return _same_call(node, node.target, in_place)
    mutating = _mutating(node.target)
    return None if mutating is None else _functional(node, node.target, mutating)


def may_copy(target: object) -> bool:
    """Whether a call of an op may be a write that begins with a copy of what it would write."""
    if target in SCATTERS or target is torch.ops.higher_order.auto_functionalized_v2:
        return True
    return isinstance(target, OpOverload) and (target.overloadpacket in _COPYING or _mutating(target) is not None)


def view_of(node: fx.Node, base: torch.Tensor, rewriter: Rewriter) -> torch.Tensor:
    """The part of a base that one of `PUTS` replaces."""
    if node.target is aten.copy.default:
        return base
    view: torch.Tensor = rewriter.fake(SCATTERS[node.target], (base, *node.args[2:]), node.kwargs)
    return view


def _scatter(node: fx.Node) -> Write:
    base, part = node.args[:2]
    assert isinstance(base, fx.Node)

    def apply(rewriter: Rewriter) -> None:
        options: dict[str, Any] = dict(node.kwargs)
        view = rewriter.insert(node, SCATTERS[node.target], base, *node.args[2:], **options)
        rewriter.insert(node, aten.copy_.default, view, part)
        node.replace_all_uses_with(base)
        rewriter.graph.erase_node(node)

    reads = tuple(n for n in node.all_input_nodes if n is not base)
    return Write(node, aten.copy_.default, (base,), (node,), reads, True, apply)


def _same_call(node: fx.Node, op: OpOverload, in_place: OpOverload) -> Write:
    """`op(base, …)` as `op_(base, …)`."""
    base = node.args[0]
    assert isinstance(base, fx.Node)

    def apply(_: Rewriter) -> None:
        node.target = in_place
        node.meta["val"] = base.meta["val"]

    reads: list[fx.Node] = []
    fx.map_arg((node.args[1:], node.kwargs), reads.append)
    return Write(node, in_place, (base,), (node,), tuple(reads), op.overloadpacket in _COPYING, apply)


def _functional(node: fx.Node, op: OpOverload, mutating: OpOverload) -> Write | None:
    """`x_functional(…, base)`, which gives the results of `x` and then the new value of each base."""
    given = _by_name(node, op)
    bases = tuple(given[name] for name in declared_writes(mutating) if name in given)
    if not all(isinstance(base, fx.Node) for base in bases):
        return None
    results = len(mutating._schema.returns)
    items = _items(node, results + len(bases))
    if items is None:
        return None

    def apply(rewriter: Rewriter) -> None:
        _call_in_place(rewriter, node, mutating, given, items[:results], list(zip(bases, items[results:], strict=True)))

    reads = tuple(n for n in node.all_input_nodes if n not in bases)
    return Write(node, mutating, bases, tuple(items[results:]), reads, True, apply)


def _functionalised(node: fx.Node) -> Write | None:
    """`auto_functionalized_v2(op, …, _all_bases=[…])`, which gives the results of `op`, and each base's new value."""
    told, given = node.args[0], dict(node.kwargs)
    if not isinstance(told, OpOverload) or torch._library.utils.is_out(told):
        return None
    bases = tuple(given.pop("_all_bases"))  # type: ignore[arg-type]  # a list of nodes
    effect = told_by(told)
    op = told if effect is None else effect.op
    names, types = auto_functionalize.get_mutable_args(told)
    views = auto_functionalize.read_view_information_from_args(names, types, given, bases)  # type: ignore[arg-type]
    left = [i for i in range(len(op._schema.returns)) if effect is None or i not in effect.returns]
    # A call that gives nothing is functional as a tuple that begins with None.
    items = _items(node, max(len(left), 1) + len(bases))
    if items is None or _is_in_place(told) or not all(_is_placed(view, bases) for view in pytree.tree_leaves(views)):
        return None
    new_values = items[max(len(left), 1) :]

    def apply(rewriter: Rewriter) -> None:
        for name in names:
            given[name] = _map_views(views[name], lambda view: _regenerate(rewriter, node, view, bases))
        results: list[fx.Node | None] = [None] * len(op._schema.returns)
        for place, item in zip(left, items, strict=False):
            results[place] = item
        _call_in_place(rewriter, node, op, given, results, list(zip(bases, new_values, strict=True)))

    reads: list[fx.Node] = []
    fx.map_arg(given, reads.append)
    return Write(node, op, bases, tuple(new_values), tuple(reads), True, apply)


def _is_in_place(op: OpOverload) -> bool:
    """Whether an op gives what it writes: then AOTAutograd's results are other ones than the op's."""
    return any(result.alias_info is not None for result in op._schema.returns)


def _map_views(views: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(views, list):
        return [function(view) for view in views]
    return function(views)


def _is_placed(view: Any, bases: tuple[fx.Node, ...]) -> bool:
    """Whether it is known where in its base a view begins.

    torch counts from the begin of a storage, which the base may have left since: all of it, or one at that begin.
    """
    if not isinstance(view, auto_functionalize.AsStridedViewInfo):
        return True
    base = bases[view.base_index]
    return _is_whole(view, base) or known_equal(base.meta["val"].storage_offset(), 0)


def _is_whole(view: Any, base: fx.Node) -> bool:
    """Whether a view is all of its base, both of them contiguous."""
    value: torch.Tensor = base.meta["val"]
    laid = value.new_empty_strided(view.size, view.stride)
    return is_contiguous(value) and is_contiguous(laid) and known_equal(value.numel(), laid.numel())


def _regenerate(rewriter: Rewriter, node: fx.Node, view: Any, bases: tuple[fx.Node, ...]) -> fx.Node | None:
    """A written argument as the view of its base that it was."""
    if view is None:
        return None
    base: fx.Node = bases[view.base_index]
    if isinstance(view, auto_functionalize.SliceViewInfo):
        return rewriter.insert(node, aten.slice.Tensor, base, view.dim, view.start, view.end)
    if isinstance(view, auto_functionalize.AsStridedViewInfo):
        offset = [] if _is_whole(view, base) else [view.storage_offset]
        return rewriter.insert(node, aten.as_strided.default, base, list(view.size), list(view.stride), *offset)
    return base


def _call_in_place(
    rewriter: Rewriter,
    node: fx.Node,
    op: OpOverload,
    given: Mapping[str, Any],
    results: list[fx.Node | None],
    new_values: list[tuple[fx.Node, fx.Node | None]],
) -> None:
    """Puts a call of `op` in place of `node`, whose results and new values are `getitem`s of it."""
    positional, named = [], {}
    for argument in op._schema.arguments:
        if argument.kwarg_only:
            named[argument.name] = given.get(argument.name, argument.default_value)
        else:
            positional.append(given.get(argument.name, argument.default_value))
    vals = tuple(None if item is None else item.meta["val"] for item in results)
    val = vals if len(vals) > 1 else vals[0] if vals else None
    call = rewriter.insert(node, op, *positional, shaped_as=lambda *_, **__: val, **named)
    for place, item in enumerate(results):
        if item is not None and len(vals) > 1:
            item.args = (call, place)
        elif item is not None:
            item.replace_all_uses_with(call)
    for base, item in new_values:
        if item is not None:
            item.replace_all_uses_with(base)
    for item in (*results, *(item for _, item in new_values)):
        if item is not None and not item.users:
            rewriter.graph.erase_node(item)
    rewriter.graph.erase_node(node)


def _items(node: fx.Node, count: int) -> list[fx.Node | None] | None:
    """The results of a node by position, where each is read by one `getitem`; else None."""
    found: list[fx.Node | None] = [None] * count
    for user in node.users:
        index: Any = user.args[1] if user.target is operator.getitem else None
        if index is None or found[index] is not None:
            return None
        found[index] = user
    return found


def _by_name(node: fx.Node, op: OpOverload) -> dict[str, Any]:
    return {**dict(zip((a.name for a in op._schema.arguments), node.args, strict=False)), **node.kwargs}


@functools.cache
def _in_place(op: OpOverload) -> OpOverload | None:
    """The op that does the same to its first argument: named with an underscore, by torch's convention."""
    found = _counterpart(op, f"{op._schema.name.partition('::')[2]}_")
    if found is None or torch.Tag.inplace_view in found.tags or not op._schema.arguments:
        return None
    returns = [str(result.type) for result in op._schema.returns]
    return found if declared_writes(found) == (op._schema.arguments[0].name,) and returns == ["Tensor"] else None


@functools.cache
def _mutating(op: OpOverload) -> OpOverload | None:
    """The op of which this is the functional form: torch_npu's end in `_functional`, and give new values last."""
    name = op._schema.name.partition("::")[2]
    found = _counterpart(op, name.removesuffix("_functional")) if name.endswith("_functional") else None
    written = () if found is None else declared_writes(found)
    if found is None or not written or len(op._schema.returns) != len(found._schema.returns) + len(written):
        return None
    return found


def _counterpart(op: OpOverload, name: str) -> OpOverload | None:
    """An op of the same namespace and overload, with the same arguments."""
    packet = getattr(getattr(torch.ops, op.namespace), name, None)
    if packet is None or op._overloadname not in packet.overloads():
        return None
    found: OpOverload = getattr(packet, op._overloadname)
    signatures = [[(a.name, str(a.type), a.kwarg_only) for a in o._schema.arguments] for o in (op, found)]
    return found if signatures[0] == signatures[1] else None
