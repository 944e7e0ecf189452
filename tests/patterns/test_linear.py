"""A projection by a weight [out, in], as a module writes it and as ATen does; nothing else is one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn
from torch.nn import functional

from helpers import compiled
from npu_fuse.patterns.linear import Linear, linear

X, SQUARE, WEIGHT, BIAS = torch.randn(5, 4), torch.randn(4, 4), torch.randn(6, 4), torch.randn(6)


def projections(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[Linear]:
    graph = compiled(function, *inputs).before.graph
    return [found for found in map(linear, graph.nodes) if found is not None]


def check(found: Linear, *, bias: bool) -> None:
    """Every part is the input of its shape, and not a view of it."""
    parts: dict[fx.Node | None, torch.Tensor] = {found.x: X, found.weight: WEIGHT}
    if bias:
        parts[found.bias] = BIAS
    for node, tensor in parts.items():
        assert node is not None
        assert node.op == "placeholder"
        assert node.meta["val"].shape == tensor.shape
    assert (found.bias is not None) == bias


BARE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "F.linear": functional.linear,
    "x @ w.T": lambda x, w: x @ w.T,
    "mm, t": lambda x, w: torch.mm(x, w.t()),
    "matmul, transpose": lambda x, w: torch.matmul(x, w.transpose(0, 1)),
    "negative axes": lambda x, w: x @ w.transpose(-1, -2),
    "axes the other way round": lambda x, w: x @ w.transpose(1, 0),
    "mT": lambda x, w: x @ w.mT,
    "permute": lambda x, w: x @ w.permute(1, 0),
}


@pytest.mark.parametrize("name", BARE)
def test_a_projection_without_bias(name: str) -> None:
    (found,) = projections(BARE[name], X, WEIGHT)
    check(found, bias=False)


BIASED: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "F.linear": functional.linear,
    "by name": lambda x, w, b: functional.linear(x, w, bias=b),
    "addmm": lambda x, w, b: torch.addmm(b, x, w.T),
}


@pytest.mark.parametrize("name", BIASED)
def test_a_projection_with_bias(name: str) -> None:
    (found,) = projections(BIASED[name], X, WEIGHT, BIAS)
    check(found, bias=True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(4,), (5, 4), (2, 3, 4), (2, 1, 3, 4)])
def test_the_module_is_one_whole_op_for_any_leading_axes(bias: bool, shape: tuple[int, ...]) -> None:
    (found,) = projections(nn.Linear(4, 6, bias=bias), torch.randn(shape))
    assert tuple(found.x.meta["val"].shape) == shape
    assert tuple(found.node.meta["val"].shape) == (*shape[:-1], 6)
    assert (found.bias is not None) == bias


OTHERS: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "a weight that is not transposed": (lambda x, w: x @ w, (X, SQUARE)),
    "a weight that is transposed twice": (lambda x, w: x @ w.T.contiguous().sin(), (X, SQUARE)),
    "a transpose that is none": (lambda x, w: x @ w.transpose(0, 0), (X, SQUARE)),
    "several weights": (lambda x, w: x @ w.mT, (torch.randn(3, 5, 4), torch.randn(3, 6, 4))),
    "a scaled sum": (lambda x, w, b: torch.addmm(b, x, w.T, beta=0.5), (X, WEIGHT, BIAS)),
    "a bias for each row": (lambda x, w, b: torch.addmm(b, x, w.T), (X, WEIGHT, torch.randn(5, 6))),
    "a bias of one element": (lambda x, w, b: torch.addmm(b, x, w.T), (X, WEIGHT, torch.randn(1))),
    "a product": (lambda x, w: x * w, (X, X)),
    "a convolution": (functional.conv1d, (torch.randn(2, 4, 5), torch.randn(6, 4, 1))),
}


@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_is_none(name: str) -> None:
    function, inputs = OTHERS[name]
    assert not projections(function, *inputs)
