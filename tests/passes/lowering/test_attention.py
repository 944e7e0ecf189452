"""Attention as one fused op: its layout, mode, mask and heads; numbers against float64; and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attentions
import pytest
import torch
from attention_cases import assert_near
from attentions import BATCH, HEAD_DIM, HEADS, KV_HEADS, SCALE, TOKENS, attend, eager, sdpa
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from helpers import Compiled, compiled, refusal, same
from npu_fuse.passes.report import Site
from npu_fuse.patterns.masks.integers import Linear
from npu_fuse.runtime.target import Target

Tensor = torch.Tensor
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INFER = "npu::npu_fused_infer_attention_score"
TRAINING = "npu::npu_fusion_attention_v3"
PROMPT = "npu::npu_prompt_flash_attention"
INF = torch.inf


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = BF16, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def qkv(
    q_len: int = TOKENS,
    kv_len: int | None = None,
    *,
    batch: int = BATCH,
    heads: int = HEADS,
    kv_heads: int | None = None,
    head_dim: int = HEAD_DIM,
    dtype: torch.dtype = BF16,
) -> list[Tensor]:
    of_kv = (batch, kv_heads or heads, kv_len or q_len, head_dim)
    return tensors((batch, heads, q_len, head_dim), of_kv, of_kv, dtype=dtype)


def by_token(x: Tensor) -> Tensor:
    """[batch, tokens, heads * head_dim], as projections give it."""
    return x.transpose(1, 2).flatten(2)


def by_head(x: Tensor, heads: int = HEADS) -> Tensor:
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def sites(found: Compiled) -> list[Site]:
    return [site for site in found.report.sites if site.kind == "attention"]


def calls(found: Compiled) -> list[dict[str, Any]]:
    """The arguments of the fused ops that ran, by name."""
    made = []
    for node in found.after.graph.nodes:
        if str(node.target).partition(".")[2].partition(".")[0] in (
            "npu_fused_infer_attention_score",
            "npu_fusion_attention_v3",
            "npu_prompt_flash_attention",
        ):
            names = [argument.name for argument in node.target._schema.arguments]
            made.append({**dict(zip(names, node.args, strict=False)), **node.kwargs})
    return made


def wide(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def check(
    function: Callable[..., Any], *inputs: Tensor, like: Callable[..., Any] | None = None, **settings: Any
) -> Compiled:
    """Compiles attention, which becomes a fused op, with float64's numbers but for one rounding, and eager's strides.

    Args:
        function: gives one tensor.
        *inputs: what it is called with.
        like: the same in float64, where `function` can't be called with that.
        **settings: of the backend.
    """
    found = compiled(function, *inputs, **settings)
    assert [site.status for site in sites(found)] == ["lowered"], [site.reason for site in sites(found)]
    with torch.no_grad():
        wanted = function(*inputs)
        truth = (like or function)(*map(wide, inputs))
    assert found.output.dtype == wanted.dtype
    assert strides(found.output) == strides(wanted)
    assert_near(found.output, truth, wanted.dtype)
    return found


def check_each(functions: Iterable[Callable[..., Tensor]], *inputs: Tensor, **settings: Any) -> list[dict[str, Any]]:
    """As `check`, for several functions in one graph.

    Returns:
        The arguments of the op of inference that each becomes.
    """
    functions = list(functions)
    found = compiled(lambda *inputs: [function(*inputs) for function in functions], *inputs, **settings)
    assert found.report.ops == {INFER: len(functions)}, [site.reason for site in sites(found)]
    with torch.no_grad():
        for out, function in zip(found.output, functions, strict=True):
            wanted = function(*inputs)
            assert strides(out) == strides(wanted)
            assert_near(out, function(*map(wide, inputs)), wanted.dtype)
    return calls(found)


def strides(tensor: Tensor) -> list[int]:
    """Of the axes along which there is a next element."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def refused(function: Callable[..., Any], *inputs: Tensor, **settings: Any) -> str:
    """The reason why attention is left as it is, with eager's numbers."""
    found = compiled(function, *inputs, **settings)
    (site,) = sites(found)
    assert site.status in ("refused", "missed")
    assert not calls(found)
    with torch.no_grad():
        wanted = function(*inputs)
    torch.testing.assert_close(found.output, wanted, rtol=0, atol=0, equal_nan=True)
    return site.reason or ""


def of_infer(found: Compiled) -> dict[str, Any]:
    """The arguments of the one call of the op of inference."""
    assert found.report.ops == {INFER: 1}
    (arguments,) = calls(found)
    return arguments


def mask_of(found: Compiled, arguments: dict[str, Any]) -> Tensor:
    """The mask that a call is given, as it is when the graph runs."""
    seen: list[Tensor] = []

    class Watching(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            value = super().run_node(n)
            if n is arguments["atten_mask"]:
                seen.append(value)
            return value

    with torch.no_grad():
        Watching(found.after).run(*found.inputs)
    return seen[0]


def copies(found: Compiled) -> list[str]:
    """The ops that copy."""
    return [
        op for op in found.targets() if op in ("aten.clone.default", "aten._unsafe_view.default", "aten.copy.default")
    ]


# Layouts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("function", [sdpa, eager])
def test_heads_before_tokens_are_given_so(function: attentions.Attention, dtype: torch.dtype) -> None:
    found = check(function, *qkv(dtype=dtype))
    arguments = of_infer(found)
    assert arguments["input_layout"] in ("BNSD", "BNSD_BSND")  # sdpa's result lies tokens first
    assert arguments["num_heads"] == HEADS
    assert arguments["scale"] == pytest.approx(SCALE)
    assert not {"atten_mask", "sparse_mode", "num_key_value_heads", "inner_precise", "pse_shift"} & set(arguments)
    assert not copies(found)


@pytest.mark.parametrize("function", [sdpa, eager])
def test_tokens_before_heads_are_given_so_and_given_back_so(function: attentions.Attention) -> None:
    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return function(*map(by_head, (q, k, v))).transpose(1, 2).contiguous().flatten(2)

    found = check(block, *map(by_token, qkv()))
    assert of_infer(found)["input_layout"] == "BSND"
    assert not copies(found)
    assert found.report.launches_after == 1


@pytest.mark.parametrize("function", [sdpa, eager])
def test_a_result_that_is_wanted_tokens_first_is_given_so(function: attentions.Attention) -> None:
    found = check(lambda q, k, v: function(q, k, v).transpose(1, 2).contiguous(), *qkv())
    assert of_infer(found)["input_layout"] == "BNSD_BSND"
    assert not copies(found)


def test_a_result_that_is_wanted_in_both_orders() -> None:
    def block(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = eager(q, k, v)
        return out.transpose(1, 2).contiguous(), out + 1

    inputs = qkv()
    found = compiled(block, *inputs)
    assert found.report.ops == {INFER: 1}
    truth = eager(*map(wide, inputs))
    assert_near(found.output[0], truth.transpose(1, 2), BF16)
    assert found.output[0].is_contiguous()
    torch.testing.assert_close(found.output[1].double(), truth + 1, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize(
    "copied",
    [
        lambda out: (out.transpose(1, 2).contiguous(), out.transpose(1, 2).contiguous()),
        lambda out: (
            out.transpose(1, 2).contiguous(),
            out.transpose(1, 2).clone(memory_format=torch.contiguous_format),
        ),
        lambda out: (out.float().to(out.dtype), out.float().to(out.dtype)),
    ],
)
def test_copies_of_a_result_stay_apart(copied: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return copied(eager(q, k, v))

    found = compiled(both, *qkv())
    assert found.report.ops == {INFER: 1}
    first, second = found.output
    assert torch.equal(first, second)
    first.zero_()
    assert second.all()


def test_rounded_results_stay_apart() -> None:
    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = eager(q.float(), k.float(), v.float())
        return out.to(q.dtype), out.to(q.dtype)

    found = compiled(both, *qkv())
    first, second = found.output
    first.zero_()
    assert second.all()


def test_the_layout_is_that_of_most() -> None:
    q, k, v = qkv()
    found = check(lambda q, k, v: eager(q, by_head(k), by_head(v)), q, by_token(k), by_token(v))
    assert of_infer(found)["input_layout"] == "BSND"
    found = check(lambda q, k, v: eager(q, k, by_head(v)), q, k, by_token(v))
    assert of_infer(found)["input_layout"] == "BNSD"
    assert len(copies(found)) == 1


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("function", [sdpa, eager])
def test_tokens_before_the_batch_are_given_so(function: attentions.Attention, dtype: torch.dtype) -> None:
    """As in `nn.MultiheadAttention`; only the op of training takes that, and no copy is needed for it."""

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(2, (-1, HEAD_DIM)).permute(1, 2, 0, 3) for x in (q, k, v))
        return function(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)).permute(2, 0, 1, 3).flatten(2)

    q, k, v = (t.permute(2, 0, 1, 3).flatten(2) for t in qkv(5, 7, kv_heads=KV_HEADS, dtype=dtype))
    found = check(block, q, k, v)
    (arguments,) = calls(found)
    assert found.report.ops == {TRAINING: 1}
    assert (arguments["input_layout"], arguments["head_num"]) == ("SBH", HEADS)
    assert found.report.launches_after == 1


def test_a_layer_of_torch_has_no_more_launches_than_before() -> None:
    layer = nn.MultiheadAttention(32, 4, batch_first=True, dtype=BF16).eval()
    (x,) = tensors((BATCH, TOKENS, 32))
    report = compiled(lambda x: layer(x, x, x, need_weights=False)[0], x).report
    assert report.ops == {TRAINING: 1}
    assert report.launches_after == report.launches_before
    report = compiled(layer, x, x, x).report
    assert report.launches_after == report.launches_before


def test_tokens_before_a_batch_of_any_size() -> None:
    layer = nn.MultiheadAttention(32, 4, dtype=BF16).eval()
    x, y = tensors((TOKENS, BATCH, 32), (TOKENS + 1, BATCH, 32))
    for tensor in (x, y):
        torch._dynamo.mark_dynamic(tensor, 0)
        torch._dynamo.mark_dynamic(tensor, 1)
    found = check(lambda x: layer(x, x, x, need_weights=False)[0], x, like=lambda x: layer.double()(x, x, x)[0])
    (arguments,) = calls(found)
    assert arguments["input_layout"] == "SBH"
    layer.to(BF16)
    (site,) = sites(compiled(lambda x, y: layer(x, y, y, need_weights=False)[0], x, y))
    assert "may be empty" in str(site.reason)  # the two batches may differ


def test_of_one_sequence_tokens_are_first_anyway() -> None:
    (x,) = tensors((TOKENS, 1, HEADS * HEAD_DIM))
    found = check(lambda x: eager(*(t.unflatten(2, (-1, HEAD_DIM)).permute(1, 2, 0, 3) for t in (x, x * 2, x * 3))), x)
    assert of_infer(found)["input_layout"] == "BSND"


def test_parts_of_one_projection_are_copied() -> None:
    x = torch.cat([by_token(t) for t in qkv()], -1)
    found = check(lambda x: eager(*map(by_head, x.chunk(3, -1))), x)
    assert len(copies(found)) == 3


@pytest.mark.parametrize("spelling", attentions.MERGED)
@pytest.mark.parametrize("tokens_first", [False, True])
def test_batch_and_heads_in_one_axis(spelling: str, tokens_first: bool) -> None:
    function = attentions.MERGED[spelling]
    inputs = qkv()
    if tokens_first:
        found = check(lambda *x: function(*map(by_head, x)), *map(by_token, inputs))
    else:
        found = check(function, *inputs)
    assert of_infer(found)["num_heads"] == HEADS


@pytest.mark.parametrize("spelling", attentions.MERGED)
def test_batch_and_heads_in_one_axis_behind_tokens(spelling: str) -> None:
    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        by_heads = (x.unflatten(2, (HEADS, -1)).permute(1, 2, 0, 3) for x in (q, k, v))
        return attentions.MERGED[spelling](*by_heads)

    found = check(block, *(t.permute(2, 0, 1, 3).flatten(2) for t in qkv(5, 7)))
    (arguments,) = calls(found)
    assert arguments["input_layout"] == "SBH"


@pytest.mark.parametrize("function", [sdpa, lambda q, k, v: attend(q @ k.mT * SCALE, v)])
def test_attention_without_heads_has_one(function: attentions.Attention) -> None:
    found = check(function, *tensors(*[(BATCH, TOKENS, HEAD_DIM)] * 3))
    assert of_infer(found)["num_heads"] == 1


def test_transposed_keys_are_brought_back() -> None:
    q, k, v = qkv(5, 7)
    check(lambda q, k, v: attend(q @ k * SCALE, v), q, k.mT.contiguous(), v)


VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x[:, :, 1:],
    lambda x: x[:, :, ::2],
    lambda x: x[:, 1:3],
    lambda x: x[1:],
    lambda x: x.flip(2),
    lambda x: x[:1].expand(BATCH, -1, -1, -1),
    lambda x: x[:, :, :1].expand(-1, -1, TOKENS, -1),
    lambda x: x.transpose(0, 1),
]


@pytest.mark.parametrize("function", [sdpa, eager])
def test_operands_may_be_any_views(function: attentions.Attention) -> None:
    check_each([lambda q, k, v, view=view: function(view(q), view(k), view(v)) for view in VIEWS], *qkv())
    check_each([lambda q, k, v, view=view: function(q[:1], view(k)[:1], view(v)[:1]) for view in VIEWS[4:7]], *qkv())


def test_a_result_used_by_reference_keeps_its_strides() -> None:
    found = check(lambda q, k, v: eager(q, k, v).transpose(1, 2), *qkv())
    assert not found.output.is_contiguous()


# Heads ---------------------------------------------------------------------------------------------------------------


def test_heads_are_not_repeated() -> None:
    for arguments in check_each(attentions.GROUPED.values(), *qkv(kv_heads=KV_HEADS)):
        assert arguments["num_key_value_heads"] == KV_HEADS
        assert arguments["key"].op == arguments["value"].op == "placeholder"


def test_one_head_for_all() -> None:
    for arguments in check_each(attentions.ONE_KV_HEAD.values(), *qkv(kv_heads=1)):
        assert arguments["num_key_value_heads"] == 1


def test_tiled_heads_stay_as_they_are() -> None:
    def tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return eager(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))

    assert "num_key_value_heads" not in of_infer(check(tiled, *qkv(kv_heads=KV_HEADS)))


def test_many_heads() -> None:
    assert of_infer(check(eager, *qkv(3, batch=1, heads=256)))
    assert "is 257 (the kernel takes 1 to 256)" in refused(eager, *qkv(3, batch=1, heads=257))


@pytest.mark.parametrize(("group", "op"), [(64, INFER), (65, TRAINING)])
def test_many_heads_in_one_group(group: int, op: str) -> None:
    found = check(lambda q, k, v: sdpa(q, k, v, enable_gqa=True), *qkv(3, batch=1, heads=group, kv_heads=1))
    assert set(found.report.ops) == {op}


@pytest.mark.parametrize(("head_dim", "op"), [(16, INFER), (24, TRAINING), (512, INFER), (528, TRAINING)])
def test_head_dims(head_dim: int, op: str) -> None:
    assert set(check(sdpa, *qkv(head_dim=head_dim)).report.ops) == {op}


def test_values_narrower_than_keys() -> None:
    q, k, v = qkv()
    assert set(check(sdpa, q, k, v[..., :8].contiguous()).report.ops) == {TRAINING}
    refused(sdpa, q[..., :8].contiguous(), k[..., :8].contiguous(), v)


# Types ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [sdpa, eager, attentions.CAUSAL["where"][0]])
def test_float32_is_another_op(function: attentions.Attention) -> None:
    found = check(function, *qkv(dtype=FP32))
    assert set(found.report.ops) == {TRAINING}


def test_float64_is_finer_than_any_op() -> None:
    assert "float64" in refused(sdpa, *qkv(dtype=torch.float64))


def test_a_coarser_step_than_the_result_is_the_models_own() -> None:
    def coarse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax((q @ k.mT * SCALE).bfloat16(), -1).to(v.dtype) @ v

    assert "rounds to torch.bfloat16" in refused(coarse, *qkv(dtype=FP16))
    assert "rounds to torch.float16" in refused(
        lambda q, k, v: torch.softmax(q @ k.mT * SCALE, -1).half().float() @ v, *qkv(dtype=FP32)
    )


def test_all_in_float32_and_rounded_at_the_end() -> None:
    def fine(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return eager(q.float(), k.float(), v.float()).to(q.dtype)

    assert of_infer(check(fine, *qkv(), like=eager))["query"].op == "placeholder"


def test_a_rounding_on_the_way_into_attention_stays() -> None:
    q, k, v = qkv(dtype=FP32)

    def rounded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q.bfloat16(), k.bfloat16(), v.bfloat16())

    check(rounded, 30 * q, k, v, like=lambda q, k, v: sdpa(*(x.bfloat16().double() for x in (q, k, v))))


# Masks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("q_len", "kv_len", "mode"), [(6, 6, 3), (4, 7, 2), (7, 4, 2)])
def test_causal_is_a_mode(q_len: int, kv_len: int, mode: int) -> None:
    for arguments in check_each((function for function, _ in attentions.CAUSAL.values()), *qkv(q_len, kv_len)):
        assert arguments["sparse_mode"] == mode
        assert arguments["atten_mask"].op == "get_attr"
        assert not {"pre_tokens", "next_tokens", "inner_precise"} & set(arguments)


@pytest.mark.parametrize("spelling", ["sdpa, bool", "masked_fill", "where, filled"])
def test_of_a_mask_that_is_a_mode_nothing_is_left(spelling: str) -> None:
    found = check(attentions.CAUSAL[spelling][0], *qkv())
    assert mask_of(found, of_infer(found)).shape == (2048, 2048)
    assert not {"aten.tril.default", "aten.where.self", "aten.ones.default"} & set(found.targets())


Positions = Callable[[Tensor, Tensor], Tensor]


def with_positions(seen: Positions, function: attentions.Attention = sdpa) -> attentions.Attention:
    """Attention whose mask is computed from positions, the last query at the last key."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        key = torch.arange(k.shape[2])
        mask = seen(torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2], key)
        return function(q, k, v, mask if function is sdpa else torch.where(mask, 0.0, -INF).to(q.dtype))

    return attention


# name: (seen, q_len, kv_len, mode, pre_tokens, next_tokens)
MODES: dict[str, tuple[Positions, int, int, int, int | None, int | None]] = {
    "causal": (lambda q, k: k <= q, 6, 6, 3, None, None),
    "causal, keys before": (lambda q, k: k <= q, 4, 7, 3, None, None),
    "causal from the first key": (lambda q, k: k <= q - 3, 4, 7, 2, None, None),
    "window": (lambda q, k: (k <= q) & (k > q - 3), 6, 6, 4, 2, 0),
    "window, keys before": (lambda q, k: (k <= q) & (q - k < 3), 4, 7, 4, 2, 0),
    "window from the first key": (lambda q, k: (k <= q - 3) & (k > q - 6), 4, 7, 4, 5, -3),
    "both sides": (lambda q, k: (q - k).abs() <= 2, 6, 6, 4, 2, 2),
    "ahead": (lambda q, k: (k >= q) & (k < q + 2), 6, 6, 4, 0, 1),
    "no later than one ahead": (lambda q, k: k <= q + 1, 6, 6, 4, 2**31 - 1, 1),
    "from two before": (lambda q, k: k >= q - 2, 6, 6, 4, 2, 2**31 - 1),
}


@pytest.mark.parametrize("name", MODES)
def test_a_band_is_a_mode(name: str) -> None:
    seen, q_len, kv_len, mode, pre_tokens, next_tokens = MODES[name]
    for arguments in check_each([with_positions(seen), with_positions(seen, eager)], *qkv(q_len, kv_len)):
        assert arguments["sparse_mode"] == mode
        assert (arguments.get("pre_tokens"), arguments.get("next_tokens")) == (pre_tokens, next_tokens)


def test_a_mask_that_hides_nothing_is_dropped() -> None:
    arguments = of_infer(check(with_positions(lambda q, k: k < 100 + q), *qkv()))
    assert "atten_mask" not in arguments


# What modes don't say: name: (seen, kind).
TABLES: dict[str, tuple[Positions, str]] = {
    "chunks": (lambda q, k: (q // 4 == k // 4) & (k <= q), "chunked"),
    "two windows": (lambda q, k: (k == 0) | ((k <= q) & (k > q - 2)), "other"),
    "every other key": (lambda q, k: (q - k) % 2 == 0, "other"),
}


@pytest.mark.parametrize("name", TABLES)
def test_another_mask_is_given_inverted(name: str) -> None:
    seen, kind = TABLES[name]
    found = check(with_positions(seen), *qkv())
    (site,) = sites(found)
    assert site.params["mask"] == kind
    arguments = of_infer(found)
    position = torch.arange(TOKENS)
    assert torch.equal(mask_of(found, arguments), ~seen(position[:, None], position)[None, None])
    assert "sparse_mode" not in arguments


def padding(batch: int = BATCH, keys: int = TOKENS) -> Tensor:
    """[batch, keys], True for tokens that are there: each sequence has others."""
    return torch.arange(keys) >= torch.arange(1, batch + 1)[:, None]


def mask_inputs() -> dict[str, Tensor]:
    """Masks of bool that are given to the model, of all shapes that they have."""
    table = torch.rand(TOKENS, TOKENS, generator=torch.Generator().manual_seed(1)) < 0.5
    table |= torch.eye(TOKENS, dtype=torch.bool)
    by_entry = table | torch.rand(BATCH, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(2)).lt(0.3)
    return {
        "[1, keys]": table[2:3],
        "[queries, 1]": torch.ones(TOKENS, 1, dtype=torch.bool),
        "[queries, keys]": table,
        "[1, queries, keys]": table[None],
        "[1, 1, queries, keys]": table[None, None],
        "[batch, 1, 1, keys]": padding()[:, None, None],
        "[batch, 1, queries, keys]": by_entry,
    }


@pytest.mark.parametrize("name", mask_inputs())
def test_a_mask_from_outside_is_given_inverted_for_all_heads(name: str) -> None:
    mask = mask_inputs()[name]
    found = check(sdpa, *qkv(), mask)
    arguments = of_infer(found)
    hidden = mask_of(found, arguments)
    assert hidden.shape[1:] == (1, TOKENS, TOKENS)
    assert torch.equal(hidden.expand(BATCH, 1, -1, -1), ~mask.expand(BATCH, 1, TOKENS, TOKENS))
    assert hidden.is_contiguous()
    assert arguments["inner_precise"] == 2  # a query may see no key, and then gets zeros


@pytest.mark.parametrize("heads", [HEADS, BATCH])
def test_a_mask_for_each_head_is_refused(heads: int) -> None:
    mask = torch.rand(heads, TOKENS, TOKENS, generator=torch.Generator().manual_seed(0)) < 0.5
    assert "one for each of" in refused(sdpa, *qkv(heads=heads), mask[None])
    assert "one for each of" in refused(sdpa, *qkv(heads=heads), mask)  # of heads, though there are as many batches


def test_a_mask_that_is_expanded_to_all_heads_is_one() -> None:
    mask = mask_inputs()["[batch, 1, queries, keys]"]
    found = check(lambda q, k, v, mask: sdpa(q, k, v, mask.expand(-1, HEADS, -1, -1)), *qkv(), mask)
    assert torch.equal(mask_of(found, of_infer(found)), ~mask)
    check(sdpa, *qkv(), mask.expand(-1, HEADS, -1, -1))
    assert "one for each of" in refused(sdpa, *qkv(), mask.repeat(1, HEADS, 1, 1))


def test_a_float_mask_that_only_hides_is_given_as_bools_though_what_it_hides_is_not_known() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        mask = torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, -INF)
        return sdpa(q, k, v, mask)

    hidden = torch.rand(TOKENS, TOKENS, generator=torch.Generator().manual_seed(0)) < 0.5
    hidden[1] = True  # a query that sees no key
    (found,) = calls(check(function, *qkv(), hidden))
    assert found["atten_mask"].meta["val"].dtype == torch.bool


def test_what_hides_by_a_number_of_an_input_is_a_bias() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, number: Tensor) -> Tensor:
        mask = torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, number)
        return sdpa(q, k, v, mask)

    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    assert "numbers are added" in refused(function, *qkv(), hidden, torch.tensor(-2.0, dtype=BF16))


def test_a_mask_of_each_batch_where_there_are_no_heads() -> None:
    q, k, v = tensors(*[(BATCH, TOKENS, HEAD_DIM)] * 3)
    mask = mask_inputs()["[batch, 1, queries, keys]"][:, 0]
    found = check(sdpa, q, k, v, mask)
    assert mask_of(found, of_infer(found)).shape == (BATCH, 1, TOKENS, TOKENS)


def test_padding_and_causal_in_one_mask() -> None:
    def padded(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
        position = torch.arange(TOKENS)
        causal = position[:, None] >= position
        mask = causal & kept[:, None, None].bool()
        return sdpa(q, k, v, mask | torch.eye(TOKENS, dtype=torch.bool))

    found = check(padded, *qkv(), padding().long())
    assert of_infer(found)["atten_mask"].op != "get_attr"


def test_packed_sequences_of_one_batch() -> None:
    def packed(q: Tensor, k: Tensor, v: Tensor, segments: Tensor) -> Tensor:
        return sdpa(q, k, v, (segments[:, None, :, None] == segments[:, None, None, :]))

    check(packed, *qkv(), torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]]))


def test_layers_share_one_mask() -> None:
    def layers(x: Tensor, kept: Tensor) -> Tensor:
        mask = kept[:, None, None] | torch.eye(TOKENS, dtype=torch.bool)
        for _ in range(3):
            x = sdpa(x, x, x, mask)
        return x

    x, *_ = qkv()
    found = compiled(layers, x, padding())
    assert found.report.ops == {INFER: 3}
    assert found.targets().count("aten.logical_not.default") == 1
    assert len({arguments["atten_mask"] for arguments in calls(found)}) == 1
    torch.testing.assert_close(found.output, layers(x, padding()), rtol=0.05, atol=0.05)


def test_layers_share_one_constant() -> None:
    def layers(x: Tensor) -> Tensor:
        x = sdpa(x, x, x, is_causal=True)
        x = sdpa(x, x, x, attentions.seen(x, x))
        return with_positions(lambda q, k: (k <= q) & (k > q - 2))(x, x, x)

    x, *_ = qkv()
    found = compiled(layers, x)
    assert [arguments["sparse_mode"] for arguments in calls(found)] == [3, 3, 4]
    assert sum(node.op == "get_attr" for node in found.after.graph.nodes) == 1
    assert sum(buffer.numel() for buffer in found.after.buffers()) == 2048 * 2048


def test_one_mask_for_other_numbers_of_queries_and_keys() -> None:
    """The mask of one query is broadcast to each of them."""

    def both(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
        mask = kept[:, None, None]
        return torch.cat([sdpa(q, k, v, mask), sdpa(q[:, :, :3], k, v, mask)], 2)

    found = compiled(both, *qkv(), padding())
    assert found.report.ops == {INFER: 2}
    assert_near(found.output, both(*map(wide, qkv()), padding()), BF16)


# Queries that see no key ---------------------------------------------------------------------------------------------


def blank() -> Tensor:
    mask = torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool)
    mask[0, 0, 2] = False
    mask[1, 0, :, 1:4] = False
    return mask


def test_a_query_that_sees_no_key_gets_zeros_where_the_model_gives_them() -> None:
    found = check(sdpa, *qkv(), blank())
    assert of_infer(found)["inner_precise"] == 2
    assert not found.output[0, :, 2].any()


@pytest.mark.parametrize(("number", "given"), [(-INF, "NaN"), (torch.finfo(BF16).min, "the mean of all values")])
def test_a_query_that_sees_no_key_is_no_matter_of_the_op_elsewhere(number: float, given: str) -> None:
    def filled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return attend((q @ k.mT * SCALE).masked_fill(~mask, number), v)

    assert f"the model gives {given} to one that sees none" in refused(filled, *qkv(), blank())


@pytest.mark.parametrize("function", [sdpa, eager])
def test_more_queries_than_keys_leave_the_first_without_one(function: attentions.Attention) -> None:
    attention = with_positions(lambda q, k: k <= q, function)
    if function is eager:
        assert "NaN" in refused(attention, *qkv(7, 4))
        return
    found = check(attention, *qkv(7, 4))
    assert not found.output[:, :, :3].any()
    assert found.output[:, :, 3:].all()


def test_sdpa_with_numbers_that_may_be_infinite_in_a_whole_row_is_refused() -> None:
    bias = torch.zeros(1, HEADS, TOKENS, TOKENS, dtype=BF16).masked_fill(~blank()[:1], -INF)
    assert "may be -inf in a whole row" in refused(sdpa, *qkv(), bias)
    assert "may be -inf in a whole row" in refused(lambda q, k, v, x: sdpa(q, k, v, x.log()), *qkv(), bias.exp())

    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Buffer(bias)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return sdpa(q, k, v, self.bias)

    refused(Buffered(), *qkv())


# One query -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [sdpa, eager])
def test_one_query_sees_all(function: attentions.Attention) -> None:
    arguments = of_infer(check(function, *qkv(1, 7)))
    assert not {"atten_mask", "sparse_mode"} & set(arguments)
    assert arguments["input_layout"] in ("BNSD", "BSND")


def test_one_query_with_a_mask_is_given_the_tensor() -> None:
    found = check(with_positions(lambda q, k: (k <= q) & (k > q - 3)), *qkv(1, 7))
    assert mask_of(found, of_infer(found)).tolist() == [[[[True] * 4 + [False] * 3]]]


def test_one_query_that_may_see_no_key_is_another_op() -> None:
    mask = torch.tensor([[True, False, True], [False] * 3])[:, None, None]
    found = check(sdpa, *qkv(1, 3), mask)
    assert set(found.report.ops) == {TRAINING}
    assert not found.output[1].any()


def test_the_causal_flag_of_one_query_leaves_it_the_first_key() -> None:
    check(lambda q, k, v: sdpa(q, k, v, is_causal=True), *qkv(1, 5))


def test_one_key() -> None:
    for q_len in (1, 3):
        check(sdpa, *qkv(q_len, 1))
        check(eager, *qkv(q_len, 1))
    check(attentions.CAUSAL["masked_fill"][0], *qkv(3, 1))


class Cached(nn.Module):
    """Decoding with a cache of a fixed size, into which keys and values are written before they are read."""

    def __init__(self, places: int = 8, kv_heads: int = KV_HEADS) -> None:
        super().__init__()
        self.keys = nn.Buffer(torch.zeros(BATCH, kv_heads, places, HEAD_DIM, dtype=BF16))
        self.values = nn.Buffer(torch.zeros(BATCH, kv_heads, places, HEAD_DIM, dtype=BF16))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        seen = torch.arange(self.keys.shape[2]) <= position[:, None]
        return sdpa(q, self.keys, self.values, seen[None, None], enable_gqa=True)


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_static_cache_step_by_step(tokens: int) -> None:
    reference, model = Cached().double(), Cached()
    found = None
    for step in range(3):
        q, k, v = tensors((BATCH, HEADS, tokens, HEAD_DIM), *[(BATCH, KV_HEADS, tokens, HEAD_DIM)] * 2, seed=step)
        position = torch.arange(tokens) + step * tokens
        if found is None:
            found = compiled(model, q, k, v, position)
            out = found.output
        else:
            with torch.no_grad():
                out = found.function(q, k, v, position)
        with torch.no_grad():
            wanted = reference(*map(wide, (q, k, v)), position)
        assert_near(out, wanted, BF16)
        assert torch.equal(model.keys.double(), reference.keys)
    (site,) = sites(found)
    assert site.params["mask"] == ("decode_prefix" if tokens == 1 else "other")
    (arguments,) = calls(found)
    assert "sparse_mode" not in arguments


def test_a_cache_that_is_written_after_it_is_read() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.keys = nn.Buffer(qkv()[1])

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = eager(q, self.keys, v)
            self.keys.copy_(k)
            return out + eager(q, self.keys, v)

    q, k, v = qkv()
    old = Model().keys.clone()
    model = Model()
    found = compiled(model, q, k.flip(0), v)
    truth = eager(*map(wide, (q, old, v))) + eager(*map(wide, (q, k.flip(0), v)))
    torch.testing.assert_close(found.output.double(), truth, rtol=2**-6, atol=2**-6)
    assert torch.equal(model.keys, k.flip(0))


# Numbers that are added ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", [name for name in attentions.BIASED if name != "sdpa"])
@pytest.mark.parametrize("heads", [HEADS, BATCH])
@pytest.mark.parametrize("kv_len", [TOKENS, 16])
def test_a_bias_is_a_shift(spelling: str, heads: int, kv_len: int) -> None:
    x = tensors((heads, TOKENS, kv_len), seed=1)[0].round()  # so that multiples of it aren't
    found = check(attentions.BIASED[spelling], *qkv(TOKENS, kv_len, heads=heads), x)
    arguments = of_infer(found)
    shift = arguments["pse_shift"].meta["val"]
    assert tuple(shift.shape[1:]) == (heads, TOKENS, 16)  # rows of whole blocks
    assert "atten_mask" not in arguments


def test_a_bias_of_a_parameter_may_be_added_by_sdpa() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(9, HEADS, dtype=BF16))

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            position = torch.arange(TOKENS)
            bias = self.table[(position[:, None] - position).clamp(-4, 4) + 4].permute(2, 0, 1)[None]
            return sdpa(q, k, v, bias)

    model = Model()
    inputs = qkv()
    found = compiled(model, *inputs)
    assert found.report.ops == {INFER: 1}
    assert_near(found.output, model.double()(*map(wide, inputs)).detach(), BF16)


def test_a_bias_and_a_mask() -> None:
    def both(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return attend((q @ k.mT * SCALE + x).masked_fill(attentions.hidden(q, k), -INF), v)

    arguments = of_infer(check(both, *qkv(), *tensors((HEADS, TOKENS, TOKENS))))
    assert arguments["sparse_mode"] == 3
    assert "pse_shift" in arguments


def test_zeros_beside_a_mask_are_nothing() -> None:
    """As T5 adds them where layers have no bias."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * SCALE + torch.zeros(1, HEADS, TOKENS, TOKENS, dtype=q.dtype)
        return attend(scores + torch.full((TOKENS, TOKENS), -INF, dtype=q.dtype).triu(1), v)

    arguments = of_infer(check(function, *qkv()))
    assert arguments["sparse_mode"] == 3
    assert "pse_shift" not in arguments


def test_two_masks_are_refused() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        scores = (q @ k.mT * SCALE).masked_fill(~keep, -INF)
        return attend(scores + torch.full((TOKENS, TOKENS), -INF, dtype=q.dtype).triu(1), v)

    assert "a second mask" in refused(function, *qkv(), torch.tensor([True] * (TOKENS - 1) + [False]))


def test_a_bias_of_another_type_is_refused() -> None:
    def added(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT * SCALE + x, -1).to(q.dtype) @ v

    assert "a bias of torch.float32 is added" in refused(added, *qkv(), *tensors((HEADS, TOKENS, TOKENS), dtype=FP32))


def test_a_hidden_key_by_a_number_is_a_bias() -> None:
    """-10000 hides in most cases, and not where all of a row has it."""

    def added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return eager(q, k, v, (1 - mask.to(q.dtype)) * -1e4)

    found = check(added, *qkv(), blank())
    assert "pse_shift" in of_infer(found)


# Dynamic sizes -------------------------------------------------------------------------------------------------------


DYNAMIC: dict[str, attentions.Attention] = {
    "sdpa": lambda q, k, v: sdpa(q, k, v, enable_gqa=True),
    "causal": lambda q, k, v: attentions.GROUPED["repeat_kv"](q, k, v) + sdpa(q, k, v, is_causal=True, enable_gqa=True),
    "bottom right": lambda q, k, v: with_positions(lambda i, j: j <= i)(
        q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    ),
    "window": lambda q, k, v: with_positions(lambda i, j: (j <= i) & (j > i - 2))(
        q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    ),
    "eager, tokens first": lambda q, k, v: attentions.GROUPED["repeat_kv"](q, k, v).transpose(1, 2).flatten(2),
    "merged": attentions.GROUPED["bmm"],
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_one_graph_for_all_sizes(name: str) -> None:
    function = DYNAMIC[name]

    def attention(q: Tensor, kv: Tensor) -> Tensor:
        return function(q, *kv.unbind())

    q, k, v = qkv(5, 7, kv_heads=KV_HEADS)
    kv = torch.stack([k, v])
    for tensor, dims in ((q, (0, 2)), (kv, (1, 3))):
        for dim in dims:
            torch._dynamo.mark_dynamic(tensor, dim)
    found = compiled(attention, q, kv)
    assert {site.status for site in sites(found)} == {"lowered"}, [site.reason for site in sites(found)]
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        for batch, q_len, kv_len in ((2, 5, 7), (3, 4, 4), (2, 2, 9), (5, 6, 3)):
            q, k, v = qkv(q_len, kv_len, batch=batch, kv_heads=KV_HEADS)
            out = found.function(q, torch.stack([k, v]))
            torch.testing.assert_close(out.double(), function(*map(wide, (q, k, v))), rtol=2**-6, atol=2**-6)


# Refusals ------------------------------------------------------------------------------------------------------------


def test_what_no_op_takes_is_refused() -> None:
    inputs = [*qkv(), *tensors((HEADS, TOKENS, TOKENS))]
    found = compiled(lambda *inputs: [function(*inputs) for function, _ in attentions.MARKED.values()], *inputs)
    assert not calls(found)
    for site, out, (function, trait) in zip(sites(found), found.output, attentions.MARKED.values(), strict=True):
        assert site.reason == f"it has {trait}, which the fused ops don't take"
        assert same(out, function(*inputs))


def test_what_only_looks_like_it_stays_as_it_is() -> None:
    functions = [function for name, function in attentions.NOT_ATTENTION.items() if name != "weights from the right"]
    inputs = qkv()
    found = compiled(lambda *inputs: [function(*inputs) for function in functions], *inputs)
    assert not calls(found)
    assert all(same(out, function(*inputs)) for out, function in zip(found.output, functions, strict=True))


@pytest.mark.parametrize("read", [lambda weights: weights, lambda weights: weights.mean(1)])
def test_weights_that_are_used_elsewhere_stay(read: Callable[[Tensor], Tensor]) -> None:
    """They are computed then, and the op would compute them once more."""

    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = attentions.softmax(q @ k.mT * SCALE)
        return weights @ v, read(weights)

    inputs = qkv()
    found = compiled(both, *inputs)
    (site,) = sites(found)
    assert site.reason == "it has weights that are read elsewhere too, which the fused ops don't take"
    for out, wanted in zip(found.output, both(*inputs), strict=True):
        assert same(out, wanted)


def test_weights_that_serve_two_values() -> None:
    def both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = attentions.softmax(q @ k.mT * SCALE)
        return torch.cat([weights @ v, weights @ k], -1)

    inputs = qkv()
    found = compiled(both, *inputs)
    assert found.report.ops == {INFER: 2}
    assert_near(found.output, both(*map(wide, inputs)), BF16)


def test_a_value_that_is_computed_from_the_weights() -> None:
    def nested(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = attentions.softmax(q @ k.mT * SCALE)
        return weights @ (weights @ v)

    found = compiled(nested, *qkv())
    torch.testing.assert_close(found.output.double(), nested(*map(wide, qkv())), rtol=2**-5, atol=2**-5)


def test_a_kind_may_be_turned_off() -> None:
    assert "turned off" in refused(sdpa, *qkv(), disable={"attention"})


def test_exact_numerics_refuse() -> None:
    assert "Options.numerics is 'exact'" in refused(eager, *qkv(), numerics="exact")


# Other machines ------------------------------------------------------------------------------------------------------


def old() -> Target:
    return Target("ascend310p")


def test_the_oldest_soc_has_an_op_of_its_own() -> None:
    found = check(attentions.CAUSAL["sdpa, bool"][0], *qkv(dtype=FP16), target=old())
    assert found.report.ops == {PROMPT: 1}
    (arguments,) = calls(found)
    assert arguments["next_tokens"] == 2**31 - 1  # 0 by default
    assert "sparse_mode" not in arguments
    assert torch.equal(mask_of(found, arguments)[0, 0], torch.ones(TOKENS, TOKENS).triu(1).bool())


def test_the_oldest_soc_takes_no_flag_and_no_groups_so_they_are_written_out() -> None:
    found = check(lambda q, k, v: sdpa(q, k, v, is_causal=True), *qkv(dtype=FP16), target=old())
    assert calls(found)[0]["atten_mask"].meta["val"].shape == (1, 1, TOKENS, TOKENS)
    for function in attentions.GROUPED.values():
        found = check(function, *qkv(dtype=FP16, kv_heads=KV_HEADS), target=old())
        assert calls(found)[0]["key"].meta["val"].shape[1] == HEADS


def test_the_oldest_soc_takes_no_bfloat16_and_no_query_without_a_key() -> None:
    refused(sdpa, *qkv(), target=old())
    refused(sdpa, *qkv(dtype=FP16), blank(), target=old())


def test_a_soc_without_any_of_the_ops_is_told() -> None:
    assert "ascend950" in refused(sdpa, *qkv(), target=Target("ascend950"))


# Anything ------------------------------------------------------------------------------------------------------------


@st.composite
def programs(draw: st.DrawFn) -> tuple[str, Callable[..., Tensor], list[Tensor]]:
    """A spelling of attention, with operands that lie anyhow and a mask of any class."""
    dtype = draw(st.sampled_from((BF16, FP16, FP32)))
    batch, kv_heads, group = (draw(st.integers(1, 3)) for _ in range(3))
    q_len, kv_len = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    if draw(st.booleans()):
        kv_len = q_len
    heads, head_dim = kv_heads * group, draw(st.sampled_from((16, 32, 24)))
    layouts = [draw(st.sampled_from(("heads first", "tokens first", "part", "expanded"))) for _ in range(3)]
    repeat = draw(st.sampled_from(("repeat_kv", "repeat_interleave")))
    mask = draw(
        st.sampled_from(
            (
                "none",
                "flag",
                "top left",
                "bottom right",
                "window",
                "ahead",
                "padding",
                "any",
                "by head",
                "blank",
                "bias",
            )
        )
    )
    put_on = draw(st.sampled_from(("sdpa", "sdpa", "added", "filled", "lowest", "where")))
    tail = draw(st.sampled_from(("nothing", "tokens first", "transposed")))
    seed = draw(st.integers(0, 9))
    generator = torch.Generator().manual_seed(seed)

    def operand(layout: str, heads: int, tokens: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        x = torch.randn(batch, heads, tokens, head_dim, generator=generator).to(dtype)
        if layout == "tokens first":
            return by_token(x), lambda y: by_head(y, heads)
        if layout == "part":
            return torch.cat([x, x + 1, x], -1), lambda y: y[..., head_dim : 2 * head_dim]
        if layout == "expanded":
            return x[:1], lambda y: y.expand(batch, -1, -1, -1)
        return x, lambda y: y

    operands = [
        operand(layout, heads if i == 0 else kv_heads, q_len if i == 0 else kv_len) for i, layout in enumerate(layouts)
    ]
    tables = torch.rand(batch, heads, q_len, kv_len, generator=generator)
    given = {
        "any": tables[:, :1] < 0.6,
        "by head": tables < 0.6,
        "blank": (tables[:, :1] < 0.6).index_fill(2, torch.tensor([0]), False),
        "padding": tables[:, 0, 0] < 0.6,
        "bias": tables.to(dtype),
    }.get(mask)

    def seen(q: Tensor, k: Tensor, table: Tensor | None) -> Tensor:
        i, j = torch.arange(q_len)[:, None], torch.arange(kv_len)
        surplus = kv_len - q_len
        if mask == "padding":
            return table[:, None, None].expand(-1, 1, q_len, -1)
        return {
            "none": lambda: torch.ones(q_len, kv_len, dtype=torch.bool),
            "top left": lambda: j <= i,
            "bottom right": lambda: j <= i + surplus,
            "window": lambda: (j <= i) & (j > i - 2),
            "ahead": lambda: j <= i + 1,
        }.get(mask, lambda: table)()

    def function(q: Tensor, k: Tensor, v: Tensor, *table: Tensor) -> Tensor:
        q, k, v = (view(x) for (_, view), x in zip(operands, (q, k, v), strict=True))
        if put_on == "sdpa":
            settings: dict[str, Any] = {"is_causal": True} if mask == "flag" else {}
            if mask not in ("none", "flag"):
                settings["mask"] = table[0] if mask == "bias" else seen(q, k, *table or (None,))
            out = sdpa(q, k, v, enable_gqa=True, **settings)
        else:
            if repeat == "repeat_kv":
                k, v = (attentions._repeated(x, group) for x in (k, v))
            else:
                k, v = (x.repeat_interleave(group, 1) for x in (k, v))
            scores = q @ k.mT * SCALE
            if mask == "bias":
                scores = scores + table[0]
            elif mask not in ("none", "flag"):
                see = seen(q, k, *table or (None,))
                number = attentions.lowest(q) if put_on == "lowest" else -INF
                if put_on == "added":
                    scores = scores + torch.zeros(see.shape, dtype=q.dtype).masked_fill(~see, number)
                elif put_on == "where":
                    scores = torch.where(see, scores, number)
                else:
                    scores = scores.masked_fill(~see, number)
            out = attend(scores, v)
        if tail == "tokens first":
            return out.transpose(1, 2).flatten(2)
        return out.mT if tail == "transposed" else out

    what = f"{dtype} {batch} {heads}/{kv_heads} {q_len} {kv_len} {head_dim} {layouts} {repeat} {mask} {put_on} {tail}"
    return what, function, [x for x, _ in operands] + ([given] if given is not None else [])


def test_whatever_becomes_a_fused_op_has_the_numbers_of_float64():
    lowered: list[bool] = []

    @settings(max_examples=40, deadline=None)
    @given(programs())
    def check_one(program: tuple[str, Callable[..., Tensor], list[Tensor]]) -> None:
        what, function, inputs = program
        found = compiled(function, *inputs)
        (site,) = sites(found)
        lowered.append(site.status == "lowered")
        with torch.no_grad():
            wanted = function(*inputs)
            truth = function(*map(wide, inputs))
        assert strides(found.output) == strides(wanted), what
        if site.status == "lowered":
            assert not found.output.isnan().any() or truth.isnan().any(), what
            assert_near(found.output, truth, wanted.dtype)
        else:
            assert same(found.output, wanted), what

    check_one()
    assert sum(lowered) > len(lowered) / 2


@pytest.fixture(scope="module")
def by_flag() -> Compiled:
    return check(lambda q, k, v: sdpa(q, k, v, is_causal=True), *qkv())


def test_what_else_a_flag_may_hide(by_flag: Compiled) -> None:
    """A mode or a mask of a band says what a flag does; what is more than that has no tensor to be given."""
    (match,) = by_flag.findings().of("attention")
    visible = "params.mask.visibility"
    for changes in (
        {visible: None},
        {f"{visible}.chunk": 4},
        {f"{visible}.segments": match.inputs["query"]},
        {f"{visible}.padding": match.inputs["query"]},
    ):
        assert "the op takes what it hides only as a mask, and the model has none" in refusal(
            by_flag, "attention", changes
        )
    unknown = {f"{visible}.band.upper": Linear(0, (("a number that is read", 1),))}
    assert "only as a mask, and the model has none for" in refusal(by_flag, "attention", unknown)


def test_a_result_that_is_not_rounded_to_the_type_of_q_is_refused() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q.float() @ k.float().mT) * SCALE).softmax(-1) @ v.float()

    found = compiled(model, *qkv())
    assert "its result is torch.float32, and q is torch.bfloat16" in sites(found)[0].reason


def test_a_float_mask_that_may_add_something_is_no_mask() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)
        seen = (j <= i) & (i // 4 == j // 4)
        return sdpa(q, k, v, torch.zeros(TOKENS, TOKENS, dtype=q.dtype).masked_fill(~seen, -INF))

    found = check(model, *qkv())
    assert "its mask is float, and " in refusal(found, "attention", {"params.mask.only_hides": False})
