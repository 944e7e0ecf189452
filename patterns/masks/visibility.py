"""Which keys a query sees: the structure of a mask, proven from the formula of its entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import fx

from .. import values
from .band import EVERYTHING, Axes, Band, banded, chunked, never_empty
from .entries import Entries, Index
from .formula import Formula, Holds, Zero, atoms, conjunction, conjuncts, literals, negation, substituted
from .integers import Axis, Entry, Linear, form, of_size

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Padding:
    """Which keys are padding.

    Args:
        node: a bool tensor [keys], or [batch or 1, …, keys] with axes of one between.
        visible: what it says of a key that is seen.
    """

    node: fx.Node
    visible: bool


@dataclass(frozen=True, slots=True)
class Visibility:
    """A query sees the keys of its band, chunk and segment that are no padding.

    Args:
        band: of positions.
        chunk: the size of chunks: `(query + band.upper) // chunk == key // chunk`, upper 0 if None.
        segments: integers [batch or 1, tokens] or [tokens]: query and key are in one segment where theirs are equal.
        padding: which keys are.
        every_query_sees_a_key: whether that is proven.
    """

    band: Band = EVERYTHING
    chunk: int | None = None
    segments: fx.Node | None = None
    padding: Padding | None = None
    every_query_sees_a_key: bool = False


def visibility(visible: Formula, axes: Axes, entries: Entries) -> Visibility | str:
    """Reads the structure of a formula; where it has none of these, says why not."""
    facts = entries.facts
    if facts.refutes(visible):
        return "no query sees a key"
    parts = [part for part in conjuncts(visible) if not facts.proves(part)]
    segments = next(filter(None, (_segments(part, axes, entries) for part in parts)), None)
    if segments is not None:
        parts = _in_one_segment([part for part in parts if part != segments.part], segments, entries)
    of_data = conjunction(*(part for part in parts if _is_data(part)))
    padding = _padding(of_data, axes, entries) if of_data is not True else None
    if of_data is not True and padding is None:
        given = any(isinstance(part, Holds) and part.entry.node.op == "placeholder" for part in literals(of_data))
        data = "data that is handed in," if given else "data"
        return f"it depends on {data} in another way than by keys that are padding or by packed sequences"
    positions = conjunction(*(part for part in parts if not _is_data(part)))
    band, chunk = banded(positions, axes, facts), None
    if band is None:
        band, chunk = chunked(positions, axes, facts)
    if band is None:
        return "the visible positions are no band and no chunks"
    node = segments.node if segments is not None else None
    seen = chunk is None and node is None and padding is None and never_empty(band, axes, facts)
    return Visibility(band, chunk, node, padding, seen)


def _is_data(part: Formula) -> bool:
    """Whether a formula speaks of anything but positions, sizes and single integers that are read."""
    if any(isinstance(literal, Holds) for literal in literals(part)):
        return True
    entries = (atom for atom in atoms(part) if isinstance(atom, Entry))
    by_place = any(isinstance(inner, Axis) for entry in entries for at in entry.index for inner in at.atoms())
    return by_place or depends_on(part, "batch", "head")


def depends_on(formula: Formula, *axes: str) -> bool:
    """Whether a formula speaks of one of these axes, such as "batch"."""
    return any(isinstance(atom, Axis) and atom.name in axes for atom in atoms(formula))


# Padding ---------------------------------------------------------------------------------------------------------


def _padding(of_data: Formula, axes: Axes, entries: Entries) -> Padding | None:
    """The bool tensor over batch and keys whose entries a formula is."""
    for (node, index), value in entries.known.items():
        if isinstance(value, tuple) or not _is_by_key(node, index, axes):
            continue
        for visible in (True, False):
            if of_data == (value if visible else negation(value)):
                return Padding(node, visible)
    return None


def _is_by_key(node: fx.Node, index: Index, axes: Axes) -> bool:
    """Whether an entry of a bool tensor is that of batch and key, and of nothing else."""
    if values.dtype(node) is not torch.bool:
        return False
    sizes = tuple(map(of_size, values.shape(node)))
    if (index, sizes) == ((axes.key,), (axes.kv_len,)):
        return True
    between = len(index) - 2
    return (index, sizes) in [
        ((batch, *[Linear(0)] * between, axes.key), (length, *[Linear(1)] * between, axes.kv_len))
        for batch, length in _batches(axes)
    ]


def _batches(axes: Axes) -> tuple[tuple[Linear, Linear], tuple[Linear, Linear]]:
    """The index and the size of a first axis that is the batch, or that all of the batch share."""
    return (axes.batch, axes.sizes[0]), (Linear(0), Linear(1))


# Packed sequences ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Segments:
    """The part of a formula that says that query and key are in one segment.

    Args:
        part: it.
        node: the tensor of segments, as long as the mask.
        query, key: what is read of it, perhaps as entries of a longer one.
    """

    part: Formula
    node: fx.Node
    query: Entry
    key: Entry


def _segments(part: Formula, axes: Axes, entries: Entries) -> _Segments | None:
    """Reads `segments[batch, query] == segments[batch, key]`."""
    if not isinstance(part, Zero) or part.form.constant or [c for _, c in part.form.terms] != [1, -1]:
        return None
    if axes.q_len != axes.kv_len:
        return None
    places: list[tuple[Index, Index]] = [((axes.query,), (axes.q_len,))]
    places += [((batch, axes.query), (length, axes.q_len)) for batch, length in _batches(axes)]
    for node, index in list(entries.known):
        if (index, tuple(map(of_size, values.shape(node)))) not in places:
            continue
        read = tuple(entries.at(node, (*index[:-1], at)) for at in (axes.query, axes.key))
        for (query, _), (key, _) in permutations(part.form.terms):
            is_read = read == (((True, form(query)),), ((True, form(key)),))
            if is_read and isinstance(query, Entry) and isinstance(key, Entry):
                return _Segments(part, node, query, key)
    return None


def _in_one_segment(parts: Sequence[Formula], segments: _Segments, entries: Entries) -> list[Formula]:
    """The other parts of a formula, with what is known of positions in one segment.

    A packed sequence starts where a position is not the one before it plus one; segments count those starts. So between
    two tokens of one segment positions rise by one a token: `positions[key] = positions[query] + key - query`.
    """
    positions = _counted_positions(segments.query, entries)
    if positions is None:
        return list(parts)
    of_query, of_key = (Entry(positions, entry.index) for entry in (segments.query, segments.key))
    apart = segments.key.index[-1] - segments.query.index[-1]
    return [substituted(part, {of_key: form(of_query) + apart}) for part in parts]


def _counted_positions(segment: Entry, entries: Entries) -> fx.Node | None:
    """The positions whose jumps a tensor of segments counts: `cumsum(positions[k] != positions[k - 1] + 1)`."""
    source = segment.node.args[0] if segment.node.target is aten.cumsum.default else None
    if not isinstance(source, fx.Node) or values.dtype(source) is not torch.bool:
        return None
    *batch, _ = segment.index
    if segment.node.args[1] not in (-1, len(batch)):
        return None
    length = of_size(values.shape(source)[-1])
    before = entries.facts.axis(f"before_{segment.node.name}", length - 1)
    continues = negation(entries.truth(source, (*batch, before + 1)))
    if not isinstance(continues, Zero) or len(continues.form.terms) != 2:
        return None
    (first, sign), _ = continues.form.terms
    if not isinstance(first, Entry):
        return None
    here, earlier = (form(Entry(first.node, (*batch, at))) for at in (before + 1, before))
    return first.node if (here - earlier - 1) * sign in (continues.form, -continues.form) else None
