"""Calls of fused attention that a graph already holds lose what hides the future, in layers that declare it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # its usual name

from helpers import Compiled, compiled
from npu_fuse import Site, Target
from npu_fuse.runtime.ops.attention_mask import compressed_causal_mask
from npu_fuse.runtime.ops.register import register

register(Target())
npu = torch.ops.npu

Tensor = torch.Tensor
HEADS, KV_HEADS, HEAD_DIM, PAGE, PAGES = 4, 2, 128, 16, 8
COMPRESSED = compressed_causal_mask("cpu")
LENGTHS = [20, 11, 33]


class Layer(nn.Module):
    """One call of a fused op, as a serving framework makes it; `call` gives all its results."""

    def __init__(self, call: Callable[..., Any], attn_type: str = "encoder_only") -> None:
        super().__init__()
        self.call = call
        self.attn_type = attn_type

    def forward(self, *tensors: Tensor) -> Any:
        return self.call(*tensors)


def site(found: Compiled) -> Site:
    (only,) = [site for site in found.report.sites if site.kind == "encoder_only"]
    return only


def arguments(found: Compiled) -> dict[str, Any]:
    """Of the one call that ran, save its tensors."""
    (call,) = [n for n in found.after.graph.nodes if "npu_fus" in str(n.target)]
    return {name: value for name, value in call.kwargs.items() if not isinstance(value, torch.fx.Node)}


def check(call: Callable[..., Any], freed: Callable[..., Any], *tensors: Tensor) -> Compiled:
    """Compiles a call in a declared layer, and compares it with the call that it is to become."""
    found = compiled(Layer(call), *tensors)
    wanted, unfreed = freed(*tensors), call(*tensors)
    for value, expected, old in zip(found.output, wanted, unfreed, strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=0, equal_nan=True)
        assert value.numel() == 0 or not torch.equal(value, old), "it makes no difference"
    assert site(found).status == "lowered"
    kept = compiled(Layer(call, "decoder"), *tensors)
    for value, old in zip(kept.output, unfreed, strict=True):
        torch.testing.assert_close(value, old, rtol=0, atol=0, equal_nan=True)
    return found


# Extend: packed sequences ---------------------------------------------------------------------------------------------


def packed() -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(10, heads, HEAD_DIM, dtype=torch.float16) for heads in (HEADS, KV_HEADS, KV_HEADS))


def extend(q: Tensor, k: Tensor, v: Tensor, **masked: Any) -> Any:
    return npu.npu_fused_infer_attention_score(
        q,
        k,
        v,
        num_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        scale=HEAD_DIM**-0.5,
        input_layout="TND",
        actual_seq_lengths=[4, 6, 10],
        actual_seq_lengths_kv=[4, 6, 10],
        softmax_lse_flag=True,
        **masked,
    )


def test_extend_sees_its_whole_sequence_and_no_other() -> None:
    q, k, v = packed()
    found = check(lambda *t: extend(*t, atten_mask=COMPRESSED, sparse_mode=3), extend, q, k, v)
    assert "sparse_mode" not in arguments(found)
    assert site(found).params["old_mask"] == "causal (sparse_mode 3)"
    assert site(found).change == (
        "attn_type of the compiled module is encoder_only: its mask was causal (sparse_mode 3), and is none"
    )
    for start, stop in ((0, 4), (4, 6), (6, 10)):
        parts = (t[start:stop].transpose(0, 1)[None].double() for t in (q, k, v))
        alone = F.scaled_dot_product_attention(*parts, enable_gqa=True)[0].transpose(0, 1)
        torch.testing.assert_close(found.output[0][start:stop].double(), alone, atol=2e-3, rtol=0)


def test_a_window_reaches_as_far_ahead_as_back() -> None:
    windowed = {"atten_mask": COMPRESSED, "sparse_mode": 4, "pre_tokens": 2}
    found = check(
        lambda *t: extend(*t, **windowed, next_tokens=0), lambda *t: extend(*t, **windowed, next_tokens=2), *packed()
    )
    assert arguments(found)["next_tokens"] == 2
    assert site(found).params["old_mask"] == "a band (sparse_mode 4, pre_tokens 2, next_tokens 0)"
    assert site(found).params["new_mask"] == "a band (sparse_mode 4, pre_tokens 2, next_tokens 2)"


def test_a_window_without_an_end_goes() -> None:
    check(lambda *t: extend(*t, atten_mask=COMPRESSED, sparse_mode=4, next_tokens=0), extend, *packed())


@pytest.mark.parametrize(
    "masked", [{}, {"atten_mask": COMPRESSED, "sparse_mode": 4, "pre_tokens": 2, "next_tokens": 1}]
)
def test_what_sees_the_future_already_is_left_alone(masked: dict[str, Any]) -> None:
    tensors = packed()
    found = compiled(Layer(lambda *t: extend(*t, **masked)), *tensors)
    torch.testing.assert_close(found.output, extend(*tensors, **masked))
    assert not [site for site in found.report.sites if site.kind == "encoder_only"]


def test_a_window_without_a_middle_is_refused() -> None:
    tensors = packed()
    masked = {"atten_mask": COMPRESSED, "sparse_mode": 4, "pre_tokens": 2, "next_tokens": -1}
    found = compiled(Layer(lambda *t: extend(*t, **masked)), *tensors)
    torch.testing.assert_close(found.output, extend(*tensors, **masked), equal_nan=True)
    assert site(found).reason == "a query doesn't see itself (next_tokens -1), so its window has no middle"


# Verify and draft extend: packed queries over a paged cache -----------------------------------------------------------


def paged(width: int = 4) -> tuple[Tensor, ...]:
    q = torch.randn(width * len(LENGTHS), HEADS, HEAD_DIM, dtype=torch.float16)
    k, v = (torch.randn(PAGES, PAGE, KV_HEADS * HEAD_DIM, dtype=torch.float16) for _ in range(2))
    return q, k, v, torch.tensor([[3, 1, 0], [5, 0, 0], [2, 4, 7]], dtype=torch.int32)


def over_pages(q: Tensor, k: Tensor, v: Tensor, table: Tensor, width: int = 4, **masked: Any) -> Any:
    return npu.npu_fused_infer_attention_score(
        q,
        k,
        v,
        block_table=table,
        block_size=PAGE,
        num_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        input_layout="TND",
        scale=HEAD_DIM**-0.5,
        actual_seq_lengths=[width, 2 * width, 3 * width],
        actual_seq_lengths_kv=LENGTHS,
        **masked,
    )


@pytest.mark.parametrize("width", [4, 8], ids=["verify", "draft extend"])
def test_a_block_of_drafts_sees_all_of_itself_and_its_context(width: int) -> None:
    causal = {"atten_mask": COMPRESSED, "sparse_mode": 3}
    found = check(
        lambda *t: over_pages(*t, width=width, **causal), lambda *t: over_pages(*t, width=width), *paged(width)
    )
    q, k, v, table = paged(width)
    pages = [cache[table[0].long()].flatten(0, 1)[: LENGTHS[0]].unflatten(1, (KV_HEADS, -1)) for cache in (k, v)]
    alone = F.scaled_dot_product_attention(
        q[:width].transpose(0, 1)[None].double(), *(p.transpose(0, 1)[None].double() for p in pages), enable_gqa=True
    )
    value = found.function(q, k, v, table)[0][:width].double()
    torch.testing.assert_close(value, alone[0].transpose(0, 1), atol=2e-3, rtol=0)


def test_the_second_version_is_freed_too() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, table: Tensor, **masked: Any) -> Any:
        return npu.npu_fused_infer_attention_score_v2(
            q,
            k,
            v,
            block_table=table,
            block_size=PAGE,
            num_query_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            input_layout="TND",
            softmax_scale=HEAD_DIM**-0.5,
            actual_seq_qlen=[4, 8, 12],
            actual_seq_kvlen=LENGTHS,
            **masked,
        )

    window = {"atten_mask": COMPRESSED, "sparse_mode": 4, "pre_tokens": 5}
    check(lambda *t: call(*t, **window, next_tokens=0), lambda *t: call(*t, **window, next_tokens=5), *paged())


# Extend per request: batches ------------------------------------------------------------------------------------------


def batch(tokens: int = 5, keys: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((2, tokens, HEADS, 64), *((2, keys, KV_HEADS, 64),) * 2)
    return tuple(torch.randn(shape, dtype=torch.float16) for shape in shapes)


def batched(q: Tensor, k: Tensor, v: Tensor, **masked: Any) -> Any:
    return npu.npu_fused_infer_attention_score(
        q, k, v, num_heads=HEADS, num_key_value_heads=KV_HEADS, scale=0.125, input_layout="BSND", **masked
    )


def future(rows: int, keys: int, batch: int = 1) -> Tensor:
    return (torch.arange(keys) > torch.arange(rows)[:, None] + keys - rows).expand(batch, 1, rows, keys)


def test_a_whole_mask_goes() -> None:
    check(lambda *t: batched(*t, atten_mask=future(5, 7).contiguous()), batched, *batch())


def test_of_a_whole_mask_padding_stays() -> None:
    padding = torch.tensor([[False] * 7, [True, True] + [False] * 5])[:, None, None, :]

    def call(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Any:
        return batched(q, k, v, atten_mask=(padding | future(5, 7, 2)).contiguous())

    def freed(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Any:
        return batched(q, k, v, atten_mask=padding.expand(2, 1, 5, 7).contiguous())

    check(call, freed, *batch(), padding)


def test_a_whole_mask_that_is_given_is_refused() -> None:
    tensors = (*batch(), future(5, 7).contiguous())
    found = compiled(Layer(lambda q, k, v, mask: batched(q, k, v, atten_mask=mask)), *tensors)
    torch.testing.assert_close(found.output, batched(*tensors[:3], atten_mask=tensors[3]))
    assert site(found).reason is not None
    assert site(found).reason.startswith("the causal part of its mask can't be told from the rest: ")


@pytest.mark.parametrize(
    "masked",
    [{"atten_mask": torch.zeros(2, 1, 1, 7, dtype=torch.bool)}, {"atten_mask": COMPRESSED, "sparse_mode": 3}],
)
def test_a_query_of_one_token_has_no_future(masked: dict[str, Any]) -> None:
    tensors = batch(tokens=1)
    found = compiled(Layer(lambda *t: batched(*t, **masked)), *tensors)
    torch.testing.assert_close(found.output, batched(*tensors, **masked))
    assert not [site for site in found.report.sites if site.kind == "encoder_only"]


def test_a_call_that_the_contract_does_not_allow_stays() -> None:
    tensors = packed()
    causal = {"atten_mask": COMPRESSED, "sparse_mode": 3}
    found = compiled(Layer(lambda *t: extend(*t, **causal)), *tensors, target=Target("ascend310p"))
    torch.testing.assert_close(found.output, extend(*tensors, **causal))
    assert site(found).status == "refused"
    assert site(found).reason is not None
    assert "has no kernel on ascend310p" in site(found).reason


def test_a_hint_for_a_call() -> None:
    tensors = packed()
    layer = Layer(lambda *t: extend(*t, atten_mask=COMPRESSED, sparse_mode=3), "decoder")
    layer.is_causal = False
    found = compiled(layer, *tensors)
    assert site(found).status == "missed"
    assert site(found).reason is not None
    assert site(found).reason.startswith(
        "is_causal of the compiled module is False, and its mask is causal (sparse_mode 3)"
    )


@pytest.mark.parametrize(
    "hidden",
    [
        lambda i, j, ids: j <= i - 3,
        lambda i, j, ids: j // 4 != i // 4,
        lambda i, j, ids: ids[:, None, None, :] != ids[:, None, :, None],
    ],
)
def test_a_whole_mask_that_hides_more_is_refused(hidden: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Any:
        i, j = torch.arange(7)[:, None], torch.arange(7)
        mask = ((j > i) | hidden(i, j, ids)).expand(2, 1, 7, 7)
        return batched(q, k, v, atten_mask=mask.contiguous())

    tensors = (*batch(tokens=7), torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 2, 2]]))
    found = compiled(Layer(call), *tensors)
    torch.testing.assert_close(found.output, call(*tensors))
    assert site(found).reason.startswith("its mask hides more than the future and padding (")


def test_a_band_of_a_whole_mask_is_refused() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return batched(q, k, v, atten_mask=future(5, 7).contiguous(), pre_tokens=3)

    tensors = batch()
    found = compiled(Layer(call), *tensors)
    torch.testing.assert_close(found.output, call(*tensors))
    assert site(found).reason.startswith("it has a mask, and of that only a band: pre_tokens and next_tokens are (3,")
