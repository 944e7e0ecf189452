"""The prologue of attention as SGLang calls it on an NPU: split, npu_rms_norm per head, npu_mrope; together one op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from helpers import Compiled, compiled, repeats
from npu_fuse.runtime.ops.register import register
from npu_fuse.runtime.target import Target

register(Target())
Tensor = torch.Tensor
PLAIN = "sgl_kernel_npu::split_qkv_rmsnorm_rope"
LOOKED_UP = "sgl_kernel_npu::split_qkv_rmsnorm_rope_pos_cache_half_npu"
TOKENS, WIDTH, HEADS, KV_HEADS, D, MOST, EPS = 5, 32, 4, 2, 64, 24, 1e-6
SIZES = {"q": HEADS * D, "k": KV_HEADS * D, "v": KV_HEADS * D}


@dataclass(frozen=True)
class Calls:
    """What is called, and how.

    Args:
        mode: of the rotation.
        rope_dim: width of the cache.
        normed: how many elements of q and k are normed together; None for no norm.
        order: of the columns of one projection; None for three projections.
        sections: of the positions.
        wide: the maths in float64, instead of the calls.
    """

    mode: str = "half"
    rope_dim: int = D
    normed: int | None = D
    order: str | None = "qkv"
    sections: tuple[int, ...] = (0, 0, 0)
    wide: bool = False


class Prologue(nn.Module):
    def __init__(self, calls: Calls, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.calls = calls
        angles = torch.arange(MOST)[:, None] / 50 ** (torch.arange(calls.rope_dim // 2) / calls.rope_dim * 2)
        self.register_buffer("cache", torch.cat([angles.cos(), angles.sin()], -1))
        order = calls.order
        parts = [*"qkv"] if order is None else [order]
        self.projections = nn.ModuleList([nn.Linear(WIDTH, sum(SIZES[n] for n in part)) for part in parts])
        self.weights = nn.ParameterDict({name: torch.rand(calls.normed or 1) + 0.5 for name in "qk"})
        self.to(dtype).requires_grad_(False)

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        order = self.calls.order
        if order is None:
            parts = dict(zip("qkv", (projection(x) for projection in self.projections), strict=True))
        else:
            split = self.projections[0](x).split([SIZES[name] for name in order], -1)
            parts = dict(zip(order, split, strict=True))
        if self.calls.normed is not None:
            for name, weight in self.weights.items():
                rows = parts[name].reshape(-1, self.calls.normed)
                parts[name] = self.norm(rows, weight).view(parts[name].shape)
        return *self.rotate(positions, parts["q"], parts["k"]), parts["v"]

    def norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        if self.calls.wide:
            return rows * (rows.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight
        return torch.ops.npu.npu_rms_norm(rows, weight, EPS)[0]

    def rotate(self, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if not self.calls.wide:
            options: dict[str, Any] = {"mrope_section": self.calls.sections, "rotary_mode": self.calls.mode}
            return torch.ops.npu.npu_mrope(positions, q.contiguous(), k.contiguous(), self.cache, D, **options)
        cos, sin = (table[:, None] for table in self.cache[positions].chunk(2, -1))
        return self._turned(q, cos, sin), self._turned(k, cos, sin)

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated, rest = x.view(TOKENS, -1, D).split([self.calls.rope_dim, D - self.calls.rope_dim], -1)
        a, b = rotated.chunk(2, -1) if self.calls.mode == "half" else (rotated[..., ::2], rotated[..., 1::2])
        parts = (a * cos - b * sin, b * cos + a * sin)
        turned = torch.cat(parts, -1) if self.calls.mode == "half" else torch.stack(parts, -1).flatten(-2)
        return torch.cat([turned, rest], -1).flatten(-2)


def inputs(dtype: torch.dtype, rows: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (rows, TOKENS) if rows else (TOKENS,)
    return torch.randn(TOKENS, WIDTH, generator=generator).to(dtype), torch.randint(0, MOST, shape, generator=generator)


def run(calls: Calls, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Compiled:
    return compiled(Prologue(calls, dtype), *inputs(dtype, 3 * any(calls.sections)), **settings)


def error(found: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> float:
    return max((a.double() - b).square().mean().sqrt().item() for a, b in zip(found, truth, strict=True))


@pytest.mark.parametrize(
    ("calls", "dtype", "op"),
    [
        (Calls(), torch.bfloat16, LOOKED_UP),
        (Calls(), torch.float32, PLAIN),
        (Calls(mode="interleave"), torch.bfloat16, PLAIN),
        (Calls(normed=None), torch.float16, PLAIN),
        (Calls(order=None), torch.bfloat16, LOOKED_UP),
    ],
)
def test_split_norm_and_rotation_are_one_op(calls: Calls, dtype: torch.dtype, op: str) -> None:
    found = run(calls, dtype)
    assert found.report.ops == {op: 1}
    model = Prologue(calls, dtype)
    exact = Prologue(replace(calls, wide=True), dtype).double()
    exact.load_state_dict(model.state_dict())
    truth = exact(inputs(dtype)[0].double(), inputs(dtype)[1])
    eager = model(*inputs(dtype))
    assert error(found.output, truth) <= 1.1 * error(eager, truth)
    assert [x.stride() for x in found.output] == [x.stride() for x in eager]


def test_what_a_rotation_is_it_says_to_the_last_bit() -> None:
    found = run(Calls())
    (match,) = found.findings().of("qkv")
    rotations = [part for part in match.parts if part.kind == "rope"]
    values = found.values()
    assert len(rotations) == 2
    assert all(repeats(rotation, values) for rotation in rotations)
    assert (match.params.q.layout.num_heads, match.params.k.layout.num_heads) == (HEADS, KV_HEADS)
    assert match.params.rope.rope_dim == match.params.rope.head_dim == D


def test_any_number_of_tokens() -> None:
    model = Prologue(Calls(), torch.bfloat16)
    x, positions = inputs(torch.bfloat16)
    for tensor in (x, positions):
        torch._dynamo.mark_dynamic(tensor, 0)
    found = compiled(lambda x, positions: model(x + 0 * positions[:, None], positions), x, positions)
    assert found.report.ops == {LOOKED_UP: 1}, found.report
    for tokens in (1, 3):
        assert found.function(x[:tokens], positions[:tokens])[0].shape == (tokens, SIZES["q"])


def test_layers_share_their_tables() -> None:
    layers = [Prologue(Calls(), torch.float16) for _ in range(2)]
    found = compiled(lambda x, positions: [layer(x, positions) for layer in layers], *inputs(torch.float16))
    shared = compiled(lambda x, positions: [layers[0](x + i, positions) for i in range(2)], *inputs(torch.float16))
    assert found.report.ops == shared.report.ops == {PLAIN: 2}
    assert shared.targets().count("aten.index_select.default") == 1


def only_k(model: Prologue) -> Callable[[Tensor, Tensor], Tensor]:
    """q is projected, normed and turned for nothing."""
    return lambda x, positions: model(x, positions)[1]


def test_a_dead_query_leaves_the_rotation_as_it_is() -> None:
    model = Prologue(Calls(), torch.bfloat16)
    found = compiled(only_k(model), *inputs(torch.bfloat16))
    assert found.report.ops == {"npu::npu_rms_norm": 2, "npu::npu_mrope": 1}
    assert torch.equal(found.output, only_k(model)(*inputs(torch.bfloat16)))


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        (Calls(sections=(8, 12, 12)), "has a position for each of the sections [8, 12, 12]"),
        (Calls(normed=2 * D), "the norm of q is over 128 elements; ops norm per head of 64"),
        (Calls(normed=D // 2), "the norm of q is over 32 elements; ops norm per head of 64"),
        (Calls(order="kqv"), "the op wants rows [q | k | v]"),
    ],
)
def test_what_is_not_the_op(calls: Calls, reason: str) -> None:
    found = run(calls)
    assert found.report.ops["npu::npu_mrope"] == 1
    assert any(reason in (site.reason or "") for site in found.report.sites if site.kind == "qkv")
    eager = Prologue(calls, torch.bfloat16)(*inputs(torch.bfloat16, 3 * any(calls.sections)))
    assert all(torch.equal(x, y) for x, y in zip(found.output, eager, strict=True))
