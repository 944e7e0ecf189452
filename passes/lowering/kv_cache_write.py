"""Keys and values written at the same slots → npu_scatter_pa_kv_cache: both at once, into the caches themselves."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ...patterns import values
from ...patterns.kv_cache_write import KvCacheWrite, in_blocks
from ...patterns.match import Match
from ...patterns.movement import source
from ...runtime.ops import CONTRACTS
from ...runtime.ops.contract import OpContract
from ...runtime.ops.scatter_pa_kv_cache import NORM
from ...runtime.sizes import is_contiguous, static_int
from ..edit import Edit, Refused

aten = torch.ops.aten

# How caches that aren't cut into blocks are cut, as far as their slots go: for the op a block is a row of slots.
_BLOCK_SIZES = (128, 64, 32, 16)

_BETWEEN = "something reads the buffer of both caches between the writes, and would see what both have written"


def lower(match: Match, edit: Edit) -> OpContract:
    """One op for both writes. `in_place` gives it the caches themselves, where nothing reads what they held before."""
    p = match.params
    assert isinstance(p, KvCacheWrite)
    contract = CONTRACTS["npu::npu_scatter_pa_kv_cache"]
    if p.layout == "batch":
        shape = tuple(values.shape(match.inputs["key_cache"]))
        raise Refused(f"its caches {shape} have a batch; {contract.name} writes slots of [blocks, block_size, …]")
    tokens = {name: edit.current(match.inputs[name]) for name in ("key", "value")}
    if all(not _lies_in_rows(node) for node in tokens.values()):
        raise Refused("neither key nor value is contiguous: to copy both costs as much as one op for two spares")
    caches = {name: cache_in_blocks(match, name, edit) for name in ("key_cache", "value_cache")}
    rows = {name: _by_token(node, caches[f"{name}_cache"], edit) for name, node in tokens.items()}
    slots = slot_mapping(match, caches["key_cache"], edit)
    _, written = edit.functional(contract, **rows, **caches, slot_mapping=slots, cache_mode=NORM)
    replace_caches({"key_cache": p.key_node, "value_cache": match.node}, written, edit)
    return contract


def cache_in_blocks(match: Match, name: str, edit: Edit) -> fx.Node:
    """A cache as [blocks, block_size, heads, head_dim].

    Raises:
        Refused: its slots can't be cut into blocks.
    """
    base = match.inputs[name]
    indices = 1 if "slots" in match.inputs else 2
    cache = in_blocks(base, indices)
    if cache is None:
        cache = edit.current(base)
        slots = static_int(values.shape(cache)[0])
        size = next((size for size in _BLOCK_SIZES if slots is not None and slots % size == 0), None)
        if size is None:
            raise Refused(f"{name} has {values.shape(cache)[0]} slots, which are no blocks of {_BLOCK_SIZES[-1]}")
        cache = edit.view(cache, [-1, size, *edit.sizes(cache)[1:]])
    cache = edit.current(_of_the_buffer(cache, edit))
    return cache if len(values.shape(cache)) == 4 else edit.call(aten.unsqueeze.default, cache, 2)


def _of_the_buffer(cache: fx.Node, edit: Edit) -> fx.Node:
    """A cache that is picked out of one buffer of all, as it was before others in there were written.

    Raises:
        Refused: something else reads the buffer between the writes, and would see both.
    """
    found: Any = None
    if cache.target is aten.select.int:
        found = cache.args
    elif cache.target is operator.getitem and source(cache).target is aten.unbind.int:
        unbound: Any = source(cache).args
        found = (unbound[0], unbound[1] if len(unbound) > 1 else 0, cache.args[1])
    if found is None or found[0].target is not aten.select_scatter.default:
        return cache
    buffer, axis, place = found
    pick = cache if cache.target is aten.select.int else source(cache)
    if len(pick.users) > 1 and pick is not cache:
        raise Refused(_BETWEEN)
    while buffer.target is aten.select_scatter.default and buffer.args[2] == axis and buffer.args[3] != place:
        if any(user is not pick and user.target is not aten.select_scatter.default for user in buffer.users):
            raise Refused(_BETWEEN)
        buffer = buffer.args[0]
    return edit.call(aten.select.int, buffer, axis, place)


def slot_mapping(match: Match, cache: fx.Node, edit: Edit) -> fx.Node:
    """The slot of each token, [tokens], none of them negative; made once for all layers."""
    p = match.params
    assert isinstance(p, KvCacheWrite)
    blocks, block_size = edit.sizes(cache)[:2]
    indices = [edit.current(match.inputs[name]) for name in ("slots", "blocks", "places") if name in match.inputs]
    slots = indices[0] if len(indices) == 1 else _slots_of(indices[0], indices[1], block_size)

    def make() -> fx.Node:
        if slots is None:
            block, place = (_from_the_start(*of, edit) for of in zip(indices, (blocks, block_size), strict=True))
            found = edit.call(aten.add.Tensor, place, edit.call(aten.mul.Tensor, block, block_size))
        else:
            found = _from_the_start(slots, _product(blocks, block_size, edit), edit) if p.wraps else slots
        found = edit.contiguous(found)
        return found if len(values.shape(found)) == 1 else edit.view(found, [-1])

    return edit.share(("slots", *(indices if slots is None else [slots]), blocks, block_size, p.wraps), make)


def _slots_of(blocks: fx.Node, places: fx.Node, block_size: int | fx.Node) -> fx.Node | None:
    """The slots that are cut into blocks and places, as `slots // block_size` and `slots % block_size`, or None."""
    divides = blocks.target is aten.floor_divide.default or (
        blocks.target is aten.div.Tensor_mode and blocks.kwargs.get("rounding_mode") == "floor"
    )
    if not divides or places.target is not aten.remainder.Scalar or blocks.args != places.args:
        return None
    slots, divisor = blocks.args
    return slots if divisor == block_size and isinstance(slots, fx.Node) else None


def _from_the_start(index: fx.Node, count: int | fx.Node, edit: Edit) -> fx.Node:
    """An index of which a negative one counts from the end as one from the start, as the op wants it."""
    return edit.call(aten.remainder.Scalar, index, count)


def _product(a: int | fx.Node, b: int | fx.Node, edit: Edit) -> int | fx.Node:
    return a * b if isinstance(a, int) and isinstance(b, int) else edit.call(operator.mul, a, b)


def _lies_in_rows(node: fx.Node) -> bool:
    value = values.tensor(node)
    return value is not None and is_contiguous(value)


def _by_token(tokens: fx.Node, cache: fx.Node, edit: Edit) -> fx.Node:
    """[tokens, heads, head_dim], contiguous."""
    tokens = edit.contiguous(tokens)
    return tokens if len(values.shape(tokens)) == 3 else edit.view(tokens, [-1, *edit.sizes(cache)[2:]])


def replace_caches(nodes: Mapping[str, fx.Node], written: Mapping[str, fx.Node], edit: Edit) -> None:
    """Lets the new values of caches stand for those that the model computes."""
    for name, node in nodes.items():
        new = written[name]
        is_viewed = not values.same_shape(values.shape(new), values.shape(node))
        edit.replace(node, edit.view(new, edit.known_sizes(node)) if is_viewed else new)
