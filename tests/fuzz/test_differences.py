"""What a comparison of two programs tells, and what it takes for rounding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from fuzz.compare import _calls, _differences

Tensor = torch.Tensor
Forward = Callable[[Tensor], object]


def differences(forward: Forward, other: Forward, dtype: torch.dtype = torch.float32) -> list[str]:
    """What is told of the second program, where the first is what eager does."""

    def model(forward: Forward) -> Callable[[int], torch.nn.Module]:
        class Model(torch.nn.Module):
            def forward(self, x: Tensor) -> tuple[object, ...]:
                return (forward(x),)

        return lambda seed: Model()

    def arguments(seed: int) -> tuple[Tensor]:
        return (torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)).to(dtype),)

    wanted, found = (_calls(model(of), None, arguments, "recorded") for of in (forward, other))
    return _differences(model(forward), arguments, "recorded", wanted, False, found)


def norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def written(x: Tensor) -> Tensor:
    y = x.sin()
    x[:, 0] = 0.5
    return y


OTHERS: dict[str, tuple[Forward, Forward, str]] = {
    "another eps": (norm, lambda x: norm(x, 1e-4), "call 0, result 0: "),
    "one wrong number": (torch.sin, lambda x: torch.where(x == x.max(), 0.5, x.sin()), "(1 such)"),
    "a write that is lost": (written, torch.sin, "call 0, argument 0: "),
    "a write that isn't there": (torch.sin, written, "call 1, argument 0: "),
    "a copy for a view": (lambda x: x[1:], lambda x: x[1:].clone(), "result 0, argument 0: not in one storage"),
    "another layout": (lambda x: x.sin(), lambda x: x.T.contiguous().T.sin(), "result 0: strides (1, 3), not (8, 1)"),
    "another type": (lambda x: x.double(), torch.sin, "result 0: dtype torch.float32, not torch.float64"),
    "another shape": (lambda x: x[1:].sin(), torch.sin, "result 0: shape [3, 8], not [2, 8]"),
    "no number": (lambda x: x / x, lambda x: (x - x) / (x - x), "nan, not 1"),
    "a number for none": (lambda x: (x - x) / (x - x), lambda x: x / x, "1, not nan"),
    "a whole number": (lambda x: x.argsort(-1), lambda x: x.argsort(-1).flip(0), "whole numbers differ"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_difference_is_told(name: str) -> None:
    forward, other, said = OTHERS[name]
    assert said in "\n".join(differences(forward, other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_none(dtype: torch.dtype) -> None:
    for forward, other in (
        (lambda x: x * 3 * 7, lambda x: x * 21),
        (norm, lambda x: norm(x.float()).to(x.dtype)),
        (lambda x: (x + 100) - 100, lambda x: x + 0),  # the digits that the sum has no room for
        (lambda x: x.softmax(-1), lambda x: x.float().softmax(-1).to(x.dtype)),
        (lambda x: (x + 100).topk(3).indices, lambda x: x.topk(3).indices),  # equals, once they are rounded
        (lambda x: x * 1e30 * 1e30 * 1e-60, lambda x: x + 0),  # an overflow on the way
    ):
        assert not differences(forward, other, dtype)
