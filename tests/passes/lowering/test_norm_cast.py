"""Residual add, norm and its cast become one op, whose results are the model's; or they stay."""

from __future__ import annotations

import pytest
import torch

from helpers import Compiled, compiled
from npu_fuse import Target

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Tensor = torch.Tensor
X1, X2 = torch.randn(2, 3, 64), torch.randn(2, 3, 64)
W, ROUTER = torch.rand(64) + 0.5, torch.randn(64, 4)
CAST, ADD = "npu::npu_add_rms_norm_cast", "npu::npu_add_rms_norm"
# Two roundings to a dtype, of values that are a few units large.
TOLERANCE = {FP16: 2**-9, BF16: 2**-6}


def norm(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def moe(x1: Tensor, x2: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    total = x1 + x2
    y = norm(total, w)
    return total, y, y.float()


def site(found: Compiled):
    (only,) = [site for site in found.report.sites if site.kind == "norm_cast"]
    return only


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_add_norm_and_cast_are_one_launch(dtype: torch.dtype) -> None:
    found = compiled(moe, X1.to(dtype), X2.to(dtype), W.to(dtype))
    assert found.report.ops == {CAST: 1}
    assert found.report.launches_after == 1
    assert {s.kind: s.op for s in found.report.sites} == dict.fromkeys(("rms_norm", "add_rms_norm", "norm_cast"), CAST)
    total, y, wide = found.output
    assert torch.equal(total, X1.to(dtype) + X2.to(dtype))
    assert wide.dtype == FP32
    assert torch.equal(wide, y.float())
    exact = X1.to(dtype).double() + X2.to(dtype).double()
    exact = exact / (exact.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * W.to(dtype).double()
    torch.testing.assert_close(y.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    if dtype == FP16:
        assert torch.equal(y, norm(total, W.half()))
        assert not site(found).roundings


def test_what_bfloat16_rounds_otherwise_is_noted() -> None:
    roundings = " ".join(site(compiled(moe, X1.bfloat16(), X2.bfloat16(), W.bfloat16())).roundings)
    assert "normalises the sum before it is rounded to torch.bfloat16" in roundings
    assert "may be that before it is rounded" in roundings
    exact = compiled(moe, X1.bfloat16(), X2.bfloat16(), W.bfloat16(), numerics="exact")
    assert exact.report.ops == {"npu::npu_rms_norm": 1}
    for actual, wanted in zip(exact.output, moe(X1.bfloat16(), X2.bfloat16(), W.bfloat16()), strict=True):
        assert torch.equal(actual, wanted)


def test_all_casts_of_one_norm_are_one() -> None:
    def model(x1: Tensor, x2: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = norm(x1 + x2, w)
        return y.float() @ ROUTER, y.sin(), y.to(FP32).exp()

    found = compiled(model, X1.half(), X2.half(), W.half())
    assert found.report.ops == {CAST: 1}
    assert "aten._to_copy.default" not in found.targets()
    for actual, wanted in zip(found.output, model(X1.half(), X2.half(), W.half()), strict=True):
        torch.testing.assert_close(actual, wanted)


def test_batch_and_tokens_may_be_symbols() -> None:
    x1, x2 = X1.half(), X2.half()
    for axis in (0, 1):
        torch._dynamo.mark_dynamic(x1, axis)
        torch._dynamo.mark_dynamic(x2, axis)
    found = compiled(moe, x1, x2, W.half())
    assert found.report.ops == {CAST: 1}
    x1, x2 = torch.randn(5, 7, 64).half(), torch.randn(5, 7, 64).half()
    for actual, wanted in zip(found.function(x1, x2, W.half()), moe(x1, x2, W.half()), strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("soc", ["ascend950", "ascend310p"])
def test_a_soc_without_the_op_casts_itself(soc: str) -> None:
    found = compiled(moe, X1.half(), X2.half(), W.half(), target=Target(soc))
    assert site(found).reason.startswith(f"{CAST} has no kernel on {soc}")
    assert found.report.ops == {ADD: 1}


def test_the_gemma_form_is_refused() -> None:
    found = compiled(lambda x, y, w: moe(x, y, 1 + w), X1.half(), X2.half(), W.half())
    assert site(found).reason == "1 is added to the weight, which the op does not do"


def test_another_type_of_weight_is_refused() -> None:
    def model(x1: Tensor, x2: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        total = x1 + x2
        wide = total.float()
        y = (w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6))).to(x1.dtype)
        return y, y.float()

    found = compiled(model, X1.half(), X2.half(), W)
    assert site(found).reason == "gamma is float32 (the kernel takes float16)"
    assert compiled(model, X1.half(), X2.half(), W.half()).report.ops == {CAST: 1}
