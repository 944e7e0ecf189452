"""Floats of the model are constants of its graph even under dynamic=True; those of the caller are not."""

import pytest
import torch
from torch import nn

from helpers import compiled

Tensor = torch.Tensor
EPS = 1e-5


def normed(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eps = EPS

    def forward(self, x: Tensor) -> Tensor:
        return normed(x, self.eps)


def of_a_closure():
    eps = EPS

    def function(x: Tensor) -> Tensor:
        return normed(x, eps)

    return function


def of_a_default(x: Tensor, eps: float = EPS) -> Tensor:
    return normed(x, eps)


def of_an_inner_default(x: Tensor) -> Tensor:
    return of_a_default(x)


def x_with_static_rows() -> Tensor:
    x = torch.randn(3, 8)
    torch._dynamo.mark_static(x, 1)
    return x


@pytest.mark.parametrize("model", [Norm(), of_a_closure(), of_an_inner_default, lambda x: normed(x, EPS)])
def test_a_float_of_the_model_is_bound(model) -> None:
    (site,) = compiled(model, x_with_static_rows(), dynamic=True).report.sites
    assert site.params["eps"] == EPS


def test_another_value_is_compiled_again_and_used() -> None:
    model = Norm()
    x = x_with_static_rows()
    found = compiled(model, x, dynamic=True)
    model.eps = 0.5
    torch.testing.assert_close(found.function(x), normed(x, 0.5))


@pytest.mark.parametrize(
    ("model", "eps"),
    [
        (lambda x, eps: normed(x, eps), EPS),
        (lambda x, eps: normed(x, eps[0]), [EPS]),
        (lambda x, eps: normed(x, eps["eps"]), {"eps": EPS}),
    ],
)
def test_a_float_of_the_caller_stays_an_input(model, eps) -> None:
    found = compiled(model, x_with_static_rows(), eps, dynamic=True)
    (site,) = found.report.sites
    assert site.reason.endswith("(a float that the caller passes is none)")
