"""Rotary position embedding:  y = x * cos + rotate(x) * sin.

However it is spelled (rotate_half by slices or chunks, halves computed apart, interleaved pairs by stack or stride or
as complex numbers, part of the axis passed through), each element reads two of x, one of them times ±cos[j], the other
times ±sin[k], and `bilinear` finds which. What the tables hold is not asked: cos is the one whose products are all
added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx

from . import values
from .bilinear import SUMS, Formula, Read, Readings, formula, read
from .canonical import Canonicaliser
from .match import Findings, Match, Miss

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
        rope_dim: how many of its first elements are rotated; the others pass.
        table_dim: length of the last axis of cos and sin: rope_dim, or rope_dim / 2 where each pair shares one column.
        is_complex: whether cos and sin are the parts of one complex table.
        compute_dtype: type of the products; of their parts, where they are complex.
        dtype: type of the result.
    """

    style: Style
    backward: bool
    head_dim: int
    rope_dim: int
    table_dim: int
    is_complex: bool
    compute_dtype: torch.dtype
    dtype: torch.dtype

    def public(self) -> dict[str, Any]:
        return {
            "style": self.style,
            "backward": self.backward,
            "head_dim": self.head_dim,
            "rope_dim": self.rope_dim,
            "dtype": self.dtype,
        }


def reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, p: Rope) -> torch.Tensor:
    """The spelling that `p` was read from, in plain torch: equal to it bit for bit in eager execution.

    Args:
        x: [..., head_dim].
        cos: [..., table_dim], broadcast against x; the complex table itself where `p.is_complex`.
        sin: likewise.
        p: a recognised spelling.
    """
    rotated, passed = x[..., : p.rope_dim].to(p.compute_dtype), x[..., p.rope_dim :]
    if p.is_complex:
        pairs = torch.view_as_complex(rotated.reshape(*rotated.shape[:-1], -1, 2))
        y = torch.view_as_real(pairs * (cos.conj() if p.backward else cos)).flatten(-2)
    else:
        y = _rotate(rotated, cos, sin, p)
    y = y.to(p.dtype)
    return torch.cat((y, passed.to(p.dtype).expand(*y.shape[:-1], -1)), -1) if passed.shape[-1] else y


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, p: Rope) -> torch.Tensor:
    first, second = x.chunk(2, -1) if p.style == "half" else (x[..., ::2], x[..., 1::2])
    if p.table_dim != p.rope_dim:
        tables = [(cos, sin), (cos, sin)]
    elif p.style == "interleave":
        tables = [(cos[..., ::2], sin[..., ::2]), (cos[..., 1::2], sin[..., 1::2])]
    else:
        half = p.rope_dim // 2
        tables = [(cos[..., :half], sin[..., :half]), (cos[..., half:], sin[..., half:])]
    (cos_a, sin_a), (cos_b, sin_b) = tables
    turn = -1 if p.backward else 1
    a = first * cos_a - turn * (second * sin_a)
    b = second * cos_b + turn * (first * sin_b)
    return torch.stack((a, b), -1).flatten(-2) if p.style == "interleave" else torch.cat((a, b), -1)


def match(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | Miss | None:
    """Recognises a node as a rotation of x, or the narrowing cast of one."""
    if values.is_float_cast(node):
        return _match_cast(node, findings)
    if node.target not in _ROOTS or not values.is_float(node):
        return None
    found = formula(node, c, findings)
    if found is None:
        return None
    if values.last_dim(found.x) is None:
        return Miss(KIND, node, "the rotated axis has no static size", place=found.x)
    readings = read(found)
    return _classify(found, readings) if readings is not None else None


_ROOTS = frozenset(
    {
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.cat.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
    }
)


def _match_cast(node: fx.Node, findings: Findings) -> Match | None:
    (below,) = node.all_input_nodes
    inner = findings.at(KIND, below)
    if inner is None or not values.is_rounding(node) or any(map(values.is_rounding, inner.claimed)):
        return None  # no cast, or the second one, whose roundings would add up
    assert isinstance(inner.params, Rope)
    return Match(KIND, node, inner.inputs, replace(inner.params, dtype=values.dtype(node)), (*inner.claimed, node))


def _classify(f: Formula, readings: Readings) -> Match | Miss | None:
    """Names the rotation that the readings show, or the first element that is not one's."""
    tables = readings.tables
    cos, sin = (0, 1) if all(r is None or r.sign > 0 for r in tables[0]) else (1, 0)
    rope_dim = sum(r is not None for r in tables[cos])
    head_dim = len(readings.plain)
    if not rope_dim or rope_dim % 2:
        return None

    def miss(message: str, *details: object, matched: int) -> Miss:
        return Miss(KIND, f.root, message, details, place=f.x, matched=matched)

    if readings.plain != (*[None] * rope_dim, *range(rope_dim, head_dim)):
        return miss("the rotated elements are not the first of their axis, with the rest passed", matched=1)
    own = [r for r in tables[cos][:rope_dim] if r is not None]
    paired = [r for r in tables[sin][:rope_dim] if r is not None]
    if not len(own) == len(paired) == rope_dim or any(r.sign < 0 for r in own) or any(tables[sin][rope_dim:]):
        return None
    pairs = [(a.place, b.place, b.sign) for a, b in zip(own, paired, strict=True)]
    known = {(style, backward): _pairs(style, rope_dim, backward) for style in _STYLES for backward in (False, True)}
    found = next((name for name, wanted in known.items() if pairs == wanted), None)
    if found is None:
        nearest = max(known.values(), key=lambda wanted: sum(a == b for a, b in zip(wanted, pairs, strict=True)))
        row = next(i for i, (a, b) in enumerate(zip(nearest, pairs, strict=True)) if a != b)
        message = "element {} is {}, a rotation has {} there"
        return miss(message, row, _shown(*pairs[row]), _shown(*nearest[row]), matched=3)
    style, backward = found
    table_dim = values.last_dim(f.tables[cos])
    columns = {rope_dim: list(range(rope_dim)), rope_dim // 2: _shared(style, rope_dim)}.get(table_dim or 0)
    widths_agree = table_dim == values.last_dim(f.tables[sin])
    if table_dim is None or not widths_agree or not _columns(own) == _columns(paired) == columns:
        message = "the columns of cos and sin ({} and {} wide) are read in an order that is not known"
        return miss(message, values.last_dim(f.tables[cos]), values.last_dim(f.tables[sin]), matched=3)
    compute_dtype = _compute_dtype(f)
    if compute_dtype is None:
        return miss("a part of the rotation is rounded before the parts are added up", matched=4)
    params = Rope(style, backward, head_dim, rope_dim, table_dim, f.is_complex, compute_dtype, values.dtype(f.root))
    inputs = {"x": values.strip_widening(f.x), "cos": f.tables[cos], "sin": f.tables[sin]}
    return Match(KIND, f.root, inputs, params, f.nodes)


_STYLES: tuple[Style, ...] = ("half", "interleave", "deinterleave")


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


def _compute_dtype(f: Formula) -> torch.dtype | None:
    """The type of all products and sums, where only their results are rounded, and to the type of the root."""
    computing = {n for n in f.nodes if n in f.products or n.target in SUMS}
    before = set(computing)
    for node in reversed(f.nodes):
        if node in before:
            before.update(node.all_input_nodes)
    dtypes = {values.dtype(n).to_real() for n in computing}
    rounding = [n for n in f.nodes if values.is_rounding(n)]
    if len(dtypes) > 1 or any(n in before or values.dtype(n) != values.dtype(f.root) for n in rounding):
        return None
    return dtypes.pop()
