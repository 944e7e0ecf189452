"""Norm, rotation and writes of latent attention → npu_kv_rmsnorm_rope_cache_v2, in one launch."""

from __future__ import annotations

import torch
from torch import fx

from ...patterns.latent_cache_write import LatentCacheWrite
from ...patterns.match import Match
from ...patterns.movement import ROW_MAJOR_VIEWS
from ...patterns.rms_norm import RmsNorm
from ...patterns.rope import Rope
from ...runtime.ops import CONTRACTS
from ...runtime.ops.contract import OpContract
from ...runtime.ops.kv_rmsnorm_rope_cache import PAGED
from ..edit import Edit, Refused
from .kv_cache_write import cache_in_blocks, replace_caches, slot_mapping
from .precision import refuse_other_precision
from .rms_norm import gamma, note_statistics
from .rope import refuse_backward, token_tables


def lower(match: Match, edit: Edit) -> OpContract:
    """One op, on kv as it comes out of its projection."""
    p = match.params
    assert isinstance(p, LatentCacheWrite)
    contract = CONTRACTS["npu::npu_kv_rmsnorm_rope_cache_v2"]
    write, norm, rope = match.parts
    if p.write.layout == "batch":
        raise Refused("its caches have a batch; it is lowered for caches in blocks")
    _check_norm(p.norm, edit)
    _check_rope(p.rope, edit)
    kv = edit.contiguous(edit.current(match.inputs["kv"]))
    tables, _ = token_tables(rope, edit)
    cos, sin = (edit.view(table, [-1, 1, 1, p.rope.rope_dim]) for table in (tables.full("cos"), tables.full("sin")))
    caches = {"k_cache": cache_in_blocks(write, f"{p.rotated}_cache", edit)}
    caches["ckv_cache"] = cache_in_blocks(write, f"{p.latent}_cache", edit)
    slots = slot_mapping(write, caches["k_cache"], edit)
    index = edit.share(("int64", slots), lambda: edit.cast(slots, torch.int64))
    nodes = {"key": p.write.key_node, "value": match.node}
    is_read = [_is_read_besides(part.node, set(nodes.values())) for part in (rope, norm)]
    results, written = edit.functional(
        contract,
        kv=edit.view(kv, [-1, 1, 1, p.norm.hidden_size + p.rope.rope_dim]),
        gamma=gamma(norm, kv, edit),
        cos=cos,
        sin=sin,
        index=index,
        **caches,
        epsilon=p.norm.eps,
        cache_mode=PAGED,
        is_output_kv=any(is_read),
    )
    replace_caches({"k_cache": nodes[p.rotated], "ckv_cache": nodes[p.latent]}, written, edit)
    for part, result, needed in zip((rope, norm), results, is_read, strict=True):
        if needed:
            edit.replace(part.node, edit.view(result, edit.known_sizes(part.node)))
    return contract


def _is_read_besides(node: fx.Node, writes: set[fx.Node]) -> bool:
    """Whether something reads a value, or a view of it, but what writes it into a cache."""
    return any(
        user not in writes and (user.target not in ROW_MAJOR_VIEWS or _is_read_besides(user, writes))
        for user in node.users
    )


def _check_norm(p: RmsNorm, edit: Edit) -> None:
    if p.is_composite or p.groups != 1 or p.offset:
        raise Refused("its norm has a bias, a gate, groups, an offset or a scale before it, which the op has not")
    refuse_other_precision(p.dtype, *p.steps)
    note_statistics(p, edit)
    if p.weight and p.normed_dtype == p.dtype:
        edit.note(f"the model rounds the normed latent to {p.dtype} before the weight; the op does not")


def _check_rope(p: Rope, edit: Edit) -> None:
    refuse_backward(p)
    if p.style != "deinterleave":
        given = {"half": "takes halves", "interleave": "leaves pairs of neighbours where they are"}[p.style]
        raise Refused(f"its rotation {given}; the op takes pairs of neighbours, and gives halves")
    if p.rope_dim != p.head_dim:
        raise Refused(f"{p.rope_dim} of {p.head_dim} elements of k are rotated; the op rotates all")
    refuse_other_precision(p.dtype, *p.steps)
    edit.note(f"the op rounds the rotated k once; the model rounds each product to {p.compute_dtype}")
