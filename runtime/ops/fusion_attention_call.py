"""One call of npu_fusion_attention_v3, and what makes it legal."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..sizes import known_equal, known_same_shape, known_true, static_int
from .attention_layout import AttentionSizes, fits_heads, is_packed, sizes
from .attention_mask import BAND, COMPRESSED, DEFAULT_MASK, is_compressed_causal_mask, mask_reasons
from .reasons import FLOATS, dtype_among, dtype_name, emptiness, rank_between, shape_text
from .sequence_lengths import packed_spans

__all__ = ["FIX_BLANK_ROWS", "FusionAttentionCall", "invalid", "packed_sequences", "value_reasons"]

# The inner_precise that makes rows which see no key zeros.
FIX_BLANK_ROWS = 2

_RANKS = {"BSH": 3, "SBH": 3, "BSND": 4, "BNSD": 4, "TND": 3}

_MAX_BATCH = 2 * 2**20
_MAX_TOKENS = 2**20
_MAX_HEADS = 256
_MAX_HEAD_DIM = 768


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionAttentionCall:
    """What the contract covers.

    Args:
        query: float16, bfloat16 or float32 in the layout, any strides as all tensors: B batch, S tokens or
            T tokens of packed sequences, N heads, D head_dim, H = N * D.
        key: in the layout, with heads that divide query's.
        value: as key; D may be smaller.
        head_num: heads of query.
        input_layout: "BSH", "SBH", "BSND", "BNSD" or "TND".
        pse: [B or 1, N, S, keys] or [B, N, 1, keys], of query's type; added to the scores. Not for "TND".
        atten_mask: bool or uint8, True hides. In sparse modes 0 and 1 [B, N, S, keys], [B or 1, 1, S, keys] or
            [S, keys], not for "TND"; in modes 2 to 4 `compressed_causal_mask`. Without one, nothing is hidden.
        scale: factor of the scores.
        pre_tockens: see `attention_mask`.
        next_tockens: likewise.
        inner_precise: 0 to 2; 2 makes rows that see no key zeros.
        actual_seq_qlen: int64, on the CPU: the ends of packed sequences, without the leading 0; trailing zeros are no
            sequences. For "TND", and needed there.
        actual_seq_kvlen: likewise of key.
        sparse_mode: 0 to 4, see `attention_mask`.
        gen_mask_parallel: how dropout works, of which there is none.
        sync: likewise.
        softmax_layout: "", or "TND" for "TND": how the statistics are ordered.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    head_num: int
    input_layout: str
    pse: torch.Tensor | None
    atten_mask: torch.Tensor | None
    scale: float
    pre_tockens: int
    next_tockens: int
    inner_precise: int
    actual_seq_qlen: torch.Tensor | None
    actual_seq_kvlen: torch.Tensor | None
    sparse_mode: int
    gen_mask_parallel: bool
    sync: bool
    softmax_layout: str

    @property
    def query_sizes(self) -> AttentionSizes:
        """Sizes of query."""
        return sizes(self.query, self.input_layout, self.head_num)

    @property
    def heads_of_key(self) -> int:
        """How many heads key has, by its head_dim, which is query's; 0 where that isn't known."""
        if "H" in self.input_layout:
            return static_int(self.key.shape[2] // self.query_sizes.head_dim) or 0
        return static_int(self.key.shape[self.input_layout.index("N")]) or 0

    @property
    def key_sizes(self) -> AttentionSizes:
        """Sizes of key."""
        return sizes(self.key, self.input_layout, self.heads_of_key)

    @property
    def value_sizes(self) -> AttentionSizes:
        """Sizes of value."""
        return sizes(self.value, self.input_layout, self.heads_of_key)


def invalid(call: FusionAttentionCall) -> Iterator[str]:
    """Why the kernel raises, or computes something undefined."""
    if call.input_layout not in _RANKS:
        yield f"input_layout {call.input_layout!r} is unknown; known: {', '.join(_RANKS)}"
    rank = _RANKS[call.input_layout]
    for name, tensor in (("query", call.query), ("key", call.key), ("value", call.value)):
        yield from dtype_among(name, tensor, FLOATS)
        if tensor.dtype != call.query.dtype:
            yield f"{name} is {dtype_name(tensor.dtype)} but query is {dtype_name(call.query.dtype)}"
        yield from rank_between(name, tensor, rank, rank)
        yield from emptiness(name, tensor)
    yield from _heads(call)
    yield from _sizes(call)
    yield from _packing(call)
    yield from _mask_and_shift(call)
    if call.inner_precise not in (0, 1, FIX_BLANK_ROWS):
        yield f"inner_precise is {call.inner_precise} (the kernel takes 0 to {FIX_BLANK_ROWS})"


def _heads(call: FusionAttentionCall) -> Iterator[str]:
    if not 1 <= call.head_num <= _MAX_HEADS:
        yield f"head_num is {call.head_num} (the kernel takes 1 to {_MAX_HEADS})"
    if not fits_heads(call.query, call.input_layout, call.head_num):
        yield f"query {shape_text(call.query.shape)} is not known to have {call.head_num} heads in {call.input_layout}"
    heads = call.heads_of_key
    if heads < 1 or call.head_num % heads:
        yield f"key {shape_text(call.key.shape)} is not known to have heads that divide head_num {call.head_num}"
    for name, tensor in (("key", call.key), ("value", call.value)):
        if not fits_heads(tensor, call.input_layout, heads):
            yield f"{name} {shape_text(tensor.shape)} is not known to have {heads} heads in {call.input_layout}"


def _sizes(call: FusionAttentionCall) -> Iterator[str]:
    query, key, value = call.query_sizes, call.key_sizes, call.value_sizes
    if not known_equal(key.batch, query.batch) or not known_equal(key.head_dim, query.head_dim):
        yield (
            f"key {shape_text(call.key.shape)} has a batch of {key.batch} and head_dim {key.head_dim}, query"
            f" {shape_text(call.query.shape)} {query.batch} and {query.head_dim} (they must be equal)"
        )
    if not known_same_shape(key[:3], value[:3]):
        yield f"value {shape_text(call.value.shape)} has other tokens or heads than key {shape_text(call.key.shape)}"
    if not known_true(value.head_dim <= key.head_dim) or not known_true(key.head_dim <= _MAX_HEAD_DIM):
        yield (
            f"head_dim is {key.head_dim} and {value.head_dim} of value"
            f" (the kernel takes {_MAX_HEAD_DIM}, and no larger one of value)"
        )
    # The op itself raises where one of these is too large: what isn't known is let pass.
    if known_true(query.batch > _MAX_BATCH):
        yield f"query {shape_text(call.query.shape)} has a batch of {query.batch} (the kernel takes {_MAX_BATCH})"
    for name, tokens in (("query", query.tokens), ("key", key.tokens)):
        if known_true(tokens > _MAX_TOKENS):
            yield f"{name} has {tokens} tokens (the kernel takes {_MAX_TOKENS})"


def _packing(call: FusionAttentionCall) -> Iterator[str]:
    packed = is_packed(call.input_layout)
    for name, ends in (("actual_seq_qlen", call.actual_seq_qlen), ("actual_seq_kvlen", call.actual_seq_kvlen)):
        if ends is not None and not packed:
            yield f"{name} is given, which layout {call.input_layout} doesn't take"
        if ends is None and packed:
            yield f"{name} is missing, which packed sequences need"
        if ends is not None:
            yield from dtype_among(name, ends, (torch.int64,))
            yield from rank_between(name, ends, 1, 1)
    if (
        call.actual_seq_qlen is not None
        and call.actual_seq_kvlen is not None
        and not known_same_shape(call.actual_seq_qlen.shape, call.actual_seq_kvlen.shape)
    ):
        yield (
            f"actual_seq_qlen {shape_text(call.actual_seq_qlen.shape)} and actual_seq_kvlen"
            f" {shape_text(call.actual_seq_kvlen.shape)} must have an end for each sequence"
        )
    if call.softmax_layout not in ("", "TND") or (call.softmax_layout and not packed):
        allowed = "'' and 'TND'" if packed else "''"
        yield f"softmax_layout is {call.softmax_layout!r} (layout {call.input_layout} takes {allowed})"


def _mask_and_shift(call: FusionAttentionCall) -> Iterator[str]:
    packed = is_packed(call.input_layout)
    batch, tokens, heads, _ = call.query_sizes
    scores = (tokens, call.key_sizes.tokens)
    if call.atten_mask is not None or not DEFAULT_MASK <= call.sparse_mode <= BAND:
        yield from mask_reasons(
            call.atten_mask,
            call.sparse_mode,
            call.pre_tockens,
            call.next_tockens,
            [] if packed else [(batch, heads, *scores), (batch, 1, *scores), (1, 1, *scores), scores],
            dtypes=(torch.bool, torch.uint8),
        )
    if call.pse is None:
        return
    if packed:
        yield "pse is given, which is not supported for packed sequences"
    if call.pse.dtype != call.query.dtype:
        yield f"pse is {dtype_name(call.pse.dtype)} but query is {dtype_name(call.query.dtype)} (they must be equal)"
    shapes = [(batch, heads, *scores), (batch, heads, 1, scores[1]), (1, heads, *scores)]
    if not any(known_same_shape(call.pse.shape, shape) for shape in shapes):
        allowed = " or ".join(map(shape_text, shapes))
        yield f"pse {shape_text(call.pse.shape)} is not known to have a shape that the kernel takes: {allowed}"


def value_reasons(call: FusionAttentionCall) -> Iterator[str]:
    """What only the values of tensors show to be undefined on the device."""
    if (
        call.atten_mask is not None
        and call.sparse_mode in COMPRESSED
        and not is_compressed_causal_mask(call.atten_mask)
    ):
        yield f"atten_mask of sparse_mode {call.sparse_mode} is not True above the diagonal and False elsewhere"
    tokens, tokens_of_key = call.query_sizes.tokens, call.key_sizes.tokens
    for (start, stop), (first, last) in packed_sequences(call):
        if not start <= stop <= tokens or not first <= last <= tokens_of_key:
            yield (
                f"actual_seq_qlen and actual_seq_kvlen have a sequence of rows {start} to {stop} and keys {first} to"
                f" {last}; there are {tokens} and {tokens_of_key}"
            )


def packed_sequences(call: FusionAttentionCall) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """First and behind the last, of the rows and of the keys of each packed sequence."""
    if call.actual_seq_qlen is None or call.actual_seq_kvlen is None:
        return []
    ends = list(zip(call.actual_seq_qlen.tolist(), call.actual_seq_kvlen.tolist(), strict=True))
    while ends and ends[-1] == (0, 0):
        ends.pop()
    return list(zip(packed_spans([rows for rows, _ in ends]), packed_spans([keys for _, keys in ends]), strict=True))
