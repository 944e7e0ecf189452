"""Graphs without a device: the ops of one run, repeated on the very memory they had.

The same rules as on a device hold, so that what is wrong there is wrong here: inputs and parameters are read at the
addresses of the capture, outputs are overwritten by the next replay, host values are constants, and no Python of the
callable runs. Each op is called as it was; views aren't, as their results alias what they view; what an op allocated
anew is copied to where the capture had it.

What a device refuses and the emulation can't see: numbers that the callable reads from CPU memory without any op, by
`tolist()` or `numpy()`. They stay as the capture had them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .capture import Captured
from .errors import CaptureError
from .host_lists import check_host_lists, taken_lists
from .outputs import bytes_of
from .record import Call, Recorder, storage_key

_UNWRITTEN = frozenset({"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty",
                        "aten::new_empty_strided", "aten::empty_permuted"})  # fmt: skip


class HostBackend:
    """Captures on the CPU. See the module."""

    name = "host"
    sees_all = False

    def warm_up(self) -> nullcontext[None]:
        """Anywhere."""
        return nullcontext()

    def capture(self, run: Callable[[], Any], host_lists: Mapping[str, Sequence[int]]) -> Captured:
        """See `CaptureBackend.capture`."""
        recorder = Recorder(keep=True, undo=True)
        try:
            with recorder:
                result = run()
            expected = [leaf.clone() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        finally:
            recorder.restore()  # it ran, which a capture on a device does not
        check_host_lists(recorder.trace.lists, host_lists)
        graph = HostGraph(recorder.trace.calls)
        _check_complete(graph, result, expected)
        return Captured(graph, result, recorder.trace)

    def busy(self) -> bool:
        """Nobody does."""
        return False

    def order(self) -> None:
        """There is one order."""


class HostGraph:
    """Ops that are called again."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._steps = [_Step(call) for call in calls if call.writes or (any(call.fresh) and not _is_empty(call))]
        self._renewed = [step for step in self._steps if step.lists]
        self._by_storage: dict[int, list[torch.Tensor]] = {}
        made: dict[int, torch.Tensor] = {}
        for call in calls:
            for tensor in tree_leaves((call.args, call.kwargs, call.results)):
                if isinstance(tensor, torch.Tensor):
                    self._by_storage.setdefault(storage_key(tensor), []).append(tensor)
            for tensor, fresh in zip(call.results, call.fresh, strict=True):
                if fresh:
                    made[storage_key(tensor)] = tensor
        self._made = list(made.values())
        self.nbytes = sum(tensor.untyped_storage().nbytes() for tensor in self._made)

    def update(self, lists: Mapping[str, Sequence[int]]) -> None:
        """See `Graph.update`."""
        for step in self._renewed:
            step.update(lists)

    def replay(self) -> None:
        """See `Graph.replay`."""
        with torch.inference_mode():  # allows writing to tensors that were made in it, and to others
            for step in self._steps:
                step.run()

    def move(self, old: torch.UntypedStorage, new: torch.UntypedStorage) -> None:
        """See `Graph.move`."""
        tensors = self._by_storage.pop(old._cdata)
        with torch.inference_mode():
            for tensor in tensors:
                tensor.set_(new, tensor.storage_offset(), tensor.size(), tensor.stride())
        self._by_storage[new._cdata] = tensors

    def users(self, storage: torch.UntypedStorage) -> int:
        """See `Graph.users`."""
        return len(self._by_storage[storage._cdata])

    def poison(self, fill: Callable[[torch.Tensor], Any]) -> None:
        """See `Graph.poison`."""
        for tensor in self._made:
            fill(tensor)


class _Step:
    """One op, and where what it allocates must be."""

    def __init__(self, call: Call) -> None:
        self._op, self._args, self._kwargs = call.op, call.args, dict(call.kwargs)
        self._results = [(i, result) for i, result in enumerate(call.results) if call.fresh[i]]
        names = [argument.name for argument in call.op._schema.arguments]
        self.lists = {name: names.index(name) for name, _ in taken_lists(call.op, call.args, call.kwargs)}

    def update(self, lists: Mapping[str, Sequence[int]]) -> None:
        for name, position in self.lists.items():
            if name in lists:
                if position < len(self._args):
                    self._args = (*self._args[:position], list(lists[name]), *self._args[position + 1 :])
                else:
                    self._kwargs[name] = list(lists[name])

    def run(self) -> None:
        result = self._op(*self._args, **self._kwargs)
        if not self._results:
            return
        leaves = (result,) if isinstance(result, torch.Tensor) else tree_leaves(result)
        for i, target in self._results:
            target.copy_(leaves[i])


def _is_empty(call: Call) -> bool:
    return call.op._schema.name in _UNWRITTEN


def _check_complete(graph: HostGraph, result: Any, expected: Sequence[torch.Tensor]) -> None:
    """Replays once, on memory that was wiped before, and compares.

    Raises:
        CaptureError: something else comes out, as ops ran past the dispatcher.
    """
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    graph.poison(lambda tensor: bytes_of(tensor).fill_(0xFF))
    undo = Recorder(undo=True)
    try:
        with undo:
            graph.replay()
        same, cause = all(map(_same_bits, outputs, expected)), None
    except Exception as error:  # such as an index that nothing wrote
        same, cause = False, error
    undo.restore()
    if not same:
        raise CaptureError(
            "a replay of the recorded ops gives something else than the run did: kernels ran past torch's dispatcher, "
            "such as those that Inductor compiles for the CPU, and the host backend can't see them; or an op writes to "
            "state undeclared: npu_fuse.register_side_effects says so; or the function returns memory that none wrote"
        ) from cause


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = (tensor.resolve_conj().resolve_neg().contiguous() for tensor in (a, b))
    return torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
