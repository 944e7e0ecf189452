"""What a user expects to be fused, and what of it is not: with the reasons of the sites that fell short."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import fx

from .report import Report, Site
from .views.table import places

aten = torch.ops.aten

# A graph with none of these is glue: embeddings, sampling, what stands between two breaks of the graph.
_PRODUCTS = frozenset(
    {
        aten.mm,
        aten.bmm,
        aten.addmm,
        aten.baddbmm,
        aten.matmul,
        aten.linear,
        aten.convolution,
        aten.scaled_dot_product_attention,
    }
)


class ExpectationError(RuntimeError):
    """Fewer sites became ops than `Options.expect` says."""


def unmet(report: Report, graph: fx.Graph, expect: Mapping[str, int]) -> list[str]:
    """A sentence for each kind of which fewer sites became an op than are expected, with all that fell short.

    A graph is held to what is expected where something is recognised in it, or nearly, or it multiplies matrices.

    Args:
        report: of the graph.
        graph: before or after fusion.
        expect: how many sites of each kind become ops, on their own or as parts of larger ones.
    """
    if not report.sites and not any(getattr(n.target, "overloadpacket", None) in _PRODUCTS for n in graph.nodes):
        return []
    found = []
    for kind, count in expect.items():
        sites = [site for site in report.sites if site.kind == kind]
        lowered = sum(site.status == "lowered" for site in sites)
        if lowered < count:
            nothing = "nothing else in the graph is nearly that" if sites else "nothing in the graph is nearly that"
            told = "".join(f"\n  {line}" for line in _fallen_short(sites)) or f"\n  {nothing}"
            found.append(f"{lowered} of the {count} {kind} expected became ops:{told}")
    return found


def lacking(report: Report) -> dict[str, str]:
    """By kind, why none of its sites became an op, where it is the machine that has none."""
    by_kind: dict[str, list[Site]] = {}
    for site in report.sites:
        if site.status != "missed":
            by_kind.setdefault(site.kind, []).append(site)
    return {
        kind: f"{kind}: {len(sites)} recognised, and no op for them here: {sites[0].reason}"
        for kind, sites in by_kind.items()
        if all(site.is_lacking for site in sites)
    }


def _fallen_short(sites: Iterable[Site]) -> Iterator[str]:
    modules: dict[tuple[str, str], list[str]] = {}
    for site in sites:
        if site.status != "lowered":
            modules.setdefault((site.status, site.reason or ""), []).append(site.where)
    for (status, reason), found in modules.items():
        what = "refused" if status == "refused" else "nearly one"
        yield f"{len(found)} {what}, in {', '.join(places(found).splitlines())}: {reason}"
