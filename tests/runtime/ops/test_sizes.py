"""Each question is answered for all sizes a program may see, and never by a guard (the fixture asserts that)."""

import pytest
import torch

from npu_fuse.runtime.sizes import is_contiguous, known_equal, known_same_shape, known_true, static_int


def test_plain_sizes():
    assert known_equal(4, 4)
    assert not known_equal(4, 5)
    assert known_true(True)
    assert static_int(7) == 7


def test_symbols_are_equal_only_to_themselves(symbolic):
    batch, tokens = symbolic(("B", "S", 64)).shape[:2]
    assert known_equal(batch, batch)
    assert known_equal(batch * tokens, tokens * batch)
    assert not known_equal(batch, tokens)
    assert not known_equal(batch, 3)


def test_a_condition_on_a_symbol_is_true_only_if_it_always_is(symbolic):
    batch = symbolic(("B", 64)).shape[0]
    assert known_true(batch * 2 % 2 == 0)
    assert known_true(batch > 0)
    assert not known_true(batch > 2)
    assert not known_true(batch == 3)


def test_static_int_of_a_symbol_is_none(symbolic):
    shape = symbolic(("B", 64)).shape
    assert static_int(shape[0]) is None
    assert static_int(shape[1]) == 64


def test_same_shape(symbolic):
    left, right = symbolic(("B", "S", 64)), symbolic(("B", "S", 64))
    assert known_same_shape(left.shape, right.shape)
    assert not known_same_shape(left.shape, right.shape[1:])
    assert not known_same_shape(left.shape, symbolic(("S", "B", 64)).shape)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(()),
        torch.empty(3, 4),
        torch.empty(3, 4).t(),
        torch.empty(3, 4)[:, 1:],
        torch.empty(3, 4)[:1, 1:],
        torch.empty(3, 1, 4).transpose(0, 1),
        torch.empty(1, 4).expand(3, 4),
        torch.empty(0, 4).t(),
        torch.empty(6).as_strided((3, 1), (1, 99)),
    ],
)
def test_is_contiguous_agrees_with_torch(tensor):
    assert is_contiguous(tensor) == tensor.is_contiguous()


def test_is_contiguous_with_symbols(symbolic):
    x = symbolic(("B", "S", 64))
    assert is_contiguous(x)
    assert is_contiguous(x.view(-1, 64))
    assert not is_contiguous(x.transpose(0, 1))
    assert not is_contiguous(x[..., :32])
