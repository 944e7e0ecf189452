"""Rotations of q and k → fused_rope_qk_mqa, npu_mrope."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ...patterns import values
from ...patterns.match import Match
from ...patterns.movement import Role
from ...patterns.qk_rope import QkRope
from ...patterns.rope import Rope
from ...runtime.ops.contract import OpContract
from ...runtime.sizes import known_equal
from ..edit import Edit, Refused
from ..layout import inverse
from .candidates import first_legal
from .precision import refuse_other_precision
from .rope import refuse_backward, rotated_part, with_rest
from .tables import TokenTables

aten = torch.ops.aten


def lower(match: Match, edit: Edit) -> OpContract:
    """One op that turns q and k, token by token."""
    p = match.params
    assert isinstance(p, QkRope)
    refuse_backward(p.q)
    if p.q.style == "deinterleave":
        raise Refused("it takes pairs of neighbours apart (de-interleaves); the op leaves every element in its place")
    q, k = (edit.current(match.inputs[name]) for name in ("q", "k"))
    for x in (q, k):
        if values.dtype(x) != p.q.dtype:
            raise Refused(f"its result is {p.q.dtype} for an x of {values.dtype(x)}; the op gives the type of x")
    refuse_other_precision(p.q.dtype, *p.q.steps)
    rank = len(values.shape(q))
    order = [*(axis for axis in range(rank - 1) if axis != p.head_axis), p.head_axis, rank - 1]
    roles: list[Role] = [order.index(axis) for axis in range(rank)]
    roles[p.head_axis], roles[-1] = "head", "dim"
    leading = [edit.sizes(q)[axis] for axis in order[:-2]]
    tables = TokenTables(match.inputs, p.q, p.shares_columns, p.lookup, tuple(roles), tuple(roles), leading, edit)
    pair = _Pair(match, p, q, k, order, tables, edit)
    candidates = {"sgl_kernel_npu::fused_rope_qk_mqa": pair.for_one_kv_head}
    if p.lookup is not None:
        candidates["npu::npu_mrope"] = pair.looked_up
    return first_legal(candidates, edit)


@dataclass(frozen=True, slots=True)
class _Pair:
    """q and k with their axes in the order tokens, heads, dim."""

    match: Match
    params: QkRope
    q: fx.Node
    k: fx.Node
    order: list[int]
    tables: TokenTables
    edit: Edit

    def for_one_kv_head(self, contract: OpContract) -> None:
        """Any strides; products in the type that q and the tables are promoted to."""
        p, edit = self.params, self.edit
        if p.num_kv_heads != 1:
            raise Refused(f"k has {p.num_kv_heads} heads; the op is for one that all heads of q share")
        whole = p.q.head_dim == p.k.head_dim and p.q.rope_start == p.k.rope_start == 0
        rotated = [self._flat(x if whole else rotated_part(x, rope, edit)) for x, rope in self._sides]
        table = self.tables.halves(p.q.compute_dtype)
        if p.q.steps - {p.q.compute_dtype, p.q.dtype}:
            edit.note(f"the op computes in {p.q.compute_dtype}; the model rounds on the way")
        fused = edit.op(
            contract,
            query=rotated[0],
            key=rotated[1],
            cos_sin=table,
            rotary_dim=p.q.rope_dim,
            is_neox_style=p.q.style == "half",
        )
        for index, (x, rope) in enumerate(self._sides):
            turned = self._unflattened(edit.item(fused, index), x)
            edit.replace(self._roots[index], turned if whole else with_rest(turned, x, rope, edit))

    def looked_up(self, contract: OpContract) -> None:
        """Rows of whole heads; the tables' rows are looked up inside."""
        p, edit = self.params, self.edit
        if p.q.rope_start or p.k.rope_start or p.q.head_dim != p.k.head_dim:
            raise Refused("the rotated elements of q and k are not the first of heads of one length")
        assert p.lookup is not None
        cache = edit.current(self.match.inputs["cache"])
        if p.lookup.dtype != values.dtype(cache):
            edit.note(f"the model rounds cos and sin to {p.lookup.dtype}; the op takes them as they are in the cache")
        if p.q.compute_dtype.itemsize < 4:
            edit.note("the op computes in float32 and rounds once, at its end; the model rounds at each step")
        if p.num_heads is None or p.num_kv_heads is None:
            raise Refused("the number of heads is not static")
        rows = [
            edit.view(edit.contiguous(edit.permuted(x, self.order)), [-1, heads * p.q.head_dim])
            for x, heads in ((self.q, p.num_heads), (self.k, p.num_kv_heads))
        ]
        fused = edit.op(
            contract,
            positions=edit.cast(self.tables.positions(), torch.int64),
            query=rows[0],
            key=rows[1],
            cos_sin_cache=cache,
            head_size=p.q.head_dim,
            rotary_mode="half" if p.q.style == "half" else "interleave",
        )
        for index, (x, _) in enumerate(self._sides):
            edit.replace(self._roots[index], self._unflattened(edit.item(fused, index), x))

    @property
    def _sides(self) -> tuple[tuple[fx.Node, Rope], tuple[fx.Node, Rope]]:
        return (self.q, self.params.q), (self.k, self.params.k)

    @property
    def _roots(self) -> tuple[fx.Node, fx.Node]:
        return self.match.inputs["rotated_q"], self.match.inputs["rotated_k"]

    def _flat(self, x: fx.Node) -> fx.Node:
        """x as [tokens, heads, dim], a view where its strides allow one."""
        edit = self.edit
        x = edit.permuted(x, self.order)
        value = values.tensor(x)
        assert value is not None
        tokens = value.dim() - 2
        steps = zip(value.shape[1:tokens], value.stride()[: tokens - 1], value.stride()[1:tokens], strict=True)
        if not all(known_equal(outer, size * inner) for size, outer, inner in steps):
            x = edit.contiguous(x)
        return edit.view(x, [-1, *edit.sizes(x)[-2:]])

    def _unflattened(self, rows: fx.Node, x: fx.Node) -> fx.Node:
        """What an op gives token by token, in the axes of x."""
        edit, sizes = self.edit, self.edit.sizes(x)
        width = values.last_dim(rows) if len(values.shape(rows)) == 3 else sizes[-1]
        assert width is not None
        if sizes[self.params.head_axis] == 1:  # it needn't be moved, and so has the usual stride
            return edit.view(rows, [*sizes[:-1], width])
        whole = edit.view(rows, [*(sizes[axis] for axis in self.order[:-1]), width])
        return edit.permuted(whole, inverse(self.order))
