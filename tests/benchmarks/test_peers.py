"""The peers' patterns find what is spelled as they spell it, and nothing that is spelled otherwise."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx

from peers import (
    HEAD_DIM,
    NUM_HEADS,
    NUM_KV_HEADS,
    found_by_literal,
    norm_then_rotary,
    qk_norm_rotary,
    rms_norm,
    rotary,
)


def found(function: Callable[..., Any], *tensors: torch.Tensor) -> dict[str, int]:
    """What the literal patterns find in a function, by peer and kind."""
    seen: list[dict[str, Counter[str]]] = []

    def look(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        seen.append(found_by_literal(module, example_inputs))
        return module.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=look, fullgraph=True)(*tensors)
    (counts,) = seen
    return {f"{peer}: {kind}": count for peer, kinds in counts.items() for kind, count in kinds.items() if count}


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 3e-4])
def test_the_norm_traced_in_bfloat16_is_found_in_bfloat16(eps: float) -> None:
    assert found(lambda x, w: rms_norm(x, w, eps), random(2, 5, 48), random(48)) == {
        "torchair, traced in bfloat16: rms_norm": 1
    }


def test_the_norm_traced_in_float32_is_found_where_the_casts_are_outside() -> None:
    def outside(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x.float(), weight, 1e-6).to(x.dtype)

    expected = {"torchair: rms_norm": 1}
    assert found(outside, random(2, 5, 48), random(48)) == expected
    assert found(lambda x, w: rms_norm(x, w, 1e-6), random(2, 5, 48, dtype=torch.float32), random(48)) == expected


def divided(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return weight * (wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def swapped(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def multiplied(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@pytest.mark.parametrize("norm", [divided, swapped, multiplied])
def test_other_spellings_of_a_norm_are_missed(norm: Callable[..., torch.Tensor]) -> None:
    assert found(norm, random(2, 5, 48), random(48)) == {}


def test_rotations() -> None:
    q, k = random(2, 3, 7, 16), random(2, 1, 7, 16)
    cos, sin = random(2, 1, 7, 16), random(7, 16)
    assert found(lambda q, k, c, s: (rotary(q, c, s), rotary(k, c, s)), q, k, cos, sin) == {"torchair: rope": 2}

    def by_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        cos, sin = cos[..., :8], sin[..., :8]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    assert found(by_halves, q, cos, sin) == {}


def test_norm_then_rotation_of_one_tensor() -> None:
    tables = random(2, 1, 7, 16), random(2, 1, 7, 16)
    counts = found(lambda *inputs: norm_then_rotary(*inputs, 1e-6), random(2, 7, 3, 16), random(16), *tables)
    assert counts["per tensor: norm_rope_chain"] == 1

    def without_transpose(x: torch.Tensor, w: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return rotary(rms_norm(x, w, 1e-6), cos, sin)

    counts = found(without_transpose, random(2, 3, 7, 16), random(16), *tables)
    assert "per tensor: norm_rope_chain" not in counts


def test_norm_and_rotation_of_q_and_k_behind_one_matmul() -> None:
    packed = random(2, 7, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    weights = random(HEAD_DIM), random(HEAD_DIM)
    tables = random(2, 7, 1, HEAD_DIM // 2), random(2, 7, 1, HEAD_DIM // 2)
    counts = found(lambda *inputs: qk_norm_rotary(*inputs, 1e-6), packed, *weights, *tables)
    assert counts == {"vLLM: norm_rope_chain": 2}
