"""Puts writes back in place, where AOTAutograd has made them functions.

    new = index_put(cache, …)               index_put_(cache, …)
    y = f(new)                       →      y = f(cache)
    copy_(cache, new)

A whole copy of the cache is spared, twice. It may be done where nothing reads the old value any more: neither the
buffer, nor a view of it, nor anything that shares its memory. Memory is told by the storages of fake values, and a
place in it by offset, sizes and strides.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.schemas import OutputType
from torch._ops import HigherOrderOperator, OpOverload

from ..patterns import values
from ..runtime.collectives import is_collective
from ..runtime.sizes import is_contiguous, known_equal, known_same_shape, known_true
from .apart import part_inputs
from .cleanup import erase_dead
from .edit import Refused
from .effects import is_pure
from .kinds import IN_PLACE
from .layout import same_layout
from .report import Site
from .rewriter import Rewriter
from .writes import PUTS, Write, may_copy, view_of, write

aten = torch.ops.aten

# Why a function of a buffer is no write into it: nothing to report.
_NOT_ITS_OWN = "the buffer keeps its old value"
# Functions of (base, part, …) that copy the part, however it is laid out.
_COPIERS = frozenset({*PUTS, aten.copy_.default})
_VIEWS_OF_INPUTS = (OutputType.alias_of_input, OutputType.is_input)


def put_back(rewriter: Rewriter) -> list[Site]:
    """Puts back in place what may be.

    Returns:
        A site for each write into an input of the graph that costs a copy of it, or did.
    """
    erase_dead(rewriter.graph)  # what fusions have left reads nothing
    epilogues = _epilogues(rewriter.graph)
    if not epilogues and not any(map(may_copy, {node.target for node in rewriter.graph.nodes})):
        return []
    return list(_InPlace(rewriter, epilogues).run())


class _InPlace:
    def __init__(self, rewriter: Rewriter, epilogues: dict[fx.Node, fx.Node]) -> None:
        self.rewriter = rewriter
        self.epilogues = epilogues
        part_inputs(rewriter, frozenset(self.epilogues))
        self.roots = _roots(rewriter.graph)
        # Scatters that put a value where it lies by now.
        self.settled: set[fx.Node] = set()
        # Where the values lay that are found at these nodes now.
        self.moved: dict[fx.Node, frozenset[int]] = {}
        self.holders: dict[int, set[fx.Node]] = {}
        for node in rewriter.graph.nodes:
            self._hold(node)

    def run(self) -> Iterator[Site]:
        for node in list(self.rewriter.graph.nodes):
            if node._erased:
                continue
            self._follow(node)
            if node in self.settled or node in self.epilogues.values():
                self._drop_if_done(node)
                continue
            candidate = write(node)
            if candidate is not None:
                yield from self._try(candidate)

    def _try(self, candidate: Write) -> Iterator[Site]:
        roots = [self.roots.get(storage) for base in candidate.bases for storage in values.storages(base)]
        if not all(root is not None and self._is_ours(root) for root in roots):
            return
        is_input = any(root in self.epilogues for root in roots)
        if not candidate.copies and not is_input:
            return
        site = Site(
            IN_PLACE,
            "refused",
            module=values.module_path(candidate.node),
            source=values.source_line(candidate.node),
        )
        try:
            settled = self._judge(candidate)
        except Refused as refusal:
            site.reason = str(refusal)
        else:
            site.status, site.op = "lowered", candidate.op._schema.name
            self.settled |= settled
            left = _memory_of(candidate.results)
            candidate.apply(self.rewriter)
            self._move((*candidate.bases, candidate.node), left)
            self._hold(candidate.node)
        if candidate.copies and is_input and site.reason != _NOT_ITS_OWN:
            yield site

    def _move(self, nodes: Iterable[fx.Node], left: frozenset[int]) -> None:
        for node in nodes:
            self.moved[node] = self.moved.get(node, frozenset()) | left

    def _hold(self, node: fx.Node) -> None:
        for storage in values.storages(node):
            self.holders.setdefault(storage, set()).add(node)

    def _readers(self, memory: frozenset[int], behind: fx.Node) -> list[fx.Node]:
        """The nodes behind one that read a memory, in graph order."""
        holders = {node for storage in memory for node in self.holders.get(storage, ()) if not node._erased}
        return sorted({user for node in holders for user in node.users if user > behind})

    def _follow(self, node: fx.Node) -> None:
        """A view of what lies elsewhere now lies there too."""
        lay = values.storages(node)
        if any(lay & self.moved.get(n, frozenset()) for n in node.all_input_nodes):
            self._move([node], lay)
            node.meta["val"] = self.rewriter.fake(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
            self._hold(node)

    def _drop_if_done(self, node: fx.Node) -> None:
        """Takes out a scatter or an epilogue that puts a value where it lies anyway."""
        base = node.args[0]
        assert isinstance(base, fx.Node)
        if self._is_done(node, {}):
            self._move([base], values.storages(node))
            node.replace_all_uses_with(base)
            self.rewriter.graph.erase_node(node)

    def _is_ours(self, root: fx.Node) -> bool:
        """Whether memory may be written: of an input that is written anyway, or of a new value.

        An op of others may give its argument back and not say so.
        """
        if root.op == "placeholder":
            return root in self.epilogues
        op = root.target
        is_new = isinstance(op, OpOverload) and op.namespace in ("aten", "prims", "npu_fuse")
        return is_new or isinstance(op, HigherOrderOperator) or "npu_fuse" in root.meta

    # Whether it may be ---------------------------------------------------------------------------------------------

    def _judge(self, candidate: Write) -> set[fx.Node]:
        """The scatters that are settled when a write is put in place.

        Raises:
            Refused: it may not be put in place.
        """
        settled: set[fx.Node] = set()
        read = _memory_of(candidate.reads)
        for base in candidate.bases:
            if values.storages(base) & read:
                raise Refused("it reads the buffer that it writes")
            if overlaps_itself(value(base)):
                sizes, strides = tuple(values.shape(base)), value(base).stride()
                raise Refused(f"elements of the buffer share memory: sizes {sizes}, strides {strides}")
        if not all(_lie_apart(value(a), value(b)) for a, b in combinations(candidate.bases, 2)):
            raise Refused("it writes one buffer through two arguments")
        if any(self._is_sent(memory, candidate.node) for memory in _memory_of(candidate.bases)):
            raise Refused("a collective that reads the buffer may still be under way")
        written = list(zip(candidate.bases, candidate.results, strict=True))
        for memory in _memory_of(candidate.bases):
            settled |= self._judge_behind(candidate, memory, [of for of in written if memory in values.storages(of[0])])
        return settled

    def _is_sent(self, memory: int, at: fx.Node) -> bool:
        """Whether a collective that reads a memory has begun before a node, and is waited for behind it."""
        readers = {user for node in self.holders.get(memory, ()) if not node._erased for user in node.users}
        begun = [node for node in readers if node < at and is_collective(node.target)]
        return any(user > at and is_collective(user.target) for node in begun for user in node.users)

    def _judge_behind(
        self, candidate: Write, memory: int, written: list[tuple[fx.Node, fx.Node | None]]
    ) -> set[fx.Node]:
        """The same for one buffer: nothing may read its old value later, or rely on the new one being apart."""
        epilogue = self.epilogues.get(self.roots[memory])
        places: dict[fx.Node, torch.Tensor] = {}  # where new values will lie
        for base, result in written:
            if result is None:
                continue
            if not _may_lie(result, base):
                new, old = value(result).stride(), value(base).stride()
                raise Refused(f"the new value has other strides than the buffer: {new} and {old}")
            places[result] = value(base)
        settled: set[fx.Node] = set()
        is_final = False
        pending = self._readers(_memory_of(places) | {memory}, behind=candidate.node)
        while pending:
            node = heapq.heappop(pending)
            if node is epilogue:
                is_final = self._is_done(node, places)
                self._judge_end(node, memory, _memory_of(places), is_final)
                break
            if self._puts_new(node, places) and self._is_done(node, places) and _may_lie(node, node.args[0]):
                places[node] = self._place(node.args[0], places)  # type: ignore[arg-type]  # a node
                settled.add(node)
                for reader in self._readers(values.storages(node), behind=node):
                    heapq.heappush(pending, reader)
            elif memory in _memory_of(node.all_input_nodes) and not (memory in values.storages(node) and is_pure(node)):
                raise Refused(f"the old value is read later, by {_name(node)}")  # what reads a view is judged itself
        else:
            if epilogue is not None:
                raise Refused(_NOT_ITS_OWN)
        if epilogue is not None and not (candidate.copies or is_final or settled):
            raise Refused("the buffer gets another value in the end")
        self._judge_between(settled, [value(base) for base, _ in written], places)
        return settled

    def _puts_new(self, node: fx.Node, places: Mapping[fx.Node, torch.Tensor]) -> bool:
        """Whether a node puts a part of the new values into a buffer: a part that it has by now is an old value."""
        return node.target in PUTS and bool(values.storages(node.args[1]) & _memory_of(places))

    def _judge_between(
        self, settled: set[fx.Node], parts: list[torch.Tensor], places: Mapping[fx.Node, torch.Tensor]
    ) -> None:
        """Of several parts that are put in one after the other, nothing may read a value that has only some of them."""
        if len(parts) < 2:
            return
        held: dict[fx.Node, set[int]] = {}
        for node in sorted(settled):
            base, part = node.args[:2]
            assert isinstance(part, fx.Node)
            start = self._place(part, places).storage_offset()
            held[node] = {i for i, of in enumerate(parts) if known_equal(of.storage_offset(), start)}
            held[node] |= held.get(base, set())  # type: ignore[arg-type]  # a node
            for user in node.users:
                if len(held[node]) < len(parts) and user not in settled:
                    raise Refused(f"the old value of a part is read between the writes, by {_name(user)}")

    def _judge_end(self, epilogue: fx.Node, memory: int, new: frozenset[int], is_final: bool) -> None:
        """Behind its last value no other is read that lay in a buffer, and the caller gets none of them."""
        if memory in values.storages(epilogue.args[1]):
            raise Refused(_NOT_ITS_OWN)
        for node in self._readers(new, behind=epilogue):
            if not is_final or (node.op == "output" and new & _memory_of(self._returned(node))):
                raise Refused("the new value is given back as a tensor of its own")

    def _returned(self, output: fx.Node) -> list[fx.Node]:
        """What the caller gets, but for views of inputs, which AOTAutograd makes anew."""
        given: Any = output.args[0]
        context = torch._guards.TracingContext.try_get()
        metadata = context.fw_metadata if context is not None else None
        infos = metadata.output_info if metadata is not None else []
        behind = metadata.num_intermediate_bases if metadata is not None else 0
        first = len(given) - behind - len(infos)  # inputs that are written by AOTAutograd come before
        views = {first + i for i, info in enumerate(infos) if info.output_type in _VIEWS_OF_INPUTS}
        return [value for i, value in enumerate(given) if isinstance(value, fx.Node) and i not in views]

    def _is_done(self, node: fx.Node, places: Mapping[fx.Node, torch.Tensor]) -> bool:
        """Whether a scatter or an epilogue puts a value where it lies, or will lie by `places`."""
        base, part = node.args[:2]
        assert isinstance(base, fx.Node)
        assert isinstance(part, fx.Node)
        whole = self._place(base, places)
        target = view_of(node, whole, self.rewriter) if node.target in PUTS else whole
        return same_place(target, self._place(part, places))

    def _place(self, node: fx.Node, places: Mapping[fx.Node, torch.Tensor]) -> torch.Tensor:
        """Where a value lies, or will lie: a new value by `places`, and a view of it there."""
        if node in places:
            return places[node]
        of = node.args[0] if node.args else None
        if not isinstance(of, fx.Node) or values.tensor(of) is None or values.storages(of) != values.storages(node):
            return value(node)
        whole = self._place(of, places)
        if whole is value(of):
            return value(node)
        place: torch.Tensor = self.rewriter.fake(node.target, (whole, *node.args[1:]), node.kwargs)  # type: ignore[arg-type]
        return place


def _may_lie(result: object, base: object) -> bool:
    """Whether a new value may lie in its base: in the layout that it had, or with no one who sees its layout."""
    new, old = value(result), value(base)
    if new.dtype != old.dtype or new.device != old.device or not known_same_shape(new.shape, old.shape):
        return False
    assert isinstance(result, fx.Node)
    is_seen = any(user.target not in _COPIERS or user.args[1] is not result for user in result.users)
    return not is_seen or same_layout(new, old)


def value(node: object) -> torch.Tensor:
    tensor = values.tensor(node)
    assert tensor is not None
    return tensor


def same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same elements of one storage, in the same order."""
    return (
        a.untyped_storage()._cdata == b.untyped_storage()._cdata
        and a.dtype == b.dtype
        and known_same_shape(a.shape, b.shape)
        and known_equal(a.storage_offset(), b.storage_offset())
        and same_layout(a, b)
    )


def _lie_apart(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are known to share no element."""
    if a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return True
    if not is_contiguous(a) or not is_contiguous(b) or a.dtype != b.dtype:
        return False
    starts = a.storage_offset(), b.storage_offset()
    return known_true(starts[0] + a.numel() <= starts[1]) or known_true(starts[1] + b.numel() <= starts[0])


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory, unless it is known that none do."""
    extent: int | torch.SymInt = 1
    pending = [(s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if not known_equal(n, 1)]
    while pending:
        axis = next(((s, n) for s, n in pending if all(known_true(s <= other) for other, _ in pending)), None)
        if axis is None or not known_true(axis[0] >= extent):
            return True
        pending.remove(axis)
        extent = axis[0] * axis[1]
    return False


def _roots(graph: fx.Graph) -> dict[int, fx.Node]:
    """The node that made each memory, if it is one only."""
    roots: dict[int, fx.Node] = {}
    shared = set()
    for node in graph.nodes:
        for storage in values.storages(node):
            if node.op == "placeholder" and storage in roots:
                shared.add(storage)
            roots.setdefault(storage, node)
    return {storage: node for storage, node in roots.items() if storage not in shared}


def _epilogues(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The copy that gives each input its final value."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        if isinstance(node.args[0], fx.Node) and node.args[0].op == "placeholder":
            found.setdefault(node.args[0], []).append(node)
    return {buffer: copies[0] for buffer, copies in found.items() if len(copies) == 1}


def _memory_of(nodes: Iterable[fx.Node | None]) -> frozenset[int]:
    return frozenset().union(*map(values.storages, nodes))


def _name(node: fx.Node) -> str:
    if node.op == "output":
        return "the caller"
    source = values.source_line(node)
    return f"{node.target} ({source})" if source else str(node.target)
