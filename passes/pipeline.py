"""The flow of a graph, on one screen.

Dynamo graph → prepare → AOTAutograd → merge repeated projections → recognise → free encoders → fuse →
put back in place → restore → cleanup → runs
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from ..patterns import KINDS, RULES, Rule, recognise
from ..patterns.match import Findings, RuleError
from ..runtime.declarations import Declarations
from ..runtime.ops import CONTRACTS, OpContract
from ..runtime.ops.host_attention import HOST_CONTRACTS
from ..runtime.options import Options
from ..runtime.target import Target
from .cleanup import cleanup
from .encoder_only import Outcome, free
from .fuse import FUSE, fuse
from .in_place import put_back
from .kinds import ENCODER_ONLY, IN_PLACE, REPEATED
from .launches import cost
from .lowering import LOWERINGS, Lowering
from .preserve import preserve, restore
from .ranges import add_ranges
from .repeated import merge
from .report import Report, Site
from .rewriter import Rewriter
from .rewrites import Rewrites
from .specialise import specialise_floats
from .truthful import tell_writes
from .views.dump import Dump
from .withheld import NOTHING, Part, PartFailed, Withheld

RECOGNISE = "recognise"
CLEANUP = "cleanup"


@dataclass(frozen=True, slots=True)
class Flow:
    """What a flow consists of.

    Args:
        rules: what is recognised.
        lowerings: how each kind is rewritten, the largest first.
        contracts: the fused ops, by name.
        merge: computes equal projections once.
        free: frees layers that declare themselves bidirectional.
        put_back: puts writes back in place.
        cleanup: takes out what is dead.
    """

    rules: Sequence[Rule] = RULES
    lowerings: Mapping[str, Lowering] = field(default_factory=lambda: LOWERINGS)
    contracts: Mapping[str, OpContract] = field(default_factory=lambda: CONTRACTS)
    merge: Callable[..., list[Site]] = merge
    free: Callable[..., list[Outcome]] = free
    put_back: Callable[[Rewriter], list[Site]] = put_back
    cleanup: Callable[[fx.GraphModule], None] = cleanup

    @property
    def own_kinds(self) -> tuple[str, ...]:
        """The kinds that were added to it."""
        return tuple(rule.kind for rule in self.rules if rule.kind not in KINDS)

    def with_kind(self, rule: Rule, lower: Lowering, *contracts: OpContract) -> Flow:
        """The same flow with one kind more, which takes what no other kind has taken.

        Args:
            rule: what is recognised.
            lower: how it becomes one of the ops.
            contracts: the ops that it may become.

        Raises:
            ValueError: there is such a kind or op already.
        """
        known = {rule.kind} & {*self.lowerings, *(known.kind for known in self.rules)}
        known |= {contract.name for contract in contracts} & self.contracts.keys()
        if known:
            raise ValueError(f"Flow.with_kind: {', '.join(sorted(known))} is there already")
        ops = {contract.name: contract for contract in contracts}
        return replace(
            self,
            rules=(*self.rules, rule),
            lowerings={**self.lowerings, rule.kind: lower},
            contracts={**self.contracts, **ops},
        )


def prepare(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a Dynamo graph for AOTAutograd: ops that are to stay whole are opaque, the model's floats are bound.

    Ops that write undeclared are called by ops that say what they write.
    """
    prepared = preserve(module)
    tell_writes(prepared.graph)
    specialise_floats(prepared.graph)
    for node in prepared.graph.find_nodes(op="placeholder"):
        node.meta.pop("grapharg", None)  # holds what the model was called with; Dynamo drops its own, too
    prepared.recompile()
    return prepared


def optimise(
    module: fx.GraphModule,
    parameters: Mapping[fx.Node, torch.Tensor],
    options: Options,
    target: Target,
    declarations: Declarations,
    dump: Dump,
    flow: Flow,
    withheld: Withheld = NOTHING,
) -> tuple[Report, Rewrites | None]:
    """Rewrites AOTAutograd's inference graph in place.

    Args:
        module: functionalised ATen graph with fake values in `meta["val"]`.
        parameters: its placeholders that are parameters of the model, with what they hold.
        options: what the user set.
        target: the machine that contracts are judged for.
        declarations: which layers are bidirectional.
        dump: gets the graph after each pass.
        flow: what is done.
        withheld: what of it is not.

    Returns:
        The report, and what there is to verify, if it is to be.

    Raises:
        PartFailed: a part raised; the graph is not to be used.
    """
    dump.stage("aot", module)
    before = cost(module.graph)
    report = Report(launches_before=before.launches, bytes_before=before.bytes)
    report.left_out = {str(part): traceback for part, traceback in withheld.parts.items()}
    rewriter = Rewriter(
        module,
        target,
        parameters,
        pack_weights=options.pack_weights,
        numerics=options.numerics,
    )
    if withheld.allows(REPEATED):
        with _part(report, REPEATED):
            report.sites += flow.merge(rewriter, disabled=REPEATED in options.disable)
            if any(site.status == "lowered" for site in report.sites):
                module.graph.lint()
    rules = [rule for rule in flow.rules if Part(RECOGNISE, rule.kind) not in withheld.parts]
    findings = Findings()
    if withheld.allows(RECOGNISE):
        with _part(report, RECOGNISE):
            findings = recognise(module.graph, rules)
    if withheld.allows(ENCODER_ONLY):
        with _part(report, ENCODER_ONLY):
            encoders = flow.free(rewriter, findings, declarations, disabled=ENCODER_ONLY in options.disable)
            if any(encoder.site.status == "lowered" for encoder in encoders):
                module.graph.lint()
                findings = recognise(module.graph, rules)
            for encoder in encoders:
                encoder.tell(findings)
            report.sites += [encoder.site for encoder in encoders]
    dump.stage(ENCODER_ONLY, module)
    rewriter.rewrites = Rewrites(module) if options.verify is not None else None
    if withheld.allows(FUSE):
        with _part(report, FUSE):
            report.sites += fuse(rewriter, findings, options, flow.lowerings, withheld)
    dump.stage(FUSE, module)
    if IN_PLACE not in options.disable and withheld.allows(IN_PLACE):
        with _part(report, IN_PLACE):
            report.sites += flow.put_back(rewriter)
            module.graph.lint()
        dump.stage(IN_PLACE, module)
    leave(module)
    if withheld.allows(CLEANUP):
        with _part(report, CLEANUP):
            if any(site.status == "lowered" for site in report.sites):
                flow.cleanup(module)
    dump.stage(CLEANUP, module)
    on_host = HOST_CONTRACTS if target.soc == "host" else ()
    ops = {contract.op: contract.name for contract in (*flow.contracts.values(), *on_host)}
    report.ops = Counter(ops[node.target] for node in module.graph.nodes if node.target in ops)
    after = cost(module.graph)
    report.launches_after, report.bytes_after = after.launches, after.bytes
    if options.profile_ranges:
        add_ranges(module.graph, ops.keys())
        module.recompile()
    return report, rewriter.rewrites


def leave(module: fx.GraphModule) -> None:
    """Makes a prepared graph runnable as the model had it."""
    restore(module.graph)
    module.recompile()


@contextmanager
def _part(report: Report, name: str) -> Iterator[None]:
    """Times a pass, and says of what it raises whose it is."""
    start = time.perf_counter()
    try:
        yield
    except PartFailed:
        raise
    except RuleError as error:
        raise PartFailed(Part(RECOGNISE, error.kind)) from error.__cause__
    except Exception as error:
        raise PartFailed(Part(name)) from error
    report.seconds_by_pass[name] = time.perf_counter() - start
