"""Writes keys and values of new tokens into a cache in blocks, in place:

    cache[slot // block_size, slot % block_size] = token

for the slot of each token; slots that no token has keep what they held.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..sizes import known_equal, known_same_shape, known_true
from ..target import Target
from .contract import OpContract
from .partly_covered import PartlyCovered
from .reasons import contiguity, dtype_among, dtype_name, raise_first, rank_between, shape_text

__all__ = ["NORM", "NPU_SCATTER_PA_KV_CACHE", "NZ"]

# Values of cache_mode: [blocks, block_size, N, D], and [blocks, N * D / last, block_size, last] with rows of 32 bytes.
NORM, NZ = "Norm", "PA_NZ"

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int8)
_LAST_OF_NZ = {torch.float16: 16, torch.bfloat16: 16, torch.int8: 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What the contract covers.

    Args:
        key: [T, N, D], float16, bfloat16, int8 or, in "Norm", float32; contiguous as all tensors.
        value: [T, N, Dv], of key's type.
        key_cache: [blocks, block_size, N, D] in "Norm"; [blocks, N * D / last, block_size, last] in "PA_NZ", where last
            is 16, or 32 for int8. Of key's type; written.
        value_cache: likewise for value.
        slot_mapping: [T], int32 or int64: block * block_size + place in the block. Each slot once; of a slot that is
            there twice it isn't known which token it holds.
        cache_mode: "PA_NZ", or None or "Norm".
    """

    key: torch.Tensor
    value: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slot_mapping: torch.Tensor
    cache_mode: str | None

    @property
    def is_nz(self) -> bool:
        """Whether the caches are in NZ layout."""
        return self.cache_mode == NZ

    @property
    def pairs(self) -> tuple[tuple[str, torch.Tensor, torch.Tensor], ...]:
        """What is written where."""
        return ("key", self.key, self.key_cache), ("value", self.value, self.value_cache)


_PART = PartlyCovered(
    "npu::npu_scatter_pa_kv_cache",
    "npu_scatter_pa_kv_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache,"
    " Tensor slot_mapping, *, Tensor? compress_lens=None, Tensor? compress_seq_offsets=None, Tensor? seq_lens=None,"
    ' str? cache_mode="PA_NZ") -> ()',
    _Call,
)


def _rows_first(cache: torch.Tensor, is_nz: bool) -> torch.Tensor:
    """A view as [blocks, block_size, ...] that holds a token in its last dims."""
    return cache.transpose(1, 2) if is_nz else cache


def _invalid(call: _Call) -> Iterator[str]:
    if call.cache_mode not in (None, NORM, NZ):
        yield f"cache_mode {call.cache_mode!r} is unknown; known: {NZ}, {NORM}, None"
    for name, tokens, cache in call.pairs:
        yield from dtype_among(name, tokens, tuple(_LAST_OF_NZ) if call.is_nz else _DTYPES)
        yield from rank_between(name, tokens, 3, 3)
        yield from rank_between(f"{name}_cache", cache, 4, 4)
        for tensor_name, tensor in ((name, tokens), (f"{name}_cache", cache)):
            if tensor.dtype != call.key.dtype:
                yield f"{tensor_name} is {dtype_name(tensor.dtype)} but key is {dtype_name(call.key.dtype)}"
            yield from contiguity(tensor_name, tensor)
        yield from _fit(name, tokens, cache, call.is_nz)
    if not known_same_shape(call.key.shape[:2], call.value.shape[:2]):
        yield f"key {shape_text(call.key.shape)} and value {shape_text(call.value.shape)} differ in tokens or heads"
    key_places, value_places = (_rows_first(cache, call.is_nz).shape[:2] for _, _, cache in call.pairs)
    if not known_same_shape(key_places, value_places):
        yield (
            f"key_cache {shape_text(call.key_cache.shape)} and value_cache {shape_text(call.value_cache.shape)} differ"
            " in blocks or block_size"
        )
    yield from dtype_among("slot_mapping", call.slot_mapping, (torch.int32, torch.int64))
    yield from rank_between("slot_mapping", call.slot_mapping, 1, 1)
    yield from contiguity("slot_mapping", call.slot_mapping)
    if not known_equal(call.slot_mapping.shape[0], call.key.shape[0]):
        yield f"slot_mapping {shape_text(call.slot_mapping.shape)} is not known to have {call.key.shape[0]} slots"


def _fit(name: str, tokens: torch.Tensor, cache: torch.Tensor, is_nz: bool) -> Iterator[str]:
    _, heads, head_dim = tokens.shape
    if not is_nz:
        if not known_same_shape(cache.shape[2:], (heads, head_dim)):
            yield f"{name}_cache {shape_text(cache.shape)} is not [blocks, block_size, {heads}, {head_dim}]"
        return
    last, width = _LAST_OF_NZ[tokens.dtype], heads * head_dim
    if not known_true(width % last == 0):
        yield f"a token of {name} takes {width} elements, not known to be a multiple of {last} ({NZ})"
    if not known_equal(cache.shape[1], width // last) or not known_equal(cache.shape[3], last):
        yield f"{name}_cache {shape_text(cache.shape)} is not [blocks, {width // last}, block_size, {last}] ({NZ})"


@_PART.refuse
def _refuse(target: Target, call: _Call) -> Iterator[str]:
    yield from _invalid(call)
    if call.key.dtype == torch.float32:
        yield "key is float32, which the kernel takes on newer SoCs alone (here float16, bfloat16, int8)"


def _value_reasons(call: _Call) -> Iterator[str]:
    blocks, block_size = _rows_first(call.key_cache, call.is_nz).shape[:2]
    outside = call.slot_mapping[(call.slot_mapping < 0) | (call.slot_mapping >= blocks * block_size)]
    if len(outside):
        yield f"slot_mapping names slots {outside.tolist()} of a cache of {blocks} blocks of {block_size}"


@_PART.kernel
def scatter_pa_kv_cache_reference(call: _Call) -> None:
    """What `npu::npu_scatter_pa_kv_cache` does to `key_cache` and `value_cache`. It returns nothing.

    Args:
        call: the arguments, see `_Call`. The others of the schema have to keep their defaults.

    Raises:
        ValueError: the op raises, or writes elsewhere in memory (a negative slot is not documented to be skipped).

    Source: torch_npu 2.13.0 (schema), op-plugin 517f2e7d (layouts, types).
    """
    raise_first(_PART.name, _invalid(call))
    raise_first(_PART.name, _value_reasons(call))
    for _, tokens, cache in call.pairs:
        places = _rows_first(cache, call.is_nz)
        slots = call.slot_mapping.long()
        places[slots // places.shape[1], slots % places.shape[1]] = tokens.reshape(len(tokens), *places.shape[2:])


@_PART.kernel
def scatter_pa_kv_cache_fake(call: _Call) -> None:
    """Nothing, as `scatter_pa_kv_cache_reference` returns."""


NPU_SCATTER_PA_KV_CACHE = OpContract(
    name=_PART.name,
    schema=_PART.schema,
    reference=scatter_pa_kv_cache_reference,
    fake=scatter_pa_kv_cache_fake,
    refuse=_refuse,
    socs=frozenset({"ascend910b", "ascend910_93"}),
    source="torch_npu 2.13.0 (schema), op-plugin 517f2e7d (layouts), CANN 8.5's documents (dtypes by SoC)",
    mutates=("key_cache", "value_cache"),
)
