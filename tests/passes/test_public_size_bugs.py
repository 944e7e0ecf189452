"""What others got wrong about sizes that vary, and about what is compiled once and used again, by the public report."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

import npu_fuse

Tensor = torch.Tensor
HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 8, 16


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Prologue(nn.Module):
    """q, k and v of tokens, which look their cos and sin up."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.q_weight, self.k_weight = (nn.Parameter(torch.rand(HEAD_DIM) + 0.5) for _ in range(2))

    def forward(self, x: Tensor, table: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        cos, sin = table[positions][:, None].chunk(2, -1)
        q, k, v = self.projection(x).split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM], -1)
        q, k = norm(q.view(-1, HEADS, HEAD_DIM), self.q_weight), norm(k.view(-1, KV_HEADS, HEAD_DIM), self.k_weight)
        return rope(q, cos, sin), rope(k, cos, sin), v


def tokens_of(count: int) -> tuple[Tensor, ...]:
    angles = torch.arange(64.0)[:, None] / 10 ** (torch.arange(HEAD_DIM // 2) / 2)
    angles = torch.cat((angles, angles), -1)
    return torch.randn(count, HIDDEN), torch.cat((angles.cos(), angles.sin()), -1), torch.arange(count)


def assert_as_eager(found: Any, wanted: Any) -> None:
    for value, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(value, want)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


@torch.no_grad()
def test_one_token_first_and_none_later() -> None:
    """pytorch/pytorch#186893, PaddlePaddle/Paddle#78253: 1 was taken for a constant, and 0 tokens divided by zero."""
    model, backend = Prologue(), npu_fuse.Backend(strict=True)
    compiled = torch.compile(model, backend=backend)
    for count in (1, 2, 7, 0, 3, 64):
        call = tokens_of(count)
        assert_as_eager(compiled(*call), model(*call))
    assert [report.ops["sgl_kernel_npu::split_qkv_rmsnorm_rope"] for report in backend.reports] == [1, 1, 0]


@torch.no_grad()
def test_the_passes_add_no_guard() -> None:
    """pytorch/pytorch#115441: comparing sizes while matching specialised the graph, or guarded it by each of them."""
    guards: list[tuple[int, int]] = []
    backend = npu_fuse.Backend(strict=True)

    def counting(module: fx.GraphModule, inputs: list[Any]) -> Any:
        shape_env = next(size.node.shape_env for size in inputs if isinstance(size, torch.SymInt))
        before = len(shape_env.guards)
        compiled = backend(module, inputs)
        guards.append((before, len(shape_env.guards)))
        return compiled

    call = tokens_of(5)
    for tensor, axis in ((call[0], 0), (call[2], 0)):
        torch._dynamo.mark_dynamic(tensor, axis)
    torch.compile(Prologue(), backend=counting)(*call)
    ((before, after),) = guards
    assert before == after
    assert backend.report.ops["sgl_kernel_npu::split_qkv_rmsnorm_rope"] == 1


@torch.no_grad()
def test_a_shape_goes_from_one_graph_to_the_next() -> None:
    """vllm-project/vllm#36038: a torch.Size was an output of the first half of a split graph, which is none."""
    weight = torch.rand(HEAD_DIM)

    def model(x: Tensor) -> Tensor:
        shape = x.shape
        y = norm(x.reshape(-1, HEAD_DIM), weight)
        torch._dynamo.graph_break()
        return norm(y.view(shape), weight) + shape[0]

    backend = npu_fuse.Backend(strict=True)
    compiled = torch.compile(model, backend=backend)
    for count in (3, 5, 2):
        x = torch.randn(count, 4, HEAD_DIM)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), model(x))
    assert {report.ops["npu::npu_rms_norm"] for report in backend.reports} == {1}
    assert backend.report.graphs > 1


@torch.no_grad()
def test_what_was_compiled_under_other_options_is_not_used_again() -> None:
    """pytorch/pytorch#136883: the source was the same and the replacement another, and the cache gave the old one."""
    weight, x = torch.rand(HEAD_DIM), torch.randn(3, HEAD_DIM)
    wanted = norm(x, weight)
    ops = []
    for disable in ((), {"rms_norm"}, ()):
        backend = npu_fuse.Backend(strict=True, disable=disable)
        torch.testing.assert_close(torch.compile(norm, backend=backend)(x, weight), wanted)
        ops.append(dict(backend.report.ops))
    assert ops == [{"npu::npu_rms_norm": 1}, {}, {"npu::npu_rms_norm": 1}]


@torch.no_grad()
def test_rows_of_a_buffer_as_many_as_there_are_tokens() -> None:
    """vllm-project/vllm-omni#1102: the size of the slice fixed a size that had been marked as dynamic."""
    weight, buffer, eager_buffer = torch.rand(HEAD_DIM), torch.zeros(16, HEAD_DIM), torch.zeros(16, HEAD_DIM)

    def model(x: Tensor, buffer: Tensor) -> Tensor:
        rows = buffer[: x.shape[0]]
        rows.copy_(norm(x + rows, weight))
        return rows * 2

    backend = npu_fuse.Backend(strict=True)
    compiled = torch.compile(model, backend=backend)
    for count in (5, 3, 9):
        x = torch.randn(count, HEAD_DIM)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x, buffer), model(x, eager_buffer))
        torch.testing.assert_close(buffer, eager_buffer)
    assert [report.ops for report in backend.reports] == [{"npu::npu_add_rms_norm": 1}]
