"""softmax(scale * q k^T, masked) v → npu_fused_infer_attention_score, or npu_prompt_flash_attention on older SoCs.

Heads of key and value are given as they are. A mask becomes a mode where one says the same; else it is given, inverted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from ...patterns import values
from ...patterns.attention import Attention
from ...patterns.match import Match
from ...patterns.movement import ROW_MAJOR_VIEWS, permutation
from ...runtime.ops.contract import OpContract
from ...runtime.sizes import is_contiguous, known_true, lies_in_order
from ..edit import Edit, Refused
from .attention_mask import Masking, masking
from .attention_ops import ATTENTION_OPS, AttentionOp, Layout
from .candidates import first_legal
from .host_attention import lower_on_host
from .precision import refuse_other_precision

aten = torch.ops.aten

# The axes of [batch, heads, tokens, head_dim] in the order of each layout; "SBH" has heads and head_dim in one.
_LAYOUTS: Mapping[Layout, tuple[int, int, int, int]] = {
    "BNSD": (0, 1, 2, 3),
    "BSND": (0, 2, 1, 3),
    "SBH": (2, 0, 1, 3),
}
_SWAPPED = _LAYOUTS["BSND"]

# What inner_precise is where rows that see no key are to be zeros.
_ZERO_BLANK_ROWS = 2


def lower(match: Match, edit: Edit) -> OpContract:
    """One call, on q, k and v in the layout that they lie in."""
    p = match.params
    assert isinstance(p, Attention)
    if p.traits:
        raise Refused(f"it has {' and '.join(p.traits)}, which the fused ops don't take")
    refuse_other_precision(values.dtype(match.node), *p.steps)
    if edit.rewriter.target.soc == "host":
        return lower_on_host(match, edit)
    nodes = [heads_second(edit.current(match.inputs[name]), edit) for name in ("query", "key", "value")]
    by_copies = sorted(ATTENTION_OPS.items(), key=lambda item: _copies(nodes, best_layout(nodes, item[1])))
    return first_legal({name: partial(_lower, match, edit, op) for name, op in by_copies}, edit)


def _lower(match: Match, edit: Edit, op: AttentionOp, contract: OpContract) -> None:
    p = match.params
    assert isinstance(p, Attention)
    query, key, value = (heads_second(edit.current(match.inputs[name]), edit) for name in ("query", "key", "value"))
    if p.key_transposed:
        key = edit.permuted(key, (0, 1, 3, 2))
    num_kv_heads = p.num_kv_heads
    if num_kv_heads != p.num_heads and edit.rewriter.target.soc in op.repeats_heads_on:
        key, value = (_repeated(node, p.num_heads // num_kv_heads, edit) for node in (key, value))
        num_kv_heads = p.num_heads
    layout = best_layout((query, key, value), op)
    keys: dict[str, Any] = {name: _laid_out(node, layout, edit) for name, node in (("key", key), ("value", value))}
    if op.num_kv_heads is not None and num_kv_heads != p.num_heads:
        keys[op.num_kv_heads] = num_kv_heads
    call(match, query, keys, masking(match, query, key, op, edit), layout, op, contract, edit)


def call(
    match: Match,
    query: fx.Node,
    keys: Mapping[str, Any],
    masked: Masking,
    layout: Layout,
    op: AttentionOp,
    contract: OpContract,
    edit: Edit,
) -> None:
    """Puts a call of an op in place of a site.

    Args:
        match: a site of attention.
        query: [batch, heads, tokens, head_dim].
        keys: the arguments that say what is attended to.
        masked: what of it is hidden.
        layout: in which query is given.
        op: the op.
        contract: its contract.
        edit: the rewrite of the site.

    Raises:
        Refused: the contract doesn't allow it, or the result is used in another type than query's.
    """
    p = match.params
    assert isinstance(p, Attention)
    roots = _in_type_of(query, match.node)
    arguments: dict[str, Any] = {"query": _laid_out(query, layout, edit), **keys}
    tokens = values.shape(query)[2]
    swaps = op.swaps_result and layout == "BNSD" and known_true(tokens > 1) and all(map(_wants_tokens_first, roots))
    given = "BNSD_BSND" if swaps else layout
    arguments |= {op.num_heads: p.num_heads, "input_layout": given, op.scale: p.scale}
    if masked.zeros_blank_rows:
        arguments["inner_precise"] = _ZERO_BLANK_ROWS
    edit.note("the op computes in float32 and rounds once; the model rounds as its own kernels do")
    result = edit.op(contract, **{**arguments, **op.constant, **masked.arguments})
    result = edit.item(result, 0) if op.gives_several else result
    for root, own in zip(roots, _each_its_own(result, len(roots), edit), strict=True):
        by_head = edit.view(own, [*edit.sizes(own)[:2], p.num_heads, -1]) if layout == "SBH" else own
        _replace(root, by_head, _SWAPPED if swaps else _LAYOUTS[layout], edit)


def _in_type_of(query: fx.Node, root: fx.Node) -> list[fx.Node]:
    """The result in query's type: the root, or where it is finer, what it is rounded to by all that use it.

    Raises:
        Refused: it is used in another type.
    """
    dtype = values.dtype(query)
    if values.dtype(root) == dtype:
        return [root]
    users = list(root.users)
    if not all(values.is_rounding(user) and values.dtype(user) == dtype for user in users):
        raise Refused(f"its result is {values.dtype(root)}, and q is {dtype}")
    return users


def heads_second(node: fx.Node, edit: Edit) -> fx.Node:
    """[batch, heads, tokens, head_dim], of which heads may be missing."""
    return node if len(values.shape(node)) == 4 else edit.call(aten.unsqueeze.default, node, 1)


def _repeated(node: fx.Node, times: int, edit: Edit) -> fx.Node:
    """Each head so often in a row."""

    def make() -> fx.Node:
        batch, heads, tokens, head_dim = edit.sizes(node)
        by_head = edit.call(aten.unsqueeze.default, node, 2)
        repeated = edit.call(aten.expand.default, by_head, [batch, heads, times, tokens, head_dim])
        all_heads = heads * times if isinstance(heads, int) else -1  # which an empty batch would leave open
        return edit.view(edit.contiguous(repeated), [batch, all_heads, tokens, head_dim])

    return edit.share(("repeated", node, times), make)


def best_layout(nodes: Sequence[fx.Node], op: AttentionOp) -> Layout:
    """The layout in which most of the tensors lie already."""
    return min(op.layouts, key=lambda layout: _copies(nodes, layout))


def _copies(nodes: Sequence[fx.Node], layout: Layout) -> int:
    """How many of the tensors have to be copied to lie in a layout."""
    return sum(not _lies_in(node, _LAYOUTS[layout]) for node in nodes)


def _laid_out(node: fx.Node, layout: Layout, edit: Edit) -> fx.Node:
    """[batch, heads, tokens, head_dim] in a layout."""
    rows = edit.contiguous(edit.permuted(node, _LAYOUTS[layout]))
    return edit.view(rows, [*edit.sizes(rows)[:2], -1]) if layout == "SBH" else rows


def _lies_in(node: fx.Node, order: tuple[int, ...]) -> bool:
    value = values.tensor(node)
    assert value is not None
    return lies_in_order(value, order)


# The result -----------------------------------------------------------------------------------------------------------


def _wants_tokens_first(node: fx.Node) -> bool:
    """Whether the model's result lies with tokens before heads, or is only used after it is brought so."""
    return len(values.shape(node)) == 4 and (_lies_in(node, _SWAPPED) or bool(_copies_in(node, _SWAPPED)))


def _copies_in(node: fx.Node, order: tuple[int, ...]) -> list[fx.Node]:
    """The contiguous copies of a node with its axes in an order, where it has no other user."""
    found = []
    for user in node.users:
        if user.target in ROW_MAJOR_VIEWS and values.same_shape(values.shape(user), values.shape(node)):
            copies = _copies_in(user, order)
        elif permutation(user) == order and all(map(_is_contiguous_copy, user.users)):
            copies = list(user.users)
        else:
            copies = []
        if not copies:
            return []
        found += copies
    return found


def _is_contiguous_copy(node: fx.Node) -> bool:
    value = values.tensor(node)
    return node.target in (aten.clone.default, aten.contiguous.default) and value is not None and is_contiguous(value)


def _each_its_own(result: fx.Node, count: int, edit: Edit) -> list[fx.Node]:
    """The result, and copies of it: what the model has in separate tensors may be written to separately."""
    return [result, *(edit.call(aten.clone.default, result) for _ in range(count - 1))]


def _replace(old: fx.Node, result: fx.Node, order: tuple[int, ...], edit: Edit) -> None:
    shape = values.shape(old)
    back = [order.index(axis) for axis in range(len(order))]
    if len(shape) == 3:
        heads_second = edit.contiguous(edit.permuted(result, back))
        rows, head_dim = (edit.rewriter.size(shape[axis], heads_second, axis + 1) for axis in (1, 2))
        edit.replace(old, edit.view(heads_second, [-1, rows, head_dim]))
        return
    copies = _copies_in(old, order) if order != _LAYOUTS["BNSD"] else []
    if copies:
        for copy, own in zip(copies, _each_its_own(result, len(copies), edit), strict=True):
            edit.replace(copy, own)
        return
    edit.replace(old, edit.permuted(result, back))
