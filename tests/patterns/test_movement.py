"""Movement is followed to what computes, and told from it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from helpers import compiled
from npu_fuse.patterns.movement import is_movement, strip_unit_axes, trace

Cut = Callable[[torch.Tensor], torch.Tensor]
B, S, D, WIDTH = 2, 3, 8, 64


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
