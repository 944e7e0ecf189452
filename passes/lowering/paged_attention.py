"""Attention over gathered blocks → npu_fused_infer_attention_score over the caches, which reads the table itself."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ...patterns import values
from ...patterns.match import Match
from ...patterns.paged_attention import PagedAttention
from ...runtime.ops import CONTRACTS
from ...runtime.ops.attention_mask import COMPRESSED
from ...runtime.ops.contract import OpContract
from ...runtime.sizes import is_contiguous, known_equal, static_int
from ..edit import Edit, Refused
from .attention import best_layout, call, heads_second
from .attention_mask import masking
from .attention_ops import ATTENTION_OPS
from .precision import refuse_other_precision

aten = torch.ops.aten

_OP = "npu::npu_fused_infer_attention_score"


def lower(match: Match, edit: Edit) -> OpContract:
    """One call over the caches as they are; nothing is gathered."""
    p = match.params
    assert isinstance(p, PagedAttention)
    contract, op = CONTRACTS[_OP], ATTENTION_OPS[_OP]
    (attention,) = match.parts
    if p.attention.traits:
        raise Refused(f"it has {' and '.join(p.attention.traits)}, which the fused op doesn't take")
    refuse_other_precision(values.dtype(match.node), *p.attention.steps)
    query = heads_second(edit.current(match.inputs["query"]), edit)
    masked = masking(attention, query, edit.current(attention.inputs["key"]), op, edit)
    arguments: dict[str, Any] = {
        "key": _cache("key_cache", match, edit),
        "value": _cache("value_cache", match, edit),
        "block_table": _block_table(match, edit),
        "block_size": p.block_size,
        "actual_seq_lengths_kv": [_tokens(match, edit)],
    }
    if p.attention.num_kv_heads != p.attention.num_heads:
        arguments["num_key_value_heads"] = p.attention.num_kv_heads
    if "atten_mask" in masked.arguments and masked.arguments.get("sparse_mode") not in COMPRESSED:
        masked.arguments["atten_mask"] = _as_wide_as_the_table(masked.arguments["atten_mask"], match, edit)
    if p.heads_first:  # such caches are for one layout, of query and result
        op = replace(op, layouts=("BNSD",), swaps_result=False)
    layout = best_layout([query], op)
    call(attention, query, arguments, masked, layout, op, contract, edit)
    return contract


def _cache(name: str, match: Match, edit: Edit) -> fx.Node:
    """A cache as [blocks, block_size, heads * head_dim], or with its heads first as it is."""
    p = match.params
    assert isinstance(p, PagedAttention)
    cache = edit.current(match.inputs[name])
    if p.heads_first or len(values.shape(cache)) == 3:
        return cache
    value = values.tensor(cache)
    assert value is not None
    if not is_contiguous(value):
        raise Refused(f"{name} has strides {tuple(value.stride())}: it is not contiguous, and the op reads it as if")
    return edit.view(cache, [*edit.sizes(cache)[:2], -1])


def _block_table(match: Match, edit: Edit) -> fx.Node:
    """The table as the op takes it: int32 [sequences, blocks], none negative; made once for all layers."""
    p = match.params
    assert isinstance(p, PagedAttention)
    table, cache = edit.current(match.inputs["block_table"]), edit.current(match.inputs["key_cache"])
    blocks = edit.sizes(cache)[0]

    def make() -> fx.Node:
        found = table
        if p.wraps:  # the op doesn't count from the end
            found = edit.call(aten.remainder.Scalar, found, blocks)
        if values.dtype(found) != torch.int32:
            found = edit.call(aten._to_copy.default, found, dtype=torch.int32)
        if len(values.shape(found)) == 1:
            found = edit.call(aten.unsqueeze.default, found, 0)
        return edit.contiguous(found)

    return edit.share(("block table", table, blocks, p.wraps), make)


def _tokens(match: Match, edit: Edit) -> int | fx.Node:
    """How many tokens of each sequence are attended to, a number of the host.

    Raises:
        Refused: it isn't known before the gathered keys are.
    """
    p = match.params
    assert isinstance(p, PagedAttention)
    known = edit.rewriter.known_size(p.tokens)
    if known is not None:
        return known
    table = edit.current(match.inputs["block_table"])
    if not known_equal(p.tokens, values.shape(table)[-1] * p.block_size):
        raise Refused(f"it attends to {p.tokens} tokens, which no size or number of the graph's inputs is")
    return edit.call(operator.mul, edit.sizes(table)[-1], p.block_size)


def _as_wide_as_the_table(mask: fx.Node, match: Match, edit: Edit) -> fx.Node:
    """A mask that hides the rest of the last block as well."""
    p = match.params
    assert isinstance(p, PagedAttention)
    blocks = static_int(values.shape(match.inputs["block_table"])[-1])
    keys = static_int(values.shape(mask)[-1])
    if blocks is None or keys is None:
        return mask
    missing = blocks * p.block_size - keys
    if missing <= 0:
        return mask
    padded = ("padded", mask, missing)
    return edit.share(padded, lambda: edit.call(aten.constant_pad_nd.default, mask, [0, missing], 1))
