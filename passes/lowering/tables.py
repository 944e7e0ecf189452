"""cos, sin and positions as fused ops take them, one row a token: made once and shared by all layers that use them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import fx

from ...patterns import values
from ...patterns.lookup import Lookup
from ...patterns.movement import Role, strip_unit_axes
from ...patterns.rope import Rope
from ...runtime.sizes import static_int
from ..edit import Edit, Refused

aten = torch.ops.aten

Name = Literal["cos", "sin"]


@dataclass(frozen=True, slots=True)
class TokenTables:
    """The tables of a rotation, for the tokens of q and k.

    Args:
        inputs: "cos" and "sin"; where they are looked up, "cache", "positions" and "rows" too.
        rope: the rotation.
        shares_columns: whether both elements of a pair are turned by one column, or by equal ones.
        lookup: how they are looked up, if they are.
        q_roles, k_roles: what the axes of q and of k count; a number is that of an axis in `leading`.
        leading: the sizes of the axes that count tokens.
    """

    inputs: Mapping[str, fx.Node]
    rope: Rope
    shares_columns: bool
    lookup: Lookup | None
    q_roles: tuple[Role, ...]
    k_roles: tuple[Role, ...]
    leading: list[int | fx.Node]
    edit: Edit

    def full(self, name: Name) -> fx.Node:
        """cos or sin as [tokens, rope_dim]: of halves a column for each element, of neighbours those of pairs twice.

        Raises:
            Refused: neighbours have columns that may differ, or there is no row a token.
        """
        if self.rope.style != "interleave" and self.rope.table_dim == self.rope.rope_dim:
            return self._rows(name)
        half = self._half(name)
        return self.edit.share(("full", half), lambda: self.edit.call(aten.cat.default, [half, half], -1))

    def halves(self, dtype: torch.dtype) -> fx.Node:
        """[tokens, rope_dim], rows of cos | sin with a column for each pair.

        Raises:
            Refused: the elements of a pair have columns that may differ, or there is no row a token.
        """
        self.refuse_own_columns()
        lookup, edit = self.lookup, self.edit
        if lookup is not None and values.dtype(self.inputs["rows"]) == lookup.dtype:
            return edit.cast(self._looked_up("rows", self.rope.rope_dim), dtype)
        parts = [self._half(name) for name in ("cos", "sin")]
        return edit.share(("halves", *parts, dtype), lambda: edit.cast(edit.call(aten.cat.default, parts, -1), dtype))

    def refuse_own_columns(self) -> None:
        """Refuses tables whose columns for the elements of a pair may differ."""
        if not self.shares_columns:
            raise Refused("cos and sin have a column for each element, and those of a pair are not known to be equal")

    def positions(self) -> fx.Node:
        """The row of the cache that each token looks up, [tokens], none of them negative.

        Raises:
            Refused: the elements of a pair have columns that may differ, there is no row a token, or the cache may have
                been written since it was read.
        """
        assert self.lookup is not None
        self.refuse_own_columns()
        if not self.edit.is_within_reach(self.inputs["rows"]):
            raise Refused("an op with side effects stands between where cos and sin are looked up and their use")
        edit, cache = self.edit, self.edit.current(self.inputs["cache"])
        flat = self._looked_up("positions", None)
        if not self.lookup.wraps:
            return flat
        # The ops don't count from the end, so that is done before: the remainder by the length of the cache.
        return edit.share(
            ("wrapped", flat, cache), lambda: edit.call(aten.remainder.Scalar, flat, edit.sizes(cache)[0])
        )

    def _looked_up(self, name: Literal["rows", "positions"], width: int | None) -> fx.Node:
        """What is looked up, or where, as one row or value for each token: its axes are those of the tables."""
        edit, node = self.edit, self.edit.current(self.inputs[name])
        sizes = [*edit.sizes(self.inputs["cos"])[:-1], *([] if width is None else [width])]
        aligned = edit.share(("aligned", node, *sizes), lambda: edit.view(edit.contiguous(node), sizes))
        return self._per_token(aligned, self._roles("cos"), width)

    def _half(self, name: Name) -> fx.Node:
        """A table as [tokens, rope_dim / 2], a column for each pair."""
        self.refuse_own_columns()
        rows, width = self._rows(name), self.rope.rope_dim
        if self.rope.table_dim != width:
            return rows
        cut = (0, width, 2) if self.rope.style == "interleave" else (0, width // 2)
        return self.edit.share(("half", rows, cut), lambda: self.edit.call(aten.slice.Tensor, rows, -1, *cut))

    def _rows(self, name: Name) -> fx.Node:
        """A table as [tokens, table_dim]."""
        roles = self._roles(name)
        base = self.edit.current(strip_unit_axes(self.inputs[name]))
        key = ("part", base, name, self.rope.is_complex)
        part = self.edit.share(key, lambda: table_part(base, name, self.rope, self.edit))
        return self._per_token(part, roles, self.rope.table_dim)

    def _roles(self, name: Name) -> list[Role]:
        """What the axes of a table of more than one element count, as it is broadcast against q and against k."""
        table = self.inputs[name]
        roles = _aligned_roles(table, self.q_roles, name)
        if roles != _aligned_roles(table, self.k_roles, name):
            raise Refused(f"{name} is broadcast otherwise against q than against k")
        return roles

    def _per_token(self, node: fx.Node, roles: list[Role], width: int | None) -> fx.Node:
        """Rows, or single values, whose axes of more than one element count `roles`, as one for each token."""
        edit = self.edit
        wanted = [i for i, size in enumerate(self.leading) if size != 1]
        row = [] if width is None else [width]

        def build() -> fx.Node:
            rows = node
            if roles != ["tokens"] and roles != wanted:
                if roles != sorted(roles, key=str):
                    raise Refused("the axes of cos and sin are ordered otherwise than those of x")
                sizes = edit.sizes(node)
                held = dict(zip(roles, (size for size in sizes[: len(sizes) - len(row)] if size != 1), strict=True))
                rows = edit.view(rows, [*(held.get(i, 1) for i in wanted), *row])
                rows = edit.call(aten.expand.default, rows, [*(self.leading[i] for i in wanted), *row])
            return edit.view(edit.contiguous(rows), [-1, *row])

        return edit.share(("per token", node, *roles, *wanted, width), build)


def with_tables(inputs: Mapping[str, fx.Node], edit: Edit) -> Mapping[str, fx.Node]:
    """The inputs of a rotation by an op that looks its tables up, and the tables: "rows", "cos", "sin", [tokens, …]."""
    cache, positions = (edit.current(inputs[name]) for name in ("cache", "positions"))
    rows = edit.share(
        ("looked up", cache, positions), lambda: edit.call(aten.index_select.default, cache, 0, positions)
    )
    halves = edit.share(("halves", rows), lambda: edit.call(aten.chunk.default, rows, 2, -1))
    tables = {name: edit.share((name, rows), partial(edit.item, halves, i)) for i, name in enumerate(("cos", "sin"))}
    return {**inputs, "rows": rows, **tables}


def _aligned_roles(table: fx.Node, roles: tuple[Role, ...], name: str) -> list[Role]:
    sizes = values.shape(table)
    aligned = roles[len(roles) - len(sizes) :]
    held = [role for role, size in zip(aligned[:-1], sizes[:-1], strict=True) if static_int(size) != 1]
    if "head" in held:
        raise Refused(f"{name} differs from head to head")
    return held


def table_part(table: fx.Node, name: Name, p: Rope, edit: Edit) -> fx.Node:
    """A table as a real tensor: where it is complex, cos is its real part and sin its imaginary one."""
    if not p.is_complex:
        return table
    parts = edit.call(aten.view_as_real.default, table)
    return edit.call(aten.select.int, parts, -1, 0 if name == "cos" else 1)
