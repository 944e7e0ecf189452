"""Frees layers that declare themselves bidirectional from the causal part of the mask that they are given.

It is done before anything is fused, and changes what the graph computes: only on a declaration, and reported with the
layer, the old mask and the new one. What becomes of the freed attention, an op or what the model wrote, is decided as
for any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..patterns import attention, values
from ..patterns.attention import Attention
from ..patterns.mask import Mask
from ..patterns.match import Findings, Match
from ..patterns.preserved import original
from ..runtime.declarations import Declaration, Declarations
from ..runtime.options import ENCODER_ONLY
from .bidirectional import has_causal_part, without_causal_part
from .report import Site
from .rewriter import Edit, Refused, Rewriter

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Freed:
    """A layer that has been freed, or has not been.

    Args:
        site: of the report.
        node: the result of its attention now.
    """

    site: Site
    node: fx.Node | None = None

    def tell(self, findings: Findings) -> None:
        """Completes the report with the mask that recognition finds now."""
        if self.node is None:
            return
        found = findings.at(attention.KIND, self.node)
        now = found.params if found is not None else None
        params = self.site.params
        params["new_mask"] = _described(now.mask) if isinstance(now, Attention) else "other"
        self.site.change = f"{params['declared']}: its mask was {params['old_mask']}, and is {params['new_mask']}"


def free(rewriter: Rewriter, findings: Findings, declarations: Declarations, *, disabled: bool) -> list[Freed]:
    """Frees what declares itself, and says what else looks so.

    Args:
        rewriter: of the graph.
        findings: of the graph as it is.
        declarations: which layers are bidirectional.
        disabled: whether nothing is to be changed.
    """
    unseen = list(_unseen(rewriter.graph, findings, declarations))
    return [*_free(rewriter, findings, declarations, disabled), *unseen]


def _free(rewriter: Rewriter, findings: Findings, declarations: Declarations, disabled: bool) -> Iterator[Freed]:
    for match in findings.of(attention.KIND):
        try:
            causal, unknown = has_causal_part(match), None
        except Refused as refusal:
            causal, unknown = False, refusal
        declaration = declarations.of(match.node, guard=causal and not disabled)
        if declaration is None:
            yield from _hint(match, declarations) if causal else ()
            continue
        if not causal and unknown is None:
            continue
        site = _site(match, declaration)
        try:
            if unknown is not None:
                raise unknown
            if disabled:
                raise Refused(f"{ENCODER_ONLY} is turned off by Options.disable")
            with rewriter.edit(match.node, match.claimed) as edit:
                _freed(match, edit)
        except Refused as refusal:
            site.reason = str(refusal)
            yield Freed(site)
        else:
            site.status = "lowered"
            yield Freed(site, rewriter.current(match.node))


def _unseen(graph: fx.Graph, findings: Findings, declarations: Declarations) -> Iterator[Freed]:
    """Near misses: layers that declare themselves, and in which no attention is recognised."""
    recognised = {values.module_path(match.node) or "" for match in findings.of(attention.KIND)}
    misses = {miss.node: miss.reason for miss in findings.near_misses() if miss.kind == attention.KIND}
    found: dict[str, Site] = {}
    seen: set[str] = set()
    for node in graph.nodes:
        declaration = declarations.of(node) if node.op == "call_function" else None
        if declaration is None:
            continue
        if any(_is_within(path, declaration.layer) for path in recognised):
            seen.add(declaration.by)
        site = found.setdefault(declaration.by, Site(ENCODER_ONLY, "missed", module=declaration.layer or None))
        if site.reason is None or node in misses:
            differs = f": {misses[node]}" if node in misses else ""
            site.reason = f"{declaration.by}, and no attention is recognised there{differs}"
            site.source = values.source_line(node)
    yield from (Freed(site) for by, site in found.items() if by not in seen)


def _is_within(path: str, layer: str) -> bool:
    return not layer or path == layer or path.startswith(f"{layer}.")


def _site(match: Match, declaration: Declaration) -> Site:
    p = match.params
    assert isinstance(p, Attention)
    return Site(
        ENCODER_ONLY,
        "refused",
        module=declaration.layer or values.module_path(match.node),
        source=values.source_line(match.node),
        params={"declared": declaration.by, "old_mask": _described(p.mask)},
    )


def _described(mask: Mask) -> str:
    band = mask.visibility.band if mask.visibility is not None else None
    return f"{mask.kind} ({band})" if band is not None and band.lower is not None else mask.kind


def _hint(match: Match, declarations: Declarations) -> Iterator[Freed]:
    """A near miss: a module says of itself that it isn't causal, and is given a causal mask."""
    hint = declarations.hint(match.node)
    if hint is None:
        return
    site = _site(match, hint)
    site.status = "missed"
    site.reason = (
        f"{hint.by}, and its mask is {site.params['old_mask']}; that is no declaration, so it stays: name the layer in"
        " Options.encoder_only, or set its attn_type to ENCODER_ONLY"
    )
    yield Freed(site)


# The graph ------------------------------------------------------------------------------------------------------------


def _freed(match: Match, edit: Edit) -> None:
    """Lets attention with what is left of its mask stand for a site."""
    mask = without_causal_part(match, edit)
    if original(match.node.target) is aten.scaled_dot_product_attention.default:
        new = _called_with(match.node, mask, edit)
    else:
        new = _written_out_with(match, mask if mask is not None else _nothing(match, edit), edit)
    edit.replace(match.node, new)


def _called_with(node: fx.Node, mask: fx.Node | None, edit: Edit) -> fx.Node:
    """The call, with another mask and no flag."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]  # an OpOverload
    given: dict[str, Any] = dict(zip((a.name for a in schema), node.args, strict=False)) | dict(node.kwargs)
    given.pop("is_causal", None)
    given.pop("attn_mask", None)
    if mask is not None:
        given["attn_mask"] = mask
    query, key, value = (given.pop(name) for name in ("query", "key", "value"))
    assert callable(node.target)
    return edit.call(node.target, query, key, value, **given)


def _nothing(match: Match, edit: Edit) -> fx.Node:
    """A mask that hides nothing, of the type and sense of the one that a site has."""
    p = match.params
    assert isinstance(p, Attention)
    mask = values.tensor(match.inputs["mask"])
    assert mask is not None
    number = not p.hides if mask.dtype == torch.bool else 0.0
    return edit.call(aten.full.default, [1] * mask.dim(), number, dtype=mask.dtype, device=mask.device)


def _written_out_with(match: Match, mask: fx.Node, edit: Edit) -> fx.Node:
    """A copy of what a site computes, with another mask. What other sites share with it stays theirs."""
    instead = {match.inputs["mask"]: mask}
    for node in match.claimed:
        if any(n in instead for n in node.all_input_nodes):
            args: Any = fx.map_arg(node.args, lambda n: instead.get(n, n))
            kwargs: Any = fx.map_arg(node.kwargs, lambda n: instead.get(n, n))
            assert callable(node.target)
            instead[node] = edit.call(node.target, *args, **kwargs)
    return instead[match.node]
