"""Attention masks as functions of (batch, head, query, key): what kind of mask one is, proven for every size.

A mask's entry is worked out as a formula (`entries`). A kind is given only where the formula is proven to be equivalent
to the kind's own, for all indices, sizes and integers read at run time (`band`, `visibility`). A mask of a fixed shape
that is computed from nothing is looked at as it is (`constant_mask`). Anything else is "bias" or "other": nothing is
assumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ..runtime.sizes import Size, known_equal, static_int
from . import values
from .cone import walk
from .masks import creation, elementwise, indexing, joining
from .masks.band import Axes, Band, never_empty
from .masks.constant_mask import band_of, constant
from .masks.entries import Entries
from .masks.facts import Facts
from .masks.formula import Formula, at_least_zero, disjunction, negation, substituted
from .masks.integers import Entry, Linear, of_size
from .masks.visibility import Visibility, depends_on, visibility

_RULES = {**creation.RULES, **elementwise.RULES, **indexing.RULES, **joining.RULES}

Kind = Literal[
    "none",
    "causal_flag",
    "all_true",
    "causal",
    "causal_offset",
    "causal_static_cache",
    "decode_prefix",
    "sliding_causal",
    "sliding_bidirectional",
    "chunked",
    "packed",
    "key_padding",
    "per_batch_or_head",
    "bias",
    "other",
]


@dataclass(frozen=True, slots=True)
class Mask:
    """What is known of one mask.

    Args:
        kind: its class.

            - "none": there is no mask; "causal_flag": causal, top-left, by the flag of the op.
            - "all_true": every query sees every key.
            - "causal": `key <= query`, as many keys as queries.
            - "causal_static_cache": `key <= query`, other numbers of keys and queries.
            - "causal_offset": `key <= query + offset`, the offset not zero or not known.
            - "decode_prefix": one query, that sees the first keys.
            - "sliding_causal", "sliding_bidirectional": a band with two bounds, up to the query's own place or beyond.
            - "chunked": query and key are in one chunk of positions.
            - "packed", "key_padding": segments or padding that all of the batch share.
            - "per_batch_or_head": it differs by batch or head; padding and segments of each are such masks.
            - "bias": a float mask that adds other numbers than zero and those that hide a key.
            - "other": none of these.
        visibility: which keys a query sees, exactly; None where that is not known.
        reason: why it is not known.
        lowest: whether a float mask hides keys by the lowest number of its type and not only by -inf: then a query that
            sees no key attends to all alike, and gets no NaN.
        only_hides: whether a float mask is proven to add nothing but 0 and what hides a key.
        alike_for_all_heads: whether it is proven to hide the same from all heads of a batch.
    """

    kind: Kind
    visibility: Visibility | None = None
    reason: str = ""
    lowest: bool = False
    only_hides: bool = False
    alike_for_all_heads: bool = False

    @property
    def kinds(self) -> frozenset[Kind]:
        """The kind, and what calls show too: the offset of a cache is read at run time, and zero while it is empty."""
        upper = self.visibility.band.upper if self.visibility is not None else None
        is_read = upper is not None and any(isinstance(atom, Entry) for atom in upper.atoms())
        empty: tuple[Kind, ...] = ("causal_static_cache",) if self.kind == "causal_offset" and is_read else ()
        return frozenset((self.kind, *empty))


def lowest(dtype: torch.dtype) -> float:
    """What hides a key where it is added to a score or stands in its place: the lowest number, also of bfloat16."""
    return max(torch.finfo(dtype).min, torch.finfo(torch.bfloat16).min)


NO_MASK = Mask("none", Visibility(every_query_sees_a_key=True))
CAUSAL_FLAG = Mask("causal_flag", Visibility(Band(None, Linear(0)), every_query_sees_a_key=True))


class Masks:
    """The masks of one graph, each analysed once however many layers share it.

    Args:
        numbers: equal for nodes of equal value; masks that each layer works out anew are one mask.
    """

    def __init__(self, numbers: Mapping[fx.Node, int]) -> None:
        self._numbers = numbers
        self._known: dict[tuple[int, Linear, Linear, bool], Mask] = {}

    def of(self, mask: fx.Node, q_len: Size, kv_len: Size, *, hides: bool = False) -> Mask:
        """What kind of mask a node is, for so many queries and keys. See `classify`."""
        key = (self._numbers[mask], of_size(q_len), of_size(kv_len), hides)
        if key not in self._known:
            self._known[key] = classify(mask, q_len, kv_len, hides=hides)
        return self._known[key]


def classify(mask: fx.Node, q_len: Size, kv_len: Size, *, hides: bool = False) -> Mask:
    """Works out what kind of mask a tensor is. No guard is installed, and the graph is not touched.

    Args:
        mask: bool (True: seen) or float (added to the scores), broadcasts to [batch, heads, q_len, kv_len].
        q_len: number of queries.
        kv_len: number of keys.
        hides: whether True hides a key, in a bool mask.
    """
    shape = values.shape(mask)
    if len(shape) > 4:
        return Mask("other", reason=f"a mask has at most 4 axes, this one has {len(shape)}")
    for size, length in zip(reversed(shape), (kv_len, q_len), strict=False):
        if static_int(size) != 1 and not known_equal(size, length):
            return Mask("other", reason=f"an axis of the mask has size {size}, and there are {length} tokens along it")
    if _is_written(mask):
        return Mask("other", reason="what it is computed from is written to in the graph")
    batch, head = map(of_size, ((1,) * 4 + shape)[-4:-2])
    entries = Entries(_RULES, Facts())
    axes = Axes.of((batch, head, of_size(q_len), of_size(kv_len)), entries.facts)
    with unset_fake_temporarily():  # constants are computed
        _assume_places(mask.graph, entries)
        found = _by_formula(mask, axes, entries, hides)
        return found if found.visibility is not None else _by_value(mask, axes, entries.facts, hides) or found


def of_band(band: Band, q_len: Size, kv_len: Size) -> Mask:
    """The mask that hides from so many queries all of so many keys but a band."""
    facts = Facts()
    axes = Axes.of((Linear(1), Linear(1), of_size(q_len), of_size(kv_len)), facts)
    return _named(Visibility(band, every_query_sees_a_key=never_empty(band, axes, facts)), axes, facts, False)


def _assume_places(graph: fx.Graph, entries: Entries) -> None:
    """What the writes of a graph say of integers that it reads: an index outside its tensor is an error.

    So is the length of a cache known to be no less than zero where the new keys are copied behind it.
    """
    writes = graph.find_nodes(op="call_function", target=torch.ops.aten.index_copy.default, sort=False)
    for index, size in {(node.args[2], of_size(values.shape(node)[node.args[1]])) for node in writes}:
        (length,) = map(of_size, values.shape(index) or (1,))
        for place in (Linear(0), length - 1):
            cases = entries.cases(index, (place,) if values.shape(index) else ())
            for _, number in cases if len(cases) == 1 else ():
                if isinstance(number, Linear):
                    entries.facts.assume(number)
                    entries.facts.assume(size - 1 - number)


def _is_written(mask: fx.Node) -> bool:
    """Whether a tensor that the mask is computed from is written to before the mask is: then it has two values."""
    written = {
        storage
        for node in takewhile(lambda node: node is not mask, mask.graph.nodes)
        if getattr(getattr(node.target, "_schema", None), "is_mutable", False)
        for storage in values.storages(node.all_input_nodes)
    }
    cone = walk(mask, lambda node: False, limit=len(mask.graph.nodes)) if written else None
    return cone is not None and bool(written & values.storages((*cone.nodes, *cone.inputs)))


def _by_formula(mask: fx.Node, axes: Axes, entries: Entries, hides: bool) -> Mask:
    index = (axes.batch, axes.head, axes.query, axes.key)[4 - len(values.shape(mask)) :]
    if values.dtype(mask) is torch.bool:
        truth = entries.truth(mask, index)
        return _of_formula(negation(truth) if hides else truth, axes, entries, by_lowest=False)
    seen: Formula = False
    by_lowest = False
    for case, found in entries.cases(mask, index):
        number = found.number if isinstance(found, Linear) else found
        if number == 0:
            seen = disjunction(seen, case)
        elif number is None or number > lowest(values.dtype(mask)):
            return Mask("bias", reason=f"it adds {number or 'numbers that are not known'}, and not only 0 and -inf")
        elif number != -math.inf:
            by_lowest = True
    return replace(_of_formula(seen, axes, entries, by_lowest), only_hides=True)


def _of_formula(visible: Formula, axes: Axes, entries: Entries, by_lowest: bool) -> Mask:
    for axis in (axes.batch, axes.head):
        first = substituted(visible, {atom: Linear(0) for atom, _ in axis.terms})
        if entries.facts.equivalent(visible, first):
            visible = first  # the same for all of them
    found = visibility(visible, axes, entries)
    alike = not depends_on(visible, "head")
    if depends_on(visible, "batch", "head"):
        seen, reason = (None, found) if isinstance(found, str) else (found, "")
        return Mask("per_batch_or_head", seen, reason, by_lowest, alike_for_all_heads=alike)
    if isinstance(found, str):
        return Mask("other", None, found, by_lowest, alike_for_all_heads=alike)
    return replace(_named(found, axes, entries.facts, by_lowest), alike_for_all_heads=alike)


def _named(found: Visibility, axes: Axes, facts: Facts, by_lowest: bool) -> Mask:
    """The mask, all of whose batch and heads see the same."""
    if found.padding is not None:
        return Mask("key_padding", found, "", by_lowest)
    if found.segments is not None:
        return Mask("packed", found, "", by_lowest)
    if found.chunk is not None:
        return Mask("chunked", found, "", by_lowest)
    kind = _band_kind(found.band, axes, facts)
    reason = f"a query sees the keys with {found.band}" if kind == "other" else ""
    return Mask(kind, found, reason, by_lowest)


def _band_kind(band: Band, axes: Axes, facts: Facts) -> Kind:
    lower, upper = band.lower, band.upper
    if upper is None:
        return "all_true" if lower is None else "other"
    if axes.q_len.number == 1:
        return "decode_prefix" if lower is None else "sliding_causal"
    if facts.proves(at_least_zero(-upper - 1)):
        return "other"  # the first queries see no key
    surplus = axes.kv_len - axes.q_len
    if lower is None and upper.number == 0:
        return "causal" if surplus.number == 0 else "causal_static_cache"
    if lower is None:
        return "causal_offset"
    up_to_itself = upper.number in (0, None) or upper == surplus
    return "sliding_causal" if up_to_itself else "sliding_bidirectional"


def _by_value(mask: fx.Node, axes: Axes, facts: Facts, hides: bool) -> Mask | None:
    """The mask as its value shows it, where that is known and is a band."""
    q_len, kv_len = axes.q_len.number, axes.kv_len.number
    value = constant(mask) if q_len is not None and kv_len is not None else None
    if value is None or q_len is None or kv_len is None:
        return None
    by_lowest = False
    if value.dtype is not torch.bool:
        is_low = value <= lowest(value.dtype)
        by_lowest = bool((is_low & (value != -math.inf)).any())
        if not (is_low | (value == 0)).all():
            return None
        value = value == 0
    elif hides:
        value = ~value
    tables = value.expand(*value.shape[:-2], q_len, kv_len).reshape(-1, q_len, kv_len)
    if not (tables == tables[0]).all():
        return Mask("per_batch_or_head", None, "it is a constant that differs by batch or head", by_lowest)
    band = band_of(tables[0])
    if band is None:
        return None
    seen = Visibility(band, every_query_sees_a_key=bool(tables[0].any(-1).all()))
    return replace(_named(seen, axes, facts, by_lowest), only_hides=True, alike_for_all_heads=True)
