"""Attention as torch_npu's dispatch leaves it in a graph is attention, and is lowered to what says the same better."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from helpers import Compiled, compiled, repeats
from npu_fuse import Site, Target
from npu_fuse.runtime.ops.register import register

register(Target())

Tensor = torch.Tensor
HEADS, KV_HEADS, TOKENS, HEAD_DIM = 4, 2, 6, 16
INFER, FUSION = "npu::npu_fused_infer_attention_score", "npu::npu_fusion_attention_v3"


def call(q: Tensor, k: Tensor, v: Tensor, layout: str = "BNSD", **others: object) -> tuple[Tensor, ...]:
    return torch.ops.npu.npu_fusion_attention_v3(q, k, v, HEADS, layout, scale=0.3, **others)


def hidden(q: Tensor, k: Tensor) -> Tensor:
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return call(q, k, v, atten_mask=hidden(q, k))[0]


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    return call(q, k, v, atten_mask=~((j <= i) & (j > i - 3)))[0]


def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal(q, *(t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v)))


def by_mode(**mode: int) -> Callable[..., Tensor]:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return call(q, k, v, atten_mask=torch.ones(2048, 2048, dtype=torch.bool).triu(1), **mode)[0]

    return function


def no_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return call(q, k, v, sparse_mode=3, next_tockens=0)[0]  # without a mask they have no effect


def tensors(dtype: torch.dtype = torch.float16, keys: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    sizes = ((HEADS, TOKENS), (KV_HEADS, keys), (KV_HEADS, keys))
    return tuple(torch.randn(2, heads, length, HEAD_DIM, dtype=dtype) for heads, length in sizes)


def site(found: Compiled) -> Site:
    (only,) = [site for site in found.report.sites if site.kind == "attention"]
    return only


CASES: dict[str, tuple[Callable[..., Tensor], str, dict[str, int]]] = {
    "causal": (causal, "causal", {"sparse_mode": 3}),
    "window": (window, "sliding_causal", {"sparse_mode": 4, "pre": 2, "next": 0}),
    "repeated heads": (repeated, "causal", {"sparse_mode": 3}),
    "mode 2": (by_mode(sparse_mode=2, next_tockens=0), "causal", {"sparse_mode": 3}),
    "mode 3": (by_mode(sparse_mode=3), "causal", {"sparse_mode": 3}),
    "mode 4": (
        by_mode(sparse_mode=4, pre_tockens=1, next_tockens=2),
        "sliding_bidirectional",
        {"sparse_mode": 4, "pre": 1, "next": 2},
    ),
    "no mask": (no_mask, "none", {}),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_a_call_is_attention_and_becomes_a_better_one(name: str, dtype: torch.dtype) -> None:
    function, mask, wanted = CASES[name]
    inputs = tensors(dtype)
    found = compiled(function, *inputs)
    torch.testing.assert_close(found.output, function(*inputs), rtol=0, atol=2e-3 if dtype == torch.float16 else 1e-6)
    assert (site(found).status, site(found).op) == ("lowered", INFER if dtype == torch.float16 else FUSION)
    assert (site(found).params["mask"], site(found).params["num_kv_heads"]) == (mask, KV_HEADS)
    (match,) = found.findings().of("attention")
    assert repeats(match, found.values())
    (node,) = [n for n in found.after.graph.nodes if n.op == "call_function" and "npu_fus" in str(n.target)]
    names = {"sparse_mode": "sparse_mode", "pre_tokens": "pre", "next_tokens": "next"}
    names |= {"pre_tockens": "pre", "next_tockens": "next"}
    assert {names[key]: value for key, value in node.kwargs.items() if key in names} == wanted
    calls = [target for target in found.targets() if target != "<built-in function getitem>"]
    assert len(calls) == 1, "no mask is made, and no head copied"


def test_a_longer_key_keeps_the_alignment_of_its_mode() -> None:
    inputs = tensors(keys=9)
    for mode, kind in ((2, "causal_static_cache"), (3, "causal_offset")):
        found = compiled(by_mode(sparse_mode=mode), *inputs)
        torch.testing.assert_close(found.output, by_mode(sparse_mode=mode)(*inputs), rtol=0, atol=2e-3)
        assert site(found).params["mask"] == kind
        assert site(found).status == "lowered"


def test_a_bias_is_read_as_one() -> None:
    def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        numbers = torch.arange(2 * HEADS * TOKENS * TOKENS).view(2, HEADS, TOKENS, TOKENS)
        return call(q, k, v, pse=numbers.to(q.dtype).sin())[0]

    inputs = tensors()
    found = compiled(biased, *inputs)
    torch.testing.assert_close(found.output, biased(*inputs), rtol=0, atol=2e-3)
    assert site(found).params["mask"] == "bias"


UNREAD: dict[str, tuple[Callable[..., object], str]] = {
    "statistics": (lambda q, k, v: call(q, k, v)[:2], "its maxima and sums are used"),
    "layout": (lambda q, k, v: call(*(t.transpose(1, 2) for t in (q, k, v)), "BSND")[0], "its layout is BSND"),
    "a mask and a band": (
        lambda q, k, v: call(q, k, v, atten_mask=hidden(q, k), next_tockens=1)[0],
        "it has a mask, and of that only a band: pre_tockens and next_tockens are 2147483647 and 1",
    ),
    "a mask of bytes": (lambda q, k, v: call(q, k, v, atten_mask=hidden(q, k).byte())[0], "its mask is torch.uint8"),
}


@pytest.mark.parametrize("name", UNREAD)
def test_what_is_more_than_attention_alone_is_left_alone(name: str) -> None:
    function, reason = UNREAD[name]
    inputs = tensors()
    found = compiled(function, *inputs)
    torch.testing.assert_close(found.output, function(*inputs), rtol=0, atol=0)
    assert site(found).status == "missed"
    assert site(found).reason is not None
    assert site(found).reason.startswith(reason)
    assert "npu.npu_fusion_attention_v3.default" in found.targets()


def test_its_mask_is_inverted() -> None:
    """True hides: a lower triangle hides the past, and is no causal mask."""

    def anticausal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return call(q, k, v, atten_mask=torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(-1))[0]

    inputs = tensors()
    found = compiled(anticausal, *inputs)
    torch.testing.assert_close(found.output, anticausal(*inputs), rtol=0, atol=2e-3)
    assert site(found).params["mask"] == "other"
