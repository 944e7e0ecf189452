"""A norm of a residual sum: both operands of the norm's own shape and type; any other add is left to itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from spellings import WEIGHTED

from helpers import compiled
from npu_fuse.patterns.match import Findings

BF16, FP32 = torch.bfloat16, torch.float32
X, Y = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
W = torch.randn(8)


def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return WEIGHTED["llama"](x, w)


def find(function: Callable[..., object], *inputs: torch.Tensor) -> Findings:
    return compiled(function, *inputs).findings()


RESIDUALS: dict[str, Callable[..., object]] = {
    "the sum is used further": lambda x, y, w: (norm(x + y, w), x + y),
    "both are returned": lambda x, y, w: [(s := x + y), norm(s, w)],
    "only the norm": lambda x, y, w: norm(x + y, w),
    "the other way round": lambda x, y, w: norm(y + x, w),
    "in place": lambda x, y, w: norm(x.clone().add_(y), w),
    "torch.add": lambda x, y, w: norm(torch.add(x, y), w),
    "what is added was computed": lambda x, y, w: norm(x.cos() + y.sin(), w),
}


@pytest.mark.parametrize("name", RESIDUALS)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_residual_add_and_its_norm(name: str, dtype: torch.dtype) -> None:
    findings = find(RESIDUALS[name], X.to(dtype), Y.to(dtype), W.to(dtype))
    (match,) = findings.of("add_rms_norm")
    (inner,) = findings.of("rms_norm")
    assert match.parts == (inner,)
    assert match.node is inner.node
    assert match.inputs["sum"] is inner.inputs["x"]
    assert {match.inputs["x1"], match.inputs["x2"]} == set(match.inputs["sum"].args)
    assert match.inputs["weight"] is inner.inputs["weight"]
    assert match.inputs["sum"] not in match.claimed  # it is a result of the op too
    assert match.params.public() == inner.params.public()


@pytest.mark.parametrize("spelling", WEIGHTED)
def test_whatever_the_spelling_of_the_norm(spelling: str) -> None:
    findings = find(lambda x, y, w: WEIGHTED[spelling](x + y, w), X.bfloat16(), Y.bfloat16(), W.bfloat16())
    assert len(findings.of("add_rms_norm")) == 1


def test_batch_and_tokens_may_be_symbols() -> None:
    x, y = X.clone(), Y.clone()
    for axis in (0, 1):
        torch._dynamo.mark_dynamic(x, axis)
        torch._dynamo.mark_dynamic(y, axis)
    findings = find(lambda x, y, w: norm(x + y, w), x, y, W)
    assert len(findings.of("add_rms_norm")) == 1


def test_a_chain_of_blocks_has_one_for_each_sum() -> None:
    def blocks(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x + norm(x, w).sin()
        return norm(x, w)

    findings = find(blocks, X, W)
    assert len(findings.of("rms_norm")) == 4
    assert len(findings.of("add_rms_norm")) == 3


OTHERS: dict[str, Callable[..., torch.Tensor]] = {
    "no add": lambda x, y, w: norm(x * y, w),
    "a difference": lambda x, y, w: norm(x - y, w),
    "a scaled sum": lambda x, y, w: norm(torch.add(x, y, alpha=2), w),
    "a number": lambda x, y, w: norm(x + 1, w),
    "a bias": lambda x, y, w: norm(x + w, w),
    "a column": lambda x, y, w: norm(x + y[..., :1], w),
    "transposed": lambda x, y, w: norm((x + y).transpose(0, 1).reshape(6, 8), w),
    "norm, then add": lambda x, y, w: norm(x, w) + y,
    "something between": lambda x, y, w: norm((x + y).sin(), w),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_add_is_none(name: str) -> None:
    findings = find(OTHERS[name], X, Y, W)
    assert len(findings.of("rms_norm")) == 1
    assert not findings.of("add_rms_norm")
    assert not [miss for miss in findings.near_misses() if miss.kind == "add_rms_norm"]


@pytest.mark.parametrize("shape", [(6, 8), (12, 4), (3, 16)])
def test_the_sum_may_be_viewed(shape: tuple[int, int]) -> None:
    weight = torch.rand(shape[-1])
    (match,) = find(lambda x, y, w: norm((x + y).view(shape), weight), X, Y, W).of("add_rms_norm")
    assert match.inputs["sum"].target is torch.ops.aten.add.Tensor


def test_the_operands_may_be_of_two_types_and_the_sum_rounded() -> None:
    for function in (lambda x, y, w: norm(x + y, w), lambda x, y, w: norm((x + y).bfloat16(), w)):
        (match,) = find(function, X, Y.bfloat16(), W).of("add_rms_norm")
        assert match.inputs["sum"].target is torch.ops.aten.add.Tensor


def test_the_sum_of_a_rotation_is_no_residual() -> None:
    def function(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        turned = torch.cat((-x[..., 4:], x[..., :4]), -1)
        return norm(x * cos + turned * sin, w)

    findings = find(function, X, torch.randn(3, 8), torch.randn(3, 8), W)
    assert len(findings.of("rope")) == len(findings.of("rope_then_norm")) == 1
    assert not findings.of("add_rms_norm")
