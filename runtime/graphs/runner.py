"""`GraphRunner`: calls of a function as replays of graphs.

A call is served in five steps: its arguments are named and their shapes looked up (a plan, made once for each set of
shapes), the watch is asked whether memory moved, what a caller still holds of earlier outputs is moved away, inputs and
padding are copied in, and the graph is replayed. Everything else happens when a plan is made.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from rich.progress import track
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from ..effects import register_known
from . import poison
from .buckets import Buckets
from .capture import CaptureBackend
from .checks import check_arguments, own_outputs, refuse_changes, refuse_escapes, refuse_gradients
from .copies import Copies, pad_list, resized
from .device import backend_for
from .holdings import Entry, Holdings, Plan
from .keys import graph_variant, plan_key, surroundings
from .outputs import OutputMode, Outputs
from .padding import NO_RUN, Mixing, Run, Trims, compare_runs, other_arguments, other_paddings, read_shapes
from .record import Recorder, place, storage_key
from .signature import Signature
from .spec import InputSpec, Shapes, Sizes
from .stats import Forecast, Memory, Stats

_MAX_PLANS = 4096
_count_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.maybe_current_level


def is_capturing() -> bool:
    """Whether a runner captures a graph on this thread."""
    return any(isinstance(mode, Recorder) for mode in _modes())


class GraphRunner:
    """Captures a callable once for each size and replays it, without the Python in it.

        runner = GraphRunner(model, buckets=[1, 2, 4, 8], inputs={
            "input_ids": InputSpec("batch"),
            "input_embeds": InputSpec("batch"),
            "positions": InputSpec("batch"),
        })
        hidden = runner(input_embeds=embeds, positions=positions)

    Inputs are copied to fixed memory, parameters and state (caches) are used where they are. Which arguments are
    present is part of what a graph is captured for, as is every value that is no tensor: numbers by their value, other
    objects by their identity. A call runs without gradients.

    Args:
        function: a module or function, compiled or not. What it returns may be any structure of tensors.
        buckets: sizes to capture, of the one padded axis, or of each by its name. Other axes get a graph for each size.
        inputs: what is known of inputs by name; other tensors are copied as they are, at their own sizes.
        outputs: "views" of memory that the next replay writes to; what a caller still holds by then is moved away, by
            one copy. "clone": always copies. "static": views that the next replay overwrites.
        backend: how to capture; by default as the device wants, and on the CPU by an emulation of a device.
        device: where inputs are copied to; by default where the first parameter is, or the first tensor passed.
        max_graphs: how many graphs are kept; the one used longest ago goes first.
        warm_ups: runs before a capture, of which no trace stays in any state.
        check_padding: before a graph serves its first padded call, compare runs with and without padding, and serve
            every size by a graph of its own (with one warning) if the results differ.
        debug_poison: before each replay, fill static memory and pads with NaN (`InputSpec.poison`), and raise if any
            comes out.

    Attributes:
        stats: what happened so far.

    Raises:
        ValueError: a setting doesn't fit the callable or the others.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        buckets: Mapping[str, Sequence[int]] | Sequence[int] | None = None,
        inputs: Mapping[str, InputSpec] | None = None,
        outputs: OutputMode = "views",
        backend: CaptureBackend | None = None,
        device: torch.device | str | None = None,
        max_graphs: int = 64,
        warm_ups: int = 2,
        check_padding: bool = True,
        debug_poison: bool = False,
    ) -> None:
        if outputs not in ("views", "clone", "static"):
            raise ValueError(f"GraphRunner.outputs: {outputs!r} is unknown; known: 'views', 'clone', 'static'")
        if max_graphs < 1 or warm_ups < 1:
            raise ValueError(f"GraphRunner: max_graphs {max_graphs} and warm_ups {warm_ups} must be at least 1")
        self.stats = Stats()
        self._settings: dict[str, Any] = {"buckets": buckets, "inputs": inputs, "outputs": outputs, "backend": backend,
                                          "device": device, "max_graphs": max_graphs, "warm_ups": warm_ups,
                                          "check_padding": check_padding, "debug_poison": debug_poison}  # fmt: skip
        self._function = function
        self._shapes = Shapes(inputs or {})
        self._signature = Signature(function, self._shapes.specs)
        self._buckets = Buckets(buckets, self._shapes.axes)
        self._mode: OutputMode = outputs
        self._given_backend, self._given_device = backend, device
        self._max_graphs, self._warm_ups = max_graphs, warm_ups
        self._check_padding, self._poison = check_padding, debug_poison
        self._lock = threading.RLock()
        self._memory: Holdings | None = None
        self._thread = 0
        self._clock = 0
        self._warned: set[str] = set()
        self.__wrapped__ = self._signature.wrapped
        self.__signature__ = self._signature.signature

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has the function (or its copy) and the settings, and begins without graphs."""
        return functools.partial(type(self), **self._settings), (self._function,)

    # A call

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the function by a replay; see the class.

        Raises:
            CaptureError: the function can't be captured; no state is changed.
            PoisonError: with `debug_poison`.
            RuntimeError: another thread still holds outputs whose memory this call would write.
            TypeError, ValueError: an argument doesn't fit.
        """
        if torch.compiler.is_compiling():
            return self._function(*args, **kwargs)
        if _is_traced():
            self.stats.eager += 1
            return self._function(*args, **kwargs)
        with self._lock:
            arguments = self._signature.bind(args, kwargs)
            memory = self._memory if self._memory is not None else self._start(arguments)
            if memory.backend.busy():
                self.stats.eager += 1
                return self._function(*args, **kwargs)
            if not torch.is_grad_enabled():
                return self._serve(memory, arguments)
            refuse_gradients(arguments)
            with torch.no_grad():
                return self._serve(memory, arguments)

    def _serve(self, memory: Holdings, arguments: dict[str, Any]) -> Any:
        thread = threading.get_ident()
        if thread != self._thread:
            self._enter(memory, thread)
        if memory.watch.moved():
            memory.drop_all()
        key = plan_key(self._shapes, arguments, surroundings(memory.device.type))
        plan = memory.plans.get(key)
        if plan is None or (plan.entry is not None and plan.entry.dropped):
            plan = self._plan(memory, arguments)
            if len(memory.plans) >= _MAX_PLANS:
                memory.plans.clear()
            memory.plans[key] = plan
        if plan.entry is None or plan.copies is None or plan.shares_what_is_written(arguments):
            self.stats.eager += 1
            return self._signature.call(self._function, arguments)
        return self._replay(memory, plan, plan.entry, plan.copies, arguments)

    def _replay(self, memory: Holdings, plan: Plan, entry: Entry, copies: Copies, arguments: Mapping[str, Any]) -> Any:
        memory.backend.order()
        if self._poison:
            exact = self._exact(memory, arguments)  # before the function writes to them
            entry.outputs.release()
            entry.graph.poison(poison.poison)
            entry.outputs.poison(poison.poison)
        copies.load(arguments)
        self.stats.moved_outputs += entry.outputs.release()  # after the copies: an output may come back as an input
        if copies.has_lists:
            entry.graph.update(copies.lists(arguments))
        entry.graph.replay()
        for name, target in plan.written:
            arguments[name].copy_(target)
        self._clock += 1
        entry.used = self._clock
        self.stats.replays += 1
        self.stats.rows += plan.rows
        self.stats.padded_rows += plan.padded_rows
        self.stats.unpadded += plan.unpadded
        result = entry.outputs.give(plan.shapes)
        if self._poison:
            poison.check(tree_leaves(result), lambda: tree_leaves(self._observed(memory, exact, refuse=False).result))
        return result

    def _enter(self, memory: Holdings, thread: int) -> None:
        """Another thread calls: it may, once nothing is held whose memory it would write while it's read."""
        if self._thread and self._mode != "clone" and any(entry.outputs.held for entry in memory.entries.values()):
            raise RuntimeError(
                "GraphRunner: another thread still holds outputs of this runner, and this call would write to their "
                "memory while they may be read: use outputs='clone', or a runner for each thread"
            )
        self._thread = thread

    # What a call is served by

    def _start(self, arguments: Mapping[str, Any]) -> Holdings:
        tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
        if self._given_device is not None:
            device = torch.empty(0, device=self._given_device).device  # with its index
        else:
            device = next((tensor.device for tensor in (*_parameters(self._function), *tensors)), torch.device("cpu"))
        register_known()
        self._memory = Holdings(self._function, device, self._given_backend or backend_for(device))
        return self._memory

    def _plan(self, memory: Holdings, arguments: dict[str, Any]) -> Plan:
        check_arguments(self._shapes, arguments, memory.device)
        sizes = self._shapes.sizes(arguments)
        if any(sizes[axis] == 0 for axis in sizes if axis in self._buckets.axes):
            return Plan()  # there is no row to pad with, nor much to compute
        bucket = self._buckets.fit(sizes)
        if bucket is None:
            self._warn(f"a call of sizes {sizes} is larger than the largest bucket; it runs without a graph, as will "
                       "others: stats.eager counts them", about="larger")  # fmt: skip
            return Plan()
        variant = graph_variant(self._shapes, arguments, surroundings(memory.device.type))
        trims, unpadded = None, False
        if bucket != sizes:
            if variant not in memory.unpadded:
                try:
                    trims = self._trims(memory, variant, arguments, sizes, bucket)
                except Mixing as reason:
                    memory.unpadded.add(variant)
                    self._warn(f"padding from {sizes} to {bucket} would change the result ({reason}); each size gets a "
                               "graph of its own. check_padding=False pads all the same", about="mixing")  # fmt: skip
            if trims is None:
                bucket, unpadded = sizes, True
        memory.add_objects(variant, arguments)
        entry = self._entry(memory, (variant, tuple(bucket.items())), arguments, bucket)
        copies = Copies(self._shapes, arguments, entry.statics, self._poison)
        return Plan(
            entry,
            copies,
            tuple((name, target) for name, target in zip(copies.names, copies.targets, strict=True)
                  if name in entry.written),
            trims.shapes(entry.outputs.leaves, sizes) if trims is not None else {},
            rows=sum(bucket[axis] for axis in sizes if axis in self._buckets.axes),
            padded_rows=sum(bucket[axis] - sizes[axis] for axis in sizes),
            unpadded=unpadded,
        )  # fmt: skip

    def _warn(self, message: str, about: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(f"GraphRunner: {message}", stacklevel=5)

    def _entry(
        self, memory: Holdings, key: tuple[Hashable, Hashable], arguments: Mapping[str, Any], bucket: Sizes
    ) -> Entry:
        entry = memory.entries.get(key)
        if entry is not None and not self._is_at(entry, arguments):
            memory.drop(key)
            entry = None
        if entry is None:
            entry = self._capture(memory, arguments, bucket)
            self.stats.captures += 1
            self.stats.recaptures += key in memory.moved
            memory.moved.discard(key)
            memory.entries[key] = entry
            self._evict(memory, entry)
            memory.prune()
            self.stats.bytes = self.memory().total
        return entry

    def _is_at(self, entry: Entry, arguments: Mapping[str, Any]) -> bool:
        """Whether the memory that is not copied is that of the capture."""
        return all(
            arguments[name].is_set_to(entry.statics[name])
            for name, spec in self._shapes.specs.items()
            if spec.static and name in arguments
        )

    def _evict(self, memory: Holdings, new: Entry) -> None:
        self._clock += 1
        new.used = self._clock
        while len(memory.entries) > self._max_graphs:
            oldest = min(memory.entries, key=lambda key: memory.entries[key].used)
            memory.entries.pop(oldest).dropped = True
            self.stats.evictions += 1

    def _trims(
        self, memory: Holdings, variant: Hashable, arguments: Mapping[str, Any], sizes: Sizes, bucket: Sizes
    ) -> Trims:
        """What of the outputs is padding.

        Raises:
            Mixing: padding would change them.
        """
        padded = frozenset(axis for axis in sizes if sizes[axis] != bucket[axis])
        key = (variant, tuple(bucket.items()), padded)
        if key in memory.trims:
            return memory.trims[key]
        statics = self._statics(memory, arguments, bucket)

        def run(rows: Mapping[str, Any], like: Run) -> Run:
            Copies(self._shapes, rows, statics).load(rows)
            return self._observed(memory, statics, like=like)

        small = self._observed(memory, self._exact(memory, arguments), refuse=False)
        large = run(arguments, small)
        trims = read_shapes(small.result, large.result, sizes, bucket)
        if self._check_padding:
            for call in other_arguments(self._shapes, arguments):
                if call is not arguments:
                    small = self._observed(memory, self._exact(memory, call), refuse=False)
                    large = run(call, small)
                others = (run(rows, small) for rows in other_paddings(self._shapes, call, bucket))
                compare_runs(small, large, others)
        if trims.unique:
            memory.trims[key] = trims
        return trims

    def _exact(self, memory: Holdings, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments as the function gets them at their own sizes, of which nothing is written to the caller's."""
        exact = dict(arguments)
        for name, value in arguments.items():
            spec = self._shapes.of(name)
            if isinstance(value, torch.Tensor) and not spec.static:
                order = self._shapes.order(name, value) or tuple(range(value.dim()))
                copy = torch.empty_permuted(value.shape, order, dtype=spec.dtype or value.dtype, device=memory.device)
                exact[name] = copy.copy_(value)
        return exact

    # Runs of the function that aren't calls

    def _observed(
        self, memory: Holdings, arguments: Mapping[str, Any], refuse: bool = True, like: Run | None = None
    ) -> Run:
        """Calls the function, and puts back what it writes.

        Args:
            memory: what there is.
            arguments: what it is called with.
            refuse: refuse what can't be replayed.
            like: a run with the state that this one's is compared with.
        """
        recorder = Recorder(undo=True, refuse=refuse)
        places = {name: place(value) for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        try:
            with memory.backend.warm_up(), recorder, _uncached_casts(memory.device):
                result = self._signature.call(self._function, arguments)
            refuse_changes(memory.roots, arguments, places, recorder.trace, result)
            copied = {name: arguments[name] for name in places if not self._shapes.of(name).static}
            reads = like.reads if like is not None else recorder.reads(set(map(storage_key, copied.values())))
            return Run(
                tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, result),
                {name: x.clone() for name, x in copied.items() if storage_key(x) in recorder.trace.written},
                reads,
                [read() for read in reads],
            )
        finally:
            recorder.restore()

    def _statics(self, memory: Holdings, arguments: Mapping[str, Any], bucket: Sizes) -> dict[str, Any]:
        """What the function is captured with: arguments in fixed memory, of the sizes of a bucket."""
        statics: dict[str, Any] = {}
        for name, value in arguments.items():
            spec = self._shapes.of(name)
            if isinstance(value, torch.Tensor) and not spec.static:
                dtype = spec.dtype or value.dtype
                largest = self._shapes.padded(name, value.shape, self._buckets.largest(bucket))
                memory.buffers.buffer(name, largest, dtype)  # smaller ones will be its beginning
                shape = self._shapes.padded(name, value.shape, bucket)
                statics[name] = memory.buffers.buffer(name, shape, dtype, self._shapes.order(name, value))
            elif spec.host is not None and value is not None:
                statics[name] = pad_list(value, int(spec.pad), self._shapes.padded(name, (len(value),), bucket)[0])
            elif spec.axes and isinstance(value, int):
                statics[name] = self._shapes.padded(name, (value,), bucket)[0]
            else:
                statics[name] = value
        return statics

    def _capture(self, memory: Holdings, arguments: Mapping[str, Any], bucket: Sizes) -> Entry:
        statics = self._statics(memory, arguments, bucket)
        Copies(self._shapes, arguments, statics).load(arguments)
        lists = {spec.host: statics[name] for name, spec in self._shapes.specs.items()
                 if spec.host and statics.get(name) is not None}  # fmt: skip
        for i in range(self._warm_ups):
            self._observed(memory, statics, refuse=i == self._warm_ups - 1, like=NO_RUN)
        with _uncached_casts(memory.device):
            captured = memory.backend.capture(functools.partial(self._signature.call, self._function, statics), lists)
        refuse_escapes(memory.roots, captured)
        keys = {name: storage_key(value) for name, value in statics.items() if isinstance(value, torch.Tensor)}
        copied = {name: key for name, key in keys.items() if not self._shapes.of(name).static}
        own = own_outputs(memory.roots, memory.backend, captured, set(keys.values()))
        if memory.watch.moved():  # by the function itself, such as weights that it packs in its first run
            memory.drop_all()
        memory.watch.add(memory.roots, set(captured.trace.outside) - set(keys.values()))
        written = frozenset(name for name, key in copied.items() if key in captured.trace.written)
        watched = memory.watch.watched()
        others = [reference for key, reference in captured.trace.outside.items() if key not in watched]
        kept = [torch.UntypedStorage._new_with_weak_ptr(reference.cdata) for reference in others]
        writes = captured.trace.written & captured.trace.outside.keys()
        outputs = Outputs(captured, own, copied.values(), self._mode)
        return Entry(captured.graph, outputs, statics, written, writes, kept)

    # Ahead of time

    def capture(self, *examples: Mapping[str, Any], progress: bool = True) -> None:
        """Captures all buckets ahead of the calls, largest first, so that smaller graphs fit into the memory of larger.

        Args:
            examples: for each combination of arguments that will be passed, one call's arguments by name, of any size:
                their rows are repeated to fill a bucket.
            progress: show a progress bar.

        Raises:
            CaptureError: the function can't be captured.
            ValueError: there would be more graphs than `max_graphs`.
        """
        with self._lock, torch.no_grad():
            jobs = self._jobs(examples)
            if len(jobs) > self._max_graphs:
                raise ValueError(f"GraphRunner.capture: {len(jobs)} graphs, and max_graphs is {self._max_graphs}")
            for arguments in track(jobs, "Capturing graphs", disable=not progress, transient=True):
                self._plan(self._memory if self._memory is not None else self._start(arguments), arguments)

    def forecast(self, *examples: Mapping[str, Any]) -> Forecast:
        """What `capture` would make of these examples. Nothing is run."""
        with self._lock:
            jobs = self._jobs(examples)
            inputs: dict[tuple[str, torch.dtype], int] = {}
            for job in jobs:
                for name, value in job.items():
                    spec = self._shapes.of(name)
                    if isinstance(value, torch.Tensor) and not spec.static:
                        dtype = spec.dtype or value.dtype
                        inputs[name, dtype] = max(inputs.get((name, dtype), 0), value.numel() * dtype.itemsize)
            return Forecast(len(jobs), min(len(jobs), 1), sum(inputs.values()), self._max_graphs)

    def _jobs(self, examples: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        jobs: list[tuple[int, dict[str, Any]]] = []
        for example in examples:
            arguments = self._signature.bind((), example)
            for bucket in self._buckets.all(self._shapes.sizes(arguments)):
                job = {name: resized(self._shapes, name, value, bucket) for name, value in arguments.items()}
                jobs.append((sum(bucket.values()), job))
        return [job for _, job in sorted(jobs, key=lambda sized: -sized[0])]

    def memory(self) -> Memory:
        """What the runner holds now."""
        if self._memory is None:
            return Memory(0, 0, 0, 0)
        entries = self._memory.entries.values()
        outputs = sum(entry.outputs.nbytes for entry in entries)
        workspace = sum(entry.graph.nbytes for entry in entries) - outputs
        return Memory(len(entries), self._memory.buffers.nbytes, outputs, workspace)

    def invalidate(self) -> None:
        """Has the next calls captured anew, after a change that isn't seen: of a number that the function reads."""
        with self._lock:
            if self._memory is not None:
                self._memory.drop_all()

    def clear(self) -> None:
        """Drops all graphs and their memory, such as before weights are replaced by others of the same size."""
        with self._lock:
            if self._memory is not None:
                self._memory.drop_all()
            self._memory = None
            self.stats.bytes = 0


def _is_traced() -> bool:
    """Whether somebody sees or rewrites this thread's ops, of which a replay has none: a capture around, a tracer."""
    if _functorch_level() is not None:
        return True
    return bool(_count_modes()) and any(isinstance(mode, Recorder) or mode.is_infra_mode() for mode in _modes())


def _modes() -> Iterator[Any]:
    return map(torch._C._get_dispatch_stack_at, range(_count_modes()))


def _uncached_casts(device: torch.device) -> AbstractContextManager[Any]:
    """Where autocast casts a weight in each run: what it keeps of the run before would be a constant of the graph."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, torch.get_autocast_dtype(device.type), cache_enabled=False)
    return nullcontext()


def _parameters(function: Callable[..., Any]) -> Iterator[torch.Tensor]:
    module = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return iter(module.parameters()) if isinstance(module, nn.Module) else iter(())
