"""Sums of products of one tensor x and two tables, and what each element of the result reads of them.

Found by running the formula on whole numbers that name their own place: every element of the result must be one
±x[j] * first[k] plus one ±x[m] * second[n] of its own row, or one x[j]. One complex table counts as two, its real and
its imaginary part. Sizes are small stand-ins for the real ones, so the cost does not grow with the model.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..runtime.sizes import Size, known_equal, static_int
from . import values
from .canonical import Canonicaliser
from .match import Findings
from .movement import COPIES, PERMUTATIONS, VIEWS, Sizes, concrete, is_movement, permutation, source

aten = torch.ops.aten

# A formula of more nodes than this is no rotation, and the walk ends.
_LIMIT = 40
SUMS = frozenset({aten.add.Tensor, aten.sub.Tensor})
_JOINING = frozenset({aten.neg.default, aten.cat.default, aten.stack.default, aten.roll.default, aten.flip.default})
# A result that is written piece by piece: the pieces are put into memory that holds nothing yet.
_WRITES = frozenset({aten.slice_scatter.default, aten.select_scatter.default, aten.copy.default})
_UNWRITTEN = frozenset({aten.empty_like.default, aten.new_empty.default, aten.empty.memory_format})
_SCALINGS = frozenset({aten.mul.Tensor, aten.mul.Scalar})
_DIFFERENCES = frozenset({aten.rsub.Scalar, aten.sub.Tensor})
_COMPLEX_VIEWS = frozenset({aten.view_as_complex.default, aten.view_as_real.default})
# What only moves or negates, but for a cast, a factor of -1, and a part of several.
_MOVES = _JOINING | _WRITES | _COMPLEX_VIEWS | VIEWS | COPIES


@dataclass(frozen=True, slots=True)
class Formula:
    """The nodes of one sum of products.

    Args:
        root: its result.
        x: the tensor of which every product has one factor.
        tables: the two to four other factors; the same node twice where it is complex.
        table_of: the table that each factor of a product is.
        products: the products.
        nodes: all nodes from x and the tables up to the root, in graph order.
    """

    root: fx.Node
    x: fx.Node
    tables: tuple[fx.Node, ...]
    table_of: Mapping[fx.Node, fx.Node]
    products: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]

    @property
    def is_complex(self) -> bool:
        return self.tables[0] is self.tables[1]


@dataclass(frozen=True, slots=True)
class Read:
    """One element of x that an element of the result reads: `sign * x[place] * table[column]`."""

    place: int
    sign: int
    column: int


@dataclass(frozen=True, slots=True)
class Readings:
    """What each element along the last axis reads through each table, and which one it reads as it is."""

    tables: tuple[tuple[Read | None, ...], ...]
    plain: tuple[int | None, ...]


# The nodes --------------------------------------------------------------------------------------------------------


def formulas(root: fx.Node, c: Canonicaliser, findings: Findings) -> Iterator[Formula]:
    """The ways to read a node as the root of a sum of products, the one with the nearest x first."""
    products = _products(root, c, findings)
    if products is None:
        return
    origins = {factor: _moved_from(factor) for product in products for factor in tensor_inputs(product)}
    shared = set().union(*(origins[factor] for factor in tensor_inputs(products[0])))
    for x in sorted(shared, reverse=True):
        if values.tensor(x) is None or not values.same_shape(values.shape(x), values.shape(root)):
            continue
        if values.strip_widening(x) is not x:
            continue  # it is read again below the cast
        table_of = _tables(x, products, origins, c)
        if table_of is None:
            continue
        tables = list(dict.fromkeys(table_of.values()))
        if len(tables) == 1 and values.is_complex(tables[0]):
            tables *= 2
        nodes = _between(root, x, products, table_of)
        if 2 <= len(tables) <= 4 and nodes is not None:
            yield Formula(root, x, tuple(tables), table_of, products, nodes)


def _is_linear(node: fx.Node) -> bool:
    is_sum = node.target in SUMS and len(tensor_inputs(node)) == 2  # with a number it is no sum of products
    return is_sum or node.target in _UNWRITTEN or _is_moved(node)


def _is_moved(node: fx.Node) -> bool:
    """True for a node that only moves, negates or casts the elements of its inputs."""
    return (
        node.target in _MOVES
        or _is_scaled(node)
        or is_movement(node)
        or values.is_float_cast(node)
    )


def _is_scaled(node: fx.Node) -> bool:
    """True for a tensor times a number, or subtracted from 0 or 0 from it: of a rotation only -1 and 0 are left."""
    if len(tensor_inputs(node)) != 1:
        return False
    return node.target in _SCALINGS or (node.target in _DIFFERENCES and 0 in node.args[:2])


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs of a node whose elements it reads: no sizes, and nothing that is overwritten as a whole."""
    if node.target in _UNWRITTEN:
        return []
    inputs = node.all_input_nodes if node.target is not aten.copy.default else node.all_input_nodes[1:]
    return [n for n in inputs if not isinstance(n.meta.get("val"), torch.SymInt)]


def _products(root: fx.Node, c: Canonicaliser, findings: Findings) -> tuple[fx.Node, ...] | None:
    """The products that the root adds up; None where there are none near."""
    crowded: set[fx.Node] = c.readings.setdefault(_CROWDED, set())
    seen: set[fx.Node] = set()
    products: set[fx.Node] = set()
    pending = [root]
    while pending:
        node = pending.pop()
        if node in seen or findings.at("rms_norm", node) is not None:
            continue
        seen.add(node)
        if len(seen) > _LIMIT or node in crowded:
            crowded.add(root)
            return None
        if node.target is aten.mul.Tensor and len(tensor_inputs(node)) == 2:
            products.add(node)
        elif _is_linear(node):
            pending.extend(tensor_inputs(node))
    enough = len(products) >= 2 or any(map(values.is_complex, products))
    return tuple(sorted(products)) if enough else None


# The nodes behind which there are too many, such as the sums of a residual stream.
_CROWDED = "crowded"


def _moved_from(node: fx.Node) -> set[fx.Node]:
    """The node and all that its elements are moved from."""
    seen: set[fx.Node] = set()
    pending = [node]
    while pending and len(seen) <= _LIMIT:
        current = pending.pop()
        if current not in seen:
            seen.add(current)
            pending.extend(tensor_inputs(current) if _is_moved(current) else ())
    return seen


def _tables(
    x: fx.Node, products: Iterable[fx.Node], origins: Mapping[fx.Node, set[fx.Node]], c: Canonicaliser
) -> dict[fx.Node, fx.Node] | None:
    """The table behind the factor that is not moved from x, for each product; None where a product has no such pair.

    Equal values are one table, however often the model computes them.
    """
    tables: dict[int, fx.Node] = {}
    table_of: dict[fx.Node, fx.Node] = {}
    for product in products:
        others = [factor for factor in tensor_inputs(product) if x not in origins[factor]]
        if len(others) != 1:
            return None
        table = values.strip_widening(others[0])
        table_of[others[0]] = tables.setdefault(c.numbers[table], table)
    return table_of


def _between(
    root: fx.Node, x: fx.Node, products: Iterable[fx.Node], tables: Iterable[fx.Node]
) -> tuple[fx.Node, ...] | None:
    """The nodes from x and the tables up to the root; None where something else is read."""
    stops = {x, *tables}
    taken = set(products)
    nodes: set[fx.Node] = set()
    pending = [root]
    while pending:
        node = pending.pop()
        if node in nodes or node in stops:
            continue
        if not _is_linear(node) and node not in taken:
            return None
        nodes.add(node)
        pending.extend(tensor_inputs(node))
    return tuple(sorted(nodes))


# The reading ------------------------------------------------------------------------------------------------------

_CODES = random.Random(20)  # any fixed seed: codes only have to differ
_MOST_ELEMENTS = 1 << 16
_SMALL = (2, 3, 5, 7, 11, 13, 17)
# Codes are whole numbers in float64, their products below 2 ** 53, so that all that is computed of them is exact.
_X_BITS, _TABLE_BITS = 30, 20


def read(f: Formula, c: Canonicaliser) -> Readings | None:
    """Runs a formula on codes; None where the result is no sum of such products row by row.

    The layers of a model have formulas of one structure, of which one is run.
    """
    structure = _structure(f)
    if structure not in c.readings:
        c.readings[structure] = _run(f)
    known: Readings | None = c.readings[structure]
    return known


def _structure(f: Formula) -> Hashable:
    """Equal for formulas that differ only in the nodes that their inputs are."""
    places: dict[fx.Node, object] = {f.x: "x"}
    places.update({factor: ("table", f.tables.index(table)) for factor, table in f.table_of.items()})
    places.update({node: place for place, node in enumerate(f.nodes)})

    def put(value: Any) -> Hashable:
        if isinstance(value, fx.Node):
            return places.get(value, value)
        if isinstance(value, (list, tuple)):
            return tuple(map(put, value))
        return value.node.expr if isinstance(value, torch.SymInt) else (type(value), value)

    def kind(node: fx.Node) -> Hashable:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return None
        return value.dtype, tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in value.shape)

    steps = tuple(
        (node.target, put(node.args), tuple((name, put(value)) for name, value in node.kwargs.items()), kind(node))
        for node in f.nodes
    )
    return steps, kind(f.x), tuple(map(kind, f.tables)), f.is_complex, places[f.root]


def _run(f: Formula) -> Readings | None:
    for shrink in (True, False):  # static sizes may be a part of the formula: then they can't be shrunk
        shapes = _shapes(f, shrink=shrink)
        result = _read(f, shapes) if shapes is not None else None
        if result is not None:
            return result
    return None


@dataclass(frozen=True, slots=True)
class _Shapes:
    """Shapes for x and the tables that broadcast as the real ones do, and numbers for all symbols."""

    x: list[int]
    tables: list[list[int]]
    sizes: Sizes


def _shapes(f: Formula, *, shrink: bool) -> _Shapes | None:
    """Symbols become small numbers, and under `shrink` static sizes do too; never those along which it picks."""
    x_shape = values.shape(f.x)
    static = [static_int(size) for size in x_shape]
    if static[-1] is None or ((shrink or None in static) and _picks_along_leading_axes(f)):
        return None
    sizes = Sizes(0)
    small: list[int] = sizes(list(x_shape))
    taken = {number for number, size in zip(small, static, strict=True) if size is None}
    for axis, size in enumerate(static[:-1]):
        if shrink and size not in (None, 0, 1):
            small[axis] = next(prime for prime in _SMALL if prime not in taken)
            taken.add(small[axis])
    tables = [_table_shape(table, x_shape, small) for table in f.tables]
    whole = [shape for shape in tables if shape is not None]
    if not 0 < torch.Size(small).numel() <= _MOST_ELEMENTS or len(whole) < len(tables):
        return None
    return _Shapes(small, whole, sizes)


# Where an op that picks elements by number is told its axes.
_PICKS: Mapping[object, tuple[int, str]] = {
    aten.slice.Tensor: (1, "dim"),
    aten.select.int: (1, "dim"),
    aten.unbind.int: (1, "dim"),
    aten.split.Tensor: (2, "dim"),
    aten.split_with_sizes.default: (2, "dim"),
    aten.chunk.default: (2, "dim"),
    aten.roll.default: (2, "dims"),
    aten.flip.default: (1, "dims"),
    aten.slice_scatter.default: (2, "dim"),
    aten.select_scatter.default: (2, "dim"),
}


def _picks_along_leading_axes(f: Formula) -> bool:
    """Whether elements may be picked by number along another axis than x's last: at other sizes, others are picked."""
    leading = values.shape(f.x)[:-1]
    for node in f.nodes:
        if node.target in PERMUTATIONS and not _keeps_leading_axes(node, leading):
            return True
        if node.target in _PICKS and not _takes_all(node):
            shape = values.shape(source(node))
            axes = _picked_axes(node)
            if not axes or any(axis % len(shape) < len(leading) for axis in axes):
                return True
            if not values.same_shape(leading, shape[: len(leading)]):
                return True
    return False


def _keeps_leading_axes(node: fx.Node, leading: Sequence[Size]) -> bool:
    """Whether a permutation is of axes that x's last axis was cut into."""
    order, kept = permutation(node), len(leading)
    return (
        order is not None
        and order[:kept] == tuple(range(kept))
        and values.same_shape(leading, values.shape(node)[:kept])
    )


def _takes_all(node: fx.Node) -> bool:
    """Whether a slice is of a whole axis, however long."""
    _, _, start, end, step = (*node.args, *(None,) * (5 - len(node.args)))[:5]
    return node.target is aten.slice.Tensor and start in (None, 0) and end in (None, _END) and step in (None, 1)


_END = (1 << 63) - 1  # how torch writes the end of an open slice


def _picked_axes(node: fx.Node) -> list[int]:
    position, name = _PICKS[node.target]
    axes: Any = node.args[position] if len(node.args) > position else node.kwargs.get(name, 0)
    return [axes] if isinstance(axes, int) else list(axes)


def _table_shape(table: fx.Node, x_shape: tuple[Size, ...], small: list[int]) -> list[int] | None:
    """The shape of a table, shrunk as x is."""
    shape = values.shape(table)
    width = static_int(shape[-1]) if shape else None
    if width is None or len(shape) > len(x_shape):
        return None
    leading = []
    aligned = len(x_shape) - len(shape)
    for axis, size in enumerate(shape[:-1]):
        if static_int(size) != 1 and not known_equal(size, x_shape[aligned + axis]):
            return None
        leading.append(1 if static_int(size) == 1 else small[aligned + axis])
    return [*leading, width]


def _codes(shape: list[int], bits: int) -> torch.Tensor:
    drawn = _CODES.sample(range(1 << (bits - 1), 1 << bits), torch.Size(shape).numel())
    return torch.tensor(drawn, dtype=torch.float64).view(shape)


def _read(f: Formula, shapes: _Shapes) -> Readings | None:
    x = _codes(shapes.x, _X_BITS)
    places = {int(code): place for place, code in enumerate(x.flatten().tolist())}
    zeros = [torch.zeros(shape, dtype=torch.float64) for shape in shapes.tables]
    plain = _evaluate(f, x, zeros, shapes.sizes)
    if plain is None or plain.shape != x.shape:
        return None
    through = []
    for i, shape in enumerate(shapes.tables):
        codes = _codes(shape, _TABLE_BITS)
        signs, products = (
            _evaluate(f, x, [table if j == i else zero for j, zero in enumerate(zeros)], shapes.sizes)
            for table in (zeros[i] + 1, codes)
        )
        if signs is None or products is None:
            return None
        columns = codes.expand(*shapes.x[:-1], shape[-1])
        reads = _decode(signs - plain, products - plain, places, columns)
        if reads is None:
            return None
        through.append(reads)
    passed = _decode_plain(plain, places)
    return Readings(tuple(through), passed) if passed is not None else None


# Ops that are given a shape, which spells out the leading sizes of x.
_SHAPED = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default})


def _evaluate(f: Formula, x: torch.Tensor, tables: list[torch.Tensor], sizes: Sizes) -> torch.Tensor | None:
    """The formula in float64, casts left out; None where a size that it spells out doesn't fit these shapes."""
    by_node = {f.tables[0]: torch.complex(*tables)} if f.is_complex else dict(zip(f.tables, tables, strict=True))
    known: dict[fx.Node, Any] = {f.x: x, **{factor: by_node[table] for factor, table in f.table_of.items()}}
    leading = values.shape(f.x)[:-1]
    for node in f.nodes:
        if values.is_float_cast(node):
            known[node] = known[source(node)]
            continue
        if node.target in _UNWRITTEN:  # what is left of it in the result is no number
            shape = values.shape(node)
            if not values.same_shape(shape[:-1], leading):
                return None
            known[node] = x.new_full((*x.shape[:-1], sizes(shape[-1])), torch.nan)
            continue
        if node.target is aten.copy.default:
            known[node] = known[tensor_inputs(node)[0]]
            continue
        try:
            if node.target in _SHAPED and values.same_shape(leading, values.shape(node)[: len(leading)]):
                trailing = sizes(values.shape(node)[len(leading) :])
                known[node] = node.target(known[source(node)], [*x.shape[:-1], *trailing])
            else:
                known[node] = concrete(node, sizes, known)
        except (RuntimeError, IndexError, ValueError, TypeError):
            return None
    result = known[f.root]
    return result if isinstance(result, torch.Tensor) else None


def _rows(tensor: torch.Tensor) -> list[list[int]]:
    rows: list[list[int]] = tensor.reshape(-1, tensor.shape[-1]).to(torch.int64).tolist()
    return rows


def _decode(
    signs: torch.Tensor, products: torch.Tensor, places: Mapping[int, int], table: torch.Tensor
) -> tuple[Read | None, ...] | None:
    """What each column reads, the same in every row; None where an element is no single ±x[j] * table[k] of its row."""
    width = signs.shape[-1]
    found = set()
    for r, (sign_row, product_row, codes) in enumerate(zip(_rows(signs), _rows(products), _rows(table), strict=True)):
        column_of = {code: column for column, code in enumerate(codes)}
        reads: list[Read | None] = []
        for signed, product in zip(sign_row, product_row, strict=True):
            if signed == 0 == product:
                reads.append(None)
                continue
            place = places.get(abs(signed))
            column = column_of.get(product // signed) if signed and product % signed == 0 else None
            if place is None or column is None or place // width != r:
                return None
            reads.append(Read(place % width, 1 if signed > 0 else -1, column))
        found.add(tuple(reads))
    return found.pop() if len(found) == 1 else None


def _decode_plain(plain: torch.Tensor, places: Mapping[int, int]) -> tuple[int | None, ...] | None:
    """Which element each column passes on, the same in every row; None where one passes on something else."""
    width = plain.shape[-1]
    found = set()
    for r, row in enumerate(_rows(plain)):
        if any(value and places.get(value, -1) // width != r for value in row):
            return None
        found.add(tuple(places[value] % width if value else None for value in row))
    return found.pop() if len(found) == 1 else None
