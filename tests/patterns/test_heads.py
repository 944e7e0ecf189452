"""Where heads start in the columns of a projection, however they are cut out; nothing else is read as heads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from helpers import compiled
from npu_fuse.patterns.heads import Heads, heads
from npu_fuse.patterns.movement import trace

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


def read(cut: Cut, *shape: int, dynamic: bool = False) -> Heads | None:
    return heads(*movement(cut, *shape, dynamic=dynamic))


def block(first: int, count: int) -> tuple[int, ...]:
    """Heads side by side."""
    return tuple(range(first, first + count * D, D))


# Of [B, S, WIDTH] -----------------------------------------------------------------------------------------------------

CUTS: dict[str, tuple[Cut, Heads]] = {
    "nothing": (lambda x: x.clone(), Heads((0,), WIDTH, (0, 1, "dim"))),
    "split, view": (
        lambda x: x.split([32, 16, 16], -1)[0].view(B, S, Q, D),
        Heads(block(0, Q), D, (0, 1, "head", "dim")),
    ),
    "slice, view": (lambda x: x[..., 32:48].view(B, S, K, D), Heads(block(32, K), D, (0, 1, "head", "dim"))),
    "slice, unflatten": (lambda x: x[..., 48:].unflatten(-1, (-1, D)), Heads(block(48, K), D, (0, 1, "head", "dim"))),
    "narrow, transpose": (
        lambda x: x.narrow(-1, 32, 16).view(B, S, K, D).transpose(1, 2),
        Heads(block(32, K), D, (0, "head", 1, "dim")),
    ),
    "view, slice of heads": (
        lambda x: x.view(B, S, Q + 2 * K, D)[:, :, Q : Q + K],
        Heads(block(32, K), D, (0, 1, "head", "dim")),
    ),
    "chunk": (lambda x: x.chunk(4, -1)[1].view(B, S, 2, D), Heads(block(16, 2), D, (0, 1, "head", "dim"))),
    "one head": (lambda x: x[..., :D].unsqueeze(1), Heads((0,), D, (0, "unit", 1, "dim"))),
    "one head of several": (lambda x: x.view(B, S, -1, D)[:, :, 3], Heads((24,), D, (0, 1, "dim"))),
    "tokens in one": (lambda x: x.view(B * S, -1, D)[:, :Q], Heads(block(0, Q), D, ("tokens", "head", "dim"))),
    "tokens in one, heads first": (
        lambda x: x.view(B * S, -1, D)[:, :Q].transpose(0, 1),
        Heads(block(0, Q), D, ("head", "tokens", "dim")),
    ),
    "sequence first": (
        lambda x: x.transpose(0, 1)[..., :32].unflatten(-1, (Q, D)),
        Heads(block(0, Q), D, (1, 0, "head", "dim")),
    ),
    "copied": (
        lambda x: x[..., :32].unflatten(-1, (Q, D)).transpose(1, 2).contiguous(),
        Heads(block(0, Q), D, (0, "head", 1, "dim")),
    ),
    "more axes of size one": (
        lambda x: x[..., :32].view(B, S, 1, Q, 1, D),
        Heads(block(0, Q), D, (0, 1, "unit", "head", "unit", "dim")),
    ),
    "half a head": (lambda x: x[..., 28:32], Heads((28,), 4, (0, 1, "dim"))),
    "q of each head of [q | k | v]": (
        lambda x: x[..., :48].view(B, S, 2, 3 * D)[..., :D],
        Heads((0, 24), D, (0, 1, "head", "dim")),
    ),
    "v of each head of [q | k | v]": (
        lambda x: x[..., :48].view(B, S, 2, 3, D).permute(0, 3, 2, 1, 4)[:, 2],
        Heads((16, 40), D, (0, "head", 1, "dim")),
    ),
    "gates": (lambda x: x.view(B, S, Q, 2 * D).chunk(2, -1)[1], Heads((8, 24, 40, 56), D, (0, 1, "head", "dim"))),
    "gates, flattened and cut again": (
        lambda x: x.view(B, S, Q, 2 * D).chunk(2, -1)[1].reshape(B, S, -1).view(B, S, Q, D).transpose(1, 2),
        Heads((8, 24, 40, 56), D, (0, "head", 1, "dim")),
    ),
    "two heads of q for each of k": (
        lambda x: x.view(B, S, K, 4, D)[..., :2, :].reshape(B, S, Q, D),
        Heads((0, 8, 32, 40), D, (0, 1, "head", "dim")),
    ),
}


@pytest.mark.parametrize("name", CUTS)
def test_a_cut_of_columns_is_read(name: str) -> None:
    cut, expected = CUTS[name]
    assert read(cut, B, S, WIDTH) == expected


@pytest.mark.parametrize("leading", [(7,), (1, 7), (7, 1), (1,)])
def test_any_leading_axes(leading: tuple[int, ...]) -> None:
    found = read(lambda x: x[..., :32].unflatten(-1, (Q, D)).movedim(-2, 0), *leading, WIDTH)
    roles = [axis if size > 1 else "unit" for axis, size in enumerate(leading)]
    assert found == Heads(block(0, Q), D, ("head", *roles, "dim"))


DYNAMIC: dict[str, tuple[Cut, Heads]] = {
    "view": (
        lambda x: x[..., :32].view(x.shape[0], x.shape[1], Q, D),
        Heads(block(0, Q), D, (0, 1, "head", "dim")),
    ),
    "reshape": (lambda x: x[..., :32].reshape(*x.shape[:2], -1, D), Heads(block(0, Q), D, (0, 1, "head", "dim"))),
    "transpose": (
        lambda x: x[..., 32:48].unflatten(-1, (-1, D)).transpose(1, 2),
        Heads(block(32, K), D, (0, "head", 1, "dim")),
    ),
    "tokens in one": (
        lambda x: x.view(-1, WIDTH)[:, :32].view(-1, Q, D),
        Heads(block(0, Q), D, ("tokens", "head", "dim")),
    ),
    "sequence first": (lambda x: x.transpose(0, 1)[..., :D], Heads((0,), D, (1, 0, "dim"))),
    "gates, flattened and cut again": (
        lambda x: x.view(*x.shape[:2], Q, 2 * D)[..., D:].reshape(*x.shape[:2], -1).view(*x.shape[:2], Q, D),
        Heads((8, 24, 40, 56), D, (0, 1, "head", "dim")),
    ),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_batch_and_tokens_may_be_symbols(name: str) -> None:
    cut, expected = DYNAMIC[name]
    assert read(cut, B, S, WIDTH, dynamic=True) == expected


WRONG: dict[str, Cut] = {
    "heads interleaved": lambda x: x.view(B, S, D, -1).transpose(-1, -2),
    "every other column": lambda x: x[..., ::2].unflatten(-1, (Q, D)),
    "columns interleaved by a copy": lambda x: x.view(B, S, 2, -1).transpose(-1, -2).reshape(B, S, Q * 2, D),
    "a head of two pieces": lambda x: x.view(B, S, -1, D)[..., :4].reshape(B, S, Q, D),
    "repeated heads": lambda x: x[..., :16].view(B, S, K, 1, D).expand(B, S, K, 2, D),
    "repeated heads, copied": lambda x: x[..., :16].view(B, S, K, 1, D).expand(B, S, K, 2, D).reshape(B, S, Q, D),
    "repeated tokens": lambda x: x[:, :1, :32].expand(B, S, 32),
    "one sequence of two": lambda x: x[0],
    "one token": lambda x: x[:, -1],
    "all but one token": lambda x: x[:, 1:],
    "heads across tokens": lambda x: x.view(B, S * WIDTH // 16, 16),
    "tokens across sequences": lambda x: x.view(S, B, WIDTH),
    "tokens and heads swapped by a copy": lambda x: x.view(B, S, -1, D).transpose(1, 2).reshape(B, S, WIDTH),
    "two axes of heads": lambda x: x.view(B, S, 2, -1, D)[..., :2, :],
    "the width for tokens": lambda x: x.transpose(1, 2),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_cut_of_heads_is_not_read(name: str) -> None:
    assert read(WRONG[name], B, S, WIDTH) is None


ROWS: dict[str, tuple[Cut, tuple[int, ...] | None]] = {
    "split, reshape": (lambda x: x.split([32, 16, 16], -1)[0].reshape(-1, D), block(0, Q)),
    "reshape, and back": (lambda x: x[..., 32:48].reshape(-1, D).view(*x.shape[:2], 16).view(-1, D), block(32, K)),
    "all heads": (lambda x: x.view(-1, D), block(0, Q + 2 * K)),
    "heads before tokens": (lambda x: x.view(*x.shape[:2], -1, D).transpose(1, 2).reshape(-1, D), None),
    "all rows but one": (lambda x: x.view(-1, D)[1:], None),
    "rows of one batch": (lambda x: x.view(x.shape[0], -1, D), None),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_tokens_and_heads_in_one_axis_are_rows(name: str, dynamic: bool) -> None:
    cut, starts = ROWS[name]
    base, path = movement(cut, B, S, WIDTH, dynamic=dynamic)
    found = heads(base, path, in_rows=True)
    assert found == (None if starts is None else Heads(starts, D, ("rows", "dim")))
    assert heads(base, path) is None  # unless they are asked for


def test_heads_side_by_side_are_cut() -> None:
    def cut(taken: Cut, head_dim: int) -> Heads | None:
        return heads(*movement(taken, B, S, WIDTH), head_dim=head_dim)

    assert cut(lambda x: x[..., 32:48], D) == Heads(block(32, K), D, (0, 1, "dim"))
    assert cut(lambda x: x[..., 32:40].unsqueeze(1), D) == Heads((32,), D, (0, "unit", 1, "dim"))
    gates = cut(lambda x: x.view(B, S, Q, 2 * D).chunk(2, -1)[1].reshape(B, S, -1), D)
    assert gates == Heads((8, 24, 40, 56), D, (0, 1, "dim"))
    assert cut(lambda x: x[..., 32:48].reshape(B * S, 16), D) == Heads(block(32, K), D, ("tokens", "dim"))
    assert cut(lambda x: x[..., 32:48], D - 1) is None
    assert cut(lambda x: x.view(-1), WIDTH) is None  # tokens lie side by side
    assert cut(lambda x: x.view(B, S, Q, 2 * D).chunk(2, -1)[1].reshape(B, S, -1), 2 * D) is None
    assert cut(lambda x: x.view(B, S, D, -1).transpose(-1, -2).flatten(-2), D) is None


def test_a_batch_that_is_the_sequence_is_told_from_it() -> None:
    assert read(lambda x: x.transpose(0, 1).unflatten(-1, (-1, D)), 4, 4, WIDTH).roles == (1, 0, "head", "dim")
    assert read(lambda x: x.unflatten(-1, (-1, D)), 4, 4, WIDTH).roles == (0, 1, "head", "dim")


def test_a_symbol_is_not_taken_for_a_number_of_the_same_size() -> None:
    """The batch is split in five, which divides the first stand-in for it, and not the second."""
    assert read(lambda x: x.view(x.shape[0] // 5, 5, WIDTH), 10, WIDTH, dynamic=False) is None
    assert read(lambda x: x.unflatten(0, (-1, 5)), 10, WIDTH, dynamic=True) is None


cuts = st.tuples(
    st.integers(0, 7), st.integers(1, 8), st.integers(1, 3), st.permutations(range(3)), st.booleans(), st.booleans()
)


@settings(max_examples=60, deadline=None)
@given(cut=cuts)
def test_heads_say_where_the_elements_are(cut: tuple[int, int, int, list[int], bool, bool]) -> None:
    first, count, step, order, split, copy = cut

    def taken(x: torch.Tensor) -> torch.Tensor:
        if split:
            heads_of_x = x.view(B, S, -1, D)[:, :, first : first + count * step : step]
        else:
            heads_of_x = x[..., first * D : (first + count) * D].unflatten(-1, (-1, D))
        if copy:
            heads_of_x = heads_of_x.flatten(-2).unflatten(-1, (-1, D))
        return heads_of_x.permute(*order, 3)

    found = read(taken, B, S, WIDTH)
    expected = taken(torch.arange(B * S * WIDTH).view(B, S, WIDTH))
    axes = {0: range(B), 1: range(S), "head": range(found.num_heads), "unit": range(1)}
    assert expected.shape == (*(len(axes[role]) for role in found.roles[:-1]), found.head_dim)
    for index in torch.cartesian_prod(*(torch.tensor(axes[role]) for role in found.roles[:-1])).tolist():
        at = dict(zip(found.roles, index, strict=False))
        row = (at[0] * S + at[1]) * WIDTH + found.starts[at.get("head", 0)]
        assert expected[tuple(index)].tolist() == list(range(row, row + D))


@pytest.mark.parametrize(
    ("starts", "stride", "side_by_side"),
    [((0, 8, 16), 8, True), ((4,), 8, True), ((0, 16), 16, False), ((8, 0), -8, False)],
)
def test_regular_heads(starts: tuple[int, ...], stride: int, side_by_side: bool) -> None:
    found = Heads(starts, D, ("head", "dim"))
    assert found.every(stride)
    assert found.side_by_side == side_by_side
    assert not Heads((0, 8, 24), D, ("head", "dim")).every(8)
    assert found.width == len(starts) * D
