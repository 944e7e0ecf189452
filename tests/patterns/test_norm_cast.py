"""A norm of a residual sum that is read in float32 too; other casts are left to themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from helpers import compiled, repeats

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
Tensor = torch.Tensor
X1, X2 = torch.randn(2, 3, 64), torch.randn(2, 3, 64)
W, ROUTER = torch.rand(64) + 0.5, torch.randn(64, 4)


def norm(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


WANTED: dict[str, Callable[[Tensor], object]] = {
    "router and experts": lambda y: (y.float() @ ROUTER, y.sin()),
    "router alone": lambda y: y.to(FP32) @ ROUTER,
    "returned": lambda y: (y.type(FP32), y),
    "flattened behind": lambda y: (y.float().view(-1, 64) @ ROUTER, y),
    "twice": lambda y: (y.float() @ ROUTER, y.sin(), y.float().exp()),
}


@pytest.mark.parametrize("name", WANTED)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_norm_and_its_cast(name: str, dtype: torch.dtype) -> None:
    found = compiled(lambda x, y, w: WANTED[name](norm(x + y, w)), X1.to(dtype), X2.to(dtype), W.to(dtype))
    findings = found.findings()
    (match,) = findings.of("norm_cast")
    assert repeats(match, found.values())
    assert match.parts == (*findings.of("add_rms_norm"), *findings.of("rms_norm"))
    assert match.node.all_input_nodes == [match.inputs["y"]]
    assert match.params.public()["dtype"] == dtype


OTHERS: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "no add": lambda x, y, w: (norm(x, w).float() @ ROUTER, y),
    "to float64": lambda x, y, w: norm(x + y, w).double(),
    "the sum": lambda x, y, w: (norm(x + y, w), (x + y).float() @ ROUTER),
    "behind something": lambda x, y, w: norm(x + y, w).sin().float(),
    "of a view": lambda x, y, w: norm(x + y, w).view(6, 64).float(),
    "the next norm": lambda x, y, w: norm(norm(x + y, w), w),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_cast_is_none(name: str) -> None:
    found = compiled(OTHERS[name], X1.bfloat16(), X2.bfloat16(), W.bfloat16())
    assert not found.findings().of("norm_cast")
    assert found.findings().of("rms_norm")


def test_in_float32_there_is_no_cast() -> None:
    assert not compiled(lambda x, y, w: norm(x + y, w).float() @ ROUTER, X1, X2, W).findings().of("norm_cast")
