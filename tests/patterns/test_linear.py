"""A projection by a weight [out, in], as a module writes it and as ATen does; nothing else is one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn
from torch.nn import functional

from helpers import compiled
from npu_fuse.patterns.linear import Linear, linear, projections_of

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


LEADING: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "x @ w.T": lambda x, w: x @ w.T,
    "matmul, t": lambda x, w: torch.matmul(x, w.t()),
    "mm of rows": lambda x, w: torch.mm(x.flatten(0, -2), w.T).unflatten(0, x.shape[:-1]),
    "reshaped": lambda x, w: torch.mm(x.reshape(-1, 4), w.T).reshape(*x.shape[:-1], -1),
}
SHAPES = {"[B, S, n]": (2, 3, 4), "[1, S, n]": (1, 3, 4), "[B, 1, n]": (2, 1, 4), "[B, H, S, n]": (2, 5, 3, 4)}


def only(found: list[Linear], weight: torch.Tensor = WEIGHT) -> Linear:
    """The one projection that has x's own axes; the product of rows within it is one of rows."""
    (whole,) = [p for p in found if len(p.x.meta["val"].shape) == len(p.node.meta["val"].shape) > 2]
    assert tuple(whole.weight.meta["val"].shape) == tuple(weight.shape)
    return whole


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LEADING)
def test_leading_axes_are_given_back(name: str, shape: str) -> None:
    x = torch.randn(SHAPES[shape])
    found = only(projections(LEADING[name], x, WEIGHT))
    assert found.x.op == "placeholder"
    assert tuple(found.x.meta["val"].shape) == tuple(x.shape)
    assert tuple(found.node.meta["val"].shape) == (*x.shape[:-1], 6)
    assert found.bias is None


@pytest.mark.parametrize("name", ["x @ w.T", "matmul, t"])
def test_rows_that_can_be_no_view_are_a_batch_of_products(name: str) -> None:
    found = only(projections(lambda x, w: LEADING[name](x.transpose(0, 1), w), torch.randn(3, 2, 4), WEIGHT))
    assert tuple(found.node.meta["val"].shape) == (2, 3, 6)
    assert found.x.target is torch.ops.aten.transpose.int
    assert found.weight.op == "placeholder"


def test_symbolic_leading_axes_are_given_back() -> None:
    x = torch.randn(2, 3, 4)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(x, 1)
    graph = compiled(lambda x, w: x @ w.T, x, WEIGHT).before.graph
    found = only([found for found in map(linear, graph.nodes) if found is not None])
    assert [str(size) for size in found.node.meta["val"].shape[:2]] == [str(s) for s in found.x.meta["val"].shape[:2]]


def test_a_bias_of_rows_stays() -> None:
    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.addmm(b, x.view(-1, 4), w.T).view(2, 3, 6)

    found = only(projections(function, torch.randn(2, 3, 4), WEIGHT, BIAS))
    assert found.bias is not None
    assert found.bias.op == "placeholder"


CUT_OTHERWISE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "columns cut": lambda x, w: torch.mm(x.view(-1, 4), w.T).view(2, 3, 3, 2),
    "rows in another order": lambda x, w: torch.mm(x.transpose(0, 1).reshape(-1, 4), w.T).view(2, 3, 6),
    "rows of other axes": lambda x, w: torch.mm(x.view(-1, 4), w.T).view(3, 2, 6),
    "x of other columns": lambda x, w: torch.mm(x.view(-1, 4), w.T).view(2, 3, 6),
}


@pytest.mark.parametrize("name", CUT_OTHERWISE)
def test_other_views_of_a_product_are_no_projection_of_x(name: str) -> None:
    x = torch.randn(2, 3, 4) if name != "x of other columns" else torch.randn(2, 2, 6)
    found = projections(CUT_OTHERWISE[name], x, WEIGHT)
    assert [tuple(p.node.meta["val"].shape) for p in found] == [(6, 6)]


@pytest.mark.parametrize("name", ["F.linear", "x @ w.T", "mm of rows"])
@pytest.mark.parametrize("shape", [(2, 3, 4), (5, 4)])
def test_all_projections_of_one_x_are_found(name: str, shape: tuple[int, ...]) -> None:
    spelled = {**LEADING, "F.linear": functional.linear}[name]
    weights = [torch.randn(n, 4) for n in (6, 5, 7)]

    def function(x: torch.Tensor, *weights: torch.Tensor) -> list[torch.Tensor]:
        return [*(spelled(x, w) for w in weights), functional.linear(x.sin(), weights[0]), x.cos()]

    graph = compiled(function, torch.randn(shape), *weights).before.graph
    x = next(n for n in graph.nodes if n.op == "placeholder" and tuple(n.meta["val"].shape) == shape)
    found = list(projections_of(x))
    assert sorted(p.weight.meta["val"].shape[0] for p in found) == [5, 6, 7]
    assert all(tuple(p.node.meta["val"].shape[:-1]) == shape[:-1] for p in found)


OTHERS: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "a weight that is not transposed": (lambda x, w: x @ w, (X, SQUARE)),
    "a weight that is transposed twice": (lambda x, w: x @ w.T.contiguous().sin(), (X, SQUARE)),
    "a transpose that is none": (lambda x, w: x @ w.transpose(0, 0), (X, SQUARE)),
    "several weights": (lambda x, w: x @ w.mT, (torch.randn(3, 5, 4), torch.randn(3, 6, 4))),
    "one weight of each batch": (lambda x, w: x @ w.mT, (torch.randn(1, 5, 4), torch.randn(3, 6, 4))),
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
