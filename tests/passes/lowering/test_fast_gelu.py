"""The fast GELU becomes one op, with eager's numbers and layout, or is refused with the reason."""

import pytest
import torch

from helpers import Compiled, compiled
from npu_fuse import Target
from npu_fuse.passes.report import Site

Tensor = torch.Tensor
OP = {"npu::npu_fast_gelu": 1}


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def fast_gelu(found: Compiled) -> Site:
    """The one site of that kind; the gated unit that it is too is another."""
    (site,) = [site for site in found.report.sites if site.kind == "fast_gelu"]
    return site



@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dynamic", [None, True])
def test_it_is_one_launch(dtype: torch.dtype, dynamic: bool | None) -> None:
    x = torch.randn(2, 5, 16, dtype=dtype)
    found = compiled(quick_gelu, x, dynamic=dynamic)
    assert found.report.ops == OP
    assert found.report.launches_after == 1
    assert torch.equal(found.output, quick_gelu(x)) or dtype != torch.float32
    torch.testing.assert_close(found.output, quick_gelu(x.double()).to(dtype))


@pytest.mark.parametrize("tokens", [1, 3])
def test_behind_a_convolution_whose_fake_kernel_has_other_strides(tokens: int) -> None:
    """In float16 that of one token has channels last, where a CPU gives a contiguous result."""

    def model(x: Tensor, w: Tensor) -> Tensor:
        return quick_gelu(torch.nn.functional.conv1d(x.transpose(1, 2), w, padding=3, groups=16))

    x, w = torch.randn(2, tokens, 16).half(), torch.randn(16, 1, 4).half()
    found = compiled(model, x, w)
    assert found.report.ops == OP
    torch.testing.assert_close(found.output, model(x, w), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    "x", [torch.randn(5, 2, 16).transpose(0, 1), torch.randn(2, 16, 5).mT, torch.randn(2, 3, 4, 4)[:, :, ::2]]
)
def test_any_dense_layout_is_kept_without_a_copy(x: Tensor) -> None:
    found = compiled(quick_gelu, x)
    assert found.report.ops == OP
    wanted = quick_gelu(x)
    assert torch.equal(found.output, wanted)
    assert found.output.stride() == wanted.stride()
    assert (found.report.launches_after == 1) == (x.numel() == x.untyped_storage().nbytes() // 4)


def test_what_is_computed_wide_is_computed_wide() -> None:
    x = torch.randn(3, 16, dtype=torch.bfloat16)
    found = compiled(lambda x: quick_gelu(x.float()).to(x.dtype), x)
    assert found.report.ops == OP
    assert not fast_gelu(found).roundings
    assert torch.equal(found.output, quick_gelu(x.float()).bfloat16())


def test_its_one_rounding_is_noted_and_refused_on_wish() -> None:
    x = torch.randn(3, 16, dtype=torch.bfloat16)
    site = fast_gelu(compiled(quick_gelu, x))
    assert site.roundings == ("the op rounds once; the model rounds to torch.bfloat16 at each step",)
    exact = compiled(quick_gelu, x, numerics="exact")
    assert not exact.report.ops
    assert torch.equal(exact.output, quick_gelu(x))
    assert compiled(quick_gelu, x.float(), numerics="exact").report.ops == OP


@pytest.mark.parametrize(
    ("function", "x", "reason"),
    [
        (quick_gelu, torch.randn(3, 16).double(), "the model computes in torch.float64"),
        (quick_gelu, torch.randn(0, 16), "is empty"),
        (lambda x: x * torch.sigmoid(1.702 * x.half()).float(), torch.randn(3, 16), "rounds to torch.float16"),
        (lambda x: quick_gelu(x.bfloat16()), torch.randn(3, 16), None),
    ],
)
def test_what_the_op_does_not_do_is_refused(function, x: Tensor, reason: str | None) -> None:
    found = compiled(function, x)
    if reason is None:
        assert found.report.ops == OP
        return
    assert not found.report.ops
    assert reason in fast_gelu(found).reason
    assert torch.equal(found.output, function(x))


@pytest.mark.parametrize("soc", ["ascend910b", "ascend910_93", "ascend950", "ascend310p"])
def test_it_is_chosen_by_soc(soc: str) -> None:
    found = compiled(quick_gelu, torch.randn(3, 16), target=Target(soc))
    assert bool(found.report.ops) == (soc in ("ascend910b", "ascend910_93"))
    if not found.report.ops:
        assert f"npu::npu_fast_gelu has no kernel on {soc}" in fast_gelu(found).reason


def test_another_factor_stays() -> None:
    x = torch.randn(3, 16)
    found = compiled(lambda x: x * torch.sigmoid(1.7 * x), x)
    assert not found.report.ops
    assert fast_gelu(found).status == "missed"
    assert torch.equal(found.output, x * torch.sigmoid(1.7 * x))
