"""Projection, split, per-head norm and rotation of q and k → split_qkv_rmsnorm_rope."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import fx

from ...patterns import values
from ...patterns.match import Match
from ...patterns.movement import HeadLayout, Role, strip_unit_axes
from ...patterns.qkv import Head, Qkv
from ...patterns.rms_norm import RmsNorm
from ...runtime.ops import CONTRACTS
from ...runtime.ops.contract import OpContract
from ...runtime.sizes import static_int
from ..rewriter import Edit, Refused
from .packing import packed_projection, projections
from .precision import refuse_other_precision
from .rms_norm import note_statistics, vector
from .rope import refuse_backward, table_part

aten = torch.ops.aten


def lower(match: Match, edit: Edit) -> OpContract:
    """One op from the rows [q | k | v] to rotated q and k, and v."""
    p = match.params
    assert isinstance(p, Qkv)
    contract = CONTRACTS["sgl_kernel_npu::split_qkv_rmsnorm_rope"]
    refuse_backward(p.rope)
    if p.rope.style == "deinterleave":
        raise Refused("it takes pairs of neighbours apart (de-interleaves); the op leaves every element in its place")
    norm = _norm(p)
    _check_columns(match, p)
    source = edit.current(match.inputs["projection" if p.style == "fused" else "q"])
    if p.rope.dtype != values.dtype(source):
        raise Refused(f"q and k are {p.rope.dtype} after the rotation, the projection is {values.dtype(source)}")
    roundings = [values.dtype(node) for node in match.claimed if values.is_rounding(node)]
    steps = (*roundings, *p.rope.steps, *(norm.steps if norm is not None else ()))
    if p.rope.rope_start:
        raise Refused(f"its first {p.rope.rope_start} elements pass and the next are rotated; the op rotates the first")
    if norm is not None and (norm.groups != 1 or norm.bias or norm.gate is not None):
        raise Refused("its norm has groups, a bias or a gate")
    refuse_other_precision(p.rope.dtype, *steps)
    projection = source
    if p.style == "separate":
        parts = projections([match.inputs[name] for name in ("q", "k", "v")])
        if parts is None:
            raise Refused("its projections have been taken by another fusion")
        projection = packed_projection(parts, edit)
    leading = edit.sizes(source)[:-1]
    width = values.last_dim(projection)
    assert width is not None
    rows = edit.view(edit.contiguous(projection), [-1, width])
    arguments: dict[str, Any] = {
        "input": rows,
        "sin": _table_rows(match, p, "sin", leading, edit),
        "cos": _table_rows(match, p, "cos", leading, edit),
        "q_hidden_size": p.q.layout.width,
        "kv_hidden_size": p.k.layout.width,
        "head_dim": p.q.layout.head_dim,
        "is_neox_style": p.rope.style == "half",
    }
    if norm is not None:
        arguments["eps"] = norm.eps
        arguments["q_weight"] = _weight(match, "q_weight", norm, edit)
        arguments["k_weight"] = _weight(match, "k_weight", norm, edit)
        note_statistics(norm, edit)
    if p.rope.dtype.itemsize < 4:
        edit.note("the op computes in float32 and rounds once, at its end; the model rounds at each step")
    fused = edit.op(contract, **arguments)
    q, k, v = (edit.item(fused, index) for index in range(3))
    edit.replace(match.inputs["rotated_q"], _heads(q, p.q.layout, leading, edit))
    edit.replace(match.inputs["rotated_k"], _heads(k, p.k.layout, leading, edit))
    if p.style == "separate":
        edit.replace(match.inputs["v"], edit.view(v, [*leading, p.k.layout.width]))
    return contract


def _norm(p: Qkv) -> RmsNorm | None:
    """The norm of q and k, where the op can do it."""
    q, k = p.q.norm, p.k.norm
    if q is None and k is None:
        return None
    if q is None or k is None:
        raise Refused(f"only {'k' if q is None else 'q'} is normed; the op norms q and k or neither")
    for name, head, norm in (("q", p.q, q), ("k", p.k, k)):
        if norm.hidden_size != head.layout.head_dim:
            raise Refused(
                f"the norm of {name} is over {norm.hidden_size} elements (full width), the op norms per head of "
                f"{head.layout.head_dim}"
            )
    if q.eps != k.eps:
        raise Refused(f"the norms of q and k have different eps: {q.eps:g} and {k.eps:g}")
    if q.offset != k.offset or q.weight != k.weight:
        raise Refused("the norms of q and k are of different kinds")
    return q


def _check_columns(match: Match, p: Qkv) -> None:
    """Refuses where q, k and v are not the op's columns [q | k | v]."""
    if p.style == "fused":
        width = values.last_dim(match.inputs["projection"])
        found = (p.q.layout.column, p.k.layout.column, width)
        wanted = (0, p.q.layout.width, p.q.layout.width + 2 * p.k.layout.width)
        if found != wanted:
            raise Refused(
                f"q and k start at columns {found[0]} and {found[1]} of {width}; the op wants rows [q | k | v], with q "
                f"and k at {wanted[0]} and {wanted[1]} of {wanted[2]}"
            )
        return
    for name, head in (("q", p.q), ("k", p.k)):
        width = values.last_dim(match.inputs[name])
        if (head.layout.column, head.layout.width) != (0, width):
            raise Refused(f"{name} is {head.layout.width} of the {width} columns of its projection")


def _weight(match: Match, name: str, norm: RmsNorm, edit: Edit) -> fx.Node:
    """The weight of q's or k's norm as the op wants it: what is multiplied, with the offset added."""
    node = match.inputs.get(name)
    if node is None:
        size, device = norm.hidden_size, _device(match)
        return edit.constant(f"_ones_{size}_float32", lambda: torch.ones(size, device=device))
    weight = vector(edit.current(node), edit)
    if not norm.offset:
        return weight
    return edit.share(
        ("offset weight", weight, norm.offset),
        lambda: edit.call(aten.add.Tensor, edit.cast(weight, torch.float32), norm.offset),
    )


def _device(match: Match) -> torch.device:
    value = values.tensor(match.node)
    assert value is not None
    return value.device


def _tokens(roles: tuple[Role, ...]) -> list[Role]:
    return [role for role in roles if role not in ("head", "dim", "unit")]


def _heads(flat: fx.Node, layout: HeadLayout, leading: list[int | fx.Node], edit: Edit) -> fx.Node:
    """Rows [tokens, heads * head_dim] in the layout that the model has them in."""
    # An axis of size one is taken for the next such axis of the projection, so that its stride is the usual one too.
    units = iter([i for i, size in enumerate(leading) if size == 1])
    roles: list[Role] = [next(units, "unit") if role == "unit" else role for role in layout.roles]
    axes: list[Role] = sorted(_tokens(tuple(roles)), key=str)
    sizes: list[int | fx.Node] = [-1 if role == "tokens" else leading[int(role)] for role in axes]
    if "head" in roles:
        axes.append("head")
        sizes.append(layout.num_heads)
    node = edit.view(flat, [*sizes, layout.head_dim])
    axes.append("dim")
    node = edit.permuted(node, [axes.index(role) for role in roles if role != "unit"])
    for axis, role in enumerate(roles):
        if role == "unit":
            node = edit.call(aten.unsqueeze.default, node, axis)
    return node


def _table_rows(match: Match, p: Qkv, name: Literal["cos", "sin"], leading: list[int | fx.Node], edit: Edit) -> fx.Node:
    """cos or sin as [tokens, rope_dim], one row a token: made once and shared by all layers that use the same table."""
    rope = p.rope
    if rope.style == "interleave" and rope.table_dim == rope.rope_dim:
        raise Refused("cos and sin of an interleaved rotation have a column of their own for both elements of a pair")
    table = match.inputs[name]
    roles = _table_roles(table, p.q, name)
    if roles != _table_roles(table, p.k, name):
        raise Refused(f"{name} is broadcast otherwise against q than against k")
    base = edit.current(strip_unit_axes(table))
    wanted = [i for i, size in enumerate(leading) if size != 1]
    key = ("rows", base, name, tuple(roles), tuple(wanted), rope.table_dim, rope.rope_dim)

    def build() -> fx.Node:
        rows = table_part(base, name, rope, edit)
        if roles != ["tokens"] and roles != wanted:
            if roles != sorted(roles, key=str):
                raise Refused(f"the axes of {name} are ordered otherwise than those of x")
            held = dict(zip(roles, _held(base, edit), strict=True))
            rows = edit.view(rows, [*(held.get(i, 1) for i in wanted), rope.table_dim])
            rows = edit.call(aten.expand.default, rows, [*(leading[i] for i in wanted), rope.table_dim])
        rows = edit.view(edit.contiguous(rows), [-1, rope.table_dim])
        return edit.call(aten.cat.default, [rows, rows], -1) if rope.table_dim != rope.rope_dim else rows

    return edit.share(key, build)


def _held(base: fx.Node, edit: Edit) -> list[int | fx.Node]:
    """The sizes of the axes of a table that hold more than one element, without the last."""
    return [size for size in edit.sizes(base)[:-1] if size != 1]


def _table_roles(table: fx.Node, head: Head, name: str) -> list[Role]:
    """What the axes of a table, as it is broadcast against q or k, count: axes of the projection, in its order."""
    roles = head.layout.roles
    sizes = values.shape(table)
    aligned = roles[len(roles) - len(sizes) :]
    held = [role for role, size in zip(aligned[:-1], sizes[:-1], strict=True) if static_int(size) != 1]
    if "head" in held:
        raise Refused(f"{name} differs from head to head")
    return held


