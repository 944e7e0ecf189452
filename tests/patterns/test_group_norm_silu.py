"""Group norms with a silu behind them: recognised, repeated bit for bit; another activation makes it none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from helpers import Compiled, compiled, repeats
from npu_fuse.patterns.match import Match

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
Tensor = torch.Tensor
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def check(found: Compiled) -> Match:
    (match,) = found.findings().of("group_norm_silu")
    assert repeats(match, found.values()), match.params
    assert not found.findings().near_misses()
    return match


def inputs(dtype: torch.dtype = FP32) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 16, 4, 5).to(dtype), torch.randn(16).to(dtype), torch.randn(16).to(dtype)


def spelled_out(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    normed = functional.group_norm(x, 4, weight, bias, 1e-6)
    return normed * torch.sigmoid(normed)


def wide(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.silu(functional.group_norm(x.float(), 4, weight.float(), bias.float(), 1e-6)).to(x.dtype)


def wide_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.silu(functional.group_norm(x.float(), 4, weight.float(), bias.float(), 1e-6).to(x.dtype))


def native(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.silu(torch.native_group_norm(x, weight, bias, 2, 16, 20, 4, 1e-6)[0])


SPELLINGS: dict[str, Function] = {
    "F": lambda x, w, b: functional.silu(functional.group_norm(x, 4, w, b, 1e-6)),
    "in place": lambda x, w, b: functional.silu(functional.group_norm(x, 4, w, b, 1e-6), inplace=True),
    "spelled out": spelled_out,
    "all wide": wide,
    "wide norm": wide_norm,
    "native": native,
}


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_every_spelling(name: str, dtype: torch.dtype) -> None:
    params = check(compiled(SPELLINGS[name], *inputs(dtype))).params
    assert (params.group, params.eps, params.weight, params.bias) == (4, 1e-6, True, True)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("shape", [(2, 16), (2, 16, 7), (2, 16, 3, 4, 5)])
def test_modules_of_any_rank(shape: tuple[int, ...], affine: bool) -> None:
    model = nn.Sequential(nn.GroupNorm(8, 16, affine=affine), nn.SiLU())
    params = check(compiled(model, torch.randn(shape))).params
    assert (params.group, params.eps, params.weight, params.bias) == (8, 1e-5, affine, affine)


@pytest.mark.parametrize("name", sorted(SPELLINGS.keys() - {"native"}))
def test_symbolic_sizes(name: str) -> None:
    x, weight, bias = inputs()
    torch._dynamo.mark_static(x, 1)
    check(compiled(SPELLINGS[name], x, weight, bias, dynamic=True))


def test_the_narrowest_type_before_silu_is_kept() -> None:
    for function, dtype in ((wide, FP32), (wide_norm, BF16), (SPELLINGS["F"], BF16)):
        assert check(compiled(function, *inputs(BF16))).params.normed_dtype == dtype


OTHERS: dict[str, Function] = {
    "gelu": lambda x, w, b: functional.gelu(functional.group_norm(x, 4, w, b)),
    "relu": lambda x, w, b: functional.relu(functional.group_norm(x, 4, w, b)),
    "silu of something else": lambda x, w, b: functional.silu(x) + functional.group_norm(x, 4, w, b),
    "a sum between": lambda x, w, b: functional.silu(functional.group_norm(x, 4, w, b) + x),
    "scaled": lambda x, w, b: functional.silu(2 * functional.group_norm(x, 4, w, b)),
    "its mean": lambda x, w, b: functional.silu(torch.native_group_norm(x, w, b, 2, 16, 20, 4, 1e-6)[1]),
    "gated by the input": lambda x, w, b: x * torch.sigmoid(functional.group_norm(x, 4, w, b)),
    "over other sizes": lambda x, w, b: functional.silu(torch.native_group_norm(x, None, None, 1, 32, 20, 4, 1e-6)[0]),
    "turned": lambda x, w, b: functional.silu(functional.group_norm(x, 4, w, b).mT),
    "layer norm": lambda x, w, b: functional.silu(functional.layer_norm(x, x.shape[1:])),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_value_is_none(name: str) -> None:
    assert not compiled(OTHERS[name], *inputs()).findings().of("group_norm_silu")


dtypes = st.sampled_from([None, None, BF16, FP16, FP32, FP64])


@settings(max_examples=30, deadline=None)
@given(
    casts=st.fixed_dictionaries(dict.fromkeys(("x", "normed", "again", "sigmoid", "result"), dtypes)),
    dtype=st.sampled_from([BF16, FP16, FP32]),
    is_spelled_out=st.booleans(),
)
def test_what_is_recognised_is_repeated_wherever_it_is_cast(
    casts: dict[str, torch.dtype | None], dtype: torch.dtype, is_spelled_out: bool
) -> None:
    def cast(step: str, value: Tensor) -> Tensor:
        return value if casts[step] is None else value.to(casts[step])

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x = cast("x", x)
        normed = cast("normed", functional.group_norm(x, 4, weight.to(x.dtype), bias.to(x.dtype)))
        normed = cast("again", normed)
        gated = normed * cast("sigmoid", torch.sigmoid(normed)) if is_spelled_out else functional.silu(normed)
        return cast("result", gated)

    found = compiled(function, *inputs(dtype))
    for match in found.findings().of("group_norm_silu"):
        assert repeats(match, found.values()), match.params
