"""Both versions of npu_fused_infer_attention_score against scaled_dot_product_attention in float64."""

import pytest
import torch
from attention_cases import (
    NO_LIMIT,
    assert_near,
    exact,
    in_version_2,
    laid_out,
    random_mask,
    random_tensors,
    seen,
    taken_apart,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_fuse.runtime.ops.attention_mask import compressed_causal_mask
from npu_fuse.runtime.ops.fused_infer_attention_score import (
    NPU_FUSED_INFER_ATTENTION_SCORE,
    NPU_FUSED_INFER_ATTENTION_SCORE_V2,
)
from npu_fuse.runtime.target import Target

V1, V2 = NPU_FUSED_INFER_ATTENTION_SCORE, NPU_FUSED_INFER_ATTENTION_SCORE_V2
DTYPES = (torch.float16, torch.bfloat16)
LAYOUTS = ("BSH", "BSND", "BNSD", "BNSD_BSND", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD")
COMPRESSED = compressed_causal_mask("cpu")


def compute(arguments, version=1):
    """The two results, by the version asked for, of a call that isn't refused."""
    contract = V1 if version == 1 else V2
    if version == 2:
        arguments = in_version_2(arguments)
    assert contract.refusal(Target(), **arguments) is None
    return contract.op(**arguments)


# sequences side by side


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_every_layout_and_mode_is_the_maths(data):
    def draw(strategy):
        return data.draw(strategy)

    layout = draw(st.sampled_from(LAYOUTS))
    batch, rows, keys = draw(st.integers(1, 3)), draw(st.integers(2, 9)), draw(st.integers(1, 9))
    heads_of_key, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads, head_dim = heads_of_key * group, draw(st.sampled_from([16, 48]))
    dtype, scale = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([1.0, 0.25]))
    of_key = (batch, heads_of_key, keys, head_dim)
    query, key, value = random_tensors(
        [(batch, heads, rows, head_dim), of_key, of_key], dtype, draw(st.integers(0, 99))
    )
    arguments = {
        "query": laid_out(query, layout),
        "key": laid_out(key, layout),
        "value": laid_out(value, layout),
        "num_heads": heads,
        "num_key_value_heads": 0 if group == 1 and draw(st.booleans()) else heads_of_key,
        "scale": scale,
        "input_layout": layout,
        "softmax_lse_flag": True,
    }

    mode = draw(st.integers(0, 4))
    masks = None
    pre, following = NO_LIMIT, NO_LIMIT
    if mode > 1:
        arguments["atten_mask"] = COMPRESSED[(None,) * draw(st.integers(0, 2))]
    elif mode == 1 or draw(st.booleans()):
        shapes = [(batch, 1, rows, keys), (1, 1, rows, keys), (1, rows, keys)]
        if "NBSD" not in layout:
            shapes.append((rows, keys))
        shape = draw(st.sampled_from(shapes))
        masks = random_mask(shape, draw(st.integers(0, 9)))
        arguments["atten_mask"] = masks.to(draw(st.sampled_from([torch.bool, torch.int8, torch.uint8])))
        masks = masks.reshape(-1, rows, keys).expand(batch, rows, keys)
    if mode == 4 or (mode == 0 and masks is not None):
        pre, following = (draw(st.one_of(st.integers(0, 4), st.just(NO_LIMIT))) for _ in range(2))
    arguments |= {"sparse_mode": mode, "pre_tokens": pre, "next_tokens": following}

    shift = None
    if draw(st.booleans()):
        (shift,) = random_tensors([(draw(st.sampled_from([1, batch])), heads, rows, 16)], dtype, 5)
        arguments["pse_shift"] = shift
        shift = shift.expand(batch, heads, rows, 16)

    row_counts, key_counts = [rows] * batch, [keys] * batch
    if draw(st.booleans()):
        row_counts = draw(st.lists(st.integers(0, rows), min_size=batch, max_size=batch))
        key_counts = draw(st.lists(st.integers(0, keys), min_size=batch, max_size=batch))
        surplus = draw(st.lists(st.just(1), max_size=2))
        arguments |= {"actual_seq_lengths": row_counts + surplus, "actual_seq_lengths_kv": key_counts + surplus}
    inner_precise = draw(st.integers(0, 3))
    arguments["inner_precise"] = inner_precise

    out, lse = compute(arguments, draw(st.sampled_from([1, 2])))
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert lse.shape == (batch, heads, rows, 1)
    out = taken_apart(out, layout, heads)
    for b, (r, k) in enumerate(zip(row_counts, key_counts, strict=True)):
        assert out[b, :, r:].isnan().all()
        assert lse[b, :, r:].isnan().all()
        if k == 0:
            assert (out[b, :, :r] == 0).all()
            assert lse[b].isnan().all()
            continue
        see = seen(mode, r, k, None if masks is None else masks[b], pre, following)
        some = see.any(-1)
        wanted, wanted_lse = exact(
            query[b, :, :r], key[b, :, :k], value[b, :, :k], scale, see, None if shift is None else shift[b, :, :r, :k]
        )
        assert_near(out[b, :, :r][:, some], wanted[:, some], dtype)
        torch.testing.assert_close(lse[b, :, :r][:, some].double(), wanted_lse[:, some], rtol=1e-5, atol=1e-5)
        blank, blank_lse = out[b, :, :r][:, ~some], lse[b, :, :r][:, ~some]
        fixed = inner_precise >= 2 or (mode == 3 and r > k)
        assert (blank == 0).all() if fixed else blank.isnan().all()
        assert blank_lse.isnan().all()


def test_the_defaults_are_one_head_no_scale_and_bsh():
    query, key, value = random_tensors([(2, 3, 16), (2, 4, 16), (2, 4, 16)], torch.float16)
    out, lse = compute({"query": query, "key": key, "value": value})
    for b in range(2):
        wanted, _ = exact(query[b, None], key[b, None], value[b, None], 1.0)
        assert_near(out[b, None], wanted, torch.float16)
    assert lse.shape == (0,)
    assert lse.dtype == torch.float32


def test_query_heads_share_a_key_head_with_their_neighbours():
    key = torch.zeros(1, 2, 3, 16).half()
    value = torch.stack([torch.full((1, 3, 16), 1.0), torch.full((1, 3, 16), 2.0)], 1).half()
    arguments = {"query": torch.ones(1, 4, 2, 16).half(), "key": key, "value": value, "num_heads": 4}
    out, _ = compute({**arguments, "num_key_value_heads": 2, "input_layout": "BNSD"})
    assert out[0, :, 0, 0].tolist() == [1.0, 1.0, 2.0, 2.0]


def test_a_mask_of_ones_hides():
    value = torch.arange(3.0).reshape(1, 1, 3, 1).expand(1, 1, 3, 16).half().contiguous()
    zeros = torch.zeros(1, 1, 3, 16).half()
    mask = torch.tensor([[False, True, True], [True, False, True], [True, True, False]])
    out, _ = compute({"query": zeros, "key": zeros, "value": value, "atten_mask": mask, "input_layout": "BNSD"})
    assert out[0, 0, :, 0].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("mode", [2, 3, 4])
def test_a_compressed_mask_that_is_inverted_is_an_error(mode):
    query, key, value = random_tensors([(1, 1, 3, 16)] * 3, torch.float16)
    arguments = {"query": query, "key": key, "value": value, "input_layout": "BNSD", "sparse_mode": mode}
    with pytest.raises(ValueError, match="is not True above the diagonal and False elsewhere"):
        V1.op(**arguments, atten_mask=torch.ones(2048, 2048).tril().bool())


def test_no_keys_give_zeros_and_no_rows_nothing():
    query, key = torch.ones(2, 4, 3, 16).half(), torch.ones(2, 4, 0, 16).half()
    out, lse = compute(
        {"query": query, "key": key, "value": key, "num_heads": 4, "input_layout": "BNSD", "softmax_lse_flag": True}
    )
    assert (out == 0).all()
    assert lse.isnan().all()
    assert compute({"query": key, "key": query, "value": query, "num_heads": 4, "input_layout": "BNSD"})[0].shape == (
        2,
        4,
        0,
        16,
    )


def test_a_mask_that_hides_rows_leaves_them_undefined_or_zeros():
    query, key, value = random_tensors([(1, 1, 3, 16)] * 3, torch.float16)
    mask = torch.tensor([[True] * 3, [False, True, True], [False] * 3])
    arguments = {"query": query, "key": key, "value": value, "input_layout": "BNSD", "atten_mask": mask}
    for inner_precise, in_the_first_row in ((0, torch.isnan), (1, torch.isnan), (2, torch.logical_not)):
        out, _ = compute({**arguments, "sparse_mode": 1, "inner_precise": inner_precise})
        assert in_the_first_row(out[0, 0, 0]).all()
        assert torch.equal(out[0, 0, 1], value[0, 0, 0])


def test_the_weights_are_not_rounded():
    """Of 300 equal scores each weight is no float16, and the mean of the values is what their exact sum gives."""
    (value,) = random_tensors([(1, 1, 300, 16)], torch.float16)
    zeros = torch.zeros(1, 1, 300, 16).half()
    out, _ = compute({"query": zeros, "key": zeros, "value": value, "input_layout": "BNSD"})
    assert torch.equal(out[0, 0, 0], value[0, 0].double().mean(0).half())


# a query of one token


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_one_token_sees_what_its_mask_shows_and_nothing_else_matters(data):
    layout = data.draw(st.sampled_from(["BSH", "BSND", "BNSD"]))
    batch, keys = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    dtype, version = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from([1, 2]))
    query, key, value = random_tensors([(batch, 4, 1, 16), (batch, 2, keys, 16), (batch, 2, keys, 16)], dtype, keys)
    arguments = {
        "query": laid_out(query, layout),
        "key": laid_out(key, layout),
        "value": laid_out(value, layout),
        "num_heads": 4,
        "num_key_value_heads": 2,
        "scale": 0.25,
        "input_layout": layout,
        "softmax_lse_flag": True,
    }
    masks = None
    if data.draw(st.booleans()):
        shape = data.draw(st.sampled_from([(batch, keys), (batch, 1, 1, keys), (1, 1, 1, keys), (1, 1, keys)]))
        masks = random_mask(shape, keys)
        arguments |= {"atten_mask": masks, "sparse_mode": data.draw(st.integers(0, 1))}
        masks = masks.reshape(-1, keys).expand(batch, keys)
    key_counts = [keys] * batch
    if data.draw(st.booleans()):
        key_counts = data.draw(st.lists(st.integers(1, keys), min_size=batch, max_size=batch))
        arguments["actual_seq_lengths_kv"] = key_counts
    # Lengths of query are ignored.
    arguments["actual_seq_lengths"] = data.draw(st.sampled_from([None, [0], [0] * batch]))
    out, lse = compute(arguments, version)
    out = taken_apart(out, layout, 4)
    for b, k in enumerate(key_counts):
        see = None if masks is None else ~masks[b : b + 1, :k]
        wanted, wanted_lse = exact(query[b], key[b, :, :k], value[b, :, :k], 0.25, see)
        assert_near(out[b], wanted, dtype)
        torch.testing.assert_close(lse[b].double(), wanted_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 3), (3, 1, 1, 3)])
def test_each_batch_entry_of_one_token_has_a_mask_of_its_own(shape):
    query, key, value = random_tensors([(3, 2, 1, 16), (3, 2, 3, 16), (3, 2, 3, 16)], torch.float16)
    arguments = {"query": query, "key": key, "value": value, "num_heads": 2, "input_layout": "BNSD"}
    shows_one = torch.tensor([[0, 1, 1], [1, 1, 0], [1, 0, 1]]).bool().reshape(shape)
    out, _ = compute({**arguments, "atten_mask": shows_one})
    for b, shown in enumerate((0, 2, 1)):
        assert torch.equal(out[b, :, 0], value[b, :, shown])


@pytest.mark.parametrize("mode", [2, 3, 4])
def test_one_token_sees_all_keys_in_every_compressed_mode(mode):
    """Mode 2 would show it the first key alone, if the decoding kernel knew of modes: so such a call is refused."""
    query, key, value = random_tensors([(1, 2, 1, 16), (1, 2, 6, 16), (1, 2, 6, 16)], torch.float16)
    arguments = {"query": query, "key": key, "value": value, "num_heads": 2, "input_layout": "BNSD"}
    moded = {**arguments, "sparse_mode": mode, "atten_mask": COMPRESSED, "pre_tokens": 1, "next_tokens": 0}
    assert f"sparse_mode {mode} has no effect for a query of one token" in V1.refusal(Target(), **moded)
    assert torch.equal(V1.op(**moded)[0], compute(arguments)[0])


def test_tokens_don_t_limit_what_one_token_sees():
    query, key, value = random_tensors([(1, 2, 1, 16), (1, 2, 6, 16), (1, 2, 6, 16)], torch.float16)
    arguments = {"query": query, "key": key, "value": value, "num_heads": 2, "input_layout": "BNSD"}
    masked = {**arguments, "atten_mask": torch.zeros(1, 6, dtype=torch.bool)}
    limited = {**masked, "pre_tokens": 1, "next_tokens": 1}
    assert "have no effect for a query of one token" in V1.refusal(Target(), **limited)
    assert torch.equal(V1.op(**limited)[0], compute(masked)[0])


# packed sequences


def packed(rows, keys, *, heads=4, heads_of_key=2, head_dims=(128, 128), dtype=torch.float16, layout="TND"):
    """Sequences of so many rows and keys one after another, and each as [N, tokens, D]."""
    of_query, of_value = head_dims
    shapes = [(sum(rows), heads, of_query), (sum(keys), heads_of_key, of_query), (sum(keys), heads_of_key, of_value)]
    tensors = random_tensors(shapes, dtype)
    parts = [
        [part.transpose(0, 1) for part in tensor.split(counts)]
        for tensor, counts in zip(tensors, (rows, keys, keys), strict=True)
    ]
    if layout.startswith("N"):
        tensors = tuple(tensor.transpose(0, 1).contiguous() for tensor in tensors)
    arguments = dict(zip(("query", "key", "value"), tensors, strict=True)) | {
        "num_heads": heads,
        "num_key_value_heads": heads_of_key,
        "scale": 0.1,
        "input_layout": layout,
        "actual_seq_lengths": torch.tensor(rows).cumsum(0).tolist(),
        "actual_seq_lengths_kv": torch.tensor(keys).cumsum(0).tolist(),
        "softmax_lse_flag": True,
    }
    return arguments, list(zip(*parts, strict=True))


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), min_size=1, max_size=4),
    layout=st.sampled_from(["TND", "NTD", "NTD_TND"]),
    mode=st.sampled_from([0, 3, 4]),
    pre=st.integers(0, 3),
    following=st.integers(0, 3),
    heads_of_key=st.sampled_from([1, 2, 4]),
    head_dims=st.sampled_from([(128, 128), (192, 128)]),
    dtype=st.sampled_from(DTYPES),
    version=st.sampled_from([1, 2]),
)
def test_packed_sequences_are_the_maths(counts, layout, mode, pre, following, heads_of_key, head_dims, dtype, version):
    rows, keys = [row for row, _ in counts], [key for _, key in counts]
    arguments, parts = packed(rows, keys, heads_of_key=heads_of_key, head_dims=head_dims, dtype=dtype, layout=layout)
    if mode:
        arguments |= {"sparse_mode": mode, "atten_mask": COMPRESSED, "pre_tokens": pre, "next_tokens": following}
    out, lse = compute(arguments, version)
    assert lse.shape == (sum(rows), 4, 1)
    if not layout.endswith("TND"):
        out = out.transpose(0, 1)
    for part, part_lse, (query, key, value) in zip(out.split(rows), lse.split(rows), parts, strict=True):
        part, part_lse = part.transpose(0, 1), part_lse.transpose(0, 1)
        r, k = query.shape[1], key.shape[1]
        if k == 0:
            assert (part == 0).all()
            continue
        see = seen(mode, r, k, None, pre, following)
        some = see.any(-1)
        wanted, wanted_lse = exact(query, key, value, 0.1, see)
        assert_near(part[:, some], wanted[:, some], dtype)
        torch.testing.assert_close(part_lse[:, some].double(), wanted_lse[:, some], rtol=1e-5, atol=1e-5)
        blank = part[:, ~some]
        assert (blank == 0).all() if mode == 3 else blank.isnan().all()


def test_lengths_of_packed_sequences_are_ends_without_the_leading_zero():
    arguments, _ = packed([2, 3], [4, 2])
    assert arguments["actual_seq_lengths"] == [2, 5]
    whole, _ = compute(arguments)
    for rows, keys, sequence in ((slice(0, 2), slice(0, 4), ([2], [4])), (slice(2, 5), slice(4, 6), ([3], [2]))):
        alone = {**arguments, "actual_seq_lengths": sequence[0], "actual_seq_lengths_kv": sequence[1]}
        alone |= {"query": arguments["query"][rows], "key": arguments["key"][keys], "value": arguments["value"][keys]}
        assert torch.equal(whole[rows], compute(alone)[0])


def test_tokens_past_the_last_packed_sequence_are_undefined():
    arguments, _ = packed([2, 3], [4, 2])
    out, lse = compute({**arguments, "actual_seq_lengths": [2, 4]})
    assert out[4:].isnan().all()
    assert lse[4:].isnan().all()
    assert not out[:4].isnan().any()


def test_64_columns_are_for_the_second_version():
    arguments, ((query, key, value),) = packed([3], [5], heads=2, head_dims=(64, 64))
    out, _ = compute(arguments, 2)
    assert_near(out.transpose(0, 1), exact(query, key, value, 0.1)[0], torch.float16)
    assert "head_dim is 64 and 64 of value (TND takes 128/128, 192/128, 192/192 here)" in V1.refusal(
        Target(), **arguments
    )


@pytest.mark.parametrize("layout", ["TND", "NTD_TND"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sink_takes_its_part_and_has_no_value(layout, dtype):
    arguments, parts = packed([3, 2], [5, 4], dtype=dtype, layout=layout)
    (sink,) = random_tensors([(4,)], torch.bfloat16, 3)
    mask = {"sparse_mode": 3, "atten_mask": COMPRESSED, "softmax_lse_flag": False}
    out, _ = compute({**arguments, **mask, "learnable_sink": sink}, 2)
    for part, (query, key, value) in zip(out.split([3, 2]), parts, strict=True):
        wanted, lse = exact(query, key, value, 0.1, seen(3, query.shape[1], key.shape[1]))
        share = lse.exp() / (lse.exp() + sink.double().exp()[:, None, None])
        assert_near(part.transpose(0, 1), wanted * share, dtype)


# caches in blocks


def in_blocks(lengths, *, heads_of_key, head_dim, block_size, heads_first, dtype, seed=0):
    """Caches with blocks in any order, the table, and for each sequence its keys and values as [N, tokens, D]."""
    generator = torch.Generator().manual_seed(seed)
    width = max(-(-max(lengths) // block_size), 1)
    num_blocks = len(lengths) * width + 2
    table = torch.randperm(num_blocks, generator=generator)[: len(lengths) * width].reshape(len(lengths), width)
    tokens, caches = [], []
    for _ in range(2):
        cache = torch.randn(num_blocks, block_size, heads_of_key, head_dim, generator=generator).to(dtype)
        rows = zip(table, lengths, strict=True)
        tokens.append([cache[row].flatten(0, 1)[:length].transpose(0, 1) for row, length in rows])
        caches.append(cache.transpose(1, 2).contiguous() if heads_first else cache.flatten(2))
    return caches, table.int(), list(zip(*tokens, strict=True))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=3),
    layout=st.sampled_from(["BSH", "BSND", "BNSD"]),
    rows=st.sampled_from([1, 3]),
    heads_first=st.booleans(),
    mode=st.sampled_from([0, 2, 3]),
    dtype=st.sampled_from(DTYPES),
    version=st.sampled_from([1, 2]),
)
def test_a_cache_in_blocks_gives_what_its_tokens_give(lengths, layout, rows, heads_first, mode, dtype, version):
    heads_first = heads_first and layout == "BNSD"
    block_size = 16 if rows == 1 else 128
    caches, table, tokens = in_blocks(
        lengths, heads_of_key=2, head_dim=16, block_size=block_size, heads_first=heads_first, dtype=dtype
    )
    batch = len(lengths)
    (query,) = random_tensors([(batch, 4, rows, 16)], dtype, 7)
    arguments = {
        "query": laid_out(query, layout),
        "num_heads": 4,
        "num_key_value_heads": 2,
        "scale": 0.25,
        "input_layout": layout,
        "actual_seq_lengths_kv": lengths,
        "softmax_lse_flag": True,
    }
    if mode and rows > 1:
        arguments |= {"sparse_mode": mode, "atten_mask": COMPRESSED}
    paged = {**arguments, "key": caches[0], "value": caches[1], "block_table": table, "block_size": block_size}
    out, lse = compute(paged, version)
    dense = [torch.zeros(batch, 2, max(lengths), 16, dtype=dtype) for _ in range(2)]
    for b, pair in enumerate(tokens):
        for whole, part in zip(dense, pair, strict=True):
            whole[b, :, : lengths[b]] = part
    whole = {**arguments, "key": laid_out(dense[0], layout), "value": laid_out(dense[1], layout)}
    wanted, wanted_lse = compute(whole, version)
    torch.testing.assert_close(out, wanted, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(lse, wanted_lse, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("version", [1, 2])
def test_packed_queries_of_a_cache_take_lengths_of_key_and_ends_of_query(heads_first, version):
    rows, lengths = [1, 4, 2], [70, 33, 16]
    caches, table, tokens = in_blocks(
        lengths, heads_of_key=2, head_dim=128, block_size=16, heads_first=heads_first, dtype=torch.bfloat16
    )
    (query,) = random_tensors([(7, 4, 128)], torch.bfloat16)
    arguments = {"query": query, "key": caches[0], "value": caches[1], "block_table": table, "block_size": 16}
    arguments |= {"num_heads": 4, "num_key_value_heads": 2, "scale": 0.1, "input_layout": "TND"}
    arguments |= {"actual_seq_lengths": [1, 5, 7], "actual_seq_lengths_kv": lengths}
    arguments |= {"sparse_mode": 3, "atten_mask": COMPRESSED}
    out, _ = compute(arguments, version)
    for part, part_query, (key, value) in zip(out.split(rows), query.split(rows), tokens, strict=True):
        see = seen(3, len(part), key.shape[1])
        wanted, _ = exact(part_query.transpose(0, 1), key, value, 0.1, see)
        assert_near(part.transpose(0, 1), wanted, torch.bfloat16)


def test_masks_and_shifts_over_a_cache_may_be_wider():
    lengths = [70, 33]
    caches, table, tokens = in_blocks(
        lengths, heads_of_key=2, head_dim=16, block_size=128, heads_first=False, dtype=torch.float16
    )
    (query, shift) = random_tensors([(2, 4, 3, 16), (1, 4, 3, 144)], torch.float16)
    mask = random_mask((2, 1, 3, 140))
    arguments = {"query": query, "key": caches[0], "value": caches[1], "block_table": table, "block_size": 128}
    arguments |= {"num_heads": 4, "num_key_value_heads": 2, "input_layout": "BNSD", "actual_seq_lengths_kv": lengths}
    out, _ = compute({**arguments, "atten_mask": mask, "pse_shift": shift, "scale": 0.25})
    for b, (key, value) in enumerate(tokens):
        see, shift_of = ~mask[b, 0, :, : lengths[b]], shift[0, :, :, : lengths[b]]
        assert_near(out[b], exact(query[b], key, value, 0.25, see, shift_of)[0], torch.float16)


@pytest.mark.parametrize("block", [-1, 5])
def test_a_block_that_the_cache_doesn_t_have_is_an_error(block):
    cache = torch.ones(5, 128, 16).half()
    arguments = {"query": torch.ones(1, 2, 16).half(), "key": cache, "value": cache, "block_size": 128}
    table = torch.tensor([[1, 3, block]]).int()
    with pytest.raises(ValueError, match=rf"block_table names blocks \[{block}\] of a cache of 5"):
        V1.op(**arguments, block_table=table, actual_seq_lengths_kv=[257])
    assert (V1.op(**arguments, block_table=table, actual_seq_lengths_kv=[256])[0] == 1).all()


# layouts of results, and torch's own checks


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("with_lse", [False, True])
def test_results_are_laid_out_as_the_fake_kernel_says(layout, with_lse):
    query, key, value = random_tensors([(1, 4, 2, 16), (1, 1, 3, 16), (1, 1, 3, 16)], torch.float16)
    arguments = {name: laid_out(tensor, layout) for name, tensor in (("query", query), ("key", key), ("value", value))}
    arguments |= {"num_heads": 4, "num_key_value_heads": 1, "input_layout": layout, "softmax_lse_flag": with_lse}
    torch.library.opcheck(V1.op, (), arguments, test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(V2.op, (), in_version_2(arguments), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("layout", ["TND", "NTD", "NTD_TND"])
def test_so_are_those_of_packed_sequences(layout):
    arguments, _ = packed([2, 3], [4, 2], head_dims=(192, 128), layout=layout)
    torch.library.opcheck(V1.op, (), arguments, test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(V2.op, (), in_version_2(arguments), test_utils=("test_schema", "test_faketensor"))


def test_so_are_those_of_caches_in_blocks():
    for heads_first in (False, True):
        caches, table, _ = in_blocks(
            [70, 33], heads_of_key=2, head_dim=16, block_size=128, heads_first=heads_first, dtype=torch.float16
        )
        (query,) = random_tensors([(2, 4, 3, 16)], torch.float16)
        arguments = {"query": query, "key": caches[0], "value": caches[1], "block_table": table, "block_size": 128}
        arguments |= {"num_heads": 4, "num_key_value_heads": 2, "input_layout": "BNSD", "actual_seq_lengths_kv": [70]}
        torch.library.opcheck(V1.op, (), arguments, test_utils=("test_schema", "test_faketensor"))
