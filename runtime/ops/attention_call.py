"""One call of an inference attention op, in one language: the ops agree in meaning and differ in names.

The rules here hold for all of them; each op adds its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..sizes import Size, known_equal, known_same_shape, known_true, static_int
from .attention_layout import AttentionSizes, fits_heads, is_packed, read_dims, sizes
from .paged_kv import cache_head_dim, max_tokens
from .reasons import contiguity, dtype_among, dtype_name, rank_between, shape_text

__all__ = [
    "MAX_TOKENS",
    "SHIFT_ALIGNMENT",
    "AttentionCall",
    "head_dim_reasons",
    "head_reasons",
    "shift_reasons",
    "size_reasons",
    "tensor_reasons",
]

MAX_TOKENS = 20 * 2**20

_DTYPES = (torch.float16, torch.bfloat16)
_MAX_BATCH = 65536
_MAX_HEADS = 256
_MAX_GROUP = 64
_MAX_HEAD_DIM = 512
_HEAD_DIM_ALIGNMENT = 16
_ROW_LIMIT = 65535
# Rows of a shift take multiples of so many bytes.
SHIFT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """Arguments of a call; None or 0 stands for "not given" as in the ops.

    Args:
        query: in the layout.
        key: in the layout, or a cache in blocks where there is a `block_table`.
        value: as key.
        pse_shift: added to the scores.
        atten_mask: True hides a key.
        q_lengths: tokens of each batch entry of query, or ends of packed sequences.
        kv_lengths: likewise of key; of packed queries with a `block_table`, tokens of each sequence.
        block_table: makes key and value caches.
        block_size: tokens of a block.
        num_heads: heads of query.
        num_key_value_heads: heads of key; 0 for as many as query has.
        scale: factor of the scores.
        pre_tokens: for sparse modes 0 and 4.
        next_tokens: likewise.
        input_layout: see `attention_layout`.
        sparse_mode: see `attention_mask`.
        inner_precise: 0 to 3; bit 1 makes rows that see no key zeros.
        sink: a score for each head, without a value.
        with_lse: whether the log-sum-exp of each row is asked for.
        names: what the op calls num_heads, q_lengths and kv_lengths.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    pse_shift: torch.Tensor | None
    atten_mask: torch.Tensor | None
    q_lengths: Sequence[Size] | None
    kv_lengths: Sequence[Size] | None
    block_table: torch.Tensor | None = None
    block_size: int = 0
    num_heads: int
    num_key_value_heads: int
    scale: float
    pre_tokens: int
    next_tokens: int
    input_layout: str
    sparse_mode: int
    inner_precise: int = 0
    sink: torch.Tensor | None = None
    with_lse: bool = False
    names: tuple[str, str, str]

    @property
    def heads_of_key(self) -> int:
        """How many heads key and value have."""
        return self.num_key_value_heads or self.num_heads

    @property
    def packed(self) -> bool:
        """Whether sequences stand one after another."""
        return is_packed(self.input_layout)

    @property
    def decodes(self) -> bool:
        """Whether query is known to have one token."""
        return not self.packed and known_equal(self.query_sizes.tokens, 1)

    @property
    def prefills(self) -> bool:
        """Whether query is known to have several tokens. An unbacked size is known to be neither."""
        return not self.packed and known_true(self.query_sizes.tokens > 1)

    @property
    def query_sizes(self) -> AttentionSizes:
        """Sizes of query."""
        return sizes(self.query, self.input_layout, self.num_heads)

    @property
    def key_sizes(self) -> AttentionSizes:
        """Sizes of key where it is no cache."""
        return sizes(self.key, self.input_layout, self.heads_of_key)

    @property
    def value_sizes(self) -> AttentionSizes:
        """Sizes of value where it is no cache."""
        return sizes(self.value, self.input_layout, self.heads_of_key)

    @property
    def tokens_of_key(self) -> Size:
        """How many tokens key has; with a cache, how many the table has places for."""
        if self.block_table is None:
            return self.key_sizes.tokens
        return max_tokens(self.block_table, self.block_size)

    @property
    def value_head_dim(self) -> Size:
        """head_dim of value, and so of the result."""
        if self.block_table is None:
            return self.value_sizes.head_dim
        return cache_head_dim(self.value, self.heads_of_key)


def tensor_reasons(call: AttentionCall) -> Iterator[str]:
    """query, key and value have the types and ranks that the kernel takes; with mask and shift they are contiguous."""
    rank = len(read_dims(call.input_layout))
    for name, tensor in (("query", call.query), ("key", call.key), ("value", call.value)):
        yield from dtype_among(name, tensor, _DTYPES)
        if tensor.dtype != call.query.dtype:
            yield f"{name} is {dtype_name(tensor.dtype)} but query is {dtype_name(call.query.dtype)}"
        if name == "query" or call.block_table is None:
            yield from rank_between(name, tensor, rank, rank)
        yield from contiguity(name, tensor)
    for name, given in (("atten_mask", call.atten_mask), ("pse_shift", call.pse_shift)):
        if given is not None:
            yield from contiguity(name, given)


def head_reasons(call: AttentionCall) -> Iterator[str]:
    """The numbers of heads are those of the tensors, and within the kernel's limits."""
    heads_name, heads, heads_of_key = call.names[0], call.num_heads, call.heads_of_key
    if not 1 <= heads <= _MAX_HEADS:
        yield f"{heads_name} is {heads} (the kernel takes 1 to {_MAX_HEADS})"
    if heads_of_key < 1 or heads % heads_of_key:
        yield f"{heads_name} {heads} is no multiple of num_key_value_heads {heads_of_key}"
    if heads // heads_of_key > _MAX_GROUP:
        yield f"{heads // heads_of_key} heads of query share one of key (the kernel takes {_MAX_GROUP})"
    named = [("query", call.query, heads)]
    if call.block_table is None:
        named += [("key", call.key, heads_of_key), ("value", call.value, heads_of_key)]
    for name, tensor, wanted in named:
        if not fits_heads(tensor, call.input_layout, wanted):
            yield f"{name} {shape_text(tensor.shape)} in layout {call.input_layout} is not known to have {wanted} heads"


def head_dim_reasons(call: AttentionCall) -> Iterator[str]:
    """head_dim is known, of 16-element blocks, and not too large."""
    head_dim = static_int(call.query_sizes.head_dim)
    if head_dim is None or not 1 <= head_dim <= _MAX_HEAD_DIM or head_dim % _HEAD_DIM_ALIGNMENT:
        yield (
            f"head_dim is {call.query_sizes.head_dim}"
            f" (the kernel takes multiples of {_HEAD_DIM_ALIGNMENT} up to {_MAX_HEAD_DIM})"
        )
    row = call.num_heads * (head_dim or 0)
    if read_dims(call.input_layout) in ("BSH", "BSND") and row >= _ROW_LIMIT:
        yield f"a token of query takes {row} elements (layout {call.input_layout} takes less than {_ROW_LIMIT})"


def size_reasons(call: AttentionCall) -> Iterator[str]:
    """Sizes of query, and of key and value that are no caches, fit each other and the kernel."""
    batch, tokens, _, head_dim = call.query_sizes
    # The op itself raises where a batch or a sequence is too long: a size that isn't known is let pass, here and in
    # other limits on batches and tokens.
    if known_true(batch > _MAX_BATCH):
        yield f"query {shape_text(call.query.shape)} has a batch of {batch} (the kernel takes {_MAX_BATCH})"
    if known_true(tokens > MAX_TOKENS):
        yield f"query {shape_text(call.query.shape)} has {tokens} tokens (the kernel takes {MAX_TOKENS})"
    if call.block_table is not None:
        return
    of_key, of_value = call.key_sizes, call.value_sizes
    if not known_equal(of_key.batch, batch) or not known_equal(of_key.head_dim, head_dim):
        yield (
            f"key {shape_text(call.key.shape)} has a batch of {of_key.batch} and head_dim {of_key.head_dim}, query"
            f" {shape_text(call.query.shape)} {batch} and {head_dim} (they must be equal)"
        )
    # Packed values may have a head_dim of their own, which a rule on packed sequences judges.
    if not known_same_shape(of_key[:3], of_value[:3]) or not (
        call.packed or known_equal(of_value.head_dim, of_key.head_dim)
    ):
        yield f"value {shape_text(call.value.shape)} and key {shape_text(call.key.shape)} must have the same shape"
    if known_true(of_key.tokens > MAX_TOKENS):
        yield f"key {shape_text(call.key.shape)} has {of_key.tokens} tokens (the kernel takes {MAX_TOKENS})"


def shift_reasons(call: AttentionCall) -> Iterator[str]:
    """pse_shift is of query's type, and has a row for each head and token of query that is not shorter than key."""
    shift, tokens_of_key = call.pse_shift, call.tokens_of_key
    if shift is None:
        return
    if shift.dtype != call.query.dtype:
        yield f"pse_shift is {dtype_name(shift.dtype)} but query is {dtype_name(call.query.dtype)}"
    yield from rank_between("pse_shift", shift, 4, 4)
    batch, tokens, heads, _ = call.query_sizes
    first, *rest, last = shift.shape
    if not (known_equal(first, 1) or known_equal(first, batch)) or not known_same_shape(rest, (heads, tokens)):
        yield (
            f"pse_shift {shape_text(shift.shape)} is not known to be"
            f" [1 or {batch}, {heads}, {tokens}, {tokens_of_key} or more]"
        )
    if not known_true(last >= tokens_of_key):
        yield f"rows of pse_shift {shape_text(shift.shape)} are not known to cover {tokens_of_key} keys"
    if not known_true(last * shift.element_size() % SHIFT_ALIGNMENT == 0):
        yield (
            f"rows of pse_shift {shape_text(shift.shape)} are not known to take multiples of {SHIFT_ALIGNMENT} bytes"
            " (pad the last dim; what it is padded with is not read)"
        )
