"""What looks like a fusion and is none: each of these once gave other numbers than the model."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # its usual name

import npu_fuse
from helpers import compiled

Tensor = torch.Tensor


def rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rms_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def check_unfused(function: object, *inputs: Tensor, **settings: object) -> npu_fuse.Report:
    """Nothing is lowered, and the numbers are eager's."""
    found = compiled(function, *inputs, **settings)
    assert not found.report.ops, str(found.report)
    assert torch.equal(found.output, function(*inputs))
    return found.report


def some_tokens(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    y = x * c + rotate_half(x) * s
    return torch.cat([y[:, :5], x[:, 5:]], 1)


def some_heads(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    y = x * c + rotate_half(x) * s
    return torch.cat([y[:, :, :6], x[:, :, 6:]], 2)


def another_sign_for_some_tokens(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    p, r = x * c, rotate_half(x) * s
    return torch.cat([(p + r)[:, :4], (p - r)[:, 4:]], 1)


def tokens_rolled(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return x * c + rotate_half(x.roll(2, 1)) * s


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "function", [some_tokens, some_heads, another_sign_for_some_tokens, tokens_rolled]
)
def test_a_rotation_of_a_part_is_no_rotation_of_the_whole(function, dynamic: bool | None) -> None:
    arguments = [torch.randn(2, 8, 8, 8), torch.randn(1, 8, 1, 8), torch.randn(1, 8, 1, 8)]
    for tensor in arguments:
        torch._dynamo.mark_static(tensor, 3)
    found = compiled(function, *arguments, dynamic=dynamic)
    torch.testing.assert_close(found.output, function(*arguments), atol=1e-6, rtol=1e-6)


def rounded_for_one_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    c, s = cos[..., :4], sin[..., :4]
    rounded = c.bfloat16().float()
    return torch.cat([a * rounded - b * s, b * c + a * s], -1)


def flipped_along_two_axes(x: Tensor, t: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    one, two = t[None].flip(0), t.flip(0)
    return torch.cat([a * one - b * sin, b * two + a * sin], -1)


def test_tables_that_differ_are_two() -> None:
    check_unfused(rounded_for_one_half, torch.randn(2, 8, 4, 8), torch.randn(1, 8, 1, 8), torch.randn(1, 8, 1, 8))
    check_unfused(flipped_along_two_axes, torch.randn(2, 8, 3, 8), torch.randn(8, 1, 4), torch.randn(8, 1, 4))


class Prologue(nn.Module):
    """q and k with a table each."""

    def __init__(self, change: object, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32, bias=False, dtype=dtype) for _ in range(3))
        self.change = change

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k = (p(x).view(2, 5, 2, 16).transpose(1, 2) for p in (self.q, self.k))
        other = self.change(cos)
        return q * other + rotate_half(q) * sin, k * cos + rotate_half(k) * sin, self.v(x)


@pytest.mark.parametrize("change", [lambda t: t.bfloat16().float(), lambda t: t.flip(2), lambda t: t[None].flip(1)[0]])
def test_q_and_k_with_tables_that_differ_are_no_prologue(change) -> None:
    model = Prologue(change)
    arguments = (torch.randn(2, 5, 32), torch.randn(1, 1, 5, 16), torch.randn(1, 1, 5, 16))
    with torch.no_grad():
        wanted = model(*arguments)
    found = compiled(model, *arguments)
    assert "sgl_kernel_npu::split_qkv_rmsnorm_rope" not in found.report.ops
    for value, expected in zip(found.output, wanted, strict=True):
        torch.testing.assert_close(value, expected)


def test_a_norm_in_float64_is_not_the_ops() -> None:
    def model(x: Tensor, w: Tensor) -> Tensor:
        return (rms_norm(x.double()) * w.double()).float()

    report = check_unfused(model, torch.randn(4, 16) * 1e25, torch.randn(16))
    assert "computes in torch.float64" in report.sites[0].reason


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float8_e4m3fn])
def test_roundings_on_the_way_to_a_wide_result_are_kept(narrow: torch.dtype) -> None:
    def glu(x: Tensor, w: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return F.silu(a).to(narrow).float() * b

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return rms_norm(x).to(narrow).float() * w

    check_unfused(glu, torch.randn(4, 16), torch.randn(16))
    found = compiled(norm, torch.randn(4, 16), torch.randn(16))
    assert found.report.launches_after >= 4


def test_a_way_through_float16_keeps_its_overflow() -> None:
    class Model(Prologue):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor):
            q, k = (p(x).view(2, 5, 2, 16).transpose(1, 2) for p in (self.q, self.k))
            q = q.half().bfloat16()
            return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin, self.v(x)

    model = Model(None, torch.bfloat16)
    bf16 = torch.bfloat16
    tables = [torch.ones(1, 1, 5, 16, dtype=bf16), torch.zeros(1, 1, 5, 16, dtype=bf16)]
    arguments = (torch.full((2, 5, 32), 1e6, dtype=bf16), *tables)
    with torch.no_grad():
        wanted = model(*arguments)
    found = compiled(model, *arguments)
    assert any("rounds to torch.float16 on the way" in (site.reason or "") for site in found.report.sites)
    torch.testing.assert_close(found.output[0], wanted[0], equal_nan=True)


@pytest.mark.parametrize("kind", ["norm", "glu"])
def test_a_size_that_may_turn_out_to_be_0_is_not_given_to_a_kernel(kind: str) -> None:
    projection = nn.Linear(8, 16, bias=False)

    def model(x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
        x = x[chosen]
        if kind == "norm":
            return rms_norm(x) * (1 + w)
        a, b = projection(x).chunk(2, -1)
        return F.silu(a) * b

    x, w = torch.randn(4, 8), torch.randn(8)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        found = compiled(model, x, w, torch.tensor([True, False, True, False]))
        for chosen in (torch.zeros(4, dtype=torch.bool), torch.ones(4, dtype=torch.bool)):
            torch.testing.assert_close(found.function(x, w, chosen), model(x, w, chosen))
    assert any("may be empty" in (site.reason or "") for site in found.report.sites)


def test_an_eps_that_is_passed_in_is_reported() -> None:
    def model(x: Tensor, eps: float) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)

    x = torch.randn(3, 8)
    torch._dynamo.mark_static(x, 1)
    report = compiled(model, x, 1e-6, dynamic=True).report
    assert "no constant" in report.sites[0].reason
