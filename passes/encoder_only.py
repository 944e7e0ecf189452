"""Frees layers that declare themselves bidirectional from the causal part of the mask that they are given.

It is done before anything is fused, and changes what the graph computes: only on a declaration, and reported with the
layer, the old mask and the new one. What becomes of the freed attention, an op or what the model wrote, is decided as
for any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import fx

from ..patterns import attention, values
from ..patterns.attention import Attention
from ..patterns.mask import Mask
from ..patterns.masks.band import EVERYTHING
from ..patterns.match import Findings, Match
from ..runtime.declarations import Declaration, Declarations
from . import bidirectional, freed_calls
from .edit import Edit, Refused
from .freed_calls import FusedCall, fused_call
from .kinds import ENCODER_ONLY
from .report import Site
from .rewriter import Rewriter

aten = torch.ops.aten

# Says what attention hides that has been freed, once the changed graph is recognised.
NewMask = Callable[[Findings], str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one layer.

    Args:
        site: of the report.
        new_mask: where it has been freed.
    """

    site: Site
    new_mask: NewMask | None = None

    def tell(self, findings: Findings) -> None:
        """Completes the report by what is recognised in the changed graph."""
        if self.new_mask is not None:
            params = self.site.params
            params["new_mask"] = self.new_mask(findings)
            self.site.change = f"{params['declared']}: its mask was {params['old_mask']}, and is {params['new_mask']}"


class _Layer(Protocol):
    """Attention of a layer, in whatever form."""

    @property
    def node(self) -> fx.Node: ...

    def mask(self) -> str:
        """What it hides, in words."""

    def is_causal(self) -> bool:
        """Whether it hides the future. Raises Refused where that can't be told."""

    def free(self, rewriter: Rewriter) -> NewMask:
        """Lets it see the future. Raises Refused where it can't be."""


def free(rewriter: Rewriter, findings: Findings, declarations: Declarations, *, disabled: bool) -> list[Outcome]:
    """Frees what declares itself, and says what else looks so.

    Args:
        rewriter: of the graph.
        findings: of the graph as it is.
        declarations: which layers are bidirectional.
        disabled: whether nothing is to be changed.
    """
    calls = [call for call in map(fused_call, rewriter.graph.nodes) if call is not None]
    in_calls = {node for call in calls for node in (call.node, *call.node.users)}
    layers: list[_Layer] = [_Called(call) for call in calls]
    layers += [_Recognised(match) for match in findings.of(attention.KIND) if match.node not in in_calls]
    layers.sort(key=lambda layer: layer.node)
    unseen = list(_unseen(rewriter.graph, findings, [layer.node for layer in layers], declarations))
    outcomes = [o for layer in layers for o in _outcome(layer, rewriter, declarations, disabled)]
    rewriter.settle_views()
    return [*outcomes, *unseen]


def _outcome(layer: _Layer, rewriter: Rewriter, declarations: Declarations, disabled: bool) -> Iterator[Outcome]:
    unknown = None
    try:
        causal = layer.is_causal()
    except Refused as refusal:
        causal, unknown = False, refusal
    declaration = declarations.of(layer.node, guard=causal and not disabled)
    if declaration is None:
        yield from _hint(layer, declarations) if causal else ()
    elif unknown is not None:
        yield Outcome(_site(layer, declaration, str(unknown)))
    elif causal and disabled:
        yield Outcome(_site(layer, declaration, f"{ENCODER_ONLY} is turned off by Options.disable"))
    elif causal:
        site = _site(layer, declaration, None)
        try:
            new_mask = layer.free(rewriter)
        except Refused as refusal:
            site.reason = str(refusal)
            yield Outcome(site)
        else:
            site.status = "lowered"
            yield Outcome(site, new_mask)


def _site(layer: _Layer, declaration: Declaration, reason: str | None) -> Site:
    return Site(
        ENCODER_ONLY,
        "refused",
        reason=reason,
        module=declaration.layer or values.module_path(layer.node),
        source=values.source_line(layer.node),
        params={"declared": declaration.by, "old_mask": layer.mask()},
    )


def _hint(layer: _Layer, declarations: Declarations) -> Iterator[Outcome]:
    """A near miss: a module says of itself that it isn't causal, and is given a causal mask."""
    hint = declarations.hint(layer.node)
    if hint is None:
        return
    site = _site(layer, hint, None)
    site.status = "missed"
    site.reason = (
        f"{hint.by}, and its mask is {layer.mask()}; that is no declaration, so it stays: name the layer in"
        " Options.encoder_only, or set its attn_type to ENCODER_ONLY"
    )
    yield Outcome(site)


def _unseen(
    graph: fx.Graph, findings: Findings, seen: Sequence[fx.Node], declarations: Declarations
) -> Iterator[Outcome]:
    """Near misses: layers that declare themselves, and in which no attention is recognised."""
    paths = {values.module_path(node) or "" for node in seen}
    misses = {miss.node: miss.reason for miss in findings.near_misses() if miss.kind == attention.KIND}
    found: dict[str, Site] = {}
    with_attention: set[str] = set()
    for node in graph.nodes:
        declaration = declarations.of(node) if node.op == "call_function" else None
        if declaration is None:
            continue
        if any(_is_within(path, declaration.layer) for path in paths):
            with_attention.add(declaration.by)
        reason = misses.get(node)
        if reason is None and freed_calls.writes_its_result(node):
            reason = "the form of the op that writes its result into a given tensor is left as it is"
        site = found.setdefault(declaration.by, Site(ENCODER_ONLY, "missed", module=declaration.layer or None))
        if site.reason is None or reason is not None:
            site.reason = f"{declaration.by}, and no attention is recognised there{f': {reason}' if reason else ''}"
            site.source = values.source_line(node)
    yield from (Outcome(site) for by, site in found.items() if by not in with_attention)


def _is_within(path: str, layer: str) -> bool:
    return not layer or path == layer or path.startswith(f"{layer}.")


# Calls of fused ops ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Called:
    call: FusedCall

    @property
    def node(self) -> fx.Node:
        return self.call.node

    def mask(self) -> str:
        return freed_calls.described(self.call)

    def is_causal(self) -> bool:
        return freed_calls.has_causal_part(self.call)

    def free(self, rewriter: Rewriter) -> NewMask:
        with rewriter.edit(self.node, [self.node]) as edit:
            new = freed_calls.without_causal_part(self.call, edit)
            freed_calls.put_in_place(self.call, new, edit)
        return lambda findings: freed_calls.described(new)


# What is recognised ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Recognised:
    match: Match

    @property
    def node(self) -> fx.Node:
        return self.match.node

    def mask(self) -> str:
        assert isinstance(self.match.params, Attention)
        return _described(self.match.params.mask)

    def is_causal(self) -> bool:
        return bidirectional.has_causal_part(self.match)

    def free(self, rewriter: Rewriter) -> NewMask:
        with rewriter.edit(self.node, self.match.claimed) as edit:
            freed = _freed(self.match, edit)
            edit.replace(self.node, freed)
        return partial(_described_at, freed)


def _described_at(node: fx.Node, findings: Findings) -> str:
    found = findings.at(attention.KIND, node)
    now = found.params if found is not None else None
    return _described(now.mask) if isinstance(now, Attention) else "not known"


# Their names say all that they hide.
_NAMED = frozenset(
    {"none", "causal_flag", "all_true", "causal", "causal_offset", "causal_static_cache", "decode_prefix"}
)


def _described(mask: Mask) -> str:
    """The kind, and what a query sees where that doesn't say it."""
    seen = mask.visibility
    if seen is None or mask.kind in _NAMED:
        return mask.kind
    parts = [str(seen.band)] if seen.band != EVERYTHING else []
    parts += ["no padding"] if seen.padding is not None else []
    parts += ["its own sequence"] if seen.segments is not None else []
    parts += [f"its own chunk of {seen.chunk}"] if seen.chunk is not None else []
    return f"{mask.kind} ({', '.join(parts)})"


def _freed(match: Match, edit: Edit) -> fx.Node:
    """The same attention, with what is left of its mask."""
    mask = bidirectional.without_causal_part(match, edit)
    call = attention.called(match.node)
    if call is not None:
        freed = _called_with(call, mask, edit)
        return freed if call is match.node else edit.item(freed, 0)
    return _written_out_with(match, mask if mask is not None else _nothing(match, edit), edit)


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
