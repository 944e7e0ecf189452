"""What is left of a mask without its causal part.

A causal mask hides from each query the keys behind its own place. Without that, each query sees what the last one sees:
all keys but padding, and but places of a cache that nothing has been written to. A window that reaches back reaches as
far ahead then; packed sequences and chunks stay apart.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from ..patterns import values
from ..patterns.attention import Attention
from ..patterns.mask import Mask
from ..patterns.masks.integers import Linear, of_size
from ..patterns.masks.visibility import Visibility
from ..patterns.match import Match
from .edit import Edit, Refused

aten = torch.ops.aten

_TO_THE_END = 2**63 - 1


def has_causal_part(match: Match) -> bool:
    """Whether a site's mask hides keys behind the place of a query.

    Raises:
        Refused: it isn't known, or it can't be told from the rest of the mask.
    """
    p = match.params
    assert isinstance(p, Attention)
    if "a second mask" in p.traits or p.mask.visibility is None:
        reason = p.mask.reason or "there are two masks"
        raise Refused(f"the causal part of its mask ({p.mask.kind}) can't be told from the rest: {reason}")
    q_len, kv_len = _lengths(match)
    band = p.mask.visibility.band
    if band.upper is None or q_len.number == 1:
        return False
    ends_at_itself = band.upper.number in (0, None) or band.upper == kv_len - q_len
    return band.lower is None or ends_at_itself


def without_causal_part(match: Match, edit: Edit) -> fx.Node | None:
    """The mask that a site has without its causal part, of the type and sense of the one that it has.

    Args:
        match: a site whose mask has a causal part.
        edit: the rewrite of the site.

    Returns:
        A tensor that broadcasts as the old one does; None where nothing is hidden.

    Raises:
        Refused: it can't be expressed.
    """
    p = match.params
    assert isinstance(p, Attention)
    visible, mask = p.mask.visibility, match.inputs.get("mask")
    assert visible is not None
    if mask is None:
        return None  # a flag says nothing but causal
    key = ("without causal part", mask, p.hides, *_lengths(match))
    if visible.band.lower is None and visible.chunk is None and visible.segments is None:
        if visible.padding is None and _last_sees_all(visible, match):
            return None
        return edit.share(key, lambda: _last_row(mask, edit))
    return edit.share(key, lambda: _as_it_was(_visible(visible, match, edit), p.mask, mask, p.hides, edit))


def _lengths(match: Match) -> tuple[Linear, Linear]:
    """How many queries and keys there are."""
    p = match.params
    assert isinstance(p, Attention)
    query, key = (values.shape(match.inputs[name]) for name in ("query", "key"))
    return of_size(query[-2]), of_size(key[-1 if p.key_transposed else -2])


def _last_sees_all(visible: Visibility, match: Match) -> bool:
    """Whether the band of the last query is proven to end behind the last key."""
    q_len, kv_len = _lengths(match)
    assert visible.band.upper is not None
    beyond = (visible.band.upper - (kv_len - q_len)).number
    return beyond is not None and beyond >= 0


def _last_row(mask: fx.Node, edit: Edit) -> fx.Node:
    return edit.call(aten.slice.Tensor, mask, len(values.shape(mask)) - 2, -1, _TO_THE_END)


def _visible(visible: Visibility, match: Match, edit: Edit) -> fx.Node:
    """True where a query sees a key: [queries, keys], or [batch or 1, 1, queries or 1, keys]."""
    own, key = _places(visible, match, edit)
    band = visible.band
    assert band.upper is not None
    seen = []
    if band.lower is not None:
        reach = (band.upper - band.lower).number
        if reach is None:
            raise Refused(f"how far its window reaches is not known: {band}")
        seen.append(edit.call(aten.ge.Tensor, key, _plus(own, -reach, edit)))
        seen.append(edit.call(aten.le.Tensor, key, _plus(own, reach, edit)))
    if not _last_sees_all(visible, match):
        last = edit.call(aten.slice.Tensor, own, 0, -1, _TO_THE_END)
        seen.append(edit.call(aten.le.Tensor, key, last))
    if visible.chunk is not None:
        chunks = [edit.call(aten.floor_divide.default, place, visible.chunk) for place in (own, key)]
        seen.append(edit.call(aten.eq.Tensor, *chunks))
    if visible.segments is not None:
        by_query, by_key = (_unsqueezed(visible.segments, axis, edit) for axis in (-1, -2))
        seen.append(edit.call(aten.eq.Tensor, by_query, by_key))
    if visible.padding is not None:
        padding = _of_keys(visible.padding.node, edit)
        seen.append(padding if visible.padding.visible else edit.call(aten.logical_not.default, padding))
    result, *rest = seen
    for condition in rest:
        result = edit.call(aten.logical_and.default, result, condition)
    p = match.params
    assert isinstance(p, Attention)
    rank = 3 if p.merged else len(values.shape(match.inputs["query"]))
    if len(values.shape(result)) > rank:
        raise Refused(f"its padding or packed sequences are by batch, and its scores have {rank} axes")
    return result


def _places(visible: Visibility, match: Match, edit: Edit) -> tuple[fx.Node, fx.Node]:
    """The place among the keys of each query, [queries, 1], and of each key, [keys]."""
    p = match.params
    assert isinstance(p, Attention)
    q_len, kv_len = _lengths(match)
    query, key = match.inputs["query"], match.inputs["key"]
    upper = visible.band.upper
    assert upper is not None
    axes = [(node, len(values.shape(node)) - back) for node, back in ((query, 2), (key, 1 if p.key_transposed else 2))]
    rows, keys = (edit.rewriter.size(values.shape(node)[axis], node, axis) for node, axis in axes)
    value = values.tensor(query)
    assert value is not None
    own, of_keys = (edit.call(aten.arange.default, size, device=value.device) for size in (rows, keys))
    own = edit.call(aten.unsqueeze.default, own, 1)
    if upper.number is not None:
        return _plus(own, upper.number, edit), of_keys
    if upper != kv_len - q_len:
        raise Refused(f"where a query stands among the keys is known only when it runs: {visible.band}")
    return edit.call(aten.sub.Tensor, edit.call(aten.add.Tensor, own, keys), rows), of_keys


def _plus(node: fx.Node, number: int, edit: Edit) -> fx.Node:
    return edit.call(aten.add.Tensor, node, number) if number else node


def _unsqueezed(segments: fx.Node, axis: int, edit: Edit) -> fx.Node:
    """[tokens] as [tokens, 1] or [1, tokens]; [batch, tokens] as [batch, 1, tokens, 1] or [batch, 1, 1, tokens]."""
    if len(values.shape(segments)) == 2:
        segments = edit.call(aten.unsqueeze.default, segments, 1)
    return edit.call(aten.unsqueeze.default, segments, axis)


def _of_keys(padding: fx.Node, edit: Edit) -> fx.Node:
    """[keys] as it is; [batch or 1, …, keys] as [batch or 1, 1, 1, keys]."""
    rank = len(values.shape(padding))
    if rank == 1:
        return padding
    for _ in range(4 - rank):
        padding = edit.call(aten.unsqueeze.default, padding, 1)
    return padding


def _as_it_was(visible: fx.Node, was: Mask, mask: fx.Node, hides: bool, edit: Edit) -> fx.Node:
    """What is visible as a mask of the type and sense of another."""
    dtype = values.dtype(mask)
    if dtype == torch.bool:
        return edit.call(aten.logical_not.default, visible) if hides else visible
    device = {"device": mask.meta["val"].device, "dtype": dtype}
    hidden = torch.finfo(dtype).min if was.lowest else -math.inf
    numbers = [edit.call(aten.full.default, [], number, **device) for number in (0.0, hidden)]
    return edit.call(aten.where.self, visible, *numbers)
