"""On a machine without an NPU attention becomes torch's own, with flags in place of masks and repeated heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from helpers import compiled, refusal
from npu_fuse import Target
from npu_fuse.passes.launches import count_launches

OP = "aten.scaled_dot_product_attention.default"
HOST = Target("host")


def heads(dtype: torch.dtype = torch.float32, kv_heads: int = 4, keys: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return (
        torch.randn(2, 4, 6, 16, dtype=dtype),
        torch.randn(2, kv_heads, keys, 16, dtype=dtype),
        torch.randn(2, kv_heads, keys, 16, dtype=dtype),
    )


def call(found) -> dict:
    """The one call of torch's attention that ran: its arguments but query, key and value."""
    (node,) = [node for node in found.after.graph.nodes if str(node.target) == OP]
    return {**dict(zip(("attn_mask",), node.args[3:], strict=False)), **node.kwargs}


def causal(q: Tensor) -> Tensor:
    return torch.arange(q.shape[2])[:, None] >= torch.arange(q.shape[2])


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_a_causal_mask_becomes_the_flag_and_repeated_heads_are_given_once(is_dynamic: bool) -> None:
    def model(q: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(2, 1) for x in q.chunk(2, 1))
        return sdpa(q, k, v, attn_mask=causal(q))

    inputs = heads()[:1]
    if is_dynamic:
        torch._dynamo.mark_dynamic(inputs[0], 2)
    found = compiled(model, *inputs, target=HOST)
    assert call(found) == {"enable_gqa": True, "scale": 0.25, "is_causal": True}
    assert count_launches(found.after.graph) == 1  # no mask, no copies
    assert torch.allclose(found.output, model(*inputs), atol=1e-6)
    assert found.report.ops == {"aten::scaled_dot_product_attention": 1}


@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.float32).min])
def test_attention_written_out_is_one_call(hidden: float) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2)) * 0.3
        return scores.masked_fill(~causal(q), hidden).softmax(-1) @ v

    inputs = heads()
    found = compiled(model, *inputs, target=HOST)
    assert call(found) == {"scale": 0.3, "is_causal": True}
    assert torch.allclose(found.output, model(*inputs), atol=1e-6)


def test_a_mask_that_no_flag_says_is_given() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        return sdpa(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), attn_mask=seen)

    inputs = (*heads(kv_heads=2), torch.rand(2, 1, 6, 6) > 0.4)
    found = compiled(model, *inputs, target=HOST)
    assert set(call(found)) == {"enable_gqa", "scale", "attn_mask"}
    assert torch.allclose(found.output, model(*inputs), atol=1e-6)


def test_causal_from_the_last_key_is_no_flag_of_torch() -> None:
    """torch counts from the first key: its flag would show each query two keys less."""

    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = torch.arange(8) <= torch.arange(6)[:, None] + 2
        return sdpa(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), attn_mask=seen)

    inputs = heads(kv_heads=2, keys=8)
    found = compiled(model, *inputs, target=HOST)
    assert "is_causal" not in call(found)
    assert torch.allclose(found.output, model(*inputs), atol=1e-6)


def test_a_row_that_is_nan_in_the_model_stays_so() -> None:
    """A query that sees no key gets NaN where the model writes attention out, and zeros of torch's own."""

    def model(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2)).masked_fill(hidden, -torch.inf).softmax(-1) @ v

    hidden = torch.rand(2, 1, 6, 6) > 0.6
    hidden[0, 0, 2] = True
    inputs = (*heads(), hidden)
    found = compiled(model, *inputs, target=HOST)
    (site,) = [site for site in found.report.sites if site.kind == "attention"]
    assert site.status == "refused"
    assert "NaN" in site.reason
    assert torch.equal(found.output.isnan(), model(*inputs).isnan())
    assert found.output[0, :, 2].isnan().all()


def test_what_is_torchs_own_already_stays_node_for_node() -> None:
    inputs = heads()
    found = compiled(lambda q, k, v: sdpa(q, k, v, is_causal=True), *inputs, target=HOST)
    (site,) = [site for site in found.report.sites if site.kind == "attention"]
    assert site.status == "refused"
    assert found.targets() == [OP]


def test_no_npu_op_is_used_on_a_host() -> None:
    weight = torch.randn(16)

    def model(x: Tensor) -> Tensor:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    found = compiled(model, torch.randn(3, 16), target=HOST)
    assert not found.report.ops
    (site,) = [site for site in found.report.sites if site.kind == "rms_norm"]
    assert "host" in site.reason


@pytest.fixture(scope="module")
def sites() -> dict:
    """A site whose keys are seen by a mask that is given, and one to whose scores a bias is added."""

    def model(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return sdpa(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), attn_mask=mask), other + 1

    other = torch.randn(2, 1, 6, 6, dtype=torch.float16)
    seen, bias = torch.rand(2, 1, 6, 6) > 0.4, torch.randn(2, 1, 6, 6)
    found = {
        name: compiled(model, *heads(kv_heads=2), mask, other, target=HOST)
        for name, mask in (("mask", seen), ("bias", bias))
    }
    assert all(of.report.ops for of in found.values())
    return found


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("mask", {"params.merged": True}, "its batch and heads are one axis, or its keys lie transposed"),
        ("mask", {"params.key_transposed": True}, "its batch and heads are one axis, or its keys lie transposed"),
        ("bias", {"params.is_written_out": True}, "numbers are added to its scores, and a row of -inf gives NaN"),
        ("mask", {"params.blank_rows": "NaN"}, "a query that sees no key gets NaN, of torch's attention zeros"),
        ("mask", {"params.mask.lowest": True}, "a query that sees no key gets the mean of all values"),
        ("mask", {"params.steps": frozenset({torch.float64})}, "the model computes in torch.float64"),
    ],
)
def test_what_else_a_site_may_be(sites: dict, name: str, changes: dict, reason: str) -> None:
    assert reason in refusal(sites[name], "attention", changes, HOST)


def test_what_else_may_be_added_or_hidden(sites: dict) -> None:
    (match,) = sites["bias"].findings().of("attention")
    both = {"inputs.mask": match.inputs["bias"]}
    assert "numbers are added to its scores, and a row of -inf" in refusal(sites["bias"], "attention", both, HOST)
    half = next(n for n in sites["mask"].before.graph.nodes if n.meta["val"].dtype == torch.float16)
    exact = refusal(sites["mask"], "attention", target=HOST, numerics="exact")
    assert exact == "Options.numerics is 'exact', and torch's attention rounds as its own kernels do"
    narrow = {"inputs.mask": half, "params.mask.only_hides": False}
    assert refusal(sites["mask"], "attention", narrow, HOST).startswith("its mask is torch.float16, and ")


def test_heads_that_are_a_batch_stay() -> None:
    q, k, v = (x.flatten(0, 1) for x in heads())
    found = compiled(lambda q, k, v: sdpa(q, k, v, is_causal=True), q, k, v, target=HOST)
    assert found.report.sites[0].reason == "its batch and heads are one axis, or its keys lie transposed"
