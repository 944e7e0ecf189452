"""What others got wrong about masks, by the public report: each is run as reported, and must be as eager."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # its usual name

from helpers import Compiled, compiled

Tensor = torch.Tensor
HEADS, HEAD_DIM = 2, 16
DTYPES = [torch.float32, torch.float16]


def heads(length: int, dtype: torch.dtype, batch: int = 1) -> Tensor:
    return torch.randn(batch, HEADS, length, HEAD_DIM, dtype=dtype)


def qkv(dtype: torch.dtype, tokens: int, keys: int | None = None, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    keys = tokens if keys is None else keys
    return heads(tokens, dtype, batch), heads(keys, dtype, batch), heads(keys, dtype, batch)


def check(function: object, *inputs: Tensor) -> Compiled:
    """Compiles a call, and compares it with eager in float64."""
    found = compiled(function, *inputs)
    exact = function(*(t.double() if t.is_floating_point() else t for t in inputs))
    tolerance = 2e-3 if inputs[0].dtype == torch.float16 else 1e-5
    torch.testing.assert_close(found.output.double(), exact, rtol=0, atol=tolerance, equal_nan=True)
    return found


def mask_kinds(found: Compiled) -> list[str]:
    return [site.params["mask"] for site in found.report.sites if site.kind == "attention"]


def calls(found: Compiled) -> list[torch.fx.Node]:
    return [node for node in found.after.graph.nodes if "npu_fus" in str(node.target)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_encoder_is_bidirectional_beside_a_causal_layer(dtype: torch.dtype) -> None:
    """sgl-project/sglang#35434: encoders were always causal, and what a reranker scored meant nothing."""

    class Block(nn.Module):
        def __init__(self, attn_type: str) -> None:
            super().__init__()
            self.attn_type = attn_type

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x + F.scaled_dot_product_attention(x, x.sin(), x.cos(), mask)

    class Reranker(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder, self.encoder = Block("decoder"), Block("encoder_only")

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            i = torch.arange(x.shape[2])
            mask = (i <= i[:, None]) & keep[:, None, None, :]
            return self.encoder(self.decoder(x, mask), mask)

    model, x = Reranker(), heads(5, dtype, batch=2)
    keep = torch.tensor([[True] * 5, [True, True, True, False, False]])
    found = compiled(model, x, keep)
    wide = x.double()
    first = model.decoder(wide, torch.ones(5, 5).tril().bool() & keep[:, None, None, :])
    exact = model.encoder(first, keep[:, None, None, :])
    torch.testing.assert_close(found.output.double(), exact, rtol=0, atol=5e-3 if dtype == torch.float16 else 1e-5)
    (site,) = [site for site in found.report.sites if site.kind == "encoder_only"]
    assert (site.status, site.module) == ("lowered", "encoder")


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_added_are_no_mask(dtype: torch.dtype) -> None:
    """huggingface/transformers#48843: a bias of positions was made a mask of bools for the NPU's op, and lost."""
    found = check(
        lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, bias),
        *qkv(dtype, 5),
        torch.randn(1, HEADS, 5, 5, dtype=dtype) * 2,
    )
    assert mask_kinds(found) == ["bias"]
    assert not any("atten_mask" in call.kwargs for call in calls(found))


@pytest.mark.parametrize("dtype", DTYPES)
def test_true_is_seen_in_torch_and_hidden_on_the_npu(dtype: torch.dtype) -> None:
    """Likewise: the two have opposite senses."""
    seen = torch.rand(1, 1, 5, 5) < 0.6
    seen |= torch.eye(5, dtype=torch.bool)
    check(lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask), *qkv(dtype, 5), seen)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_window_to_both_sides_stays_one(dtype: torch.dtype) -> None:
    """sgl-project/sglang#39298: the window was applied to causal layers alone, and ModernBERT's saw everything."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i = torch.arange(q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, (i[:, None] - i).abs() <= 2)

    found = check(model, *qkv(dtype, 8))
    assert mask_kinds(found) == ["sliding_bidirectional"]
    (call,) = calls(found)
    assert call.kwargs["sparse_mode"] == 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3])
def test_padding_behind_the_512th_key_is_hidden(tokens: int, dtype: torch.dtype) -> None:
    """vllm-project/vllm-ascend#15503: of a mask with other axes than documented, what came behind was not read."""
    q, k, v = qkv(dtype, tokens, 600)
    k[:, :, 550:] = 3.0
    v[:, :, 550:] = 100.0
    keep = (torch.arange(600) < 550)[None, None, None, :]
    found = check(lambda q, k, v, keep: F.scaled_dot_product_attention(q, k, v, keep), q, k, v, keep)
    assert found.output.abs().max() < 10
    for call in calls(found):
        assert tuple(call.kwargs["atten_mask"].meta["val"].shape) == (1, 1, tokens, 600)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_causal_with_more_keys_is_aligned_as_it_is_said(tokens: int, dtype: torch.dtype) -> None:
    """pytorch/pytorch#115111: the flag is aligned top left, so with a cache a query saw the first key alone."""

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.arange(8) <= torch.arange(q.shape[2])[:, None] + (8 - q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, mask)

    inputs = qkv(dtype, tokens, 8)
    found = check(masked, *inputs)
    assert not [n for n in found.after.graph.nodes if n.kwargs.get("is_causal")]
    check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *inputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_padding_does_what_it_does_in_eager(dtype: torch.dtype) -> None:
    """pytorch/pytorch#101967: a weight of zero times NaN is NaN, so a hidden value of NaN is not hidden."""
    q, k, v = qkv(dtype, 5)
    v[:, :, 3:] = torch.nan
    keep = (torch.arange(5) < 3)[None, None, None, :]
    found = check(lambda q, k, v, keep: F.scaled_dot_product_attention(q, k, v, keep), q, k, v, keep)
    assert found.output.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 0, 2])
def test_a_window_of_zero_is_none_where_the_model_says_so(window: int | None, dtype: torch.dtype) -> None:
    """unslothai/unsloth#8253: on one path the window was lost, and a width of 0 hid every key."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i = torch.arange(q.shape[2])
        mask = i <= i[:, None]
        if window:
            mask = mask & (i > i[:, None] - window)
        return F.scaled_dot_product_attention(q, k, v, mask)

    assert mask_kinds(check(model, *qkv(dtype, 6))) == ["sliding_causal" if window else "causal"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_window_that_hides_every_key_is_as_in_eager(dtype: torch.dtype) -> None:
    """Likewise, where the model does take a width of 0 at its word."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i = torch.arange(q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, (i <= i[:, None]) & (i > i[:, None]))

    check(model, *qkv(dtype, 6))
