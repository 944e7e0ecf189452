"""Rotary position embedding:  y = x * cos + rotate(x) * sin.

However it is spelled (rotate_half by slices or chunks, halves computed apart, interleaved pairs by stack or stride,
part of the axis passed through), the result is linear in x with one coefficient from each of two tables. So the formula
is found by running it on whole numbers that name their own place: every output element must read exactly two elements
of x, one of them times ±cos[j], the other times ±sin[k]. What the tables hold is not asked: the one that multiplies an
element by itself is cos.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from ..runtime.sizes import known_equal, static_int
from . import values
from .canonical import Canonicaliser
from .match import Findings, Match, Miss
from .movement import Sizes, concrete, is_movement, source
from .term import Term

KIND = "rope"
aten = torch.ops.aten

Style = Literal["half", "interleave"]


@dataclass(frozen=True, slots=True)
class Rope:
    """What one spelling of the rotation fixes.

    Args:
        style: "half" pairs element i with i + rope_dim / 2 (NeoX), "interleave" 2i with 2i + 1 (GPT-J).
        head_dim: length of the last axis.
        rope_dim: how many of its first elements are rotated; the others pass.
        table_dim: length of the last axis of cos and sin: rope_dim, or rope_dim / 2 where each pair shares one column.
        compute_dtype: type of the products.
        dtype: type of the result.
    """

    style: Style
    head_dim: int
    rope_dim: int
    table_dim: int
    compute_dtype: torch.dtype
    dtype: torch.dtype

    def public(self) -> dict[str, Any]:
        return {"style": self.style, "head_dim": self.head_dim, "rope_dim": self.rope_dim, "dtype": self.dtype}


def reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, p: Rope) -> torch.Tensor:
    """The spelling that `p` was read from, in plain torch: equal to it bit for bit in eager execution.

    Args:
        x: [..., head_dim].
        cos: [..., table_dim], broadcast against x.
        sin: likewise.
        p: a recognised spelling.
    """
    wide = x.to(p.compute_dtype)
    rotated, passed = wide[..., : p.rope_dim], x[..., p.rope_dim :]
    if p.style == "half":
        first, second = rotated.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    else:
        first, second = rotated[..., ::2], rotated[..., 1::2]
        turned = torch.stack((-second, first), -1).flatten(-2)
    if p.table_dim != p.rope_dim:
        cos, sin = (torch.cat((t, t), -1) if p.style == "half" else t.repeat_interleave(2, -1) for t in (cos, sin))
    y = (rotated * cos + turned * sin).to(p.dtype)
    return torch.cat((y, passed.expand(*y.shape[:-1], -1)), -1) if passed.shape[-1] else y


def match(node: fx.Node, c: Canonicaliser, findings: Findings) -> Match | Miss | None:
    """Recognises a node as a rotation of x, or the narrowing cast of one."""
    if values.is_float_cast(node):
        return _match_cast(node, findings)
    if node.target not in _ROOTS or not values.is_float(node):
        return None
    combination = _combination(node, findings)
    if combination is None:
        return None
    candidate = _roles(node, combination, c)
    return _probe(node, candidate) if candidate is not None else None


def _match_cast(node: fx.Node, findings: Findings) -> Match | None:
    (below,) = node.all_input_nodes
    inner = findings.at(KIND, below)
    if inner is None or values.is_widening(values.dtype(below), values.dtype(node)):
        return None
    p = inner.params
    assert isinstance(p, Rope)
    params = Rope(p.style, p.head_dim, p.rope_dim, p.table_dim, p.compute_dtype, values.dtype(node))
    return Match(KIND, node, inner.inputs, params, (*inner.claimed, node))


# The formula: products of x and a table, added up and moved -------------------------------------------------------

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
_ADDITIVE = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten.cat.default, aten.stack.default})
_LIMIT = 40


def _is_linear(node: fx.Node) -> bool:
    return node.target in _ADDITIVE or is_movement(node) or values.is_float_cast(node)


@dataclass(frozen=True, slots=True)
class _Combination:
    """A sum of products, as nodes: what lies between the root and the products, and the terms that are no product."""

    nodes: frozenset[fx.Node]
    products: tuple[fx.Node, ...]
    plain: tuple[fx.Node, ...]


def _combination(root: fx.Node, findings: Findings) -> _Combination | None:
    """Walks from the root down to products of two tensors; None where there are none near."""
    nodes: set[fx.Node] = set()
    products: dict[fx.Node, None] = {}
    plain: dict[fx.Node, None] = {}
    pending = [root]
    while pending:
        node = pending.pop()
        if node in nodes or node in products or node in plain:
            continue
        if findings.at("rms_norm", node) is not None:
            plain[node] = None
        elif node.target is aten.mul.Tensor and len(node.all_input_nodes) == 2:
            products[node] = None
        elif _is_linear(node):
            nodes.add(node)
            pending.extend(n for n in node.all_input_nodes if not isinstance(n.meta.get("val"), torch.SymInt))
        else:
            plain[node] = None
        if len(nodes) + len(products) > _LIMIT:
            return None
    if len(products) < 2 or not nodes:
        return None
    return _Combination(frozenset(nodes), tuple(sorted(products)), tuple(sorted(plain)))


def _moved_from(node: fx.Node) -> set[fx.Node]:
    """The node and all that it is moved, negated or cast from."""
    seen: set[fx.Node] = set()
    pending = [node]
    while pending and len(seen) <= _LIMIT:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        if is_movement(current) or values.is_float_cast(current) or current.target in (
            aten.neg.default,
            aten.cat.default,
            aten.stack.default,
        ):
            pending.extend(n for n in current.all_input_nodes if not isinstance(n.meta.get("val"), torch.SymInt))
    return seen


@dataclass(frozen=True, slots=True)
class _Candidate:
    """The nodes that play x and the two tables, and the nodes that compute the root from them."""

    x: fx.Node
    tables: tuple[fx.Node, fx.Node]
    table_of: Mapping[fx.Node, fx.Node]
    nodes: tuple[fx.Node, ...]
    products: tuple[fx.Node, ...]


def _roles(root: fx.Node, combination: _Combination, c: Canonicaliser) -> _Candidate | None:
    """Finds x: the last tensor shaped as the root of which every product has one factor, and all else is moved from."""
    origins = {n: _moved_from(n) for p in combination.products for n in p.all_input_nodes}
    first = combination.products[0]
    shared = set().union(*(origins[n] for n in first.all_input_nodes))
    for x in sorted(shared, reverse=True):
        if values.tensor(x) is None or not values.same_shape(values.shape(x), values.shape(root)):
            continue
        tables: dict[Term, fx.Node] = {}
        table_of: dict[fx.Node, fx.Node] = {}
        for product in combination.products:
            others = [n for n in product.all_input_nodes if x not in origins[n]]
            if len(others) != 1:
                break
            table = values.strip_widening(others[0])
            table_of[others[0]] = tables.setdefault(c.terms[table], table)
        else:
            nodes = _between(root, x, combination, table_of)
            if len(tables) == 2 and nodes is not None:
                a, b = tables.values()
                return _Candidate(x, (a, b), table_of, nodes, combination.products)
    return None


def _between(
    root: fx.Node, x: fx.Node, combination: _Combination, tables: Iterable[fx.Node]
) -> tuple[fx.Node, ...] | None:
    """The nodes from x and the tables up to the root; None where something else is read."""
    stops = {x, *tables}
    nodes: set[fx.Node] = set()
    pending = [root]
    while pending:
        node = pending.pop()
        if node in nodes or node in stops or isinstance(node.meta.get("val"), torch.SymInt):
            continue
        if not _is_linear(node) and node not in combination.products:
            return None
        nodes.add(node)
        pending.extend(node.all_input_nodes)
    return tuple(sorted(nodes))


def _rounds(node: fx.Node) -> bool:
    return values.is_float_cast(node) and not values.is_widening(values.dtype(source(node)), values.dtype(node))


# The probe --------------------------------------------------------------------------------------------------------

_CODES = random.Random(20)  # any fixed seed: codes only have to differ
_MOST_ELEMENTS = 1 << 18
_SMALL = (2, 3, 5, 7, 11)


def _codes(count: int, bits: int) -> torch.Tensor:
    drawn = _CODES.sample(range(1 << (bits - 1), 1 << bits), count)
    return torch.tensor(drawn, dtype=torch.int64)


def _probe(root: fx.Node, candidate: _Candidate) -> Match | Miss | None:
    """Runs the formula on codes and reads the rotation off the result."""
    head_dim = values.last_dim(candidate.x)
    if head_dim is None or head_dim % 2:
        return None
    for shrink in (True, False):
        shapes = _probe_shapes(candidate, shrink=shrink)
        if shapes is None:
            continue
        readings = _run(root, candidate, *shapes)
        if readings is not None:
            return _classify(root, candidate, readings, head_dim)
    return None


def _probe_shapes(candidate: _Candidate, *, shrink: bool) -> tuple[list[int], list[list[int]]] | None:
    """Small shapes for x and the tables that broadcast as the real ones do; `shrink` also replaces static sizes."""
    x_shape = values.shape(candidate.x)
    if len(x_shape) > len(_SMALL):
        return None
    sizes = Sizes(0)
    small = [
        prime if shrink and static_int(size) not in (0, 1) else sizes(size)
        for prime, size in zip(_SMALL, x_shape, strict=False)
    ]
    small[-1] = static_int(x_shape[-1]) or 0
    tables = []
    for table in candidate.tables:
        table_shape = values.shape(table)
        width = static_int(table_shape[-1]) if table_shape else None
        if width is None or len(table_shape) > len(x_shape):
            return None
        leading = []
        aligned = len(x_shape) - len(table_shape)
        for i, size in enumerate(table_shape[:-1]):
            if static_int(size) == 1:
                leading.append(1)
            elif known_equal(size, x_shape[aligned + i]):
                leading.append(small[aligned + i])
            else:
                return None
        tables.append([*leading, width])
    elements = torch.Size(small).numel()
    return (small, tables) if 0 < elements <= _MOST_ELEMENTS else None


@dataclass(frozen=True, slots=True)
class _Readings:
    """For each element of the last axis: what it reads of x through each table (position, sign, column), or plainly."""

    tables: tuple[list[tuple[int, int, int] | None], list[tuple[int, int, int] | None]]
    plain: list[int | None]


def _run(root: fx.Node, candidate: _Candidate, x_shape: list[int], table_shapes: list[list[int]]) -> _Readings | None:
    x = _codes(torch.Size(x_shape).numel(), 36).view(x_shape)
    tables = [_codes(torch.Size(s).numel(), 20).view(s) for s in table_shapes]
    zeros = [torch.zeros_like(t) for t in tables]
    ones = [torch.ones_like(t) for t in tables]

    def run(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor | None:
        return _evaluate(root, candidate, x, (first, second))

    plain = run(zeros[0], zeros[1])
    if plain is None or plain.shape != x.shape:
        return None
    places = {int(code): i for i, code in enumerate(x.flatten().tolist())}
    through: list[list[tuple[int, int, int] | None]] = []
    for i in range(2):
        arguments = [ones[i], zeros[1]] if i == 0 else [zeros[0], ones[i]]
        coded = [tables[i], zeros[1]] if i == 0 else [zeros[0], tables[i]]
        signs, products = run(*arguments), run(*coded)
        if signs is None or products is None:
            return None
        columns = tables[i].expand(*x_shape[:-1], table_shapes[i][-1])
        reading = _decode(signs - plain, products - plain, places, columns)
        if reading is None:
            return None
        through.append(reading)
    passes = _decode_plain(plain, places)
    return _Readings((through[0], through[1]), passes) if passes is not None else None


def _evaluate(
    root: fx.Node, candidate: _Candidate, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor | None:
    by_node = dict(zip(candidate.tables, tables, strict=True))
    env: dict[fx.Node, Any] = {candidate.x: x}
    env.update({operand: by_node[table] for operand, table in candidate.table_of.items()})
    sizes = Sizes(0)
    for node in candidate.nodes:
        if values.is_float_cast(node):
            env[node] = env[source(node)]
            continue
        try:
            env[node] = concrete(node, sizes, env)
        except (RuntimeError, IndexError, ValueError, TypeError):
            return None  # a size written out in the model doesn't fit the probe's shapes
    result = env[root]
    return result if isinstance(result, torch.Tensor) else None


def _decode(
    signs: torch.Tensor, products: torch.Tensor, places: Mapping[int, int], table: torch.Tensor
) -> list[tuple[int, int, int] | None] | None:
    """What each column reads, the same in every row; None where an element is no single ±x[j] * table[k] of its row."""
    width, table_width = signs.shape[-1], table.shape[-1]
    rows = table.reshape(-1, table_width).tolist()
    result: list[tuple[int, int, int] | None] | None = None
    for r, (sign_row, product_row) in enumerate(
        zip(signs.reshape(-1, width).tolist(), products.reshape(-1, width).tolist(), strict=True)
    ):
        column_of = {code: k for k, code in enumerate(rows[r])}
        row: list[tuple[int, int, int] | None] = []
        for signed, product in zip(sign_row, product_row, strict=True):
            if signed == 0:
                row.append(None)
                continue
            place = places.get(abs(signed))
            column = column_of.get(product // signed) if product % signed == 0 else None
            if place is None or column is None or place // width != r:
                return None
            row.append((place % width, 1 if signed > 0 else -1, column))
        if result is None:
            result = row
        elif result != row:
            return None
    return result


def _decode_plain(plain: torch.Tensor, places: Mapping[int, int]) -> list[int | None] | None:
    width = plain.shape[-1]
    result: list[int | None] | None = None
    for r, values_ in enumerate(plain.reshape(-1, width).tolist()):
        row: list[int | None] = []
        for value in values_:
            place = places.get(value)
            if value and (place is None or place // width != r):
                return None
            row.append(place % width if place is not None else None)
        if result is None:
            result = row
        elif result != row:
            return None
    return result


def _classify(root: fx.Node, candidate: _Candidate, readings: _Readings, head_dim: int) -> Match | Miss | None:
    """Names the rotation that the readings show, or the first element that is not one's."""
    (first, second), (cos, sin) = readings.tables, candidate.tables
    if all(r is None or r[0] == i for i, r in enumerate(second)):
        first, second, cos, sin = second, first, sin, cos
    rope_dim = sum(r is not None for r in first)
    own = [r for r in first[:rope_dim] if r is not None]
    paired = [r for r in second[:rope_dim] if r is not None]
    if not len(own) == len(paired) == rope_dim or any((r[0], r[1]) != (i, 1) for i, r in enumerate(own)):
        return None

    def miss(message: str, *details: object, matched: int) -> Miss:
        return Miss(KIND, root, message, details, place=candidate.x, matched=matched)

    if not rope_dim or readings.plain != [*[None] * rope_dim, *range(rope_dim, head_dim)]:
        return miss("the rotated elements are not the first of their axis", matched=1)
    partners = _partners(rope_dim)
    read = [(place, sign) for place, sign, _ in paired]
    style = next((style for style, wanted in partners.items() if read == wanted), None)
    if style is None:
        nearest = max(partners.values(), key=lambda pairs: sum(a[0] == b[0] for a, b in zip(pairs, read, strict=True)))
        row = next(i for i, (a, b) in enumerate(zip(nearest, read, strict=True)) if a != b)
        message = "element {} reads {} * sin, a rotation reads {} * sin"
        return miss(message, row, _signed(*read[row]), _signed(*nearest[row]), matched=3)
    table_dim = values.last_dim(cos)
    columns = [[column for _, _, column in reading] for reading in (own, paired)]
    each, shared = list(range(rope_dim)), [i % (rope_dim // 2) if style == "half" else i // 2 for i in range(rope_dim)]
    wanted_columns = {rope_dim: each, rope_dim // 2: shared}.get(table_dim or 0)
    if table_dim is None or table_dim != values.last_dim(sin) or columns != [wanted_columns, wanted_columns]:
        message = "the columns of cos and sin ({} and {} wide) are read in an order that is not known"
        return miss(message, values.last_dim(cos), values.last_dim(sin), matched=3)
    compute_dtypes = {values.dtype(p) for p in candidate.products}
    if len(compute_dtypes) != 1 or any(_rounds(n) for n in candidate.nodes if n is not root):
        return miss("a part of the rotation is rounded before the parts are added up", matched=4)
    params = Rope(style, head_dim, rope_dim, table_dim, compute_dtypes.pop(), values.dtype(root))
    inputs = {"x": values.strip_widening(candidate.x), "cos": cos, "sin": sin}
    return Match(KIND, root, inputs, params, candidate.nodes)


def _partners(rope_dim: int) -> dict[Style, list[tuple[int, int]]]:
    """For each style, which element times sin each element reads, and with which sign."""
    half = rope_dim // 2
    return {
        "half": [(i + half, -1) if i < half else (i - half, 1) for i in range(rope_dim)],
        "interleave": [(i + 1, -1) if i % 2 == 0 else (i - 1, 1) for i in range(rope_dim)],
    }


def _signed(place: int, sign: int) -> str:
    return f"{'+' if sign > 0 else '-'}x[{place}]"
