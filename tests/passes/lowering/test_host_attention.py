"""On a machine without an NPU attention becomes torch's own, with flags in place of masks and repeated heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from helpers import compiled, refusal
from npu_fuse import Target
from npu_fuse.passes.launches import cost
from npu_fuse.runtime.ops.host_attention import BANDED_ATTENTION, CPU_ATTENTION

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


BAND = "npu_fuse.banded_attention.default"
CPU_OP = "aten._scaled_dot_product_flash_attention_for_cpu.default"


def kernel_call(found) -> tuple[bool, Tensor | None]:
    """The one call of the kernel on the CPU that ran: whether it is causal, and the shape of its mask."""
    (node,) = [node for node in found.after.graph.nodes if str(node.target) == CPU_OP]
    given = {**dict(zip(("dropout_p", "is_causal"), node.args[3:], strict=False)), **node.kwargs}
    return given["is_causal"], given["attn_mask"].meta["val"].shape


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
    assert cost(found.after.graph).launches == 1  # no mask, no copies
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


# What needn't be computed ---------------------------------------------------------------------------------------------


def padded(keys: int = 6) -> Tensor:
    """[2, keys]: the first tokens of the first prompt are padding, which leaves its first queries without a key."""
    return torch.arange(keys) >= torch.tensor([[2], [0]])


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("visible", [True, False])
def test_causal_with_padding_is_a_band_and_the_padding(is_dynamic: bool, visible: bool) -> None:
    def model(q: Tensor, padding: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(2, 1) for x in q.chunk(2, 1))
        seen = padding if visible else ~padding
        return sdpa(q, k, v, causal(q) & seen[:, None, None, :])

    inputs = (heads()[0], padded() if visible else ~padded())
    if is_dynamic:
        torch._dynamo.mark_dynamic(inputs[0], 2)
        torch._dynamo.mark_dynamic(inputs[1], 1)
    found = compiled(model, *inputs, target=HOST)
    assert found.report.ops == {"npu_fuse::banded_attention": 1}
    assert "aten.ge.Tensor" not in found.targets()  # nothing of tokens by tokens is computed
    assert torch.allclose(found.output, model(*inputs), atol=1e-6)
    assert not found.output[0, :, :2].any()  # which see no key


def test_causal_within_a_window_is_a_band() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(q.shape[2])
        return sdpa(q, k, v, causal(q) & (place[:, None] - place < 3))

    inputs = heads()
    found = compiled(model, *inputs, target=HOST)
    assert found.targets() == [BAND]
    (node,) = found.after.graph.find_nodes(op="call_function", target=torch.ops.npu_fuse.banded_attention.default)
    assert node.kwargs["window"] == 3
    assert torch.allclose(found.output, model(*inputs), atol=1e-6)


def test_causal_within_segments_is_the_flag_and_the_mask() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, segments: Tensor) -> Tensor:
        alike = segments[:, None, :, None] == segments[:, None, None, :]
        return sdpa(q, k, v, causal(q) & alike)

    inputs = (*heads(), torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]]))
    found = compiled(model, *inputs, target=HOST)
    assert kernel_call(found) == (True, (2, 1, 6, 6))
    assert torch.allclose(found.output, model(*inputs), atol=1e-6)


def test_causal_within_chunks_is_the_flag_and_the_mask() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        place = torch.arange(q.shape[2])
        return sdpa(q, k, v, causal(q) & (place[:, None] // 2 == place // 2))

    inputs = heads()
    found = compiled(model, *inputs, target=HOST)
    assert kernel_call(found) == (True, (1, 1, 6, 6))
    assert torch.allclose(found.output, model(*inputs), atol=1e-6)


def test_a_window_that_grows_with_the_tokens_is_the_flag_and_the_mask() -> None:
    def model(x: Tensor) -> Tensor:
        q, k, v = x.unbind()
        place = torch.arange(q.shape[2])
        return sdpa(q, k, v, causal(q) & (place[:, None] - place < q.shape[2] - 3))

    x = torch.stack(heads())
    torch._dynamo.mark_dynamic(x, 3)
    found = compiled(model, x, target=HOST)
    assert [site.op for site in found.report.sites if site.kind == "attention"] == [CPU_ATTENTION.name]
    assert torch.allclose(found.output, model(x), atol=1e-6)


def test_layers_share_one_mask() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        seen = causal(q) & padding[:, None, None, :]
        return sdpa(sdpa(q, k, v, seen), k, v, seen)

    inputs = (*heads(), padded())
    found = compiled(model, *inputs, target=HOST)
    assert found.targets() == ["aten.expand.default", BAND, BAND] or found.targets() == [BAND, BAND]
    assert torch.allclose(found.output, model(*inputs), atol=1e-6)


def test_one_key_more_than_the_querys_own_is_not_causal() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        place = torch.arange(q.shape[2])
        return sdpa(q, k, v, (place <= place[:, None] + 1) & padding[:, None, None, :])

    inputs = (*heads(), padded())
    found = compiled(model, *inputs, target=HOST)
    assert found.targets().count(OP) == 1
    assert torch.allclose(found.output, model(*inputs), atol=1e-6)


def test_the_mean_of_all_values_is_no_mean_of_the_keys_so_far() -> None:
    """A query whose keys are all hidden by the lowest number attends to later keys too, which the flag would hide."""

    def model(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        seen = causal(q) & padding[:, None, None, :]
        return (q @ k.transpose(-1, -2) + torch.where(seen, 0.0, torch.finfo(q.dtype).min)).softmax(-1) @ v

    inputs = (*heads(), padded())
    found = compiled(model, *inputs, target=HOST)
    assert not {BAND, CPU_OP} & {*found.targets()}
    assert torch.allclose(found.output, model(*inputs), atol=1e-6)


def test_keys_of_another_width_than_values_are_not_the_kernels() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        return sdpa(q, k, v, causal(q) & padding[:, None, None, :])

    q, k, v = heads()
    inputs = (q, k, v[..., :8], padded())
    found = compiled(model, *inputs, target=HOST)
    assert not {BAND, CPU_OP} & {*found.targets()}
    assert torch.allclose(found.output, model(*inputs), atol=1e-6)


@pytest.mark.parametrize("tokens", [6, 1300])
@pytest.mark.parametrize("window", [None, 3, 600])
@pytest.mark.parametrize("padding", ["none", "before all", "anywhere", "everywhere"])
def test_a_band_agrees_with_exact_maths(tokens: int, window: int | None, padding: str) -> None:
    """Of prompts shorter and longer than what the op computes at once, with queries that see no key."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, tokens, 16) for heads in (4, 2, 2))
    place = torch.arange(tokens)
    seen = {
        "none": None,
        "before all": place >= torch.tensor([[tokens // 3], [tokens // 2]]),
        "anywhere": torch.rand(2, tokens) > 0.4,
        "everywhere": torch.zeros(1, tokens, dtype=torch.bool),
    }[padding]
    behind = place[:, None] - place
    visible = (behind >= 0) & (behind < (window or tokens)) & (seen[:, None, None] if seen is not None else True)
    k4, v4 = (x.double().repeat_interleave(2, 1) for x in (k, v))
    scores = (q.double() @ k4.transpose(-1, -2) / 4).masked_fill(~visible, -torch.inf)
    output = BANDED_ATTENTION.reference(q, k, v, seen, window)
    assert torch.allclose(output.double(), scores.softmax(-1).nan_to_num(0.0) @ v4, atol=1e-5)
    assert output.stride() == BANDED_ATTENTION.fake(q, k, v, seen, window).stride()


def test_a_band_is_refused_for_other_shapes() -> None:
    q, k, v = heads()
    seen = padded()

    def told(*arguments: object) -> str:
        return str(BANDED_ATTENTION.refusal(HOST, *arguments))

    assert told(q, k, v, seen, 3) == "None"
    assert "has other tokens than key" in told(q[:, :, 1:], k, v)
    assert "other batch or head_dim" in told(q[..., :8], k, v)
    assert "no multiple of key's 3" in told(q, k[:, :3], v[:, :3])
    assert "another shape than key" in told(q, k, v[..., :8])
    assert "of which the last isn't 1" in told(q, k.transpose(2, 3).contiguous().transpose(2, 3), v)
    assert "window is 0" in told(q, k, v, None, 0)
    assert "bool [batch or 1, keys]" in told(q, k, v, seen.int())
    assert "is not for keys" in told(q, k, v, seen[:, 1:])
    assert "has no kernel on ascend910b" in str(BANDED_ATTENTION.refusal(Target("ascend910b"), q, k, v))
