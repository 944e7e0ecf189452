"""Rotary position embedding:  y = x * cos + rotate(x) * sin.

However it is spelled (rotate_half by slices or chunks, halves computed apart, interleaved pairs by stack or stride or
as complex numbers, part of the axis passed through), each element reads two of x, one of them times ±cos[j], the other
times ±sin[k], and `bilinear` finds which. What the tables hold is not asked: cos is the one whose products are all
added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import fx

from . import values
from .bilinear import SUMS, Formula, Read, Readings, formulas, read
from .canonical import Canonicaliser
from .match import Findings, Match, Miss
from .movement import ROW_MAJOR_VIEWS, source
from .spelling import Spelling, spell, spell_cast
from .tables import merged

KIND = "rope"
aten = torch.ops.aten

Style = Literal["half", "interleave", "deinterleave"]


@dataclass(frozen=True, slots=True)
class Rope:
    """What one spelling of the rotation fixes.

    Args:
        style: "half" pairs element i with i + rope_dim / 2 (NeoX), "interleave" 2i with 2i + 1 (GPT-J); "deinterleave"
            pairs 2i with 2i + 1 and puts them at i and i + rope_dim / 2 (DeepSeek).
        backward: whether it turns by the negative angle: y = x * cos - rotate(x) * sin.
        head_dim: length of the last axis.
        rope_dim: how many of its elements are rotated; the others pass.
        rope_start: the first of them.
        table_dim: length of the last axis of cos and sin: rope_dim, or rope_dim / 2 where each pair shares one column.
        is_complex: whether cos and sin are the parts of one complex table.
        compute_dtype: the widest type of the products; of their parts, where they are complex.
        dtype: type of the result.
        steps: all types that something is computed in or rounded to.
        spelling: the formula, over x, cos and sin; the complex table itself stands for both.
    """

    style: Style
    backward: bool
    head_dim: int
    rope_dim: int
    rope_start: int
    table_dim: int
    is_complex: bool
    compute_dtype: torch.dtype
    dtype: torch.dtype
    steps: frozenset[torch.dtype]
    spelling: Spelling = field(compare=False)

    def public(self) -> dict[str, Any]:
        return {
            "style": self.style,
            "backward": self.backward,
            "head_dim": self.head_dim,
            "rope_dim": self.rope_dim,
            "rope_start": self.rope_start,
            "dtype": self.dtype,
        }


def match(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | Miss | None:
    """Recognises a node as a rotation of x, or the narrowing cast of one."""
    if values.is_float_cast(node):
        return _match_cast(node, c, findings)
    if node.target not in ROOTS or not values.is_float(node) or _is_seen_again(node, findings):
        return None
    near: Miss | None = None
    matched: Match | None = None
    for found in formulas(node, c, findings):
        result = _match_formula(found, c)
        if isinstance(result, Match) and (matched is None or _takes_pairs_apart(result)):
            matched = result
        elif isinstance(result, Miss):
            near = near or result
    return matched or near


def _is_seen_again(node: fx.Node, findings: Findings) -> bool:
    """Whether a node is a rotation that is known, under another name: a result of its own, perhaps, in one memory."""
    if node.target not in ROW_MAJOR_VIEWS:
        return False
    below = source(node)
    return findings.at(KIND, below) is not None and values.same_shape(values.shape(node), values.shape(below))


def _takes_pairs_apart(match: Match) -> bool:
    """Whether it does in one what may also be seen as a movement of x and a rotation of halves."""
    assert isinstance(match.params, Rope)
    return match.params.style == "deinterleave"


def _match_formula(found: Formula, c: Canonicaliser) -> Match | Miss | None:
    if values.last_dim(found.x) is None:
        return Miss(KIND, found.root, "the rotated axis has no static size", place=found.x)
    readings = read(found, c)
    if readings is None:
        return None
    result = _classify(found, _Tables(found.tables, readings, ()), c) if len(found.tables) == 2 else None
    if result is None or (isinstance(result, Match) and _has_column_pairs(result)):
        # What the tables are cut or repeated from says more: one table for both halves, one column for each pair.
        whole = _Tables(*merged(found, readings, c))
        narrow = _classify(found, whole, c) if len(whole.nodes) == 2 and whole.nodes != found.tables else None
        if isinstance(narrow, Match) and (result is None or not _has_column_pairs(narrow)):
            return narrow
    return result


@dataclass(frozen=True, slots=True)
class _Tables:
    """The two tables, what is read of each, and the nodes between them and the products."""

    nodes: tuple[fx.Node, ...]
    readings: Readings
    path: tuple[fx.Node, ...]


def _has_column_pairs(match: Match) -> bool:
    """Whether both elements of a pair of neighbours have a column of their own."""
    p = match.params
    assert isinstance(p, Rope)
    return p.style == "interleave" and p.table_dim == p.rope_dim


ROOTS = frozenset(
    {
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.cat.default,
        aten.slice_scatter.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
    }
)


def _match_cast(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | None:
    (below,) = node.all_input_nodes
    inner = findings.at(KIND, below)
    if inner is None or not values.is_rounding(node) or values.is_rounding(below):
        return None  # no cast, or the second one, whose roundings would add up
    p = inner.params
    assert isinstance(p, Rope)
    dtype = values.dtype(node)
    params = replace(p, dtype=dtype, steps=p.steps | {dtype}, spelling=spell_cast(node, p.spelling, c))
    return Match(KIND, node, inner.inputs, params, (*inner.claimed, node))


def _classify(f: Formula, of: _Tables, c: Canonicaliser) -> Match | Miss | None:
    """Names the rotation that the readings show, or the first element that is not one's."""
    readings = of.readings
    tables = readings.tables
    cos, sin = (0, 1) if all(r is None or r.sign > 0 for r in tables[0]) else (1, 0)
    rope_dim = sum(r is not None for r in tables[cos])
    head_dim = len(readings.plain)
    if not rope_dim or rope_dim % 2:
        return None

    def miss(message: str, *details: object, matched: int) -> Miss:
        return Miss(KIND, f.root, message, details, place=f.x, matched=matched)

    start = next(i for i, r in enumerate(tables[cos]) if r is not None)
    end = start + rope_dim
    if readings.plain != (*range(start), *[None] * rope_dim, *range(end, head_dim)):
        return miss("the rotated elements are not side by side, with the rest passed as they are", matched=1)
    own = [r for r in tables[cos][start:end] if r is not None]
    paired = [r for r in tables[sin][start:end] if r is not None]
    passed = (*tables[sin][:start], *tables[sin][end:])
    if not len(own) == len(paired) == rope_dim or any(r.sign < 0 for r in own) or any(passed):
        return None
    pairs = [(a.place - start, b.place - start, b.sign) for a, b in zip(own, paired, strict=True)]
    known = _known_pairs(rope_dim)
    found = next((name for name, wanted in known.items() if pairs == wanted), None)
    if found is None:
        nearest = max(known.values(), key=lambda wanted: sum(a == b for a, b in zip(wanted, pairs, strict=True)))
        row = next(i for i, (a, b) in enumerate(zip(nearest, pairs, strict=True)) if a != b)
        message = "element {} is {}, a rotation has {} there"
        return miss(message, row, _shown(*pairs[row]), _shown(*nearest[row]), matched=3)
    style, backward = found
    widths = values.last_dim(of.nodes[cos]), values.last_dim(of.nodes[sin])
    table_dim = widths[0]
    columns = {rope_dim: list(range(rope_dim)), rope_dim // 2: _shared(style, rope_dim)}.get(table_dim or 0)
    if table_dim is None or widths[1] != table_dim or not _columns(own) == _columns(paired) == columns:
        message = "the columns of cos and sin ({} and {} wide) are read in an order that is not known"
        return miss(message, *widths, matched=3)
    inputs = {"x": values.strip_widening(f.x), "cos": c.first(of.nodes[cos]), "sin": c.first(of.nodes[sin])}
    spelling = spell(f.root, inputs, c)
    if spelling is None:
        return miss("x or a table is computed twice, and not alike", matched=4)
    computing = [n for n in f.nodes if n in f.products or n.target in SUMS]
    dtypes = [values.dtype(n).to_real() for n in computing]
    rounding = [n for n in f.nodes if values.is_rounding(n) or n.target is aten.copy.default]
    steps = frozenset((*dtypes, *map(values.dtype, rounding)))
    compute_dtype = max(dtypes, key=lambda dtype: dtype.itemsize)
    dtype = values.dtype(f.root)
    params = Rope(
        style=style,
        backward=backward,
        head_dim=head_dim,
        rope_dim=rope_dim,
        rope_start=start,
        table_dim=table_dim,
        is_complex=f.is_complex,
        compute_dtype=compute_dtype,
        dtype=dtype,
        steps=steps,
        spelling=spelling,
    )
    return Match(KIND, f.root, inputs, params, tuple(sorted({*f.nodes, *of.path})))


_STYLES: tuple[Style, ...] = ("half", "interleave", "deinterleave")


@cache
def _known_pairs(rope_dim: int) -> Mapping[tuple[Style, bool], list[tuple[int, int, int]]]:
    """What each rotation reads, by its style and whether it turns backward."""
    return {(style, backward): _pairs(style, rope_dim, backward) for style in _STYLES for backward in (False, True)}


def _pairs(style: Style, rope_dim: int, backward: bool) -> list[tuple[int, int, int]]:
    """For each element: which one it reads times cos, which times sin, and the sign of the latter."""
    half = rope_dim // 2
    turn = -1 if backward else 1
    if style == "half":
        return [(i, i + half, -turn) if i < half else (i, i - half, turn) for i in range(rope_dim)]
    if style == "interleave":
        return [(i, i + 1, -turn) if i % 2 == 0 else (i, i - 1, turn) for i in range(rope_dim)]
    first = [(2 * i, 2 * i + 1, -turn) for i in range(half)]
    return [*first, *((2 * i + 1, 2 * i, turn) for i in range(half))]


def _shared(style: Style, rope_dim: int) -> list[int]:
    """The column of each element where a pair shares one."""
    return [i // 2 if style == "interleave" else i % (rope_dim // 2) for i in range(rope_dim)]


def _columns(reads: Sequence[Read]) -> list[int]:
    return [r.column for r in reads]


def _shown(own: int, paired: int, sign: int) -> str:
    return f"x[{own}] * cos {'+' if sign > 0 else '-'} x[{paired}] * sin"
