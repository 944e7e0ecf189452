"""A group norm with silu becomes one op, with eager's numbers and layout, or is refused with the reason."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # its usual name

from helpers import compiled
from npu_fuse import Target

Tensor = torch.Tensor
OP = {"npu::npu_group_norm_silu": 1}


def block(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 4, weight, bias, 1e-6))


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 16, 4, 5).to(dtype), torch.randn(16).to(dtype), torch.randn(16).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dynamic", [None, True])
def test_it_is_one_launch(dtype: torch.dtype, dynamic: bool | None) -> None:
    arguments = inputs(dtype)
    torch._dynamo.mark_static(arguments[0], 1)
    found = compiled(block, *arguments, dynamic=dynamic)
    assert found.report.ops == OP
    assert found.report.launches_after == 1
    wanted = block(*arguments)
    torch.testing.assert_close(found.output, block(*(t.double() for t in arguments)).to(dtype))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.output, wanted, rtol=tolerance, atol=tolerance)
    assert found.output.stride() == wanted.stride()


def test_a_module_of_parameters() -> None:
    model, x = nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU()), torch.randn(2, 16, 9)
    with torch.no_grad():
        wanted = model(x)
    found = compiled(model, x)
    assert found.report.ops == OP
    torch.testing.assert_close(found.output, wanted)


def test_a_wide_weight_of_a_narrow_input() -> None:
    def wide(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.silu(F.group_norm(x.float(), 4, weight, bias, 1e-6)).to(x.dtype)

    x, weight, bias = inputs()
    x = x.bfloat16()
    found = compiled(wide, x, weight, bias)
    assert found.report.ops == OP
    assert not found.report.sites[0].roundings
    torch.testing.assert_close(found.output, wide(x, weight, bias))

    def wide_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.silu(F.group_norm(x.float(), 4, weight, bias, 1e-6).to(x.dtype))

    found = compiled(wide_norm, x, weight, bias)
    assert found.report.ops == OP
    assert "the model rounds the norm to torch.bfloat16 before silu" in found.report.sites[0].roundings[0]


def test_channels_that_lie_last_come_last() -> None:
    x, weight, bias = inputs()
    x = x.to(memory_format=torch.channels_last)
    found = compiled(block, x, weight, bias)
    wanted = block(x, weight, bias)
    torch.testing.assert_close(found.output, wanted)
    assert found.output.stride() == wanted.stride()


def used_twice(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    normed = F.group_norm(x, 4, weight, bias, 1e-6)
    return F.silu(normed), normed


@pytest.mark.parametrize(
    ("function", "arguments", "reason"),
    [
        (used_twice, inputs(), "the norm is used elsewhere too"),
        (block, inputs(torch.float64), "the model computes in torch.float64"),
        (lambda x, w, b: F.silu(F.group_norm(x, 4)), inputs(), "weight is missing"),
        (lambda x, w, b: F.silu(F.group_norm(x, 4, w)), inputs(), "bias is missing"),
        (lambda x, w, b: F.silu(F.group_norm(x, 4, w, b).bfloat16()), inputs(), "its result is torch.bfloat16 for an"),
    ],
)
def test_what_the_op_does_not_do_is_refused(function, arguments: tuple[Tensor, ...], reason: str) -> None:
    found = compiled(function, *arguments)
    assert not found.report.ops
    assert reason in found.report.sites[0].reason
    wanted = function(*arguments)
    for result, expected in zip(found.output, wanted, strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("soc", ["ascend910b", "ascend910_93", "ascend950", "ascend310p"])
def test_it_is_chosen_by_soc(soc: str) -> None:
    found = compiled(block, *inputs(), target=Target(soc))
    assert found.report.ops == (OP if soc in ("ascend910b", "ascend310p") else {})
    if soc == "ascend310p":
        assert not compiled(block, *inputs(torch.bfloat16), target=Target(soc)).report.ops
