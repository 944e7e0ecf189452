"""How heads lie in the columns of a projection, however they are cut out; what is no plain cut is not read as one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from helpers import compiled
from npu_fuse.patterns.movement import HeadLayout, head_layout, is_movement, strip_unit_axes, trace

Cut = Callable[[torch.Tensor], torch.Tensor]
B, S, Q, K, D = 2, 3, 4, 2, 8  # q has four heads, k and v two, of eight elements
WIDTH = (Q + 2 * K) * D


def movement(cut: Cut, *shape: int, dynamic: bool = False) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """The tensor that is cut, and the nodes that cut it."""
    x = torch.randn(shape)
    for axis in range(len(shape) - 1):
        if dynamic:
            torch._dynamo.mark_dynamic(x, axis)
    graph = compiled(lambda x: cut(x.sin()).cos(), x).before.graph
    cosine = next(node for node in graph.nodes if node.target is torch.ops.aten.cos.default)
    base, path = trace(cosine.args[0])
    assert base.target is torch.ops.aten.sin.default
    return base, path


def read(cut: Cut, *shape: int, dynamic: bool = False) -> HeadLayout | None:
    return head_layout(*movement(cut, *shape, dynamic=dynamic))


# Of [B, S, WIDTH] = [q | k | v] --------------------------------------------------------------------------------------

CUTS: dict[str, tuple[Cut, HeadLayout]] = {
    "nothing": (lambda x: x.clone(), HeadLayout(0, 1, WIDTH, (0, 1, "dim"))),
    "split, view": (
        lambda x: x.split([32, 16, 16], -1)[0].view(B, S, Q, D),
        HeadLayout(0, Q, D, (0, 1, "head", "dim")),
    ),
    "slice, view": (lambda x: x[..., 32:48].view(B, S, K, D), HeadLayout(32, K, D, (0, 1, "head", "dim"))),
    "slice, unflatten": (lambda x: x[..., 48:].unflatten(-1, (-1, D)), HeadLayout(48, K, D, (0, 1, "head", "dim"))),
    "narrow, transpose": (
        lambda x: x.narrow(-1, 32, 16).view(B, S, K, D).transpose(1, 2),
        HeadLayout(32, K, D, (0, "head", 1, "dim")),
    ),
    "view, slice of heads": (
        lambda x: x.view(B, S, Q + 2 * K, D)[:, :, Q : Q + K],
        HeadLayout(32, K, D, (0, 1, "head", "dim")),
    ),
    "chunk": (lambda x: x.chunk(4, -1)[1].view(B, S, 2, D), HeadLayout(16, 2, D, (0, 1, "head", "dim"))),
    "one head": (lambda x: x[..., :D].unsqueeze(1), HeadLayout(0, 1, D, (0, "unit", 1, "dim"))),
    "one head of several": (lambda x: x.view(B, S, -1, D)[:, :, 3], HeadLayout(24, 1, D, (0, 1, "dim"))),
    "tokens in one": (lambda x: x.view(B * S, -1, D)[:, :Q], HeadLayout(0, Q, D, ("tokens", "head", "dim"))),
    "tokens in one, heads first": (
        lambda x: x.view(-1, WIDTH)[:, :32].view(-1, Q, D).transpose(0, 1),
        HeadLayout(0, Q, D, ("head", "tokens", "dim")),
    ),
    "sequence first": (
        lambda x: x.transpose(0, 1)[..., :32].unflatten(-1, (Q, D)),
        HeadLayout(0, Q, D, (1, 0, "head", "dim")),
    ),
    "permuted": (
        lambda x: x.view(B, S, -1, D).permute(2, 1, 0, 3)[:Q],
        HeadLayout(0, Q, D, ("head", 1, 0, "dim")),
    ),
    "copied": (
        lambda x: x[..., :32].view(B, S, Q, D).transpose(1, 2).contiguous(),
        HeadLayout(0, Q, D, (0, "head", 1, "dim")),
    ),
    "transposed there and back": (
        lambda x: x[..., :32].view(B, S, Q, D).transpose(1, 2).transpose(1, 2).flatten(2),
        HeadLayout(0, 1, 32, (0, 1, "dim")),
    ),
    "axes of size one": (
        lambda x: x[..., :32].view(B, S, Q, D)[:, None].transpose(1, 2).unsqueeze(-2),
        HeadLayout(0, Q, D, (0, 1, "unit", "head", "unit", "dim")),
    ),
    "half a head": (lambda x: x[..., 28:32], HeadLayout(28, 1, 4, (0, 1, "dim"))),
}


@pytest.mark.parametrize("name", CUTS)
def test_a_cut_of_columns_is_read(name: str) -> None:
    cut, layout = CUTS[name]
    assert read(cut, B, S, WIDTH) == layout


@pytest.mark.parametrize("leading", [(7,), (1, 7), (7, 1), (1,)])
def test_any_leading_axes(leading: tuple[int, ...]) -> None:
    found = read(lambda x: x[..., :32].unflatten(-1, (Q, D)).movedim(-2, 0), *leading, WIDTH)
    roles = [axis if size > 1 else "unit" for axis, size in enumerate(leading)]
    assert found == HeadLayout(0, Q, D, ("head", *roles, "dim"))


DYNAMIC: dict[str, tuple[Cut, HeadLayout]] = {
    "view": (lambda x: x[..., :32].view(x.shape[0], x.shape[1], Q, D), HeadLayout(0, Q, D, (0, 1, "head", "dim"))),
    "reshape": (lambda x: x[..., :32].reshape(*x.shape[:2], -1, D), HeadLayout(0, Q, D, (0, 1, "head", "dim"))),
    "transpose": (
        lambda x: x[..., 32:48].unflatten(-1, (-1, D)).transpose(1, 2),
        HeadLayout(32, K, D, (0, "head", 1, "dim")),
    ),
    "tokens in one": (
        lambda x: x.view(-1, WIDTH)[:, :32].view(-1, Q, D),
        HeadLayout(0, Q, D, ("tokens", "head", "dim")),
    ),
    "sequence first": (lambda x: x.transpose(0, 1)[..., :D], HeadLayout(0, 1, D, (1, 0, "dim"))),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_batch_and_tokens_may_be_symbols(name: str) -> None:
    cut, layout = DYNAMIC[name]
    assert read(cut, B, S, WIDTH, dynamic=True) == layout


WRONG: dict[str, Cut] = {
    "every third head": lambda x: x[..., :48].view(B, S, 2, 3, D)[:, :, :, 0],
    "heads interleaved": lambda x: x.view(B, S, D, -1).transpose(-1, -2),
    "every other column": lambda x: x[..., ::2].unflatten(-1, (Q, D)),
    "repeated heads": lambda x: x[..., :16].view(B, S, K, 1, D).expand(B, S, K, 2, D),
    "repeated heads, copied": lambda x: x[..., :16].view(B, S, K, 1, D).expand(B, S, K, 2, D).reshape(B, S, Q, D),
    "repeated tokens": lambda x: x[:, :1, :32].expand(B, S, 32),
    "one sequence of two": lambda x: x[0],
    "one token": lambda x: x[:, -1],
    "all but one token": lambda x: x[:, 1:],
    "heads across tokens": lambda x: x.view(B, S * WIDTH // 16, 16),
    "tokens across sequences": lambda x: x.view(S, B, WIDTH),
    "tokens and heads swapped by a copy": lambda x: x.view(B, S, -1, D).transpose(1, 2).reshape(B, S, WIDTH),
    "the width for tokens": lambda x: x.transpose(1, 2),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_plain_cut_is_not_read(name: str) -> None:
    assert read(WRONG[name], B, S, WIDTH) is None


def test_a_batch_that_is_the_sequence_is_told_from_it() -> None:
    assert read(lambda x: x.transpose(0, 1).unflatten(-1, (-1, D)), 4, 4, WIDTH).roles == (1, 0, "head", "dim")
    assert read(lambda x: x.unflatten(-1, (-1, D)), 4, 4, WIDTH).roles == (0, 1, "head", "dim")


def test_a_symbol_is_not_taken_for_a_number_of_the_same_size() -> None:
    """The batch is split in five, which divides the first stand-in for it, and not the second."""
    assert read(lambda x: x.view(x.shape[0] // 5, 5, WIDTH), 10, WIDTH, dynamic=False) is None
    assert read(lambda x: x.unflatten(0, (-1, 5)), 10, WIDTH, dynamic=True) is None


cuts = st.tuples(st.integers(0, 7), st.integers(1, 8), st.permutations(range(3)), st.booleans())


@settings(max_examples=40, deadline=None)
@given(cut=cuts)
def test_a_layout_says_where_the_elements_are(cut: tuple[int, int, list[int], bool]) -> None:
    first, count, order, split = cut

    def heads(x: torch.Tensor) -> torch.Tensor:
        columns = x[..., first * D : (first + count) * D].unflatten(-1, (-1, D))
        sections = x.view(B, S, -1, D)[:, :, first : first + count]
        return (sections if split else columns).permute(*order, 3)

    found = read(heads, B, S, WIDTH)
    expected = heads(torch.arange(B * S * WIDTH).view(B, S, WIDTH))
    axes = {0: range(B), 1: range(S), "head": range(found.num_heads), "unit": range(1)}
    assert expected.shape == (*(len(axes[role]) for role in found.roles[:-1]), found.head_dim)
    for index in torch.cartesian_prod(*(torch.tensor(axes[role]) for role in found.roles[:-1])).tolist():
        at = dict(zip(found.roles, index, strict=False))
        row = (at[0] * S + at[1]) * WIDTH + found.column + at.get("head", 0) * D
        assert expected[tuple(index)].tolist() == list(range(row, row + D))


# Small things ---------------------------------------------------------------------------------------------------------


def test_trace_ends_at_what_computes() -> None:
    base, path = movement(lambda x: x.split([32, 32], -1)[1].view(B, S, 4, D).transpose(1, 2).clone(), B, S, WIDTH)
    assert len(path) == 5
    assert all(map(is_movement, path))
    assert not is_movement(base)


def test_axes_of_size_one_are_stripped() -> None:
    for cut in (
        lambda x: x[:, None],
        lambda x: x.unsqueeze(0).unsqueeze(-2),
        lambda x: x.view(B, 1, S, 1, WIDTH),
        lambda x: x.unsqueeze(0).squeeze(0)[None],
    ):
        base, path = movement(cut, B, S, WIDTH)
        assert strip_unit_axes(path[-1]) is base


def test_a_view_that_moves_elements_is_not_stripped() -> None:
    for cut in (
        lambda x: x[:, None].transpose(-1, -2),
        lambda x: x[:, :, :32],
        lambda x: x.view(B, 1, -1),
        lambda x: x.expand(2, B, S, WIDTH),
    ):
        base, path = movement(cut, B, S, WIDTH)
        assert strip_unit_axes(path[-1]) is path[-1]
        assert path[-1] is not base
