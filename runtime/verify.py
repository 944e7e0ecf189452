"""Each rewritten site beside what the model had there, on the inputs of real calls.

A call that is verified is the model's own: its graph runs op by op, and what that gives and writes is what the caller
gets. Beside it, the fused ops of each site run on the values that the model has there, with copies of what they write.
So no number of a wrong site reaches the caller, no op of the model runs twice, and each site answers for itself alone.
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ..passes.rewrites import Program, Rewrite, Rewrites, SiteKey
from .graphs.record import Recorder
from .reproducer import Reproducers
from .tolerance import Difference, difference, in_float64, in_order, tolerance

Without = Callable[[Mapping[SiteKey, str]], tuple[Callable[..., Any], Rewrites | None]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """On one site, in one call.

    Args:
        rewrite: the site.
        original: what the model has there.
        worst: of its results; None where the fused ops raised.
        error: what they raised.
        values: what both programs read, where the site is wrong.
    """

    rewrite: Rewrite
    original: Program
    worst: Difference | None
    error: Exception | None
    values: Mapping[fx.Node, Any]

    @property
    def is_right(self) -> bool:
        return self.worst is not None and self.worst.is_rounding

    def __str__(self) -> str:
        return f"the fused op raised {type(self.error).__name__}: {self.error}" if self.error else str(self.worst)


class Verified:
    """A graph of which calls are verified; what is found wrong is put back.

    Args:
        run: the graph as it runs.
        rewrites: its sites.
        when: "first", until nothing is wrong; "always"; or every so many calls.
        without: gives the graph without some sites, each with the reason for the report.
        reproducers: where to write what reproduces a wrong site.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        rewrites: Rewrites,
        when: Literal["first", "always"] | int,
        without: Without,
        reproducers: Reproducers,
    ) -> None:
        self._run = run
        self._rewrites: Rewrites | None = rewrites
        self._when = when
        self._without: Without | None = without
        self._reproducers = reproducers
        self._calls = 0

    def __call__(self, *inputs: Any) -> Any:
        if self._rewrites is None or not _can_be_verified(inputs):
            return self._run(*inputs)
        place, self._calls = self._calls, self._calls + 1
        if isinstance(self._when, int) and place % self._when:
            return self._run(*inputs)
        call = _Beside(self._rewrites)
        with torch.no_grad():
            outputs = call.run(*inputs)
        self._judge(call.verdicts)
        return outputs

    def _judge(self, verdicts: list[Verdict]) -> None:
        wrong = [verdict for verdict in verdicts if not verdict.is_right]
        for verdict in verdicts:
            verdict.rewrite.site.verified = str(verdict)
        if wrong:
            assert self._without is not None
            self._run, self._rewrites = self._without(self._told(wrong))
            self._calls = 0  # what stands there now is verified by the next call
        elif self._when == "first":
            self._rewrites = self._without = None  # and all that they keep

    def _told(self, wrong: list[Verdict]) -> dict[SiteKey, str]:
        """Warns, once, with a reproducer for each kind; gives the reasons for the report."""
        folders: dict[tuple[str, str | None], Any] = {}
        reasons = {}
        for verdict in wrong:
            site = verdict.rewrite.site
            like = site.kind, site.op
            if like not in folders:
                told = verdict.rewrite, verdict.original, verdict.values, str(verdict)
                folders[like] = self._reproducers.of_site(*told)
            reasons[verdict.rewrite.key] = f"verification failed: {verdict}; reproducer in {folders[like]}"
        counts = Counter(verdict.rewrite.site.kind for verdict in wrong)
        first = wrong[0].rewrite
        warnings.warn(
            f"npu_fuse: verification failed, and the sites are put back:"
            f" {', '.join(f'{count} {kind}' for kind, count in counts.items())}."
            f" The first, {first.site.kind} in {first.site.where}: {reasons[first.key]}",
            stacklevel=4,
        )
        return reasons


def _can_be_verified(inputs: tuple[Any, ...]) -> bool:
    """Whether this is a call with numbers, of which nobody records the ops, as the capture of a graph does."""
    modes = map(torch._C._get_dispatch_stack_at, range(torch._C._len_torch_dispatch_stack()))
    is_recorded = any(isinstance(mode, Recorder) or mode.is_infra_mode() for mode in modes)
    return not is_recorded and all(map(_has_numbers, inputs))


def _has_numbers(value: Any) -> bool:
    return not isinstance(value, FakeTensor) and not (isinstance(value, torch.Tensor) and value.is_meta)


class _Beside(fx.Interpreter):
    """Runs the model's graph, and each site as soon as all that it is compared by is there."""

    def __init__(self, rewrites: Rewrites) -> None:
        super().__init__(rewrites.model)
        self.verdicts: list[Verdict] = []
        self._due: dict[fx.Node, list[tuple[Rewrite, Program]]] = defaultdict(list)
        self._readers: Counter[fx.Node] = Counter()
        self._values: dict[fx.Node, Any] = {}
        for rewrite in rewrites.all:
            original = rewrite.original()
            read = {*rewrite.inputs, *rewrite.outputs, *original.inputs}
            self._due[max(read)].append((rewrite, original))
            self._readers.update(read)

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n in self._readers:
            self._values[n] = value
        for rewrite, original in self._due.get(n, ()):
            self.verdicts.append(_verdict(rewrite, original, self._values))
            for node in {*rewrite.inputs, *rewrite.outputs, *original.inputs}:
                self._readers[node] -= 1
                if not self._readers[node]:
                    del self._values[node]
        return value


def _verdict(rewrite: Rewrite, original: Program, values: Mapping[fx.Node, Any]) -> Verdict:
    """Compares one site."""
    read = {node: values[node] for node in (*rewrite.inputs, *original.inputs)}
    try:
        found = rewrite.fused(*(values[node] for node in rewrite.inputs))
    except Exception as error:
        return Verdict(rewrite, original, None, error, read)
    allowed = tolerance(original.module, rewrite.fused)
    found, wanted = (
        in_order(results, original.module) for results in (found, [values[node] for node in rewrite.outputs])
    )
    worst = _worst([difference(*of, (), allowed) for of in zip(found, wanted, strict=True)])
    if not worst.is_rounding:
        exact = in_float64(original.module, [values[node] for node in original.inputs])
        worst = _worst([difference(*of, allowed) for of in zip(found, wanted, exact, strict=True)])
    return Verdict(rewrite, original, worst, None, {} if worst.is_rounding else read)


def _worst(differences: list[Difference]) -> Difference:
    return max(differences, key=lambda of: (not of.is_rounding, of.error / of.allowed if of.allowed else of.error))
