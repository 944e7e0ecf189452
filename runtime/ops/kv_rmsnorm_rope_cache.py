"""RMSNorm and rotation of what latent attention keeps of a token, written into its two caches:

    [latent | k] = kv
    ckv_cache[slot] = latent * (mean(latent^2) + epsilon)^-1/2 * gamma
    k_cache[slot] = rotated k, whose pairs of neighbours are taken apart as by npu_interleave_rope

The first version doesn't declare what it writes, and gives the caches back; the second declares it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..sizes import known_equal, known_same_shape, known_true
from ..target import Soc, Target
from .contract import OpContract
from .interleave_rope import apart
from .partly_covered import PartlyCovered
from .reasons import contiguity, dtype_among, dtype_name, emptiness, raise_first, rank_between, shape_text
from .rotary import rotate_half

__all__ = [
    "LATENT_DIM",
    "NPU_KV_RMSNORM_ROPE_CACHE",
    "NPU_KV_RMSNORM_ROPE_CACHE_V2",
    "PAGED",
    "ROPE_DIM",
]

# What the kernel is written for: the sizes of DeepSeek V2 and V3.
LATENT_DIM, ROPE_DIM = 512, 64

# Values of cache_mode; the others order elements of a block otherwise, or name blocks in place of slots.
PAGED = "PA_BNSD"
_BY_BATCH = "Norm"
_MODES = (_BY_BATCH, "PA", PAGED)

_BLOCK_ALIGNMENT = 16
_MAX_BATCH = 65535

_SOCS: frozenset[Soc] = frozenset({"ascend910b", "ascend910_93"})
_SOURCE = (
    "torch_npu 2.13.0 (schema, shapes), op-plugin 517f2e7d (layouts),"
    " CANN's host code, kernel and document of KvRmsNormRopeCache (limits, roundings, negative slots)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What the contract covers.

    Args:
        kv: [B, 1, S, 576], float16 or bfloat16, contiguous as all tensors: 512 elements that are normed, then 64 that
            are turned, pairs of neighbours.
        gamma: [512], of kv's type, as all floats.
        cos: [B, 1, S, 64], the halves belonging to those of the rotated k; also [B, 1, 1, 64], save where the results
            are asked for.
        sin: likewise.
        index: int64 slots: [B, S] in "Norm", [B * S] else. -1 writes nothing. Each slot once; of one that is there
            twice it isn't known which token it holds.
        k_cache: [B, 1, L, 64] in "Norm"; [blocks, block_size, 1, 64] else, block_size a multiple of 16. Written.
        ckv_cache: likewise, 512 wide.
        epsilon: added to the mean of squares.
        cache_mode: "Norm", or "PA" or "PA_BNSD", which are the same.
        is_output_kv: whether the results are asked for. Only in "PA" and "PA_BNSD".
    """

    kv: torch.Tensor
    gamma: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    index: torch.Tensor
    k_cache: torch.Tensor
    ckv_cache: torch.Tensor
    epsilon: float
    cache_mode: str
    is_output_kv: bool

    @property
    def is_paged(self) -> bool:
        """Whether the caches are in blocks."""
        return self.cache_mode != _BY_BATCH

    @property
    def caches(self) -> tuple[tuple[str, torch.Tensor, int], ...]:
        """The caches, with how wide they are."""
        return ("k_cache", self.k_cache, ROPE_DIM), ("ckv_cache", self.ckv_cache, LATENT_DIM)


def _invalid(call: _Call) -> Iterator[str]:
    if call.cache_mode not in _MODES:
        yield f"cache_mode {call.cache_mode!r} is not covered; covered: {', '.join(_MODES)}"
    ranks = {"kv": 4, "gamma": 1, "cos": 4, "sin": 4, "k_cache": 4, "ckv_cache": 4}
    for name, rank in ranks.items():
        tensor: torch.Tensor = getattr(call, name)
        yield from dtype_among(name, tensor, (torch.float16, torch.bfloat16))
        if tensor.dtype != call.kv.dtype:
            yield f"{name} is {dtype_name(tensor.dtype)} but kv is {dtype_name(call.kv.dtype)}"
        yield from rank_between(name, tensor, rank, rank)
        yield from emptiness(name, tensor)
        yield from contiguity(name, tensor)
    batch, heads, tokens, width = call.kv.shape
    if not known_equal(heads, 1) or not known_equal(width, LATENT_DIM + ROPE_DIM):
        yield f"kv {shape_text(call.kv.shape)} is not [B, 1, S, {LATENT_DIM + ROPE_DIM}]"
    if known_true(batch > _MAX_BATCH):
        yield f"kv {shape_text(call.kv.shape)} has a batch of {batch} (the kernel takes {_MAX_BATCH})"
    if not known_equal(call.gamma.shape[0], LATENT_DIM):
        yield f"gamma {shape_text(call.gamma.shape)} is not [{LATENT_DIM}]"
    for name, table in (("cos", call.cos), ("sin", call.sin)):
        rows = (tokens,) if call.is_paged and call.is_output_kv else (tokens, 1)
        if not any(known_same_shape(table.shape, (batch, 1, count, ROPE_DIM)) for count in rows):
            allowed = " or ".join(shape_text((batch, 1, count, ROPE_DIM)) for count in rows)
            yield f"{name} {shape_text(table.shape)} is not {allowed}"
    if not known_same_shape(call.cos.shape, call.sin.shape):
        yield f"cos {shape_text(call.cos.shape)} and sin {shape_text(call.sin.shape)} differ in shape"
    yield from _caches_fit(call)
    yield from dtype_among("index", call.index, (torch.int64,))
    yield from contiguity("index", call.index)
    wanted = (batch * tokens,) if call.is_paged else (batch, tokens)
    if not known_same_shape(call.index.shape, wanted):
        yield f"index {shape_text(call.index.shape)} is not known to be {shape_text(wanted)}"


def _caches_fit(call: _Call) -> Iterator[str]:
    for name, cache, width in call.caches:
        heads = cache.shape[2 if call.is_paged else 1]
        if not known_equal(heads, 1) or not known_equal(cache.shape[3], width):
            layout = "blocks, block_size, 1" if call.is_paged else "B, 1, L"
            yield f"{name} {shape_text(cache.shape)} is not [{layout}, {width}]"
        if call.is_paged and not known_true(cache.shape[1] % _BLOCK_ALIGNMENT == 0):
            yield f"{name} has blocks of {cache.shape[1]}, not known to be a multiple of {_BLOCK_ALIGNMENT}"
        if not call.is_paged and not known_equal(cache.shape[0], call.kv.shape[0]):
            yield f"{name} {shape_text(cache.shape)} is not for a batch of {call.kv.shape[0]}"
    shapes = call.k_cache.shape, call.ckv_cache.shape
    if not known_same_shape(shapes[0][:3], shapes[1][:3]):
        yield f"k_cache {shape_text(shapes[0])} and ckv_cache {shape_text(shapes[1])} differ in slots"


def _refusals(target: Target, call: _Call) -> Iterator[str]:
    yield from _invalid(call)
    if call.is_output_kv and not call.is_paged:
        yield "is_output_kv is given in cache_mode Norm, in which the results are left uninitialised"


def _value_reasons(call: _Call) -> Iterator[str]:
    slots = call.k_cache.shape[0] * call.k_cache.shape[1] if call.is_paged else call.k_cache.shape[2]
    outside = call.index[(call.index < -1) | (call.index >= slots)]
    if len(outside):
        yield f"index names slots {outside.tolist()}, and there are {slots}"


def _computed(name: str, call: _Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes the caches. The results: the rotated k and the normed latent."""
    raise_first(name, _invalid(call))
    raise_first(name, _value_reasons(call))
    wide = call.kv.float()
    latent, k = wide[..., :LATENT_DIM], wide[..., LATENT_DIM:]
    root = (latent.pow(2).mean(-1, keepdim=True) + call.epsilon).sqrt()
    normed = (latent / root * call.gamma.float()).to(call.kv.dtype)
    k = apart(k)
    turned = (k * call.cos.float() + rotate_half(k) * call.sin.float()).to(call.kv.dtype)
    written = call.index >= 0
    for (_, cache, width), tokens in zip(call.caches, (turned, normed), strict=True):
        rows = tokens.reshape(*call.index.shape, width)[written]
        if call.is_paged:
            cache.view(-1, width)[call.index[written]] = rows
        else:
            batch = torch.arange(len(cache)).unsqueeze(1).expand_as(call.index)
            cache[batch[written], 0, call.index[written]] = rows
    if call.is_paged and call.is_output_kv:
        return turned, normed
    return torch.full_like(turned, torch.nan), torch.full_like(normed, torch.nan)


def _shapes(call: _Call) -> tuple[torch.Tensor, torch.Tensor]:
    rows = call.kv.shape[:-1]
    return call.kv.new_empty((*rows, ROPE_DIM)), call.kv.new_empty((*rows, LATENT_DIM))


_ARGUMENTS = (
    "Tensor? k_rope_scale=None, Tensor? c_kv_scale=None, Tensor? k_rope_offset=None, Tensor? c_kv_offset=None,"
    ' Tensor? v=None, float epsilon=1e-5, str cache_mode="Norm", bool is_output_kv=False'
)

# npu_kv_rmsnorm_rope_cache

_FIRST = PartlyCovered(
    "npu::npu_kv_rmsnorm_rope_cache",
    "npu_kv_rmsnorm_rope_cache(Tensor kv, Tensor gamma, Tensor cos, Tensor sin, Tensor index, Tensor k_cache,"
    f" Tensor ckv_cache, *, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _Call,
)


@_FIRST.kernel
def kv_rmsnorm_rope_cache_reference(call: _Call) -> tuple[torch.Tensor, ...]:
    """What `npu::npu_kv_rmsnorm_rope_cache` does: all in float32, each result rounded once.

    Args:
        call: the arguments, see `_Call`. The others of the schema have to keep their defaults.

    Returns:
        k_cache and ckv_cache themselves, the rotated k [B, 1, S, 64] and the normed latent [B, 1, S, 512]. The last two
        are NaN, which stands for uninitialised memory, where they aren't asked for.

    Raises:
        ValueError: the op raises, or writes elsewhere in memory.

    Source: CANN's kernel of KvRmsNormRopeCache for 16-bit caches that aren't quantised.
    """
    return call.k_cache, call.ckv_cache, *_computed(_FIRST.name, call)


@_FIRST.kernel
def kv_rmsnorm_rope_cache_fake(call: _Call) -> tuple[torch.Tensor, ...]:
    """Shapes of `kv_rmsnorm_rope_cache_reference`."""
    return torch.empty_like(call.k_cache), torch.empty_like(call.ckv_cache), *_shapes(call)


NPU_KV_RMSNORM_ROPE_CACHE = OpContract(
    name=_FIRST.name,
    schema=_FIRST.schema,
    reference=kv_rmsnorm_rope_cache_reference,
    fake=kv_rmsnorm_rope_cache_fake,
    refuse=_FIRST.refuse(_refusals),
    socs=_SOCS,
    source=_SOURCE,
    mutates=("k_cache", "ckv_cache"),
)

# npu_kv_rmsnorm_rope_cache_v2

_SECOND = PartlyCovered(
    "npu::npu_kv_rmsnorm_rope_cache_v2",
    "npu_kv_rmsnorm_rope_cache_v2(Tensor kv, Tensor gamma, Tensor cos, Tensor sin, Tensor index, Tensor(a!) k_cache,"
    f" Tensor(b!) ckv_cache, *, {_ARGUMENTS}, int? k_cache_dtype=None, int? ckv_cache_dtype=None) -> (Tensor, Tensor)",
    _Call,
)


@_SECOND.kernel
def kv_rmsnorm_rope_cache_v2_reference(call: _Call) -> tuple[torch.Tensor, torch.Tensor]:
    """What `npu::npu_kv_rmsnorm_rope_cache_v2` does: as the first version, without the caches among its results."""
    return _computed(_SECOND.name, call)


@_SECOND.kernel
def kv_rmsnorm_rope_cache_v2_fake(call: _Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes of `kv_rmsnorm_rope_cache_v2_reference`."""
    return _shapes(call)


NPU_KV_RMSNORM_ROPE_CACHE_V2 = OpContract(
    name=_SECOND.name,
    schema=_SECOND.schema,
    reference=kv_rmsnorm_rope_cache_v2_reference,
    fake=kv_rmsnorm_rope_cache_v2_fake,
    refuse=_SECOND.refuse(_refusals),
    socs=_SOCS,
    source=_SOURCE,
    mutates=("k_cache", "ckv_cache"),
)
