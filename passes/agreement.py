"""Whether all ranks have fused the same collectives of a graph."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from torch import fx

from ..patterns import values
from ..runtime import ranks
from ..runtime.snapshot import Snapshot
from .report import Report

# Of a site that holds collectives, the parameter that names their group.
GROUP = "process_group"


def ranks_differ(before: Snapshot, report: Report, settled: Collection[str]) -> dict[str, str]:
    """Asks the other ranks of each group over which a collective was recognised as a part of a site.

    Args:
        before: the graph, before anything was rewritten.
        report: what this rank did to it.
        settled: groups about which nothing is to be asked.

    Returns:
        The groups whose ranks differ, and why no collective over them may be fused, alike on all of them.

    Raises:
        RanksDisagreeError: they can't come to one decision.
    """
    decisions: dict[str, list[str]] = {}
    for site in report.sites:
        if GROUP in site.params and site.params[GROUP] not in settled:
            decided = site.op if site.status == "lowered" else f"none, as {site.reason}"
            place = f"{site.kind} of {site.module or site.source}"
            decisions.setdefault(site.params[GROUP], []).append(f"{place}: {decided}")
    told = {}
    for group, lines in sorted(decisions.items()):
        told[group] = ranks.disagreement(group, _skeleton(before.restored().graph), "\n".join(lines))
    return {group: reason for group, reason in told.items() if reason is not None}


def _skeleton(graph: fx.Graph) -> str:
    """A digest of what is alike on all ranks of one model: the ops and the types and shapes of what they give.

    Numbers are left out: where a rank's rows begin is another on each.
    """
    digest = hashlib.sha256()
    for node in graph.nodes:
        value = values.tensor(node)
        shape = f"{value.dtype} {tuple(value.shape)}" if value is not None else ""
        digest.update(f"{node.op} {node.target} {shape}\n".encode())
    return digest.hexdigest()
