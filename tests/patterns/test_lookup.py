"""Tables that are halves of looked-up rows, however they are looked up and cut; nothing else is taken for that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from helpers import compiled
from npu_fuse.patterns.canonical import Canonicaliser
from npu_fuse.patterns.lookup import LookedUp, looked_up
from npu_fuse.patterns.term import TermPool

Tensor = torch.Tensor
Tables = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
ROWS, T, PAIRS = 32, 5, 4
CACHE, POSITIONS = torch.randn(ROWS, 2 * PAIRS), torch.randint(ROWS, (T,))


def read(
    tables: Tables, cache: Tensor = CACHE, positions: Tensor = POSITIONS, rope_dim: int = 2 * PAIRS
) -> LookedUp | None:
    """What is read of the inputs of exp (cos) and sin (sin)."""

    def function(cache: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = tables(cache, positions)
        return cos.exp(), sin.sin()

    graph = compiled(function, cache, positions).before.graph
    canonicaliser = Canonicaliser(TermPool())
    for node in graph.nodes:
        if node.op != "output":
            canonicaliser.visit(node)
    cos, sin = (
        next(node.args[0] for node in graph.nodes if node.target is target)
        for target in (torch.ops.aten.exp.default, torch.ops.aten.sin.default)
    )
    return looked_up(cos, sin, rope_dim, canonicaliser)


def halves(rows: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = rows.chunk(2, -1)
    return cos, sin


def apart(cache: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Looked up once for each half."""
    return cache[positions][..., :PAIRS], cache[positions][..., PAIRS:]


SPELLINGS: dict[str, tuple[Tables, bool]] = {
    "index": (lambda cache, p: halves(cache[p]), True),
    "index_select": (lambda cache, p: halves(cache.index_select(0, p)), False),
    "embedding": (lambda cache, p: halves(functional.embedding(p, cache)), False),
    "twice": (apart, True),
    "split": (lambda cache, p: cache[p].split(PAIRS, -1), True),
    "view": (lambda cache, p: cache[p].view(T, 2, PAIRS).unbind(1), True),
    "for heads": (lambda cache, p: tuple(t.unsqueeze(-2) for t in halves(cache[p])), True),
    "for batch and heads": (lambda cache, p: tuple(t[None, None] for t in halves(cache[p])), True),
    "repeated": (lambda cache, p: tuple(torch.cat((t, t), -1) for t in halves(cache[p])), True),
    "repeated, for heads": (
        lambda cache, p: tuple(torch.cat((t, t), -1).unsqueeze(1) for t in halves(cache.index_select(0, p))),
        False,
    ),
    "for heads, repeated": (
        lambda cache, p: tuple(torch.cat([t[:, None]] * 2, dim=2) for t in halves(cache[p])),
        True,
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_halves_of_rows_are_read(name: str) -> None:
    tables, wraps = SPELLINGS[name]
    found = read(tables)
    assert found is not None
    assert found.params.wraps == wraps
    assert found.params.dtype == torch.float32
    assert found.inputs["cache"].op == found.inputs["positions"].op == "placeholder"
    assert tuple(found.inputs["cache"].meta["val"].shape) == (ROWS, 2 * PAIRS)
    assert tuple(found.inputs["rows"].meta["val"].shape) == (T, 2 * PAIRS)


@pytest.mark.parametrize("shape", [(2, 3), (1, 5)])
def test_positions_may_have_axes_of_their_own(shape: tuple[int, ...]) -> None:
    found = read(lambda cache, p: halves(cache[p]), positions=torch.randint(ROWS, shape))
    assert found is not None
    assert tuple(found.inputs["positions"].meta["val"].shape) == shape
    merged = read(lambda cache, p: halves(cache[p].view(-1, 1, 2 * PAIRS)), positions=torch.randint(ROWS, shape))
    assert merged is not None


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_are_whole_numbers(dtype: torch.dtype) -> None:
    assert read(SPELLINGS["index"][0], positions=POSITIONS.to(dtype)) is not None


def test_the_narrowest_type_is_told() -> None:
    for cast in (
        lambda cache, p: halves(cache.index_select(0, p).bfloat16()),
        lambda cache, p: tuple(t.unsqueeze(1).bfloat16() for t in halves(cache[p])),
        lambda cache, p: tuple(torch.cat((t, t), -1).bfloat16().float() for t in halves(cache[p])),
    ):
        assert read(cast).params.dtype == torch.bfloat16
    assert read(lambda cache, p: tuple(t.float() for t in halves(cache[p])), CACHE.half()).params.dtype == torch.float16


def across(rows: Tensor) -> tuple[Tensor, Tensor]:
    """For sin the columns of sin and then those of cos, out of rows that are repeated."""
    return torch.cat((rows[..., :PAIRS],) * 2, -1), torch.cat((rows, rows), -1)[..., PAIRS : 3 * PAIRS]


WRONG: dict[str, Tables] = {
    "some of what is repeated": lambda cache, p: across(cache[p]),
    "sin in front": lambda cache, p: halves(cache[p])[::-1],
    "the same half twice": lambda cache, p: (halves(cache[p])[0],) * 2,
    "two caches": lambda cache, p: (halves(cache[p])[0], halves(cache.cos()[p])[1]),
    "two positions": lambda cache, p: (halves(cache[p])[0], halves(cache[p.flip(0)])[1]),
    "columns in turn": lambda cache, p: (cache[p][..., ::2], cache[p][..., 1::2]),
    "less than half": lambda cache, p: (cache[p][..., :3], cache[p][..., 4:7]),
    "computed after": lambda cache, p: tuple(t * 2 for t in halves(cache[p])),
    "two halves that differ": lambda cache, p: tuple(torch.cat((t, t.flip(-1)), -1) for t in halves(cache[p])),
    "repeated along tokens": lambda cache, p: tuple(torch.cat((t, t), 0) for t in halves(cache[p])),
    "pairs repeated": lambda cache, p: tuple(t.repeat_interleave(2, -1) for t in halves(cache[p])),
    "a slice of positions": lambda cache, p: halves(cache[3 : 3 + T]),
    "columns looked up": lambda cache, p: halves(cache[:, p % 8]),
    "columns index_selected": lambda cache, p: halves(cache.index_select(1, p % 8)),
    "two indices": lambda cache, p: halves(cache.view(4, 8, 8)[p % 4, p % 8]),
    "a mask": lambda cache, p: halves(cache.where(p[0] > 3, 0.0)),
    "tokens in another order": lambda cache, p: tuple(t.flip(0) for t in halves(cache[p])),
    "some of the tokens": lambda cache, p: tuple(t[1:] for t in halves(cache[p])),
    "rows of three axes": lambda cache, p: halves(cache.view(4, 8, 8)[p % 4]),
}


@pytest.mark.parametrize("name", WRONG)
def test_anything_else_is_not_read(name: str) -> None:
    assert read(WRONG[name]) is None


@pytest.mark.parametrize("times", [1, 2])
def test_rows_have_a_column_of_each_table_for_each_pair(times: int) -> None:
    def tables(cache: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = halves(cache[positions])
        return torch.cat([cos] * times, -1), torch.cat([sin] * times, -1)

    assert read(tables) is not None
    assert read(tables, rope_dim=4 * PAIRS) is None
    assert read(tables, rope_dim=PAIRS) is None


def test_transposed_positions_are_not_read_as_they_are() -> None:
    positions = torch.randint(ROWS, (2, 3))
    assert read(lambda cache, p: tuple(t.transpose(0, 1) for t in halves(cache[p])), positions=positions) is None
    assert read(lambda cache, p: halves(cache[p.T]), positions=positions) is not None


def test_a_complex_table_is_not_read() -> None:
    def tables(cache: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        table = torch.view_as_complex(cache.view(ROWS, PAIRS, 2))[positions]
        return table, table

    def function(cache: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = tables(cache, positions)
        return torch.view_as_real(cos.exp()), torch.view_as_real(sin.sin())

    graph = compiled(function, CACHE, POSITIONS).before.graph
    canonicaliser = Canonicaliser(TermPool())
    for node in graph.nodes:
        if node.op != "output":
            canonicaliser.visit(node)
    (gathered,) = [node for node in graph.nodes if node.target is torch.ops.aten.index.Tensor]
    assert looked_up(gathered, gathered, 2 * PAIRS, canonicaliser) is None
