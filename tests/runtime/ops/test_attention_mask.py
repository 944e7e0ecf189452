"""The sparse modes against their formulas, pair by pair."""

import pytest
import torch
from attention_cases import random_mask, seen
from hypothesis import given
from hypothesis import strategies as st

from npu_fuse.runtime.ops.attention_mask import (
    UNLIMITED,
    Masking,
    compressed_causal_mask,
    four_dims,
    is_compressed_causal_mask,
)

SIZES = st.integers(1, 7)
TOKENS = st.one_of(st.integers(-3, 8), st.just(UNLIMITED))


@given(mode=st.integers(0, 4), rows=SIZES, keys=SIZES, pre=TOKENS, following=TOKENS, seed=st.integers(0, 9))
def test_each_mode_hides_what_its_formula_says(mode, rows, keys, pre, following, seed):
    mask = random_mask((rows, keys), seed) if mode < 2 else None
    masking = Masking(
        sparse_mode=mode, mask=four_dims(mask), pre_tokens=pre, next_tokens=following, blank_rows="undefined"
    )
    hidden = masking.hidden(0, rows, keys, torch.device("cpu"))
    assert torch.equal(~hidden.expand(1, rows, keys)[0], seen(mode, rows, keys, mask, pre, following))


def test_mode_0_without_a_mask_hides_nothing_whatever_the_tokens():
    masking = Masking(sparse_mode=0, mask=None, pre_tokens=0, next_tokens=0, blank_rows="undefined")
    assert masking.hidden(0, 3, 4, torch.device("cpu")) is None


def test_the_causal_modes_agree_with_torch_where_they_should():
    def shown(mode, rows, keys):
        masking = Masking(sparse_mode=mode, mask=None, pre_tokens=0, next_tokens=0, blank_rows="undefined")
        return ~masking.hidden(0, rows, keys, torch.device("cpu"))

    ones = torch.ones(3, 5, dtype=torch.bool)
    assert torch.equal(shown(2, 3, 5), ones.tril())  # is_causal
    assert torch.equal(shown(3, 3, 5), ones.tril(2))  # what follows a cache of 2
    assert torch.equal(shown(2, 5, 5), shown(3, 5, 5))


def test_a_mask_of_each_batch_entry_is_its_own_and_a_single_one_is_everyones():
    masks = random_mask((2, 1, 3, 4))
    own = Masking(sparse_mode=1, mask=masks, pre_tokens=0, next_tokens=0, blank_rows="undefined")
    shared = Masking(sparse_mode=1, mask=masks[:1], pre_tokens=0, next_tokens=0, blank_rows="undefined")
    for batch in (0, 1):
        assert torch.equal(own.hidden(batch, 3, 4, masks.device), masks[batch])
        assert torch.equal(own.hidden(batch, 2, 3, masks.device), masks[batch, :, :2, :3])
        assert torch.equal(shared.hidden(batch, 3, 4, masks.device), masks[0])


@pytest.mark.parametrize(
    ("blank_rows", "mode", "rows", "keys", "zeroes"),
    [
        ("undefined", 3, 5, 3, False),
        ("zeros", 4, 3, 5, True),
        ("zeros if causal", 3, 5, 3, True),
        ("zeros if causal", 3, 3, 3, False),
        ("zeros if causal", 4, 5, 3, False),
    ],
)
def test_which_rows_without_keys_become_zeros(blank_rows, mode, rows, keys, zeroes):
    masking = Masking(sparse_mode=mode, mask=None, pre_tokens=0, next_tokens=0, blank_rows=blank_rows)
    assert masking.zeroes(rows, keys) == zeroes


def test_the_compressed_mask_is_true_strictly_above_the_diagonal():
    mask = compressed_causal_mask("cpu")
    assert mask.shape == (2048, 2048)
    assert mask.dtype == torch.bool
    assert [bool(mask[at]) for at in ((0, 0), (0, 1), (1, 0), (2047, 2047), (2046, 2047))] == [
        False,
        True,
        False,
        False,
        True,
    ]
    assert is_compressed_causal_mask(mask)
    assert is_compressed_causal_mask(mask[None, None].to(torch.int8))
    assert not is_compressed_causal_mask(~mask)
    assert not is_compressed_causal_mask(mask.tril(0) | mask.triu(2))
    assert not is_compressed_causal_mask(torch.ones(2048, 2048).triu().bool())
