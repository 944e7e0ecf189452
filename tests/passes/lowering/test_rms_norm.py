"""Norms become one op each, with eager's numbers, or are refused with the reason."""

from functools import partial

import pytest
import torch
from torch import nn

from helpers import compiled, refusal

Tensor = torch.Tensor


def normed(x: Tensor, eps: float = 1e-6) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def llama(x: Tensor, w: Tensor) -> Tensor:
    return w * normed(x).to(x.dtype)


def olmo(x: Tensor, w: Tensor) -> Tensor:
    return (w * normed(x)).to(x.dtype)


def gemma(x: Tensor, w: Tensor) -> Tensor:
    return (normed(x) * (1.0 + w.float())).to(x.dtype)


def bare(x: Tensor, w: Tensor) -> Tensor:
    return normed(x).to(x.dtype)


NORM, GEMMA = "npu::npu_rms_norm", "npu::npu_gemma_rms_norm"
OPS = {llama: NORM, olmo: NORM, gemma: GEMMA, bare: NORM}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spelling", OPS)
def test_a_lone_norm_is_one_launch(spelling, dtype) -> None:
    x, w = torch.randn(2, 5, 64, dtype=dtype), torch.randn(64, dtype=dtype)
    found = compiled(spelling, x, w)
    assert found.report.ops == {OPS[spelling]: 1}
    assert found.report.launches_after == 1
    wanted = spelling(x, w)
    if spelling in (llama, gemma, bare):
        assert torch.equal(found.output, wanted)
    torch.testing.assert_close(found.output, wanted)
    assert found.output.stride() == wanted.stride()


def test_another_rounding_is_noted_and_refused_on_wish() -> None:
    x, w = torch.randn(2, 64, dtype=torch.bfloat16), torch.randn(64, dtype=torch.bfloat16)
    (site,) = compiled(olmo, x, w).report.sites
    assert "rounds the normed x to torch.bfloat16 before the weight; the model does not" in site.roundings[0]
    exact = compiled(olmo, x, w, numerics="exact")
    assert not exact.report.ops
    assert "numerics is 'exact'" in exact.report.sites[0].reason
    assert torch.equal(exact.output, olmo(x, w))
    assert compiled(llama, x, w, numerics="exact").report.ops == {"npu::npu_rms_norm": 1}
    assert compiled(olmo, x.float(), w.float(), numerics="exact").report.ops == {"npu::npu_rms_norm": 1}


def test_a_transposed_x_is_normed_where_it_lies() -> None:
    x, w = torch.randn(2, 5, 3, 64).transpose(1, 2), torch.randn(64)
    for spelling in (llama, gemma):
        found = compiled(spelling, x, w)
        assert found.report.launches_after == 1
        torch.testing.assert_close(found.output, spelling(x, w))
        assert found.output.stride() == spelling(x, w).stride()


def test_a_strided_x_is_normed_too() -> None:
    x, w = torch.randn(4, 192)[:, 64:128], torch.randn(64)
    for spelling, launches in ((llama, 1), (gemma, 2)):  # the Gemma op wants its rows side by side
        found = compiled(spelling, x, w)
        assert found.report.launches_after == launches
        torch.testing.assert_close(found.output, spelling(x, w))


def test_an_offset_without_an_op_is_refused() -> None:
    def half(x: Tensor, w: Tensor) -> Tensor:
        return normed(x) * (0.5 + w)

    found = compiled(half, torch.randn(3, 8), torch.randn(8))
    assert not found.report.ops
    assert found.report.sites[0].reason == "0.5 is added to the weight; there are ops for 0 and 1"


def test_a_wide_result_is_refused() -> None:
    def wide(x: Tensor, w: Tensor) -> Tensor:
        return normed(x) * w

    x, w = torch.randn(3, 8, dtype=torch.bfloat16), torch.randn(8)
    found = compiled(wide, x, w)
    assert not found.report.ops
    assert "torch.float32 for an x of torch.bfloat16" in found.report.sites[0].reason
    assert torch.equal(found.output, wide(x, w))


class Residual(nn.Module):
    """Adds and norms; both the sum and the norm are used on."""

    def __init__(self, norm, size: int = 64, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.norm = norm
        self.weight = nn.Parameter(torch.rand(size, dtype=dtype) + 0.5)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total = x + y
        return self.norm(total, self.weight), total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_residual_add_and_norm_are_one_launch(dtype) -> None:
    model = Residual(llama, dtype=dtype)
    x, y = torch.randn(2, 5, 64, dtype=dtype), torch.randn(2, 5, 64, dtype=dtype)
    found = compiled(model, x, y)
    assert found.report.ops == {"npu::npu_add_rms_norm": 1}
    assert found.report.launches_after == 1
    assert found.report.count("add_rms_norm") == found.report.count("rms_norm") == 1
    with torch.no_grad():
        wanted = model(x, y)
    torch.testing.assert_close(found.output[0], wanted[0])
    assert torch.equal(found.output[1], wanted[1])


def test_the_gemma_form_has_no_add() -> None:
    model = Residual(gemma)
    found = compiled(model, torch.randn(3, 64), torch.randn(3, 64))
    assert found.report.ops == {"npu::npu_gemma_rms_norm": 1}
    assert found.report.count("add_rms_norm") == 1
    add = next(site for site in found.report.sites if site.kind == "add_rms_norm")
    assert add.reason == "1 is added to the weight, which npu::npu_add_rms_norm does not do"


def test_a_broadcast_add_is_no_residual() -> None:
    found = compiled(Residual(llama), torch.randn(3, 64), torch.randn(64))
    assert found.report.count("add_rms_norm") == 0
    assert found.report.ops == {"npu::npu_rms_norm": 1}


@pytest.mark.parametrize(("size", "dynamic"), [(64, None), (32, None), (128, None), (64, True), (32, True)])
def test_a_sum_that_is_viewed_before_the_norm_is_one_launch(size, dynamic) -> None:
    class Model(Residual):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            total = x + y
            return self.norm(total.view(-1, size), self.weight), total

    x, y = torch.randn(2, 6, 64), torch.randn(2, 6, 64)
    for tensor in (x, y):
        torch._dynamo.mark_static(tensor, 2)
    model = Model(llama, size)
    found = compiled(model, x, y, dynamic=dynamic)
    assert found.report.ops == {"npu::npu_add_rms_norm": 1}
    assert found.report.launches_after == 1
    for value, wanted in zip(found.output, model(x, y), strict=True):
        torch.testing.assert_close(value, wanted)
        assert value.stride() == wanted.stride()


def test_a_sum_that_is_rounded_before_the_norm_is_refused() -> None:
    def model(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        total = x + y
        return llama(total.bfloat16(), w), total

    report = compiled(model, torch.randn(3, 64), torch.randn(3, 64), torch.randn(64).bfloat16()).report
    assert report.ops == {"npu::npu_rms_norm": 1}
    (add,) = [site for site in report.sites if site.kind == "add_rms_norm"]
    assert add.reason == "the sum is rounded to torch.bfloat16 before the norm; the op norms it as it is"


@pytest.mark.parametrize(("dtype", "between"), [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_nor_may_it_have_been_rounded_and_cast_back(dtype: torch.dtype, between: torch.dtype) -> None:
    def model(x: Tensor, y: Tensor, w: Tensor, *, by: torch.dtype) -> tuple[Tensor, Tensor]:
        total = x + y
        return llama(total.to(by).to(dtype), w), total

    inputs = torch.randn(3, 64).to(dtype), torch.randn(3, 64).to(dtype), torch.randn(64).to(dtype)
    found = compiled(partial(model, by=between), *inputs)
    assert found.report.ops == {"npu::npu_rms_norm": 1}
    (add,) = [site for site in found.report.sites if site.kind == "add_rms_norm"]
    assert add.reason == f"the sum is rounded to {between} before the norm; the op norms it as it is"
    for value, wanted in zip(found.output, model(*inputs, by=between), strict=True):
        assert torch.equal(value, wanted)
    assert compiled(partial(model, by=torch.float32), *inputs).report.ops == {"npu::npu_add_rms_norm": 1}


def test_an_add_of_two_types_is_refused() -> None:
    x, y = torch.randn(3, 64), torch.randn(3, 64, dtype=torch.bfloat16)
    report = compiled(Residual(llama), x, y).report
    assert report.ops == {"npu::npu_rms_norm": 1}
    (add,) = [site for site in report.sites if site.kind == "add_rms_norm"]
    assert add.status == "refused"
    assert "bfloat16" in add.reason
    assert "float32" in add.reason


def test_two_norms_of_one_sum_share_it() -> None:
    w = torch.rand(64) + 0.5

    def model(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total = x + y
        return llama(total, w), llama(total, 2 * w)

    x, y = torch.randn(3, 64), torch.randn(3, 64)
    found = compiled(model, x, y)
    assert found.report.ops == {"npu::npu_add_rms_norm": 1, "npu::npu_rms_norm": 1}
    for value, wanted in zip(found.output, model(x, y), strict=True):
        torch.testing.assert_close(value, wanted)


def test_an_inner_value_that_is_used_elsewhere_stays() -> None:
    def model(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        scaled = normed(x)
        return w * scaled, scaled.exp()

    x, w = torch.randn(3, 8), torch.randn(8)
    found = compiled(model, x, w)
    for value, wanted in zip(found.output, model(x, w), strict=True):
        torch.testing.assert_close(value, wanted)


def test_a_soc_without_the_op_keeps_the_model() -> None:
    from npu_fuse import Target

    x, w = torch.randn(3, 64, dtype=torch.bfloat16), torch.randn(64, dtype=torch.bfloat16)
    found = compiled(llama, x, w, target=Target("ascend310p"))
    assert not found.report.ops
    assert "bfloat16" in found.report.sites[0].reason
    assert torch.equal(found.output, llama(x, w))


def sglang(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The sum is normed in float32, and handed on rounded."""
    total = x.float() + residual.float()
    return (normed(total) * w).to(x.dtype), total.to(x.dtype)


@pytest.mark.parametrize(("dtype", "roundings"), [(torch.bfloat16, 2), (torch.float16, 3)])
def test_a_sum_in_float32_of_narrow_tensors_is_the_op_s(dtype: torch.dtype, roundings: int) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(3, 64, dtype=dtype) for _ in range(2)] + [torch.randn(64, dtype=dtype)]
    found = compiled(sglang, *inputs)
    assert found.report.ops == {"npu::npu_add_rms_norm": 1}
    assert found.report.launches_after == 1
    assert torch.equal(found.output[1], sglang(*inputs)[1])
    x, residual, w = (x.double() for x in inputs)
    truth = (x + residual) * ((x + residual).square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w
    assert ((found.output[0] - truth).abs() <= 1.05 * roundings * torch.finfo(dtype).eps / 2 * truth.abs()).all()
    (site,) = [site for site in found.report.sites if site.kind == "add_rms_norm"]
    assert any("rounds the sum to torch.float16" in note for note in site.roundings) == (dtype == torch.float16)
    assert not any("before it is rounded" in note for note in site.roundings)


def test_layers_hand_their_sums_on() -> None:
    x, residual, w = (torch.randn(3, 64).bfloat16(), torch.randn(3, 64).bfloat16(), torch.randn(64).bfloat16())

    def model(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(3):
            x, residual = sglang(x, residual, w)
            x = x.tanh()
        return x, residual

    found = compiled(model, x, residual, w)
    assert found.report.ops == {"npu::npu_add_rms_norm": 3}
    for ours, eager in zip(found.output, model(x, residual, w), strict=True):
        torch.testing.assert_close(ours, eager, rtol=0.05, atol=0.05)


def used_wide(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    total = x.float() + residual.float()
    return (normed(total) * w).to(x.dtype), total


def of_two_types(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    total = x.float() + residual.to(torch.float16).float()
    return (normed(total) * w).to(x.dtype), total.to(x.dtype)


def kept_in_another_type(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    total = x.float() + residual.float()
    return (normed(total) * w).to(x.dtype), total.to(torch.float16)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (used_wide, "its sum is used in torch.float32 as well; the op gives it in torch.bfloat16"),
        (kept_in_another_type, "its sum is used in torch.float32 as well; the op gives it in torch.bfloat16"),
        (of_two_types, "its result is torch.bfloat16 for an x of torch.float32; the op gives the type of x"),
    ],
)
def test_a_wide_sum_that_the_op_does_not_give_is_refused(function, reason: str) -> None:
    inputs = (torch.randn(3, 64).bfloat16(), torch.randn(3, 64).bfloat16(), torch.randn(64).bfloat16())
    found = compiled(function, *inputs)
    assert not found.report.ops
    assert reason in [site.reason for site in found.report.sites if site.kind == "add_rms_norm"]
    assert all(torch.equal(x, y) for x, y in zip(found.output, function(*inputs), strict=True))


@pytest.fixture(scope="module")
def of_a_sum():
    """A residual sum and its norm: in float16, likewise but added in float32, as SGLang has it, and in float32."""

    def model(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        total = x + y
        return total, llama(total, w)

    def wide(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        total = x.float() + y.float()
        return total.to(x.dtype), normed(total).to(x.dtype) * w

    given = [torch.randn(shape) for shape in ((2, 64), (2, 64), (64,))]
    half = [tensor.half() for tensor in given]
    return [compiled(model, *half), compiled(wide, *half), compiled(model, *given)]


BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("rms_norm", {"groups": 4}, "it norms 4 groups of the last axis, each on its own"),
        ("rms_norm", {"offset": 0.5}, "0.5 is added to the weight; there are ops for 0 and 1"),
        ("rms_norm", {"dtype": torch.float32, "steps": frozenset()}, "its result is torch.float32 for an x of"),
        ("add_rms_norm", {"norm.offset": 1.0}, "1 is added to the weight, which npu::npu_add_rms_norm does not do"),
        ("add_rms_norm", {"norm.bias": True}, "its norm has a bias, a gate, groups or a scale before it"),
        ("add_rms_norm", {"norm.groups": 4}, "its norm has a bias, a gate, groups or a scale before it"),
        ("add_rms_norm", {"norm.dtype": torch.float32, "norm.steps": frozenset()}, "its result is torch.float32"),
    ],
)
def test_what_else_a_norm_may_be(of_a_sum, kind: str, changes: dict, reason: str) -> None:
    assert reason in refusal(of_a_sum[0], kind, {f"params.{path}": value for path, value in changes.items()})


def test_a_sum_in_float32_is_rounded_only_where_the_op_rounds(of_a_sum) -> None:
    (site,) = (site for site in of_a_sum[1].report.sites if site.kind == "add_rms_norm")
    assert site.status == "lowered"
    steps = {"params.norm.steps": frozenset({BF16})}
    assert "rounds to torch.bfloat16 on the way" in refusal(of_a_sum[1], "add_rms_norm", steps)


@pytest.mark.parametrize(("kind", "path"), [("rms_norm", "params"), ("add_rms_norm", "params.norm")])
@pytest.mark.parametrize("dtype", ["statistics_dtype", "scale_dtype"])
def test_coarse_statistics_are_not_exact(of_a_sum, kind: str, path: str, dtype: str) -> None:
    said = refusal(of_a_sum[2], kind, {f"{path}.{dtype}": BF16}, numerics="exact")
    assert said == (
        "Options.numerics is 'exact', and the model takes its statistics in torch.bfloat16, the op in float32"
    )
