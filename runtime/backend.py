"""The Dynamo entry: `torch.compile(model, backend="npu_fuse")`, or a `Backend` of one's own to keep its reports."""

from __future__ import annotations

import functools
import logging
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext, tracing
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..passes.agreement import ranks_differ
from ..passes.expectation import ExpectationError, lacking, unmet
from ..passes.pipeline import Flow, leave, optimise, prepare
from ..passes.report import Report
from ..passes.rewrites import Rewrites, SiteKey
from ..passes.views.dump import Dump
from ..passes.withheld import NOTHING, PartFailed, Withheld
from .cache import cached, folder_of
from .collector import paused_collector
from .declarations import Declarations
from .effects import register_known
from .graphs.errors import CaptureError
from .graphs.replayed import Replayed
from .inner import executable
from .ops.register import register
from .options import Options
from .owners import Owners
from .ranks import RanksDisagreeError
from .reproducer import Reproducers
from .shards import is_distributed, is_part, position
from .snapshot import Snapshot
from .target import Target
from .verify import Verified

_log = logging.getLogger("npu_fuse")

Compiled = Callable[..., Any]


@dataclass(slots=True)
class Compilation:
    """One graph on its way, and what is kept of it to optimise it again.

    Args:
        parameters: the model's, by the positions of the inputs of Dynamo's graph.
        target: the machine.
        dump: gets the stages.
        withheld: what is left out.
        declarations: which layers are bidirectional.
        place: of its report among all.
        kept: of its graphs among those that are kept.
        rewrites: what there is to verify, if it is to be.
        before: the graph before all passes.
    """

    parameters: Mapping[int, torch.Tensor]
    target: Target
    dump: Dump
    withheld: Withheld = NOTHING
    declarations: Declarations | None = None
    place: int | None = None
    kept: int = 0
    rewrites: Rewrites | None = None
    before: Snapshot | None = None


class Backend:
    """A torch.compile backend with its own options and reports; nothing is shared with other backends.

    Args:
        options: all settings in one.
        flow: what is done to a graph; `Flow().with_kind(…)` adds a kind of one's own.
        settings: or single ones, by the names of `Options`.

    Attributes:
        reports: one `Report` for each graph compiled, in order.
        graphs: with `Options.keep_graphs`, each graph compiled: functional, as the model had it, and as it runs.
        runners: with `Options.graphs`, what captures and replays each graph; `runners[i].runner.stats` counts.

    Raises:
        ValueError: a setting is unknown.
    """

    def __init__(self, options: Options | None = None, *, flow: Flow | None = None, **settings: Any) -> None:
        if options is not None and settings:
            raise ValueError(f"Backend: give Options or single settings, not both (got {', '.join(settings)})")
        self.options = options if options is not None else Options.of(settings)
        self.flow = flow if flow is not None else Flow()
        self.reports: list[Report] = []
        self.graphs: list[tuple[fx.GraphModule, fx.GraphModule]] = []
        self.runners: list[Replayed] = []
        self._lacking: set[str] = set()

    def __deepcopy__(self, memo: Mapping[int, object]) -> Backend:
        """Itself: transformers copies each `CompileConfig`, and nobody would see the reports of a copy."""
        return self

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None) -> Compiled:
        """Compiles one graph of Dynamo's.

        Args:
            module: the graph.
            example_inputs: its inputs.
            mode: of torch.compile: "reduce-overhead" captures the graph and replays it, as the option `graphs` does.

        Raises:
            ValueError: the mode is unknown.
        """
        graphs = {} if _is_replayed(mode) and self.options.graphs is None else self.options.graphs
        reason = _why_not(example_inputs)
        if reason is not None:
            self._keep(Report(remark=reason))
            return self._as_it_is(module, example_inputs)
        try:
            target = self.options.target if self.options.target is not None else Target.detect()
            register(target, self.flow.contracts.values())
            register_known()
            dump = self._dump()
            dump.stage("dynamo", module)
            prepared = prepare(module)
            parameters = _parameters(module.graph)
        except Exception as error:
            self._fail(error)
            return self._as_it_is(module, example_inputs)

        def inference(graph: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
            compilation = Compilation(parameters, target, dump)

            def runs(is_late: bool = False) -> Compiled:
                optimised = self._optimised(graph, compilation)
                if graphs is None or not self._can_capture(optimised.graph):
                    return self._executable(optimised, inputs, is_late=is_late)
                static = _of_the_model(module.graph, optimised.graph)
                compile = functools.partial(self._run, is_late=is_late)
                self.runners.append(Replayed(optimised, static, graphs, self.options.strict, compile))
                return self.runners[-1]

            function = runs()
            if self.options.verify is None or compilation.rewrites is None:
                return _boxed_call(function)
            context = TracingContext.try_get()

            def without(sites: Mapping[SiteKey, str]) -> tuple[Compiled, Rewrites | None]:
                compilation.withheld = compilation.withheld.with_sites(sites)
                with tracing(context):
                    return runs(is_late=True), compilation.rewrites

            folders = Reproducers(self.options.dump)
            return _boxed_call(Verified(function, compilation.rewrites, self.options.verify, without, folders))

        return _compile(prepared, example_inputs, inference)

    def _dump(self) -> Dump:
        """What gets the stages; only torch's trace where the folder can't be made."""
        try:
            return Dump(self.options.dump)
        except OSError as error:
            if self.options.strict:
                raise
            warnings.warn(f"npu_fuse: nothing is dumped, as the folder can't be made: {error}", stacklevel=2)
            return Dump()

    def _as_it_is(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        """Runs a graph of Dynamo's that is left alone."""
        if self.options.inner == "inductor":
            compiled: Compiled = torch._inductor.compile(_copy(module), list(example_inputs))
            return compiled
        return _compile(module, example_inputs, lambda graph, inputs: _boxed_call(self._executable(graph, inputs)))

    def _executable(self, graph: fx.GraphModule, inputs: Sequence[Any], *, is_late: bool = False) -> Compiled:
        """What runs a graph of AOTAutograd's: it is called with these inputs, which are fake here."""
        return self._run(graph, is_late=is_late)

    def _run(self, graph: fx.GraphModule, *, is_late: bool) -> Compiled:
        return executable(graph, self.options.inner, strict=self.options.strict, is_late=is_late)

    def _can_capture(self, graph: fx.Graph) -> bool:
        """Whether a graph can be captured: on a CPU nothing sees what Inductor compiles.

        Raises:
            CaptureError: it can't be, under `strict`.
        """
        tensors = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
        on_cpu = any(isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in tensors)
        if self.options.inner == "eager" or not on_cpu:
            return True
        reason = "on a CPU, kernels of Inductor run past torch's dispatcher; inner='eager' can be captured there"
        if self.options.strict:
            raise CaptureError(reason)
        warnings.warn(f"npu_fuse: a graph runs without capture: {reason}", stacklevel=3)
        return False

    def _optimised(self, module: fx.GraphModule, compilation: Compilation) -> fx.GraphModule:
        """The graph with its fusions; on an internal failure, without what failed."""
        if compilation.before is None:
            compilation.before = Snapshot(module)
        snapshot = compilation.before
        try:
            with paused_collector():
                work, report = self._without_failures(snapshot, compilation)
                _LazyGraphModule.force_recompile(work)
            compilation.dump.report(report)
        except RanksDisagreeError:
            raise
        except Exception as error:
            self._fail(error)
            compilation.rewrites = None
            module = snapshot.restored()
            leave(module)
            return module
        is_new = compilation.place is None
        self._keep(report, compilation)
        if is_new:
            self._tell_what_is_missing(report, work.graph, compilation.target)
        if self.options.keep_graphs:
            before = snapshot.restored()
            leave(before)
            if is_new:
                compilation.kept = len(self.graphs)
                self.graphs.append((before, work))
            else:
                self.graphs[compilation.kept] = (before, work)
        return work

    def _tell_what_is_missing(self, report: Report, graph: fx.Graph, target: Target) -> None:
        """Warns of kinds that the machine has no op for, once each, and of what is expected and isn't there.

        Raises:
            ExpectationError: the latter, under `strict`.
        """
        if target.soc != "host":  # of which it is known
            for kind, told in lacking(report).items():
                if kind not in self._lacking:
                    _log.warning("%s", told)
                self._lacking.add(kind)
        for told in unmet(report, graph, self.options.expect):
            if self.options.strict:
                raise ExpectationError(f"npu_fuse: graph {len(self.reports) - 1}: {told}")
            _log.warning("graph %d: %s", len(self.reports) - 1, told)

    def _without_failures(self, snapshot: Snapshot, compilation: Compilation) -> tuple[fx.GraphModule, Report]:
        """Optimises a graph, anew until nothing fails that isn't left out yet."""
        while True:
            work = snapshot.take()
            parameters = _by_placeholder(work.graph, compilation.parameters)
            if compilation.declarations is None:
                compilation.declarations = Declarations(self.options.encoder_only, Owners())
            try:
                report = self._passed(work, parameters, compilation, compilation.declarations)
            except PartFailed as failure:
                error = failure.__cause__
                assert isinstance(error, Exception)
                if self.options.strict or failure.part in compilation.withheld.parts:
                    raise error from None
                told = "".join(traceback.format_exception(error))
                compilation.withheld = compilation.withheld.with_part(failure.part, told)
                reproducers, before = Reproducers(self.options.dump), snapshot.restored()
                folder = reproducers.of_failure(before, failure.part, told, self.options)
                warnings.warn(
                    f"npu_fuse: {failure.part} is left out, by an internal failure: {type(error).__name__}: {error}"
                    f" (reproducer: {folder})",
                    stacklevel=2,
                )
            else:
                differing = ranks_differ(snapshot, report, compilation.withheld.groups)
                if not differing:
                    return work, report
                compilation.withheld = compilation.withheld.with_groups(differing)

    def _passed(
        self,
        module: fx.GraphModule,
        parameters: Mapping[fx.Node, torch.Tensor],
        compilation: Compilation,
        declarations: Declarations,
    ) -> Report:
        """Runs the passes, or takes from the cache what they made of this graph in an earlier process."""
        options, target = self.options, compilation.target

        def passes(declarations: Declarations) -> Report:
            known = declarations, compilation.dump, self.flow, compilation.withheld
            report, compilation.rewrites = optimise(module, parameters, options, target, *known)
            return report

        folder = folder_of(options.cache)
        # Who looks on sees the passes at work.
        watched = options.dump is not None or options.verify is not None or options.profile_ranges
        if folder is None or watched or self.flow != Flow() or compilation.withheld is not NOTHING:
            return passes(declarations)
        return cached(folder, module, parameters, options, target, declarations, passes)

    def _fail(self, error: Exception) -> None:
        """An internal failure: raised under `strict`, else one warning, and a report with its traceback."""
        if self.options.strict:
            raise error
        message = f"npu_fuse: the graph runs unfused, by an internal failure: {type(error).__name__}: {error}"
        warnings.warn(message, stacklevel=3)
        self._keep(Report(failure="".join(traceback.format_exception(error))))

    def _keep(self, report: Report, compilation: Compilation | None = None) -> None:
        """Keeps a report; that of a graph that is optimised again takes the place of its last one."""
        report.own_kinds = self.flow.own_kinds
        place = compilation.place if compilation is not None else None
        if place is None:
            place = len(self.reports)
            self.reports.append(report)
        else:
            self.reports[place] = report
        if compilation is not None:
            compilation.place = place
        _log.info("graph %d: %s", place, report.summary())

    @property
    def report(self) -> Report:
        """All reports in one."""
        return Report.merged(self.reports)


def npu_fuse(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **unknown: Any,
) -> Compiled:
    """The backend by its name, for `torch.compile(model, backend="npu_fuse", options={…})`.

    Args:
        module: a graph of Dynamo's.
        example_inputs: its inputs.
        mode: "reduce-overhead" captures each graph and replays it, as the option `graphs` does; "default" doesn't.
        options: settings by the names of `Options`.
        unknown: nothing else.

    Raises:
        TypeError: there is another argument.
        ValueError: the mode or an option is unknown.
    """
    if unknown:
        raise TypeError(f"npu_fuse: unknown argument {', '.join(unknown)}; known: mode, options")
    return Backend(Options.of(options or {}))(module, example_inputs, mode=mode)


def _is_replayed(mode: str | None) -> bool:
    if mode not in (None, "default", "reduce-overhead"):
        raise ValueError(f"npu_fuse: unknown mode {mode!r}; known: 'default', 'reduce-overhead'")
    return mode == "reduce-overhead"


def _why_not(example_inputs: Sequence[Any]) -> str | None:
    """Why a graph is not looked at, or None."""
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    if torch.is_grad_enabled() and any(value.requires_grad for value in tensors):
        return "the graph needs gradients, and fused ops have none: call the model under torch.no_grad()"
    if any(is_traceable_wrapper_subclass(value) and not is_distributed(value) for value in tensors):
        return "an input is a tensor subclass, whose ops are its own"
    return None


def _compile(
    module: fx.GraphModule, example_inputs: Sequence[Any], compiler: Callable[[fx.GraphModule, Sequence[Any]], Compiled]
) -> Compiled:
    """Runs AOTAutograd, which keeps the semantics of the model: mutations, aliases, gradients."""
    through_aot = aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, inference_compiler=compiler, keep_inference_input_mutations=True
    )
    compiled: Compiled = through_aot(module, example_inputs)
    return compiled


def _boxed_call(function: Compiled) -> Compiled:
    """As AOTAutograd calls it: with a list that it may empty, so that inputs die as soon as they are used."""
    boxed: Compiled = make_boxed_func(function)
    return boxed


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return _LazyGraphModule(module, graph)  # whose code is made once, when nothing changes any more


def _parameters(graph: fx.Graph) -> dict[int, torch.Tensor]:
    """The parameters among the inputs of a Dynamo graph, by their position."""
    inputs = (getattr(node.meta.get("grapharg"), "example", None) for node in graph.find_nodes(op="placeholder"))
    return {i: value for i, value in enumerate(inputs) if isinstance(value, torch.nn.Parameter)}


def _by_placeholder(graph: fx.Graph, parameters: Mapping[int, torch.Tensor]) -> dict[fx.Node, torch.Tensor]:
    """The same by the placeholders of AOTAutograd's graph, which say what input of the Dynamo graph they are."""
    places = {node: position(node) for node in graph.find_nodes(op="placeholder") if not is_part(node)}
    return {node: parameters[place] for node, place in places.items() if place is not None and place in parameters}


def _of_the_model(before: fx.Graph, after: fx.Graph) -> set[int]:
    """Positions of the inputs of AOTAutograd's graph that Dynamo found to belong to the model, or marked as static."""
    static = {
        i
        for i, node in enumerate(before.find_nodes(op="placeholder"))
        if node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type") is not None
    }
    placeholders = list(enumerate(after.find_nodes(op="placeholder")))
    return {i for i, node in placeholders if position(node) in static and isinstance(node.meta["val"], torch.Tensor)}
