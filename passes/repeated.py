"""A projection that a model computes twice, of one x by one weight, is computed once.

Serving frameworks project and look at the result, and a branch for an NPU projects again. Done before recognition, so
that all that is cut from the one and from the other comes from one node.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import fx

from ..patterns import values
from ..patterns.linear import linear
from ..patterns.preserved import original
from .edit import Refused
from .kinds import REPEATED
from .report import Site
from .rewriter import Rewriter

aten = torch.ops.aten

_PROJECTIONS = frozenset({aten.linear.default, aten.matmul.default, aten.mm.default, aten.addmm.default})


def merge(rewriter: Rewriter, *, disabled: bool) -> list[Site]:
    """Lets the first of equal projections stand for the others.

    Args:
        rewriter: of the graph.
        disabled: whether nothing is to be changed.

    Returns:
        A site for each of the others.
    """
    (output,) = rewriter.graph.find_nodes(op="output")
    results = frozenset().union(*map(values.storages, output.all_input_nodes))
    known: dict[Hashable, fx.Node] = {}
    sites = []
    for node in list(rewriter.graph.nodes):
        projection = linear(node) if original(node.target) in _PROJECTIONS else None
        if projection is None:
            continue
        key = (node.target, projection.x, projection.weight, projection.bias)
        first = known.setdefault(key, node)
        if first is node:
            continue
        site = Site(REPEATED, "refused", module=values.module_path(node), source=values.source_line(node))
        try:
            if disabled:
                raise Refused(f"{REPEATED} is turned off by Options.disable")
            if values.storages(first) & results and values.storages(node) & results:
                raise Refused("both are results of the graph, and each has memory of its own")
            with rewriter.edit(node, [first, node]) as edit:
                edit.replace(node, first)
        except Refused as refusal:
            site.reason = str(refusal)
            known[key] = node
        else:
            site.status = "lowered"
        sites.append(site)
    rewriter.settle_views()
    return sites
