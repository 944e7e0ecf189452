"""A lone rotation becomes one op, in the type that the model computes it in."""

import pytest
import torch

from helpers import compiled

Tensor = torch.Tensor


def half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def tables(tokens: int, width: int, *, doubled: bool = True) -> tuple[Tensor, Tensor]:
    angles = torch.arange(tokens)[:, None] / 100 ** (torch.arange(width // 2) / width * 2)
    angles = torch.cat((angles, angles), -1) if doubled else angles
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_rotation(dtype) -> None:
    x = torch.randn(2, 5, 3, 16, dtype=dtype).transpose(1, 2)
    cos, sin = (t[None, None].to(dtype) for t in tables(5, 16))
    found = compiled(half, x, cos, sin)
    assert found.report.ops == {"npu::npu_rotary_mul": 1}
    assert found.report.launches_after == 1
    bound = 1e-6 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(found.output, half(x, cos, sin), atol=bound, rtol=bound)
    assert found.output.stride() == half(x, cos, sin).stride()


def test_interleaved_pairs() -> None:
    x = torch.randn(2, 3, 5, 16)
    cos, sin = (t[None, None] for t in tables(5, 16, doubled=False))
    found = compiled(interleaved, x, cos, sin)
    assert found.report.ops == {"npu::npu_rotary_mul": 1}
    assert found.report.count("rope", style="interleave") == 1
    torch.testing.assert_close(found.output, interleaved(x, cos, sin))


def test_partial_rotation_passes_the_rest() -> None:
    def partial(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch.cat((half(x[..., :8], cos, sin), x[..., 8:]), -1)

    x = torch.randn(2, 3, 5, 16)
    cos, sin = (t[None, None] for t in tables(5, 8))
    found = compiled(partial, x, cos, sin)
    assert found.report.ops == {"npu::npu_rotary_mul": 1}
    assert found.report.count("rope", rope_dim=8, head_dim=16) == 1
    torch.testing.assert_close(found.output, partial(x, cos, sin))


def test_wide_tables_are_never_rounded_to_the_type_of_x() -> None:
    def olmo(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return half(x, cos, sin).to(x.dtype)

    x = torch.randn(1, 3, 5, 64, dtype=torch.bfloat16)
    cos, sin = (t[None, None] for t in tables(5, 64))
    found = compiled(olmo, x, cos, sin)
    assert found.report.ops == {"npu::npu_rotary_mul": 1}
    assert torch.equal(found.output, olmo(x, cos, sin))


def test_tables_are_widened_once_for_all_layers() -> None:
    def layers(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return interleaved(x, cos, sin), interleaved(y, cos, sin)

    cos, sin = (t[None, None] for t in tables(5, 16, doubled=False))
    found = compiled(layers, torch.randn(2, 3, 5, 16), torch.randn(2, 3, 5, 16), cos, sin)
    assert found.report.ops == {"npu::npu_rotary_mul": 2}
    assert sum(target == "aten.stack.default" for target in found.targets()) == 2


def test_an_axis_too_long_for_the_kernel_is_refused() -> None:
    x = torch.randn(1, 2, 3, 896)
    cos, sin = (t[None, None] for t in tables(3, 896))
    found = compiled(half, x, cos, sin)
    assert not found.report.ops
    assert "896" in next(site for site in found.report.sites if site.kind == "rope").reason
    assert torch.equal(found.output, half(x, cos, sin))
