"""GPT-OSS's gated unit becomes one op, on a tensor that holds gate and up in turn or as halves."""

import pytest
import torch
from torch import nn

from helpers import compiled
from npu_fuse import Target

Tensor = torch.Tensor
OP = {"npu::npu_clipped_swiglu": 1}


def unit(gate: Tensor, up: Tensor, alpha: float = 1.702, limit: float = 7.0, bias: float = 1.0) -> Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return (up + bias) * (gate * torch.sigmoid(gate * alpha))


def in_turn(x: Tensor) -> Tensor:
    return unit(x[..., ::2], x[..., 1::2])


def halves(x: Tensor) -> Tensor:
    return unit(*x.chunk(2, -1))


@pytest.mark.parametrize("function", [in_turn, halves])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dynamic", [None, True])
def test_it_is_one_launch(function, dtype: torch.dtype, dynamic: bool | None) -> None:
    x = 5 * torch.randn(3, 5, 32, dtype=dtype)
    torch._dynamo.mark_static(x, 2)
    found = compiled(function, x, dynamic=dynamic)
    assert found.report.ops == OP
    assert found.report.launches_after == 1
    assert {site.kind: site.status for site in found.report.sites} == {
        "clipped_swiglu": "lowered",
        "fast_gelu": "lowered",
        "glu": "lowered",
    }
    wanted = function(x)
    torch.testing.assert_close(found.output, wanted, rtol=2e-2, atol=5e-2 if dtype != torch.float32 else 1e-5)
    torch.testing.assert_close(found.output, function(x.double()).to(dtype))
    assert found.output.stride() == wanted.stride()


def test_its_numbers_are_the_models() -> None:
    x = 5 * torch.randn(4, 32)
    for numbers in ((1.0, 7.0, 1.0), (1.702, 0.5, 0.0), (2.0, 3.0, -0.25)):

        def function(x: Tensor, numbers: tuple[float, ...] = numbers) -> Tensor:
            return unit(x[..., ::2], x[..., 1::2], *numbers)

        found = compiled(function, x)
        assert found.report.ops == OP
        assert all(site.status == "lowered" for site in found.report.sites)
        torch.testing.assert_close(found.output, function(x))


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(16, 24), nn.Linear(16, 24)

    def forward(self, x: Tensor) -> Tensor:
        return unit(self.gate(x), self.up(x))


def test_separate_projections_are_packed() -> None:
    model, x = Projections(), 5 * torch.randn(3, 16)
    with torch.no_grad():
        wanted = model(x)
    found = compiled(model, x)
    assert found.report.ops == OP
    assert found.report.launches_after == 2
    torch.testing.assert_close(found.output, wanted)


def test_its_one_rounding_is_noted_and_refused_on_wish() -> None:
    x = 5 * torch.randn(3, 32, dtype=torch.bfloat16)
    sites = {site.kind: site for site in compiled(in_turn, x).report.sites}
    assert sites["clipped_swiglu"].roundings == ("the op rounds once; the model rounds to torch.bfloat16 at each step",)
    exact = compiled(in_turn, x, numerics="exact")
    assert not exact.report.ops
    assert torch.equal(exact.output, in_turn(x))


def widened(x: Tensor) -> Tensor:
    return unit(x[..., ::2].float(), x[..., 1::2].float())


CUTS = {
    "up comes before gate in the tensor that both are cut from": lambda x: unit(x[..., 1::2], x[..., ::2]),
    "up comes before gate in the tensor that": lambda x: unit(x[..., 16:], x[..., :16]),
    "neither halves of one tensor nor projections": lambda x: unit(x[..., :8], x[..., 8:16]),
    "nor projections of one x": lambda x: unit(x, x.cos()),
    "its result is torch.float32 for a gate of torch.bfloat16": lambda x: widened(x.bfloat16()),
    "the model computes in torch.float64": lambda x: in_turn(x.double()),
}


@pytest.mark.parametrize("reason", CUTS)
def test_what_the_op_does_not_do_is_refused(reason: str) -> None:
    x = 5 * torch.randn(4, 32)
    found = compiled(CUTS[reason], x, disable={"fast_gelu"})
    assert not found.report.ops
    assert reason in next(site.reason for site in found.report.sites if site.kind == "clipped_swiglu")
    assert torch.equal(found.output, CUTS[reason](x))


def test_where_it_is_refused_the_fast_gelu_in_it_is_still_one_op() -> None:
    x = 5 * torch.randn(4, 32)
    found = compiled(lambda x: unit(x[..., 1::2], x[..., ::2]), x)
    assert found.report.ops == {"npu::npu_fast_gelu": 1}
    torch.testing.assert_close(found.output, unit(x[..., 1::2], x[..., ::2]))


@pytest.mark.parametrize("soc", ["ascend910b", "ascend910_93", "ascend950", "ascend310p"])
def test_it_is_chosen_by_soc(soc: str) -> None:
    found = compiled(in_turn, 5 * torch.randn(4, 32), target=Target(soc))
    assert found.report.ops == (OP if soc in ("ascend910b", "ascend910_93") else {})
