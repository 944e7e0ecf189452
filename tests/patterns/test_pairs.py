"""Whether the columns of a pair are known to be equal: by how the tables are computed, never by their values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from spellings import ROTATIONS
from torch import fx

from helpers import compiled
from npu_fuse.patterns.canonical import Canonicaliser
from npu_fuse.patterns.pairs import share_columns
from npu_fuse.patterns.rope import Rope
from npu_fuse.patterns.term import TermPool

Tensor = torch.Tensor
Tables = Callable[[Tensor], tuple[Tensor, Tensor]]
S, D = 5, 8


def numbered(graph: fx.Graph) -> Canonicaliser:
    canonicaliser = Canonicaliser(TermPool())
    for node in graph.nodes:
        if node.op != "output":
            canonicaliser.visit(node)
    return canonicaliser


def shared(style: str, tables: Tables, angles: Tensor | None = None) -> list[bool]:
    """What is found of cos and sin of one rotation, whose tables are computed of [S, D / 2] angles."""
    spelled = ROTATIONS[style, "full"]["llama" if style == "half" else "stride, stack"]

    def function(x: Tensor, angles: Tensor) -> Tensor:
        cos, sin = tables(angles)
        return spelled(x, cos, sin)

    angles = torch.randn(S, D // 2) if angles is None else angles
    found = compiled(function, torch.randn(2, 3, S, D), angles)
    (match,) = found.findings().of("rope")
    assert isinstance(match.params, Rope)
    graph = match.node.graph
    return [share_columns(match.inputs[name], match.params, numbered(graph)) for name in ("cos", "sin")]


def both(table: Callable[[Tensor], Tensor]) -> Tables:
    return lambda angles: (table(angles.cos()), table(angles.sin()))


def repeated(angles: Tensor) -> Tensor:
    return torch.cat((angles, angles), -1)


def in_turn(angles: Tensor) -> Tensor:
    return angles.repeat_interleave(2, -1)


HALVES: dict[str, Tables] = {
    "llama": lambda angles: (repeated(angles).cos(), repeated(angles).sin()),
    "scaled and cast": lambda angles: tuple((t * 1.5).bfloat16().float() for t in both(repeated)(angles)),
    "scaled before": lambda angles: tuple((t * 2 + 0.5)[None, None] for t in both(repeated)(angles)),
    "computed apart": lambda angles: (torch.cat((angles.cos(), angles.cos()), -1), repeated(angles).sin()),
    "for heads": lambda angles: tuple(t[None, :, None].transpose(1, 2) for t in both(repeated)(angles)),
    "of some tokens": lambda angles: tuple(t[3:] for t in both(repeated)(torch.cat((angles[:3], angles)))),
}


@pytest.mark.parametrize("name", HALVES)
def test_repeated_halves_are_known(name: str) -> None:
    assert shared("half", HALVES[name]) == [True, True]


PAIRS: dict[str, Tables] = {
    "cohere": lambda angles: (in_turn(angles).cos(), in_turn(angles).sin()),
    "glm": lambda angles: tuple(in_turn(t[..., : D // 2]) for t in both(repeated)(angles)),
    "stacked": lambda angles: tuple(torch.stack((t, t), -1).flatten(-2) for t in both(lambda t: t)(angles)),
    "glm, for heads": lambda angles: tuple(in_turn(t.unsqueeze(0)[..., : D // 2]) for t in both(repeated)(angles)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_repeated_pairs_are_known(name: str) -> None:
    assert shared("interleave", PAIRS[name]) == [True, True]


def test_a_column_for_a_pair_is_shared() -> None:
    spelled = ROTATIONS["half", "half"]["halves"]
    found = compiled(spelled, torch.randn(2, 3, S, D), torch.randn(S, D // 2), torch.randn(S, D // 2))
    (match,) = found.findings().of("rope")
    assert share_columns(match.inputs["cos"], match.params, numbered(match.node.graph))


WIDE = torch.randn(S, D)
OWN: dict[str, tuple[str, Tables, Tensor | None]] = {
    "given": ("half", lambda angles: (angles.cos(), angles.sin()), WIDE),
    "given, equal by chance": ("half", lambda angles: (angles.cos(), angles.sin()), repeated(WIDE[:, :4])),
    "halves that differ": ("half", lambda a: (torch.cat((a, a * 2), -1).cos(), torch.cat((a, a * 2), -1).sin()), None),
    "neighbours repeated, halves rotated": ("half", lambda a: (in_turn(a).cos(), in_turn(a).sin()), None),
    "halves repeated, neighbours rotated": ("interleave", lambda a: (repeated(a).cos(), repeated(a).sin()), None),
    "scaled by column": ("half", lambda a: tuple(repeated(t) * WIDE[0].cos() for t in (a.cos(), a.sin())), None),
    "shifted by column": ("half", lambda a: tuple(repeated(t) + torch.arange(D) for t in (a.cos(), a.sin())), None),
    "transposed": ("half", lambda a: tuple(torch.cat((t, t), 0).T for t in (a.cos(), a.sin())), torch.randn(4, S)),
}


@pytest.mark.parametrize("name", OWN)
def test_columns_that_may_differ_are_not(name: str) -> None:
    style, tables, angles = OWN[name]
    assert shared(style, tables, angles) == [False, False]


def test_each_table_is_asked_for_itself() -> None:
    def tables(angles: Tensor) -> tuple[Tensor, Tensor]:
        return repeated(angles).cos(), torch.cat((angles, -angles), -1).sin()

    assert shared("half", tables) == [True, False]
