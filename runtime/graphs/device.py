"""Graphs of a device: `torch.npu.NPUGraph` and `torch.cuda.CUDAGraph`, which have one interface but for host lists."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .capture import CaptureBackend, Captured
from .host import HostBackend
from .host_lists import check_host_lists
from .record import Recorder


class DeviceBackend:
    """Captures on one stream, into one memory pool that the graphs of a runner share.

    A graph that is captured into a pool may use memory of which earlier graphs no longer hold a tensor. Outputs are
    held as long as their graph lives, so only what is inside the graphs is shared; replays follow each other.
    """

    sees_all = True

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self._module: Any = getattr(torch, name)
        self._device = device
        self._pool = self._module.graph_pool_handle()
        self._stream = self._module.Stream(device=device)
        self._last: Any = None

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        """On the stream of the capture, as libraries keep a workspace for each stream."""
        current = self._module.current_stream()
        self._stream.wait_stream(current)
        try:
            with self._module.stream(self._stream):
                yield
        finally:  # what a run that failed has written is put back on the current stream
            current.wait_stream(self._stream)

    def _capturing(self, graph: Any) -> Any:
        return self._module.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")

    def _new_graph(self) -> Any:
        return self._module.CUDAGraph()

    def capture(self, run: Callable[[], Any], host_lists: Mapping[str, Sequence[int]]) -> Captured:
        """See `CaptureBackend.capture`; nothing runs, so that no state is written."""
        graph = self._new_graph()
        before = self._module.memory_allocated(self._device)
        recorder = Recorder()
        with _no_collection(), self._capturing(graph), recorder:
            result = run()
        check_host_lists(recorder.trace.lists, host_lists)
        grown = self._module.memory_allocated(self._device) - before
        return Captured(self._graph(graph, grown), result, recorder.trace)

    def _graph(self, graph: Any, nbytes: int) -> DeviceGraph:
        return DeviceGraph(graph, nbytes)

    def busy(self) -> bool:
        """See `CaptureBackend.busy`."""
        return bool(self._module.is_current_stream_capturing())

    def order(self) -> None:
        """See `CaptureBackend.order`."""
        current = self._module.current_stream()
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)
        self._last = current


class DeviceGraph:
    """A captured graph of the device, which knows addresses alone."""

    def __init__(self, graph: Any, nbytes: int) -> None:
        self._graph = graph
        self.nbytes = nbytes

    def update(self, lists: Mapping[str, Sequence[int]]) -> None:
        """See `Graph.update`; there are none."""

    def replay(self) -> None:
        """See `Graph.replay`."""
        self._graph.replay()

    def move(self, old: torch.UntypedStorage, new: torch.UntypedStorage) -> None:
        """See `Graph.move`; the address is the same."""

    def users(self, storage: torch.UntypedStorage) -> int:
        """See `Graph.users`."""
        return 0

    def poison(self, fill: Callable[[torch.Tensor], Any]) -> None:
        """See `Graph.poison`; what is inside can't be reached."""


class NpuBackend(DeviceBackend):
    """Ascend graphs: ops that take lists from the host are recorded apart, and renewed before a replay."""

    def __init__(self, device: torch.device) -> None:
        super().__init__("npu", device)

    def _new_graph(self) -> Any:
        return self._module.NPUGraph()

    def _capturing(self, graph: Any) -> Any:
        return self._module.graph(
            graph,
            pool=self._pool,
            stream=self._stream,
            auto_dispatch_capture=True,
            capture_error_mode="thread_local",
        )

    def _graph(self, graph: Any, nbytes: int) -> DeviceGraph:
        return NpuGraph(graph, nbytes, self._module)


class NpuGraph(DeviceGraph):
    """A captured graph of an NPU."""

    def __init__(self, graph: Any, nbytes: int, module: Any) -> None:
        super().__init__(graph, nbytes)
        self._done = module.Event()
        self._replayed = False

    def update(self, lists: Mapping[str, Sequence[int]]) -> None:
        """See `Graph.update`. It is complete before the replay begins, and begins when the one before has ended."""
        if lists:
            if self._replayed:
                self._done.synchronize()
            self._graph.update(cpu_update_input=[{key: list(value) for key, value in lists.items()}])

    def replay(self) -> None:
        """See `Graph.replay`."""
        super().replay()
        self._done.record()
        self._replayed = True


def backend_for(device: torch.device) -> CaptureBackend:
    """The way to capture on a device.

    Raises:
        ValueError: there is none for this kind of device.
    """
    if device.type == "cpu":
        return HostBackend()
    if device.type == "npu":
        return NpuBackend(device)
    if device.type == "cuda":
        return DeviceBackend("cuda", device)
    raise ValueError(f"GraphRunner: no graphs for device {device}; known: npu, cuda, cpu (which emulates them)")


@contextmanager
def _no_collection() -> Iterator[None]:
    """A garbage collection during a capture could free tensors and graphs of the device, which the capture forbids."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
