"""Attention over blocks reads them from the caches, by the table, where lengths can be said; else they are gathered."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional

from helpers import Compiled, compiled, refusal, repeats
from npu_fuse import Target
from npu_fuse.runtime.effects import register_side_effects

Tensor = torch.Tensor
BLOCKS, SIZE, HEADS, DIM, BATCH, WIDTH = 9, 128, 2, 64, 2, 3
TOKENS = WIDTH * SIZE
FIA = "npu::npu_fused_infer_attention_score"
TABLE = torch.tensor([[4, 0, 7], [3, 8, 1]], dtype=torch.int32)


def inputs(tokens: int = 5, size: int = SIZE, dtype: torch.dtype = torch.float16) -> tuple[Tensor, ...]:
    """query [batch, 2 * heads, tokens, dim], key_cache, value_cache, table."""
    query = torch.randn(BATCH, 2 * HEADS, tokens, DIM, dtype=dtype)
    return query, *(torch.randn(BLOCKS, size, HEADS, DIM, dtype=dtype) for _ in range(2)), TABLE.clone()


def exact(query: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor, hidden: Tensor | None = None) -> Tensor:
    """In float64, token by token."""
    heads = torch.arange(2 * HEADS) // 2
    result = torch.empty(*query.shape, dtype=torch.float64)
    for b, blocks in enumerate(table.long().tolist()):
        keys, of_values = (torch.cat([cache[i] for i in blocks]).double() for cache in (key_cache, value_cache))
        scores = torch.einsum("hqd,thd->hqt", query[b].double(), keys[:, heads]) / DIM**0.5
        if hidden is not None:
            scores = scores.masked_fill(hidden[b], -torch.inf)
        result[b] = torch.einsum("hqt,thd->hqd", scores.softmax(-1).nan_to_num(0.0), of_values[:, heads])
    return result


def check(model: Callable[..., Tensor], *given: Tensor, **settings: Any) -> Compiled:
    """Compiles the call, and compares it with eager and the float64 of its inputs."""
    found = compiled(model, *given, **settings)
    torch.testing.assert_close(found.output, model(*given), rtol=2e-2, atol=2e-3)
    return found


def is_paged(found: Compiled) -> bool:
    gathers = ("aten.index.Tensor", "aten.index_select.default", "aten.embedding.default")
    return found.report.ops == {FIA: 1} and not any(gather in found.targets() for gather in gathers)


def call_of(found: Compiled) -> torch.fx.Node:
    (call,) = found.after.graph.find_nodes(
        op="call_function", target=torch.ops.npu.npu_fused_infer_attention_score.default
    )
    return call


def reason_of(found: Compiled) -> str:
    (reason,) = (site.reason for site in found.report.sites if site.kind == "paged_attention")
    return reason


def sdpa(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, enable_gqa=True, **given)


def viewed(query: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor, **given: Any) -> Tensor:
    keys, of_values = (
        cache[table].view(BATCH, -1, *cache.shape[2:]).transpose(1, 2) for cache in (key_cache, value_cache)
    )
    return sdpa(query, keys, of_values, **given)


def flattened(query: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor) -> Tensor:
    keys, of_values = (cache[table.long()].flatten(1, 2).transpose(1, 2) for cache in (key_cache, value_cache))
    return sdpa(query, keys, of_values)


def selected(query: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor) -> Tensor:
    keys, of_values = (
        cache.index_select(0, table.flatten()).reshape(BATCH, TOKENS, HEADS, DIM).permute(0, 2, 1, 3)
        for cache in (key_cache, value_cache)
    )
    return sdpa(query, keys, of_values)


def repeated(query: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor) -> Tensor:
    keys, of_values = (
        cache[table].view(BATCH, TOKENS, HEADS, DIM).transpose(1, 2).repeat_interleave(2, 1)
        for cache in (key_cache, value_cache)
    )
    weights = (query @ keys.mT * DIM**-0.5).softmax(-1, dtype=torch.float32).to(query.dtype)
    return weights @ of_values


SPELLINGS = (viewed, flattened, selected, repeated)


@pytest.mark.parametrize("model", SPELLINGS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 5])
def test_nothing_is_gathered(model: Callable[..., Tensor], dtype: torch.dtype, tokens: int) -> None:
    given = inputs(tokens, dtype=dtype)
    found = check(model, *given)
    assert is_paged(found)
    (match,) = found.findings().of("paged_attention")
    assert repeats(match, found.values())
    torch.testing.assert_close(found.output.double(), exact(*given), rtol=2**-8, atol=1e-4)
    call = call_of(found)
    assert call.kwargs["block_size"] == SIZE
    assert call.kwargs["actual_seq_lengths_kv"] == [TOKENS]
    assert call.kwargs["num_key_value_heads"] == HEADS
    assert call.args[1].meta["val"].shape == (BLOCKS, SIZE, HEADS * DIM)
    assert call.kwargs["block_table"].meta["val"].dtype == torch.int32


def test_a_cache_without_a_heads_axis() -> None:
    def model(query: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor) -> Tensor:
        keys, of_values = (
            cache[table].view(BATCH, -1, HEADS, DIM).transpose(1, 2) for cache in (key_cache, value_cache)
        )
        return sdpa(query, keys, of_values)

    query, key_cache, value_cache, table = inputs()
    assert is_paged(check(model, query, key_cache.flatten(2), value_cache.flatten(2), table))


def test_a_cache_with_heads_before_tokens() -> None:
    def model(query: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor) -> Tensor:
        keys, of_values = (
            cache[table].permute(0, 2, 1, 3, 4).reshape(BATCH, HEADS, TOKENS, DIM) for cache in (key_cache, value_cache)
        )
        return sdpa(query, keys[:, :, :300], of_values[:, :, :300])

    query, key_cache, value_cache, table = inputs()
    first = (key_cache.transpose(1, 2).contiguous(), value_cache.transpose(1, 2).contiguous())
    found = check(model, query, *first, table)
    assert is_paged(found)
    assert call_of(found).kwargs["input_layout"].startswith("BNSD")
    assert call_of(found).kwargs["actual_seq_lengths_kv"] == [300]
    swapped = check(lambda q, *rest: model(q.transpose(1, 2), *rest), query.transpose(1, 2).contiguous(), *first, table)
    assert is_paged(swapped)


@pytest.mark.parametrize("count", [1, 257, 384])
def test_the_first_tokens(count: int) -> None:
    def model(query: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor) -> Tensor:
        keys, of_values = (
            cache[table].view(BATCH, -1, HEADS, DIM)[:, :count].transpose(1, 2) for cache in (key_cache, value_cache)
        )
        return sdpa(query, keys, of_values)

    given = inputs()
    found = check(model, *given)
    assert is_paged(found)
    assert call_of(found).kwargs["actual_seq_lengths_kv"] == [count]
    beyond = torch.arange(TOKENS).expand(BATCH, 1, 5, -1) >= count
    torch.testing.assert_close(found.output.double(), exact(*given, beyond), rtol=2**-10, atol=1e-4)


def test_one_sequence_by_its_row_of_the_table() -> None:
    def model(query: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor) -> Tensor:
        keys, of_values = (
            cache[table[1, :2]].view(1, -1, HEADS, DIM)[:, :200].transpose(1, 2) for cache in (key_cache, value_cache)
        )
        return sdpa(query[1:], keys, of_values)

    found = check(model, *inputs())
    assert is_paged(found)
    assert call_of(found).kwargs["block_table"].meta["val"].shape == (1, 2)


def test_negative_blocks_count_from_the_end() -> None:
    *given, _ = inputs()
    table = torch.tensor([[4, -1, 7], [-9, 8, -2]], dtype=torch.int32)
    found = check(viewed, *given, table)
    assert is_paged(found)
    torch.testing.assert_close(found.output.double(), exact(*given, table), rtol=2**-10, atol=1e-4)


def test_sizes_that_are_not_known_beforehand() -> None:
    query, key_cache, value_cache, table = inputs()
    for cache in (key_cache, value_cache):
        for axis in (1, 2, 3):
            torch._dynamo.mark_static(cache, axis)
    for axis in (1, 3):
        torch._dynamo.mark_static(query, axis)
    found = check(flattened, query, key_cache, value_cache, table, dynamic=True)
    assert is_paged(found)
    wider = torch.cat([table, table[:, :2]], 1)
    torch.testing.assert_close(
        found.function(query, key_cache, value_cache, wider).double(),
        exact(query, key_cache, value_cache, wider),
        rtol=2**-10,
        atol=1e-4,
    )


# Masks ---------------------------------------------------------------------------------------------------------------


def test_causal_to_the_end_is_a_mode() -> None:
    def model(query: Tensor, *rest: Tensor) -> Tensor:
        rows = torch.arange(5)[:, None] + TOKENS - 5
        return viewed(query, *rest, attn_mask=torch.arange(TOKENS) <= rows)

    given = inputs()
    found = check(model, *given)
    assert is_paged(found)
    assert call_of(found).kwargs["sparse_mode"] == 3
    hidden = torch.arange(TOKENS) > torch.arange(5)[:, None] + TOKENS - 5
    torch.testing.assert_close(
        found.output.double(), exact(*given, hidden.expand(BATCH, 1, 5, -1)), rtol=2**-10, atol=1e-4
    )


def test_lengths_in_a_tensor_are_a_mask() -> None:
    def model(query: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        mask = (torch.arange(TOKENS) < lengths[:, None])[:, None, None]
        return viewed(query, key_cache, value_cache, table, attn_mask=mask)

    lengths = torch.tensor([300, 0])
    given = inputs()
    found = check(model, *given, lengths)
    assert is_paged(found)
    hidden = (torch.arange(TOKENS) >= lengths[:, None])[:, None, None].expand(-1, 1, 5, -1)
    torch.testing.assert_close(found.output.double(), exact(*given, hidden), rtol=2**-10, atol=1e-4)


def test_a_mask_that_is_narrower_than_the_table_hides_the_rest() -> None:
    def model(query: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor, mask: Tensor) -> Tensor:
        keys, of_values = (
            cache[table].view(BATCH, -1, HEADS, DIM)[:, :300].transpose(1, 2) for cache in (key_cache, value_cache)
        )
        return sdpa(query, keys, of_values, attn_mask=mask)

    mask = torch.rand(BATCH, 1, 5, 300) < 0.5
    given = inputs()
    found = check(model, *given, mask)
    assert is_paged(found)
    assert call_of(found).kwargs["atten_mask"].meta["val"].shape == (BATCH, 1, 5, TOKENS)
    hidden = torch.nn.functional.pad(~mask, (0, TOKENS - 300), value=True)
    torch.testing.assert_close(found.output.double(), exact(*given, hidden), rtol=2**-10, atol=1e-4)


def recent(query: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor) -> Tensor:
    """One token that sees the last hundred."""
    tokens = table.shape[1] * key_cache.shape[1]
    return viewed(query, key_cache, value_cache, table, attn_mask=(torch.arange(tokens) >= tokens - 100)[None])


def test_one_token_sees_what_a_short_mask_says() -> None:
    query, key_cache, value_cache, table = inputs(1)
    found = check(recent, query, key_cache, value_cache, table)
    assert is_paged(found)
    hidden = (torch.arange(TOKENS) < TOKENS - 100).expand(BATCH, 1, 1, -1)
    wanted = exact(query, key_cache, value_cache, table, hidden)
    torch.testing.assert_close(found.output.double(), wanted, rtol=2**-10, atol=1e-4)
    found = check(recent, query, key_cache, value_cache, torch.cat([table, table[:, :2]], 1))  # 640 keys
    assert not is_paged(found)
    assert "covers more than 512 keys of a cache" in reason_of(found)
    assert found.targets().count("aten.index.Tensor") == 2


def test_one_token_that_may_see_nothing() -> None:
    def model(query: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        mask = (torch.arange(TOKENS) < lengths[:, None])[:, None, None]
        return viewed(query, key_cache, value_cache, table, attn_mask=mask)

    found = check(model, *inputs(1), torch.tensor([300, 0]))
    assert "not proven that every query sees a key" in reason_of(found)
    assert found.targets().count("aten.index.Tensor") == 2


# Limits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "size", "legal"), [(5, 64, False), (1, 16, True), (1, 24, False), (5, 256, True)])
def test_block_sizes(tokens: int, size: int, legal: bool) -> None:
    found = check(viewed, *inputs(tokens, size))
    assert is_paged(found) == legal
    if not legal:
        assert f"block_size is {size}" in reason_of(found)
        assert found.report.ops == {FIA: 1}  # over what is gathered
        assert found.targets().count("aten.index.Tensor") == 2


def test_caches_that_are_not_contiguous() -> None:
    query, key_cache, value_cache, table = inputs()
    both = torch.stack([key_cache, value_cache], 1)  # [blocks, 2, …]
    found = check(lambda q, kv, t: viewed(q, kv[:, 0], kv[:, 1], t), query, both, table)
    assert not is_paged(found)
    assert "key_cache has strides" in reason_of(found)


def test_two_tables_and_parts_of_tokens_are_no_pages() -> None:
    query, key_cache, value_cache, table = inputs()

    def two(query: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor) -> Tensor:
        keys = key_cache[table].view(BATCH, -1, HEADS, DIM).transpose(1, 2)
        of_values = value_cache[table.flip(0)].view(BATCH, -1, HEADS, DIM).transpose(1, 2)
        return sdpa(query, keys, of_values)

    def later(query: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor) -> Tensor:
        keys, of_values = (
            cache[table].view(BATCH, -1, HEADS, DIM)[:, 3:].transpose(1, 2) for cache in (key_cache, value_cache)
        )
        return sdpa(query, keys, of_values)

    def interleaved(query: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor) -> Tensor:
        keys, of_values = (
            cache[table].transpose(1, 2).reshape(BATCH, -1, HEADS, DIM).transpose(1, 2)
            for cache in (key_cache, value_cache)
        )
        return sdpa(query, keys, of_values)

    def of_a_token(query: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor) -> Tensor:
        keys, of_values = (cache.flatten(0, 1)[table.long()].transpose(1, 2) for cache in (key_cache, value_cache))
        return sdpa(query, keys, of_values)

    for model in (two, later, interleaved, of_a_token):
        found = check(model, query, key_cache, value_cache, table)
        assert not found.findings().of("paged_attention")


def test_other_socs_and_types() -> None:
    found = check(viewed, *inputs(), target=Target(soc="ascend310p"))
    assert "no kernel on ascend310p" in reason_of(found)
    found = check(viewed, *inputs(dtype=torch.float32))
    assert "query is float32" in reason_of(found)
    assert "turned off" in reason_of(check(viewed, *inputs(), disable={"paged_attention"}))


def test_what_is_gathered_before_an_effect_is_not_read_behind_it() -> None:
    library = torch.library.Library("npu_fuse_test_paged", "FRAGMENT")
    library.define("clear(Tensor cache) -> Tensor")
    library.impl("clear", lambda cache: cache.zero_()[0, 0, 0].clone(), "CompositeExplicitAutograd")
    torch.library.register_fake("npu_fuse_test_paged::clear", lambda cache: cache.new_empty(DIM), lib=library)
    register_side_effects("npu_fuse_test_paged::clear")  # what it writes isn't told

    def model(query: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor) -> Tensor:
        keys, of_values = (
            cache[table].view(BATCH, -1, HEADS, DIM).transpose(1, 2) for cache in (key_cache, value_cache)
        )
        zeros = torch.ops.npu_fuse_test_paged.clear(key_cache)
        return sdpa(query, keys, of_values) + zeros

    query, key_cache, value_cache, table = inputs()
    found = compiled(model, query, key_cache.clone(), value_cache, table)
    wanted = model(query, key_cache.clone(), value_cache, table)
    torch.testing.assert_close(found.output, wanted, rtol=2e-2, atol=2e-3)
    assert reason_of(found) == "an op with side effects stands between its nodes"
    library._destroy()


@pytest.mark.parametrize(("mode", "window"), [(2, None), (4, 100)])
def test_other_modes(mode: int, window: int | None) -> None:
    def model(query: Tensor, *rest: Tensor) -> Tensor:
        if window is None:
            return viewed(query, *rest, is_causal=True)
        rows, keys = torch.arange(5)[:, None] + TOKENS - 5, torch.arange(TOKENS)
        return viewed(query, *rest, attn_mask=(keys <= rows) & (keys > rows - window))

    given = inputs()
    found = check(model, *given)
    assert is_paged(found)
    assert call_of(found).kwargs["sparse_mode"] == mode
    rows, keys = torch.arange(5)[:, None] + (TOKENS - 5) * (window is not None), torch.arange(TOKENS)
    hidden = (keys > rows) | (keys <= rows - (window or TOKENS))
    torch.testing.assert_close(
        found.output.double(), exact(*given, hidden.expand(BATCH, 1, 5, -1)), rtol=2**-10, atol=1e-4
    )


# With the write ------------------------------------------------------------------------------------------------------


def test_a_layer_writes_and_reads_its_cache_in_two_launches() -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor, at: Tensor):
        key_cache.view(-1, HEADS, DIM).index_copy_(0, at, k)
        value_cache.view(-1, HEADS, DIM).index_copy_(0, at, v)
        return viewed(q, key_cache, value_cache, table)

    query, key_cache, value_cache, table = inputs(1)
    tokens = [torch.randn(BATCH, HEADS, DIM).half() for _ in range(2)]
    at = torch.tensor([7 * SIZE + 20, 3 * SIZE])
    given = (query, *tokens, key_cache, value_cache, table, at)
    own, expected = ([value.clone() for value in given] for _ in range(2))
    found = compiled(layer, *own)
    torch.testing.assert_close(found.output, layer(*expected), rtol=1e-2, atol=1e-3)
    for value, want in zip(own, expected, strict=True):
        assert torch.equal(value, want)
    assert found.report.ops == {FIA: 1, "npu::npu_scatter_pa_kv_cache": 1}
    # the table is brought from the start of the cache, once for all layers
    assert found.report.launches_after == 3
    targets = found.targets()
    assert targets.index("npu.npu_scatter_pa_kv_cache.default") < targets.index(
        "npu.npu_fused_infer_attention_score.default"
    )


@pytest.fixture(scope="module")
def paged() -> Compiled:
    found = check(viewed, *inputs())
    assert is_paged(found)
    return found


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention.traits": ("a soft cap", "sinks")}, "it has a soft cap and sinks, which the fused op doesn't take"),
        ({"attention.steps": frozenset({torch.float64})}, "the model computes in torch.float64"),
        ({"tokens": ShapeEnv().create_unbacked_symint()}, "tokens, which no size or number of the graph's inputs is"),
    ],
)
def test_what_else_a_site_may_be(paged: Compiled, changes: dict, reason: str) -> None:
    given = {f"params.{path}": value for path, value in changes.items()}
    assert reason in refusal(paged, "paged_attention", given)
