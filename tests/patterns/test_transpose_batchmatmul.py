"""Batched matmuls whose result is transposed: recognised through views, repeated bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from helpers import Compiled, compiled, repeats
from npu_fuse.patterns.match import Match

BF16, FP32 = torch.bfloat16, torch.float32
Tensor = torch.Tensor
Function = Callable[[Tensor, Tensor], Tensor]
B, M, K, N = 4, 5, 8, 6


def check(found: Compiled) -> Match:
    (match,) = found.findings().of("transpose_batchmatmul")
    assert repeats(match, found.values()), match.params
    assert not found.findings().near_misses()
    return match


BATCH_FIRST: dict[str, Function] = {
    "bmm": lambda x, w: torch.bmm(x, w).transpose(0, 1),
    "matmul": lambda x, w: torch.matmul(x, w).transpose(0, 1),
    "permute": lambda x, w: torch.bmm(x, w).permute(1, 0, 2),
    "swapaxes": lambda x, w: (x @ w).swapaxes(-2, -3),
    "einsum": lambda x, w: torch.einsum("bmk,bkn->mbn", x, w),
    "copied": lambda x, w: torch.bmm(x, w).transpose(0, 1).contiguous(),
    "flattened": lambda x, w: torch.bmm(x, w).transpose(0, 1).flatten(1),
    "reshaped": lambda x, w: torch.bmm(x, w).transpose(0, 1).reshape(x.shape[1], -1),
}
BATCH_SECOND: dict[str, Function] = {
    "absorbed": lambda x, w: torch.bmm(x.transpose(0, 1), w).transpose(0, 1),
    "absorbed by matmul": lambda x, w: (x.transpose(0, 1) @ w).transpose(0, 1),
    "absorbed by einsum": lambda x, w: torch.einsum("mbk,bkn->mbn", x, w),
    "copied before": lambda x, w: torch.bmm(x.transpose(0, 1).contiguous(), w).transpose(0, 1),
    "permuted before": lambda x, w: torch.bmm(x.permute(1, 0, 2), w).permute(1, 0, 2).reshape(x.shape[0], -1),
}


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", [*BATCH_FIRST, *BATCH_SECOND])
def test_every_spelling(name: str, dtype: torch.dtype, dynamic: bool | None) -> None:
    batch_second = name in BATCH_SECOND
    function = (BATCH_SECOND if batch_second else BATCH_FIRST)[name]
    x = torch.randn((M, B, K) if batch_second else (B, M, K), dtype=dtype)
    weight = torch.randn(B, K, N, dtype=dtype)
    torch._dynamo.mark_static(x, 0 if not batch_second else 1)
    torch._dynamo.mark_static(x, 2)
    torch._dynamo.mark_static(weight)
    match = check(compiled(function, x, weight, dynamic=dynamic))
    assert match.params.batch_second == batch_second
    assert all(n.op == "placeholder" for n in match.inputs.values())


def test_a_weight_of_another_layout_is_read_as_the_view_that_it_is() -> None:
    x = torch.randn(B, M, K)
    for function, weight in (
        (lambda x, w: torch.bmm(x, w.mT).transpose(0, 1), torch.randn(B, N, K)),
        (lambda x, w: torch.bmm(x, w.transpose(0, 1)).transpose(0, 1), torch.randn(K, B, N)),
    ):
        assert check(compiled(function, x, weight)).inputs["weight"].op == "call_function"


def test_x_may_be_a_part_of_something_larger() -> None:
    def function(q: Tensor, weight: Tensor) -> Tensor:
        nope, _ = q.split([K, 3], -1)
        return torch.bmm(nope.transpose(0, 1), weight).transpose(0, 1)

    match = check(compiled(function, torch.randn(M, B, K + 3), torch.randn(B, K, N)))
    assert match.params.batch_second


def test_batch_and_rows_of_one_size_are_told_apart() -> None:
    x, weight = torch.randn(B, B, K), torch.randn(B, K, N)
    assert not check(compiled(BATCH_FIRST["bmm"], x, weight)).params.batch_second
    assert check(compiled(BATCH_SECOND["absorbed"], x, weight)).params.batch_second
    assert not compiled(lambda x, w: torch.bmm(x, w), x, weight).findings().of("transpose_batchmatmul")


OTHERS: dict[str, Function] = {
    "not transposed": lambda x, w: torch.bmm(x, w),
    "the other axes": lambda x, w: torch.bmm(x, w).mT,
    "all axes": lambda x, w: torch.bmm(x, w).permute(2, 1, 0),
    "turned": lambda x, w: torch.bmm(x, w).permute(1, 2, 0),
    "a part": lambda x, w: torch.bmm(x, w)[:, :2].transpose(0, 1),
    "computed between": lambda x, w: (2 * torch.bmm(x, w)).transpose(0, 1),
    "reshaped, not transposed": lambda x, w: torch.bmm(x, w).reshape(M, B, N),
    "with a bias": lambda x, w: torch.baddbmm(x[..., :N], x, w).transpose(0, 1),
    "one matrix for all": lambda x, w: torch.matmul(x, w[0]).transpose(0, 1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_value_is_none(name: str) -> None:
    found = compiled(OTHERS[name], torch.randn(B, M, K), torch.randn(B, K, N))
    assert not found.findings().of("transpose_batchmatmul")
