"""Which keys a mask lets be seen: found for every spelling, proven for every size, and never assumed."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import transformers
from masks import Analysed, analysed, attentions, of_attention
from torch import fx
from torch._subclasses import FakeTensorMode

from helpers import compiled
from npu_fuse.patterns.mask import CAUSAL_FLAG, NO_MASK, Masks, classify
from npu_fuse.patterns.masks.band import Band
from npu_fuse.patterns.masks.constant_mask import constant
from npu_fuse.patterns.masks.integers import Linear
from tiny_models import SIZES, build, prompt

Tensor = torch.Tensor
Spelling = Callable[..., Tensor]
LOWEST = torch.finfo(torch.float32).min


def rows(n: int) -> Tensor:
    return torch.arange(n)[:, None]


def columns(n: int) -> Tensor:
    return torch.arange(n)[None, :]


def ones(q: int, k: int) -> Tensor:
    return torch.ones(q, k, dtype=torch.bool)


def written(q: int, k: int) -> Tensor:
    """Row by row into a tensor of False."""
    mask = torch.zeros(q, k, dtype=torch.bool)
    for row in range(q):
        mask[row, : row + 1] = True
    return mask


CAUSAL: dict[str, Spelling] = {
    "compared": lambda q, k: columns(k) <= rows(q),
    "compared the other way": lambda q, k: rows(q) >= columns(k),
    "less than the next": lambda q, k: columns(k) < rows(q) + 1,
    "not after": lambda q, k: ~(columns(k) > rows(q)),
    "difference": lambda q, k: (rows(q) - columns(k)) >= 0,
    "twice the difference": lambda q, k: 2 * (rows(q) - columns(k)) > -2,
    "tril": lambda q, k: ones(q, k).tril(),
    "tril of floats": lambda q, k: torch.tril(torch.ones(q, k)) == 1,
    "tril, bool": lambda q, k: torch.tril(torch.ones(q, k)).bool(),
    "tril of bytes": lambda q, k: torch.ones(q, k, dtype=torch.uint8).tril().to(torch.bool),
    "not triu": lambda q, k: ones(q, k).triu(1).logical_not(),
    "triu == 0": lambda q, k: torch.triu(torch.ones(q, k), diagonal=1) == 0,
    "transposed triu": lambda q, k: ones(k, q).triu().transpose(0, 1),
    "flipped twice": lambda q, k: (columns(k) <= rows(q)).flip(0).flip(0),
    "1 - triu": lambda q, k: (1 - ones(q, k).triu(1).int()).bool(),
    "minimum": lambda q, k: torch.minimum(rows(q), columns(k)) == columns(k),
    "clamped": lambda q, k: (columns(k) - rows(q)).clamp(min=0) == 0,
    "where": lambda q, k: torch.where(columns(k) > rows(q), False, True),
    "counted": lambda q, k: torch.ones(k, dtype=torch.long).cumsum(0)[None] <= torch.ones(q).long().cumsum(0)[:, None],
    "two halves": lambda q, k: torch.cat(((columns(k) <= rows(q))[: q // 2], (columns(k) <= rows(q))[q // 2 :])),
    "stacked": lambda q, k: torch.stack([columns(k) <= rows(q), columns(k) <= rows(q)], 0)[:, None],
    "expanded": lambda q, k: (columns(k) <= rows(q))[None, None].expand(2, 1, q, k),
    "of every head": lambda q, k: (columns(k) <= rows(q)).repeat(2, 2, 1, 1),
    "sliced of a larger one": lambda q, k: ones(64, 64).tril()[None, None, :q, :k],
    "and more": lambda q, k: (columns(k) <= rows(q)) & (columns(k) >= 0) & (rows(q) < q),
    "of a wide window": lambda q, k: (columns(k) <= rows(q)) & (columns(k) > rows(q) - k),
    "of itself or before": lambda q, k: (columns(k) < rows(q)) | (columns(k) == rows(q)),
    "fancy": lambda q, k: (columns(k) <= rows(q))[torch.arange(q)[:, None], torch.arange(k)[None]],
    "float": lambda q, k: torch.zeros(q, k).masked_fill(columns(k) > rows(q), -math.inf),
    "float, full and triu": lambda q, k: torch.full((q, k), -math.inf).triu(1),
    "float, where": lambda q, k: torch.where(columns(k) <= rows(q), 0.0, -math.inf),
    "float, lowest": lambda q, k: (1.0 - (columns(k) <= rows(q)).float()) * LOWEST,
    "bool of a float": lambda q, k: torch.zeros(q, k).masked_fill(columns(k) > rows(q), LOWEST).bool().logical_not(),
    "float, twice": lambda q, k: torch.full((q, k), LOWEST).triu(1) + torch.full((q, k), LOWEST).triu(1),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("spelling", CAUSAL.values(), ids=CAUSAL)
def test_every_spelling_of_causal_is_causal(spelling, dynamic):
    mask = analysed(spelling, 6, 6, dynamic=dynamic)
    assert mask.found.kind == "causal", mask.found.reason
    assert mask.found.visibility.every_query_sees_a_key
    assert torch.equal(mask.described(), mask.table)


def top_left(q: int, k: int) -> Tensor:
    return columns(k) <= rows(q)


# A mask that is moved, in parts and as a whole; in the end each key is where it was.
MOVED: dict[str, Spelling] = {
    "permuted": lambda q, k: top_left(q, k)[None].expand(3, q, k).permute(1, 2, 0)[..., 1],
    "flipped and looked up backwards": lambda q, k: top_left(q, k).flip(1)[:, k - 1 - torch.arange(k)],
    "looked up by negative places": lambda q, k: top_left(q, k)[:, torch.arange(k) - k],
    "looked up with an axis between": lambda q, k: (
        top_left(q, k)[:, None, :].expand(q, 2, k)[torch.arange(q)[:, None], :, torch.arange(k)][..., 1]
    ),
    "looked up with an axis between, behind one": lambda q, k: (
        top_left(q, k)[None, :, None, :].expand(3, q, 2, k)[:, torch.arange(q)[:, None], :, torch.arange(k)][..., 2, 1]
    ),
    "looked up beside": lambda q, k: top_left(q, k)[None].expand(2, q, k)[:, torch.arange(q)[:, None], torch.arange(k)],
    "index_select": lambda q, k: top_left(q, k).index_select(0, torch.arange(q)).index_select(-1, torch.arange(k)),
    "counted": lambda q, k: torch.ones(k).long().cumsum(0)[None] - 1 <= rows(q),
    "counted from behind": lambda q, k: columns(k) + torch.ones(q).bool().cumsum(0).flip(0)[:, None] <= q,
    "chunked": lambda q, k: torch.cat(top_left(q, k).chunk(2, 1), 1),
    "split": lambda q, k: torch.cat(top_left(q, k).split([1, q - 1]), 0),
    "unbound": lambda q, k: torch.stack((~top_left(q, k), top_left(q, k))).unbind()[1],
    "selected from the end": lambda q, k: torch.stack((~top_left(q, k), top_left(q, k)), -1)[..., -1],
    "squeezed": lambda q, k: top_left(q, k)[:, None, :, None].squeeze(1).squeeze(-1),
    "repeated": lambda q, k: top_left(q, k)[..., None].repeat(1, 1, 3)[..., 2],
    "repeated by two": lambda q, k: torch.stack((~top_left(q, k), top_left(q, k))).repeat(2, 1, 1)[3],
    "strided": lambda q, k: (columns(2 * k) <= 2 * rows(q))[:, ::2],
    "the end, cut off": lambda q, k: (columns(k + 3) <= rows(q))[:, :-3],
    "from the end": lambda q, k: (columns(k + 3) - 3 <= rows(q))[:, 3:],
    "a slice written over": lambda q, k: torch.slice_scatter(ones(q, k), top_left(q, k)[:, 1:], 1, 1),
    "a row written over": lambda q, k: torch.select_scatter(top_left(q, k) | (rows(q) == 0), columns(k)[0] <= 0, 0, 0),
    "merged and split": lambda q, k: top_left(q, k)[:, None].expand(q, 3, k).reshape(-1, k).unflatten(0, (q, 3))[:, 1],
    "spread": lambda q, k: top_left(q, k).view(q, k, 1).expand(q, k, 4).reshape(q, 4 * k).unflatten(1, (k, 4))[..., 3],
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("spelling", MOVED.values(), ids=MOVED)
def test_a_mask_may_be_moved(spelling, dynamic):
    mask = analysed(spelling, 4, 7, dynamic=dynamic)
    assert mask.found.kind == "causal_static_cache", mask.found.reason
    assert torch.equal(mask.described(), mask.table)
    assert torch.equal(mask.table[0, 0], top_left(4, 7))


def windowed(window: int) -> Spelling:
    return lambda q, k: (columns(k) <= rows(q)) & (columns(k) > rows(q) - window)


# Where positions are: a mask, the numbers of queries and keys, what it is, and what it is when sizes are dynamic.
KINDS: dict[str, tuple[Spelling, int, int, str, str]] = {
    "ones": (ones, 4, 7, "all_true", "all_true"),
    "zeros, float": (lambda q, k: torch.zeros(q, k), 4, 7, "all_true", "all_true"),
    "always true": (lambda q, k: columns(k) < k + rows(q), 4, 7, "all_true", "all_true"),
    "one query of all": (lambda q, k: columns(k) <= rows(q) + k - q, 1, 7, "all_true", "all_true"),
    "top-left": (lambda q, k: columns(k) <= rows(q), 4, 7, "causal_static_cache", "causal_static_cache"),
    "bottom-right": (lambda q, k: columns(k) <= rows(q) + k - q, 4, 7, "causal_offset", "causal_offset"),
    "bottom-right tril": (lambda q, k: ones(q, k).tril(k - q), 4, 7, "causal_offset", "causal_offset"),
    "bottom-right, square": (lambda q, k: ones(q, k).tril(k - q), 6, 6, "causal", "causal"),
    "two ahead": (lambda q, k: columns(k) <= rows(q) + 2, 6, 6, "causal_offset", "causal_offset"),
    "first rows": (lambda q, k: (columns(k) <= rows(64))[:q], 4, 7, "causal_static_cache", "causal_static_cache"),
    "last rows": (lambda q, k: ones(k, k).tril()[k - q :], 4, 7, "causal_offset", "causal_offset"),
    "prefix": (lambda q, k: columns(k) <= rows(q) + 4, 1, 7, "decode_prefix", "decode_prefix"),
    "window": (windowed(3), 6, 6, "sliding_causal", "sliding_causal"),
    "window by distance": (
        lambda q, k: (rows(q) >= columns(k)) & ((rows(q) - columns(k)) < 3), 6, 6, "sliding_causal", "sliding_causal",
    ),
    "window of triangles": (
        lambda q, k: ones(q, k).tril() & ones(q, k).triu(-2), 6, 6, "sliding_causal", "sliding_causal",
    ),
    "window of one": (windowed(1), 6, 6, "sliding_causal", "sliding_causal"),
    "window as wide": (windowed(6), 6, 6, "causal", "sliding_causal"),
    "window, bottom-right": (lambda q, k: windowed(3)(k, k)[k - q :], 4, 7, "sliding_causal", "sliding_causal"),
    "both sides": (
        lambda q, k: (rows(q) - columns(k)).abs() <= 2, 8, 8, "sliding_bidirectional", "sliding_bidirectional",
    ),
    "both sides, triangles": (
        lambda q, k: torch.triu(ones(q, k), -2).tril(2), 8, 8, "sliding_bidirectional", "sliding_bidirectional",
    ),
    "both sides, unequal": (
        lambda q, k: ones(q, k).triu(-3).tril(1), 8, 8, "sliding_bidirectional", "sliding_bidirectional",
    ),
    "both sides, of all": (lambda q, k: (rows(q) - columns(k)).abs() < 8, 8, 8, "all_true", "sliding_bidirectional"),
    "chunks": (lambda q, k: rows(q) // 4 == columns(k) // 4, 9, 9, "chunked", "chunked"),
    "causal chunks": (
        lambda q, k: (rows(q) // 4 == columns(k) // 4) & (columns(k) <= rows(q)), 9, 9, "chunked", "chunked",
    ),
    "one chunk": (
        lambda q, k: (rows(q) // 64 == columns(k) // 64) & (columns(k) <= rows(q)), 9, 9, "causal", "chunked",
    ),
    "only later keys": (lambda q, k: columns(k) >= rows(q), 6, 6, "other", "other"),
    "strictly earlier keys": (lambda q, k: columns(k) < rows(q), 6, 6, "other", "other"),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", KINDS.values(), ids=KINDS)
def test_what_positions_see(case, dynamic):
    spelling, q_len, kv_len, fixed, symbolic = case
    mask = analysed(spelling, q_len, kv_len, dynamic=dynamic)
    assert mask.found.kind == (symbolic if dynamic else fixed), mask.found
    assert torch.equal(mask.described(), mask.table)
    assert not mask.found.visibility.every_query_sees_a_key or mask.table.any(-1).all()


# Of a fixed shape, and made by ops that are not looked into.
CONSTANTS: dict[str, tuple[Spelling, str]] = {
    "rolled there and back": (lambda q, k: top_left(q, k).roll(2, 0).roll(-2, 0), "causal"),
    "put in place": (
        lambda q, k: ones(q, k).int().index_put_(tuple(torch.triu_indices(q, k, 1)), torch.tensor(0).int()) > 0,
        "causal",
    ),
    "sorted": (lambda q, k: top_left(q, k).int().sort(-1).values.flip(-1) > 0, "causal"),
    "of blocks": (lambda q, k: torch.block_diag(torch.ones(2, 3), torch.ones(4, 3)) > 0, "other"),
    "of floats that are rounded": (lambda q, k: (rows(q) * 0.1).exp() >= (columns(k) * 0.1).exp(), "other"),
}


@pytest.mark.parametrize("case", CONSTANTS.values(), ids=CONSTANTS)
def test_a_constant_is_looked_at(case):
    spelling, kind = case
    mask = analysed(spelling, 6, 6)
    assert mask.found.kind == kind
    if kind == "causal":
        assert torch.equal(mask.described(), mask.table)
        assert mask.found.visibility.every_query_sees_a_key


def test_what_is_not_initialised_is_no_constant():
    def attention(q: Tensor) -> Tensor:
        mask = torch.empty(6, 6, dtype=torch.bool)
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    (node,) = attentions(compiled(attention, torch.randn(2, 2, 6, 4)).before.graph)
    assert constant(node.args[3]) is None


# Nearly causal; and some that are of no kind at all.
NEARLY: dict[str, Spelling] = {
    "j < i": lambda q, k: columns(k) < rows(q),
    "one ahead": lambda q, k: ones(q, k).tril(1),
    "one behind": lambda q, k: ones(q, k).tril(-1),
    "transposed": lambda q, k: rows(q) <= columns(k),
    "triu": lambda q, k: ones(q, k).triu(),
    "flipped": lambda q, k: ones(q, k).tril().flip(1),
    "turned": lambda q, k: (columns(k) <= rows(q))[(torch.arange(q) - 2)],
    "anti-diagonal": lambda q, k: rows(q) + columns(k) < q,
    "steeper": lambda q, k: columns(k) <= 2 * rows(q),
    "flatter": lambda q, k: 2 * columns(k) <= rows(q),
    "but the first": lambda q, k: (columns(k) <= rows(q)) & (columns(k) > 0),
    "and the last": lambda q, k: (columns(k) <= rows(q)) | (columns(k) == k - 1),
    "with sinks": lambda q, k: windowed(3)(q, k) | ((columns(k) < 2) & (columns(k) <= rows(q))),
    "with a prefix": lambda q, k: (columns(k) <= rows(q)) | (columns(k) < 2),
    "every other": lambda q, k: (columns(k) <= rows(q)) & (columns(k) % 2 == 0),
    "dilated": lambda q, k: (columns(k) <= rows(q)) & ((rows(q) - columns(k)) % 2 == 0),
    "no diagonal": lambda q, k: columns(k) != rows(q),
    "of one head": lambda q, k: torch.stack([ones(q, k).tril(), ones(q, k)]),
    "of one of the batch": lambda q, k: torch.stack([ones(q, k).tril(), ones(q, k)])[:, None],
    "none": lambda q, k: torch.zeros(q, k, dtype=torch.bool),
    "all alike": ones,
    "but one entry": lambda q, k: torch.cat((ones(1, k), ones(q, k).tril()[1:])),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("spelling", NEARLY.values(), ids=NEARLY)
def test_what_is_nearly_causal_is_not(spelling, dynamic):
    mask = analysed(spelling, 6, 6, dynamic=dynamic)
    assert mask.found.kind != "causal"
    if mask.found.visibility is not None:
        assert torch.equal(mask.described(), mask.table)
    else:
        assert mask.found.reason


def test_square_is_not_causal():
    """A mask of as many queries as keys that is handed in says nothing of itself."""
    table = ones(6, 6).tril()
    for handed_in, kind in (
        (table, "other"),
        (table.expand(2, 1, 6, 6).contiguous(), "per_batch_or_head"),
        (torch.zeros(6, 6).masked_fill(~table, -math.inf), "bias"),
    ):
        assert analysed(lambda q, k, mask: mask, 6, 6, handed_in).found.kind == kind


# Data ------------------------------------------------------------------------------------------------------------

KEPT = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
PADDING: dict[str, tuple[Spelling, Tensor]] = {
    "bool": (lambda q, k, kept: kept[:, None, None, :], KEPT.bool()),
    "expanded": (lambda q, k, kept: kept[:, None, None, :].expand(-1, 2, q, k), KEPT.bool()),
    "cast": (lambda q, k, kept: kept.bool()[:, None, None, :] & (columns(k) <= rows(q)), KEPT),
    "== 1": (lambda q, k, kept: (kept == 1)[:, None, None, :] & (columns(k) <= rows(q)), KEPT),
    "not == 0": (lambda q, k, kept: ~(kept == 0)[:, None, None, :] & (columns(k) <= rows(q)), KEPT),
    "what is hidden": (lambda q, k, hidden: (columns(k) <= rows(q)) & ~hidden[:, None, None, :], ~KEPT.bool()),
    "indexed": (lambda q, k, kept: kept[torch.arange(2)[:, None, None, None], torch.arange(k)], KEPT.bool()),
    "first columns": (lambda q, k, kept: kept[:, None, None, :k], torch.cat((KEPT, KEPT), 1).bool()),
    "float": (lambda q, k, kept: torch.zeros(2, 1, 1, k).masked_fill(~kept[:, None, None, :], -math.inf), KEPT.bool()),
    "float, lowest": (lambda q, k, kept: (1 - kept[:, None, None, :].float()) * LOWEST, KEPT.bool()),
    "float, over a causal one": (
        lambda q, k, kept: torch.full((q, k), LOWEST).triu(1).masked_fill((kept == 0)[:, None, None, :], LOWEST), KEPT,
    ),
    "window": (lambda q, k, kept: windowed(3)(q, k) & kept[:, None, None, :], KEPT.bool()),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", PADDING.values(), ids=PADDING)
def test_padding_of_each_is_a_tensor_of_keys(case, dynamic):
    spelling, kept = case
    mask = analysed(spelling, 6, 6, kept, dynamic=dynamic)
    assert mask.found.kind == "per_batch_or_head"
    assert mask.found.visibility is not None, mask.found.reason
    assert mask.found.visibility.padding is not None
    assert not mask.found.visibility.every_query_sees_a_key
    assert torch.equal(mask.described(), mask.table)


NARROW: dict[str, tuple[Spelling, Tensor]] = {
    "-1 is 255": (lambda q, k, kept: (kept != -1)[:, None, None, :], torch.tensor([[255, 0, 1, 2, 3, 4]] * 2).byte()),
    "256 is 0": (lambda q, k, kept: (kept < 256)[:, None, None, :], torch.tensor([[255, 0, 1, 2, 3, 4]] * 2).byte()),
    "2 ** 31 is negative": (lambda q, k, kept: (columns(k).int() < 2**31) & kept[:, None, None, :], KEPT.bool()),
    "100 + 100 is negative": (
        lambda q, k, kept: ((columns(k) >= 0).char() * 100 + 100 > 0) & kept[:, None, None, :], KEPT.bool(),
    ),
}


@pytest.mark.parametrize("case", NARROW.values(), ids=NARROW)
def test_narrow_integers_wrap_around(case):
    spelling, kept = case
    mask = analysed(spelling, 6, 6, kept)
    assert mask.found.kind != "all_true"
    assert mask.found.visibility is None or torch.equal(mask.described(), mask.table)
    assert mask.found.visibility is not None or mask.found.reason


def test_padding_that_all_share_is_of_keys():
    def spelling(q: int, k: int, kept: Tensor) -> Tensor:
        return kept[:, None, None, :]

    mask = analysed(spelling, 6, 6, KEPT[:1].bool(), batch=1)
    assert mask.found.kind == "key_padding"
    assert torch.equal(mask.described(), mask.table)
    shared = analysed(lambda q, k, kept: kept[0][None], 6, 6, KEPT.bool())  # the first row, for all of the batch
    assert shared.found.kind == "key_padding"
    assert torch.equal(shared.described(), shared.table)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_padding_of_queries_is_no_padding_of_keys(dynamic):
    def spelling(q: int, k: int, kept: Tensor) -> Tensor:
        return kept[:, None, :, None] & kept[:, None, None, :]

    mask = analysed(spelling, 6, 6, KEPT.bool(), dynamic=dynamic)
    assert mask.found.kind == "per_batch_or_head"
    assert mask.found.visibility is None
    assert "depends on data that is handed in" in mask.found.reason


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_segments_are_packed(batch, causal):
    segments = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]])[:batch]

    def spelling(q: int, k: int, segments: Tensor) -> Tensor:
        same = (segments[:, :, None] == segments[:, None, :])[:, None]
        return same & (columns(k) <= rows(q)) if causal else same

    mask = analysed(spelling, 6, 6, segments, batch=batch)
    assert mask.found.kind == ("packed" if batch == 1 else "per_batch_or_head")
    assert mask.found.visibility.segments is not None
    assert mask.found.visibility.band.upper == (Linear(0) if causal else None)
    assert torch.equal(mask.described(), mask.table)


def test_segments_of_other_tokens_are_not_packed():
    """Equal where they are, and read one token later."""
    segments = torch.tensor([[0, 0, 1, 1, 1, 2, 2]])
    mask = analysed(lambda q, k, s: (s[:, :-1, None] == s[:, None, 1:])[:, None], 6, 6, segments, batch=1)
    assert mask.found.visibility is None


def counted(positions: Tensor) -> Tensor:
    """Which packed sequence a token is of, by the positions that start again."""
    before = torch.cat((positions[:, :1] - 1, positions[:, :-1]), -1)
    return (positions != before + 1).cumsum(-1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_positions_of_packed_sequences_are_causal_in_each(dynamic):
    def spelling(q: int, k: int, positions: Tensor) -> Tensor:
        segments = counted(positions)
        earlier = positions[:, None, :] <= positions[:, :, None]
        return (earlier & (segments[:, None, :] == segments[:, :, None]))[:, None]

    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [3, 4, 5, 6, 0, 1]])
    mask = analysed(spelling, 6, 6, positions, dynamic=dynamic)
    assert mask.found.kind == "per_batch_or_head"
    assert mask.found.visibility is not None, mask.found.reason
    assert mask.found.visibility.band.upper == Linear(0)
    assert torch.equal(mask.described(), mask.table)


@pytest.mark.parametrize("step", [0, 2])
def test_positions_that_rise_by_another_step_are_not_causal(step):
    """Segments count jumps, of steps of 2 or of none: in one segment positions are no longer those of tokens."""

    def spelling(q: int, k: int, positions: Tensor) -> Tensor:
        before = torch.cat((positions[:, :1] - step, positions[:, :-1]), -1)
        segments = (positions != before + step).cumsum(-1)
        earlier = positions[:, None, :] <= positions[:, :, None]
        return (earlier & (segments[:, None, :] == segments[:, :, None]))[:, None]

    positions = torch.tensor([[0, 2, 4, 4, 4, 0], [3, 3, 3, 5, 7, 1]])
    mask = analysed(spelling, 6, 6, positions)
    assert mask.found.visibility is None


def test_positions_alone_are_not_causal():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    mask = analysed(lambda q, k, p: (p[:, None, :] <= p[:, :, None])[:, None], 6, 6, positions)
    assert mask.found.kind == "per_batch_or_head"
    assert mask.found.visibility is None


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("q_len", "window", "kind"),
    [(1, None, "decode_prefix"), (4, None, "causal_offset"), (1, 3, "sliding_causal"), (4, 3, "sliding_causal")],
)
def test_the_length_of_a_cache_is_an_offset(q_len, window, kind, dynamic):
    def spelling(q: int, k: int, length: Tensor) -> Tensor:
        at = torch.arange(q)[:, None] + length
        seen = columns(k) <= at
        return seen if window is None else seen & (columns(k) > at - window)

    mask = analysed(spelling, q_len, 12, torch.tensor(5), dynamic=dynamic)
    assert mask.found.kind == kind
    # Nothing in the graph tells the first tokens, that find the cache empty, from later ones.
    assert mask.found.kinds == {kind} | ({"causal_static_cache"} if kind == "causal_offset" else set())
    assert str(mask.found.visibility.band.upper).endswith("[]")  # an entry of the one number that is read
    assert not mask.found.visibility.every_query_sees_a_key
    assert torch.equal(mask.described(), mask.table)


def test_lengths_of_each_are_no_offset():
    mask = analysed(lambda q, k, n: columns(k) <= rows(q) + n[:, None, None, None], 4, 12, torch.tensor([5, 6]))
    assert mask.found.kind == "per_batch_or_head"
    assert mask.found.visibility is None


# Floats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", ["-inf", "lowest", "lowest of float32"])
def test_a_float_mask_of_hidden_keys_is_one_of_bools(dtype, hidden):
    least = {"-inf": -math.inf, "lowest": torch.finfo(dtype).min, "lowest of float32": LOWEST}[hidden]

    def spelling(q: int, k: int) -> Tensor:
        return torch.zeros(q, k).masked_fill(columns(k) > rows(q), least).to(dtype)

    def attention(q: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=spelling(6, 6))

    (mask,) = of_attention(compiled(attention, torch.randn(2, 2, 6, 4, dtype=dtype)))
    assert mask.found.kind == "causal"
    assert mask.found.lowest is (spelling(6, 6)[0, -1].item() == torch.finfo(dtype).min)
    assert torch.equal(mask.described(), mask.table)


def test_the_lowest_of_bfloat16_hides_in_float32_too():
    mask = analysed(lambda q, k: torch.full((q, k), torch.finfo(torch.bfloat16).min).triu(1))
    assert (mask.found.kind, mask.found.lowest) == ("causal", True)


BIASES: dict[str, Spelling] = {
    "random": lambda q, k: torch.arange(q * k).view(q, k) * 0.1,
    "large, and no more": lambda q, k: torch.zeros(q, k).masked_fill(columns(k) > rows(q), -10000.0),
    "-1e9": lambda q, k: torch.zeros(q, k).masked_fill(columns(k) > rows(q), -1e9),
    "of seen keys": lambda q, k: torch.full((q, k), 0.5).masked_fill(columns(k) > rows(q), -math.inf),
    "the slope of ALiBi": lambda q, k: -(rows(q) - columns(k)).abs() * 0.5,
    "NaN": lambda q, k: (columns(k) > rows(q)).float() * -math.inf,
    "nearly the lowest of bfloat16": lambda q, k: torch.full((q, k), -3e38).triu(1),
}


@pytest.mark.parametrize("spelling", BIASES.values(), ids=BIASES)
def test_other_numbers_are_a_bias(spelling):
    mask = analysed(spelling)
    assert mask.found.kind == "bias"
    assert mask.found.visibility is None
    assert mask.found.reason


def test_a_bias_is_named():
    assert "-10000" in analysed(BIASES["large, and no more"]).found.reason


def test_a_bias_that_is_handed_in_is_a_bias():
    """huggingface/transformers#48843: a bias of positions, taken for a mask of bools."""
    bias = torch.randn(1, 2, 5, 5) * 2
    assert analysed(lambda q, k, bias: bias, 5, 5, bias).found.kind == "bias"
    causal = analysed(lambda q, k, bias: bias.masked_fill(columns(k) > rows(q), -math.inf), 5, 5, bias)
    assert causal.found.kind == "bias"


# Models ----------------------------------------------------------------------------------------------------------

IDS = prompt()
ATTENTION_MASK = torch.ones_like(IDS).index_fill(1, torch.arange(3), 0)
POSITIONS = torch.arange(16).expand(2, -1).contiguous()


def prefill(model: torch.nn.Module, **arguments: Tensor) -> Callable[..., Tensor]:
    return lambda ids, *given: model(input_ids=ids, use_cache=False, **dict(zip(arguments, given, strict=True))).logits


def filled(model: torch.nn.Module, cache: str) -> object:
    if cache == "static":
        state = transformers.StaticCache(config=model.config, max_cache_len=32)
    else:
        state = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=IDS, cache=state)
    return state


def masks_of(model: torch.nn.Module, phase: str, dynamic: bool) -> list[Analysed]:
    if phase == "prefill":
        call = compiled(prefill(model), IDS, dynamic=dynamic)
    elif phase == "padded":
        call = compiled(prefill(model, attention_mask=IDS), IDS, ATTENTION_MASK, dynamic=dynamic)
    elif phase == "positions":
        call = compiled(prefill(model, position_ids=IDS), IDS, POSITIONS, dynamic=dynamic)
    else:
        cache, tokens = phase.split()
        step = IDS[:, : {"decode": 1, "chunk": 4}[tokens]]
        state = filled(model, cache)
        call = compiled(lambda ids, state: model(input_ids=ids, cache=state).logits, step, state, dynamic=dynamic)
    return of_attention(call)


MODELS = {
    ("llama", "prefill"): "causal",
    ("llama", "padded"): "per_batch_or_head",
    ("llama", "positions"): "per_batch_or_head",
    ("llama", "static decode"): "decode_prefix",
    ("llama", "static chunk"): "causal_offset",
    ("llama", "growing chunk"): "causal_offset",
    ("mistral", "prefill"): "sliding_causal",
    ("mistral", "padded"): "per_batch_or_head",
    ("mistral", "static decode"): "all_true",
    ("mistral", "static chunk"): "sliding_causal",
    ("mistral", "growing chunk"): "sliding_causal",
}


@pytest.mark.parametrize(("model_type", "phase"), MODELS, ids=map(" ".join, MODELS))
def test_masks_of_models(model_type, phase):
    sizes = {"sliding_window": 8} if model_type == "mistral" else {}
    model = build(model_type, num_hidden_layers=1, **sizes)
    masks = masks_of(model, phase, dynamic=False)
    assert masks
    for mask in masks:
        assert mask.found.kind == MODELS[model_type, phase]
        assert mask.found.visibility is not None, mask.found.reason
        assert torch.equal(mask.described(), mask.table)


@pytest.mark.parametrize("phase", ["prefill", "padded", "positions", "static decode"])
def test_masks_of_models_of_any_size(phase):
    for mask in masks_of(build("llama", num_hidden_layers=1), phase, dynamic=True):
        assert mask.found.kind == MODELS["llama", phase]
        assert mask.found.visibility is not None, mask.found.reason
        assert torch.equal(mask.described(), mask.table)


def test_chunked_attention_of_llama_4():
    sizes = {"attention_chunk_size": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 128}
    model = build("llama4_text", no_rope_layers=[1, 0], **sizes)
    kinds = [mask.found.kind for mask in masks_of(model, "prefill", dynamic=False)]
    assert kinds == ["chunked", "causal"]


def test_windows_on_both_sides_of_modernbert():
    config = transformers.ModernBertConfig(
        **{**SIZES, "num_hidden_layers": 3}, local_attention=8, cls_token_id=1, sep_token_id=2
    )
    model = transformers.ModernBertModel._from_config(config, attn_implementation="sdpa").eval()
    call = compiled(lambda ids, kept: model(ids, attention_mask=kept).last_hidden_state, IDS, ATTENTION_MASK)
    masks = of_attention(call)
    assert {mask.found.kind for mask in masks} == {"per_batch_or_head"}
    bounds = {(str(m.found.visibility.band.lower), str(m.found.visibility.band.upper)) for m in masks}
    assert bounds == {("None", "None"), ("-4", "4")}
    assert all(torch.equal(mask.described(), mask.table) for mask in masks)


# Bugs of others ----------------------------------------------------------------------------------------------------


def test_an_encoder_is_not_causal_beside_a_decoder():
    """sgl-project/sglang#35434: encoders attended causally; here both are in one graph."""

    def both(q: Tensor, kept: Tensor) -> Tensor:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        seen = sdpa(q, q, q, attn_mask=kept[:, None, None, :])
        return sdpa(seen, seen, seen, attn_mask=columns(5) <= rows(5))

    encoder, decoder = of_attention(compiled(both, torch.randn(2, 2, 5, 4), KEPT[:, :5].bool()))
    assert encoder.found.visibility.band == Band()
    assert encoder.found.kind == "per_batch_or_head"
    assert decoder.found.kind == "causal"


@pytest.mark.parametrize("q_len", [1, 2, 3])
def test_a_causal_flag_is_top_left_and_a_bottom_right_mask_is_not(q_len):
    """pytorch/pytorch#115111: with more keys than queries both are called causal."""
    mask = analysed(lambda q, k: ones(q, k).tril(k - q), q_len, 8)
    assert mask.found.visibility.band.upper != CAUSAL_FLAG.visibility.band.upper
    assert mask.found.kind == ("all_true" if q_len == 1 else "causal_offset")


@pytest.mark.parametrize(("window", "kind"), [(0, "causal"), (None, "causal"), (2, "sliding_causal")])
def test_no_window_is_no_window(window, kind):
    """unslothai/unsloth#8253: a window of 0 hid every key."""

    def spelling(q: int, k: int) -> Tensor:
        return windowed(window)(q, k) if window else columns(k) <= rows(q)

    assert analysed(spelling).found.kind == kind
    assert analysed(windowed(0)).found.kind == "other"  # as it is written, no query sees a key


# The analysis itself -------------------------------------------------------------------------------------------------


def test_the_graph_and_its_guards_are_left_alone():
    def attention(q: Tensor) -> Tensor:
        tokens = q.shape[-2]
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=ones(tokens, tokens).tril())

    graph = compiled(attention, torch.randn(2, 2, 6, 4), dynamic=True).before.graph
    (attention,) = attentions(graph)
    size = attention.args[0].meta["val"].shape[-2]
    before, guards = str(graph), len(size.node.shape_env.guards)
    assert classify(attention.args[3], size, size).kind == "causal"
    assert (str(graph), len(size.node.shape_env.guards)) == (before, guards)


def test_a_mask_is_analysed_while_the_graph_is_compiled():
    """Then torch makes nothing but fake tensors, that have no value."""

    def attention(q: Tensor) -> Tensor:
        mask = (1 - torch.ones(6, 6).tril()) * LOWEST
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask.flip(0).flip(0))

    (node,) = attentions(compiled(attention, torch.randn(2, 2, 6, 4)).before.graph)
    with FakeTensorMode():
        assert classify(node.args[3], 6, 6).kind == "causal"


def test_a_mask_that_layers_share_is_analysed_once():
    def two(q: Tensor) -> Tensor:
        mask = ones(6, 6).tril()
        for _ in range(2):
            q = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        return q

    first, second = attentions(compiled(two, torch.randn(2, 2, 6, 4)).before.graph)
    masks = Masks({first.args[3]: 0, second.args[3]: 0})
    assert masks.of(first.args[3], 6, 6) is masks.of(second.args[3], 6, 6)
    assert masks.of(first.args[3], 6, 7) is not masks.of(first.args[3], 6, 6)  # no mask of so many keys


def test_a_mask_of_other_sizes_is_refused_with_both():
    (attention,) = attentions(
        compiled(
            lambda q: torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=ones(6, 6).tril()),
            torch.randn(2, 2, 6, 4),
        ).before.graph
    )
    found = classify(attention.args[3], 6, 7)
    assert found.kind == "other"
    assert "6" in found.reason
    assert "7" in found.reason


def test_what_is_written_to_has_no_one_value():
    """A mask read of a tensor that the graph writes to before."""
    graph = fx.Graph()
    with FakeTensorMode():
        start = torch.ones(6, 6, dtype=torch.bool)
        source = graph.placeholder("source")
        made = graph.call_function(torch.ops.aten.full.default, ([6, 6], True), {"dtype": torch.bool})
        causal = graph.call_function(torch.ops.aten.tril.default, (made,))
        written = graph.call_function(torch.ops.aten.copy_.default, (made, source))
        later = graph.call_function(torch.ops.aten.tril.default, (made,))
        source.meta["val"], made.meta["val"], written.meta["val"] = start.clone(), start, start
        causal.meta["val"], later.meta["val"] = start.clone(), start.clone()
    graph.output((written, later))
    assert classify(causal, 6, 6).kind == "causal"
    assert classify(later, 6, 6).kind == "other"
    assert "written to" in classify(later, 6, 6).reason


def test_no_mask_and_the_flag():
    assert NO_MASK.visibility.band == Band()
    assert CAUSAL_FLAG.visibility.band.upper == Linear(0)
