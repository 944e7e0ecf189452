"""On the oldest SoC attention is npu_prompt_flash_attention: a head of key for each of query, and masks as tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from helpers import compiled
from npu_fuse import Target

OP = "npu::npu_prompt_flash_attention"
TARGET = Target("ascend310p")


def heads(tokens: int = 6, kv_heads: int = 2, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q = torch.randn(2, 4, tokens, 32).to(dtype)
    return q, *(torch.randn(2, kv_heads, 6, 32).to(dtype) for _ in range(2))


def exact(q: Tensor, k: Tensor, v: Tensor, **given) -> Tensor:
    return sdpa(q.double(), k.double(), v.double(), **given)


def test_the_flag_becomes_a_mask_and_heads_are_repeated() -> None:
    inputs = heads()
    found = compiled(lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True), *inputs, target=TARGET)
    assert found.report.ops == {OP: 1}
    expected = exact(*inputs, is_causal=True, enable_gqa=True)
    assert torch.allclose(found.output.double(), expected, atol=2e-3)


def test_two_layers_share_mask_and_repeated_heads() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = sdpa(q, k, v, is_causal=True, enable_gqa=True)
        return sdpa(q, k, v, is_causal=True, enable_gqa=True)

    inputs = heads()
    found = compiled(model, *inputs, target=TARGET)
    targets = found.targets()
    assert targets.count("npu.npu_prompt_flash_attention.default") == 2
    assert targets.count("aten.gt.Scalar") == 1
    assert targets.count("aten.clone.default") == 2
    first = exact(*inputs, is_causal=True, enable_gqa=True)
    assert torch.allclose(found.output.double(), exact(first, *inputs[1:], is_causal=True, enable_gqa=True), atol=4e-3)


@pytest.mark.parametrize("tokens", [1, 6])
def test_a_mask_is_given_inverted(tokens: int) -> None:
    seen = torch.arange(6) <= torch.arange(tokens)[:, None] + 6 - tokens
    inputs = heads(tokens, kv_heads=4)
    model = lambda q, k, v: sdpa(q, k, v, attn_mask=torch.arange(6) <= torch.arange(tokens)[:, None] + 6 - tokens)  # noqa: E731
    found = compiled(model, *inputs, target=TARGET)
    assert found.report.ops == {OP: 1}
    assert torch.allclose(found.output.double(), exact(*inputs, attn_mask=seen), atol=2e-3)


def test_a_query_that_may_see_no_key_is_refused() -> None:
    seen = torch.rand(2, 1, 6, 6) > 0.5
    inputs = (*heads(kv_heads=4), seen)
    found = compiled(lambda q, k, v, seen: sdpa(q, k, v, attn_mask=seen), *inputs, target=TARGET)
    (site,) = [site for site in found.report.sites if site.kind == "attention"]
    assert site.status == "refused"
    assert "sees a key" in site.reason
    assert torch.equal(found.output, sdpa(*inputs[:3], attn_mask=seen))


def test_bfloat16_is_refused() -> None:
    inputs = heads(kv_heads=4, dtype=torch.bfloat16)
    found = compiled(lambda q, k, v: sdpa(q, k, v), *inputs, target=TARGET)
    (site,) = [site for site in found.report.sites if site.kind == "attention"]
    assert site.status == "refused"
    assert "bfloat16" in site.reason


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_an_empty_batch_is_no_failure(dtype: torch.dtype) -> None:
    inputs = [x[:0] for x in heads(dtype=dtype)]
    found = compiled(lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True), *inputs, target=TARGET)
    assert found.output.shape == inputs[0].shape
