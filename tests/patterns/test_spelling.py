"""A spelling is the formula of a value: run, it gives the same bits; printed, it reads as maths."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from helpers import Compiled, compiled, same
from npu_fuse.patterns.canonical import Canonicaliser
from npu_fuse.patterns.spelling import Spelling, spell
from npu_fuse.patterns.term import TermPool

Function = Callable[..., torch.Tensor]
X, W = torch.randn(2, 5, 12).bfloat16(), torch.randn(12).bfloat16()


def spelled(found: Compiled, names: tuple[str, ...] = ("x", "w"), output: int = 0) -> Spelling | None:
    """The spelling of an output over the first placeholders that are tensors."""
    graph = found.before.graph
    canonicaliser = Canonicaliser(TermPool())
    for node in graph.nodes:
        if node.op != "output":
            canonicaliser.visit(node)
    tensors = [n for n in graph.find_nodes(op="placeholder") if isinstance(n.meta["val"], torch.Tensor)]
    result = graph.output_node().args[0][output]
    assert isinstance(result, fx.Node)
    return spell(result, dict(zip(names, tensors, strict=False)), canonicaliser)


WRITTEN: dict[str, Function] = {
    "x * w": lambda x, w: x * w,
    "w * bf16(f32(x) * rsqrt(mean(f32(x) ** 2) + 1e-06))": lambda x, w: (
        w * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()
    ),
    "(x + w) * (x - w)": lambda x, w: (x + w) * (x - w),
    "x - (x - w)": lambda x, w: x - (x - w),
    "x / w / (x / w)": lambda x, w: x / w / (x / w),
    "-x * w": lambda x, w: -x * w,
    "-(x + w)": lambda x, w: -(x + w),
    "(x * w) ** 2": lambda x, w: (x * w) ** 2,
    "silu(f32(x)) * w": lambda x, w: torch.nn.functional.silu(x.float()) * w,
    "cat(-x, x) * cat(w, w)": lambda x, w: torch.cat((-x, x), -1) * torch.cat((w, w)),
    "x * w + x": lambda x, w: x.transpose(0, 1).contiguous().transpose(0, 1) * w.view(1, 1, -1) + x,
}


@pytest.mark.parametrize("text", WRITTEN)
def test_it_reads_as_maths_and_runs_as_the_model(text: str) -> None:
    spelling = spelled(compiled(WRITTEN[text], X, W))
    assert str(spelling) == text
    assert same(spelling(x=X, w=W), WRITTEN[text](X, W))


def test_sites_that_are_spelled_alike_are_equal() -> None:
    def two(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        return [x.float().sin() * w, y.float().sin() * v, y.sin().float() * v]

    found = compiled(two, X, W, X + 1, W + 1)
    first = spelled(found, ("x", "w"))
    others = [spelled(found, ("_", "_2", "x", "w"), output) for output in (1, 2)]
    assert all(other is not None and other.inputs == ("_", "_2", "x", "w") for other in others)
    alike = spelled(compiled(lambda x, w: x.float().sin() * w, X, W))
    assert first == alike
    assert hash(first) == hash(alike)
    assert first != spelled(compiled(lambda x, w: x.sin().float() * w, X, W))


def test_a_value_that_is_computed_twice_alike_is_one() -> None:
    spelling = spelled(compiled(lambda x, w: (x.sin() * w) + (x.sin() * w), X, W))
    assert len(spelling.steps) == 3


def test_symbolic_sizes_are_those_of_the_inputs() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.view(x.shape[0] * x.shape[1], -1) * w).view(x.shape[0], x.shape[1], -1)

    x = X.clone()
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(x, 1)
    spelling = spelled(compiled(function, x, W))
    for shape in ((2, 5, 12), (3, 4, 12), (1, 7, 12)):
        x = torch.randn(shape).bfloat16()
        assert same(spelling(x=x, w=W), function(x, W))


def test_what_reads_something_else_or_is_random_has_none() -> None:
    assert spelled(compiled(lambda x, w: x * w, X, W), names=("x",)) is None
    assert spelled(compiled(lambda x, w: torch.nn.functional.dropout(x, 0.5) * w, X, W)) is None


def test_wrong_inputs_are_named() -> None:
    spelling = spelled(compiled(lambda x, w: x * w, X, W))
    with pytest.raises(ValueError, match="this spelling takes x, w; given: x, v"):
        spelling(x=X, v=W)
