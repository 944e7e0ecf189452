"""The flow of a graph, on one screen.

Dynamo graph → prepare → AOTAutograd → recognise → free encoders → fuse → put back in place → restore → cleanup → runs
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import fx

from ..patterns import recognise
from ..runtime.declarations import Declarations
from ..runtime.ops import CONTRACTS
from ..runtime.ops.host_attention import HOST_ATTENTION
from ..runtime.options import ENCODER_ONLY, IN_PLACE, Options
from ..runtime.target import Target
from .cleanup import cleanup
from .encoder_only import free
from .fuse import fuse
from .in_place import put_back
from .launches import count_bytes, count_launches
from .preserve import preserve, restore
from .report import Report
from .rewriter import Rewriter
from .specialise import specialise_floats
from .truthful import tell_writes
from .views.dump import Dump


def prepare(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a Dynamo graph for AOTAutograd: ops that are to stay whole are opaque, the model's floats are bound.

    Ops that write undeclared are called by ops that say what they write.
    """
    prepared = preserve(module)
    tell_writes(prepared.graph)
    specialise_floats(prepared.graph)
    prepared.recompile()
    return prepared


def optimise(
    module: fx.GraphModule,
    parameters: Mapping[fx.Node, torch.Tensor],
    options: Options,
    target: Target,
    declarations: Declarations,
    dump: Dump,
) -> Report:
    """Rewrites AOTAutograd's inference graph in place.

    Args:
        module: functionalised ATen graph with fake values in `meta["val"]`.
        parameters: its placeholders that are parameters of the model, with what they hold.
        options: what the user set.
        target: the machine that contracts are judged for.
        declarations: which layers are bidirectional.
        dump: gets the graph after each pass.
    """
    dump.stage("aot", module)
    report = Report(launches_before=count_launches(module.graph), bytes_before=count_bytes(module.graph))
    with _timed(report, "recognise"):
        findings = recognise(module.graph)
    rewriter = Rewriter(
        module,
        target,
        parameters,
        pack_weights=options.pack_weights,
        numerics=options.numerics,
    )
    with _timed(report, ENCODER_ONLY):
        encoders = free(rewriter, findings, declarations, disabled=ENCODER_ONLY in options.disable)
        if any(encoder.site.status == "lowered" for encoder in encoders):
            findings = recognise(module.graph)
        for encoder in encoders:
            encoder.tell(findings)
        report.sites = [encoder.site for encoder in encoders]
    dump.stage(ENCODER_ONLY, module)
    with _timed(report, "fuse"):
        report.sites += fuse(rewriter, findings, options)
    dump.stage("fuse", module)
    if IN_PLACE not in options.disable:
        with _timed(report, "in_place"):
            report.sites += put_back(rewriter)
        dump.stage(IN_PLACE, module)
    with _timed(report, "cleanup"):
        leave(module)
        if any(site.status == "lowered" for site in report.sites):
            cleanup(module)
    dump.stage("cleanup", module)
    on_host = [HOST_ATTENTION] if target.soc == "host" else []
    ops = {contract.op: contract.name for contract in (*CONTRACTS.values(), *on_host)}
    report.ops = Counter(ops[node.target] for node in module.graph.nodes if node.target in ops)
    report.launches_after, report.bytes_after = count_launches(module.graph), count_bytes(module.graph)
    return report


def leave(module: fx.GraphModule) -> None:
    """Makes a prepared graph runnable as the model had it."""
    restore(module.graph)
    module.recompile()


@contextmanager
def _timed(report: Report, name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    report.seconds_by_pass[name] = time.perf_counter() - start
