"""Attention in the spellings of public models: recognised, and repeated bit for bit; what only looks like it is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import attentions
import pytest
import torch
from attentions import BATCH, HEAD_DIM, HEADS, KV_HEADS, SCALE, TOKENS

from helpers import compiled, repeats
from npu_fuse.patterns.attention import Attention
from npu_fuse.patterns.match import Match

Tensor = torch.Tensor
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = BF16, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def shape(heads: int, tokens: int = TOKENS, head_dim: int = HEAD_DIM) -> tuple[int, ...]:
    return BATCH, heads, tokens, head_dim


@dataclass(frozen=True)
class Recognised:
    """One spelling in one dtype.

    Attributes:
        match: what it is found to be.
        values: of all nodes of its graph.
    """

    match: Match
    values: dict[torch.fx.Node, Tensor]


Table = Mapping[str, attentions.Attention]


def recognised(
    table: Table, *shapes: tuple[int, ...], dtype: torch.dtype = BF16, dynamic: bool = False
) -> list[Recognised]:
    """What the spellings of a table are, compiled in one graph; and there is nothing else."""
    inputs = tensors(*shapes, dtype=dtype)
    if dynamic:
        for tensor in inputs[:3]:
            torch._dynamo.mark_dynamic(tensor, 0)
            torch._dynamo.mark_dynamic(tensor, 2)
    found = compiled(lambda *inputs: [function(*inputs) for function in table.values()], *inputs)
    findings = found.findings()
    assert not findings.near_misses()
    assert len(findings.of("attention")) == len(table)
    values = found.values()
    return [Recognised(match, values) for match in findings.of("attention")]


@cache
def _whole_table(name: str, kv_heads: int, further: tuple[tuple[int, ...], ...]) -> dict[str, list[Recognised]]:
    table = getattr(attentions, name)
    functions = {spelling: value if callable(value) else value[0] for spelling, value in table.items()}
    shapes = (shape(HEADS), shape(kv_heads), shape(kv_heads), *further)
    in_each = [recognised(functions, *shapes, dtype=dtype) for dtype in DTYPES]
    return dict(zip(table, map(list, zip(*in_each, strict=True)), strict=True))


def of(name: str, spelling: str, kv_heads: int = HEADS, *further: tuple[int, ...]) -> list[Recognised]:
    """What a spelling of one of the tables is, in each dtype."""
    return _whole_table(name, kv_heads, further)[spelling]


def check(found: Recognised, kv_heads: int = HEADS) -> Attention:
    """It has the heads and the scale that it has, is repeated bit for bit, and its parameters say what it gives."""
    match, p = found.match, found.match.params
    assert isinstance(p, Attention)
    assert (p.num_heads, p.num_kv_heads, p.traits) == (HEADS, kv_heads, ())
    assert p.scale == pytest.approx(SCALE, rel=1e-6)
    assert all(match.inputs[name].op == "placeholder" for name in ("query", "key", "value"))
    assert repeats(match, found.values), p.spelling
    close_to_the_maths(match, found.values)
    return p


def close_to_the_maths(match: Match, values: dict[torch.fx.Node, Tensor]) -> None:
    """What the parameters say, in float64, is what the graph gives but for rounding."""
    p = match.params
    q, k, v = (values[match.inputs[name]].double() for name in ("query", "key", "value"))
    k, v = (x.repeat_interleave(p.num_heads // p.num_kv_heads, 1) for x in (k, v))
    scores = p.scale * (q @ k.mT)
    if "bias" in match.inputs:
        bias = values[match.inputs["bias"]].double()
        by_batch = bias.dim() == 3 and len(bias) == q.shape[0] * q.shape[1]
        scores = scores + (bias.view(*q.shape[:2], *bias.shape[1:]) if by_batch else bias)
    if p.mask.kind in ("causal", "causal_flag", "causal_static_cache"):
        scores = scores + torch.full(scores.shape[-2:], -torch.inf, dtype=torch.float64).triu(1)
    expected = (torch.softmax(scores, -1) @ v).view(values[match.node].shape)
    coarsest = max(torch.finfo(dtype).eps for dtype in p.steps)
    torch.testing.assert_close(values[match.node].double(), expected, rtol=6 * coarsest, atol=6 * coarsest)


# Spellings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", attentions.PLAIN)
def test_attention_is_recognised_and_repeated(spelling: str) -> None:
    for found in of("PLAIN", spelling):
        p = check(found)
        is_call = spelling.startswith("sdpa")
        assert p.is_written_out is not is_call
        assert p.blank_rows == ("zeros" if is_call else "NaN")
        assert p.mask.kind == "none"
        assert set(found.match.inputs) == {"query", "key", "value"}


@pytest.mark.parametrize("spelling", attentions.MERGED)
def test_batch_and_heads_may_be_one_axis(spelling: str) -> None:
    assert all(check(found).merged for found in of("MERGED", spelling))


@pytest.mark.parametrize("spelling", attentions.GROUPED)
def test_repeated_heads_are_not_repeated(spelling: str) -> None:
    for found in of("GROUPED", spelling, KV_HEADS):
        check(found, KV_HEADS)


@pytest.mark.parametrize("spelling", attentions.ONE_KV_HEAD)
def test_one_head_serves_all(spelling: str) -> None:
    for found in of("ONE_KV_HEAD", spelling, 1):
        check(found, 1)


@pytest.mark.parametrize("spelling", attentions.CAUSAL)
def test_a_causal_mask_is_recognised_however_it_is_put_on(spelling: str) -> None:
    for found in of("CAUSAL", spelling):
        p = check(found)
        assert p.mask.kind == ("causal_flag" if spelling == "sdpa, flag" else "causal")
        assert p.mask.visibility.every_query_sees_a_key
        assert p.blank_rows == attentions.CAUSAL[spelling][1]


@pytest.mark.parametrize("spelling", attentions.BIASED)
def test_numbers_are_a_bias(spelling: str) -> None:
    for found in of("BIASED", spelling, HEADS, (HEADS, TOKENS, TOKENS)):
        assert check(found).mask.kind == "bias"
        assert "mask" not in found.match.inputs


@pytest.mark.parametrize("spelling", attentions.MARKED)
def test_what_else_is_done_to_the_scores_is_a_trait(spelling: str) -> None:
    for found in of("MARKED", spelling, HEADS, (HEADS, TOKENS, TOKENS)):
        assert found.match.params.traits == (attentions.MARKED[spelling][1],)
        assert repeats(found.match, found.values)


def test_a_bias_and_a_mask_are_both_recognised() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        scores = q @ k.mT * SCALE + x
        return attentions.attend(scores.masked_fill(attentions.hidden(q, k), -torch.inf), v)

    (found,) = recognised({"": function}, *[shape(HEADS)] * 3, (HEADS, TOKENS, TOKENS))
    assert {"bias", "mask"} < set(found.match.inputs)
    p = check(found)
    assert p.mask.kind == "causal"
    assert p.hides


def test_attention_without_heads() -> None:
    for function in (lambda q, k, v: attentions.attend(q @ k.mT * SCALE, v), attentions.sdpa):
        q, k, v = tensors(*[(BATCH, TOKENS, HEAD_DIM)] * 3)
        found = compiled(function, q, k, v)
        (match,) = found.findings().of("attention")
        assert (match.params.num_heads, match.params.num_kv_heads, match.params.merged) == (1, 1, False)
        assert repeats(match, found.values())


def test_a_key_may_lie_transposed() -> None:
    q, k, v = tensors(shape(HEADS), (BATCH, HEADS, HEAD_DIM, TOKENS), shape(HEADS))
    found = compiled(lambda q, k, v: attentions.attend(q @ k * SCALE, v), q, k, v)
    (match,) = found.findings().of("attention")
    assert match.params.key_transposed
    assert repeats(match, found.values())


def test_one_tensor_may_be_query_key_and_value() -> None:
    (x,) = tensors(shape(HEADS))
    for function in (attentions.sdpa, attentions.eager):
        found = compiled(lambda x, f=function: f(x, x, x), x)
        (match,) = found.findings().of("attention")
        assert len(set(match.inputs.values())) == 1
        assert repeats(match, found.values())


def test_value_is_as_it_is_computed() -> None:
    q, k, v = tensors(*[shape(HEADS)] * 3)
    found = compiled(lambda q, k, v: attentions.eager(q, k, v * 2), q, k, v)
    (match,) = found.findings().of("attention")
    assert match.params.scale == pytest.approx(SCALE)
    assert match.inputs["value"].op == "call_function"
    assert repeats(match, found.values())


def test_the_scale_is_that_of_the_head_dim_where_none_is_given() -> None:
    q, k, v = tensors(*[shape(HEADS, head_dim=24)] * 3)
    found = compiled(torch.nn.functional.scaled_dot_product_attention, q, k, v)
    (match,) = found.findings().of("attention")
    assert match.params.scale == pytest.approx(24**-0.5)


def test_a_rounded_number_is_taken_as_rounded() -> None:
    q, k, v = tensors(*[shape(HEADS)] * 3)
    found = compiled(lambda q, k, v: attentions.attend(q @ k.mT * torch.full([], 0.3, dtype=BF16), v), q, k, v)
    (match,) = found.findings().of("attention")
    assert match.params.scale == torch.tensor(0.3, dtype=BF16).item()


def test_batch_and_tokens_may_be_symbols() -> None:
    for found in recognised(attentions.GROUPED, shape(HEADS), shape(KV_HEADS), shape(KV_HEADS), dynamic=True):
        assert isinstance(found.match.inputs["query"].meta["val"].shape[2], torch.SymInt)
        check(found, KV_HEADS)


def test_a_mask_may_have_a_symbolic_size() -> None:
    chosen = ("sdpa, flag", "sdpa, bool", "lowest added", "masked_fill", "where, filled")
    table = {spelling: attentions.CAUSAL[spelling][0] for spelling in chosen}
    for found in recognised(table, *[shape(HEADS)] * 3, dynamic=True):
        assert check(found).mask.kind in ("causal_flag", "causal_static_cache")  # as many keys as may be


def test_a_merged_batch_may_be_a_symbol() -> None:
    for found in recognised(attentions.MERGED, *[shape(HEADS)] * 3, dynamic=True):
        assert check(found).merged


def test_other_numbers_of_queries_and_keys() -> None:
    q, k, v = tensors(shape(HEADS, 3), shape(HEADS, 7), shape(HEADS, 7))
    for function in (attentions.sdpa, attentions.eager, attentions.CAUSAL["where"][0]):
        found = compiled(function, q, k, v)
        (match,) = found.findings().of("attention")
        assert match.params.mask.kind in ("none", "causal_static_cache")
        assert repeats(match, found.values())


# What is something else ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", attentions.NOT_ATTENTION)
def test_something_else_is_not_recognised(spelling: str) -> None:
    of_value = (BATCH, HEADS, TOKENS, TOKENS if spelling == "weights from the right" else HEAD_DIM)
    found = compiled(attentions.NOT_ATTENTION[spelling], *tensors(shape(HEADS), shape(HEADS), of_value))
    assert not found.findings().of("attention")


def tiled(x: Tensor) -> Tensor:
    """Query head h reads head h % kv heads, not h // group."""
    return x.repeat(1, HEADS // KV_HEADS, 1, 1)


def tiled_by_view(x: Tensor) -> Tensor:
    return x[:, None].expand(-1, HEADS // KV_HEADS, -1, -1, -1).reshape(BATCH, HEADS, *x.shape[2:])


@pytest.mark.parametrize("repeat", [tiled, tiled_by_view])
@pytest.mark.parametrize("function", [attentions.sdpa, attentions.eager])
def test_tiled_heads_are_no_groups(function: attentions.Attention, repeat: Callable[[Tensor], Tensor]) -> None:
    q, k, v = tensors(shape(HEADS), shape(KV_HEADS), shape(KV_HEADS))
    found = compiled(lambda q, k, v: function(q, repeat(k), repeat(v)), q, k, v)
    (match,) = found.findings().of("attention")
    assert match.params.num_kv_heads == HEADS
    assert repeats(match, found.values())


def test_keys_and_values_that_are_repeated_differently_are_told() -> None:
    q, k, v = tensors(shape(HEADS), shape(KV_HEADS), shape(KV_HEADS))
    found = compiled(lambda q, k, v: attentions.sdpa(q, k.repeat_interleave(HEADS // KV_HEADS, 1), tiled(v)), q, k, v)
    (miss,) = found.findings().near_misses()
    assert miss.kind == "attention"
    assert miss.reason.endswith("q, k and v have 4, 2, 4 heads")


@pytest.mark.parametrize("rank", [2, 5])
def test_other_ranks_are_told(rank: int) -> None:
    q, k, v = tensors(*[(2, 3, HEADS, TOKENS, HEAD_DIM)[5 - rank :]] * 3)
    found = compiled(lambda q, k, v: attentions.attend(q @ k.mT * SCALE, v), q, k, v)
    assert not found.findings().of("attention")
    (miss,) = found.findings().near_misses()
    assert "not [batch, heads, tokens, head_dim] each" in miss.reason


@pytest.mark.parametrize("spelling", ["less the maximum of each key", "scaled by a tensor", "scores squared"])
def test_a_softmax_of_other_scores_is_told(spelling: str) -> None:
    found = compiled(attentions.NOT_ATTENTION[spelling], *tensors(*[shape(HEADS)] * 3))
    (miss,) = found.findings().near_misses()
    assert "a softmax, but not of scale * q k^T" in miss.reason
