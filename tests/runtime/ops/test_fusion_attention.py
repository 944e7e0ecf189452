"""npu_fusion_attention_v3 against scaled_dot_product_attention in float64, its statistics, and its limits."""

import pytest
import torch
from attention_cases import (
    NO_LIMIT,
    assert_near,
    exact,
    laid_out,
    random_mask,
    random_tensors,
    seen,
    taken_apart,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from npu_fuse.runtime.ops.attention_mask import compressed_causal_mask
from npu_fuse.runtime.ops.fusion_attention import NPU_FUSION_ATTENTION_V3
from npu_fuse.runtime.target import Target

V3 = NPU_FUSION_ATTENTION_V3
HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32
COMPRESSED = compressed_causal_mask("cpu")
LAYOUTS = ("BSH", "SBH", "BSND", "BNSD")


def compute(arguments):
    assert V3.refusal(Target(), **arguments) is None
    return V3.op(**arguments)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_every_layout_and_mode_is_the_maths(data):
    def draw(strategy):
        return data.draw(strategy)

    layout, dtype = draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from([HALF, BRAIN, FLOAT]))
    batch, rows, keys = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 6))
    heads_of_key, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    heads, head_dim, scale = heads_of_key * group, draw(st.sampled_from([8, 20])), draw(st.sampled_from([1.0, 0.25]))
    of_value = draw(st.sampled_from([head_dim, 8]))
    shapes = [
        (batch, heads, rows, head_dim),
        (batch, heads_of_key, keys, head_dim),
        (batch, heads_of_key, keys, of_value),
    ]
    query, key, value = random_tensors(shapes, dtype, draw(st.integers(0, 99)))
    arguments = {
        "query": laid_out(query, layout),
        "key": laid_out(key, layout),
        "value": laid_out(value, layout),
        "head_num": heads,
        "scale": scale,
        "input_layout": layout,
    }
    mode, masks, pre, following = draw(st.integers(0, 4)), None, NO_LIMIT, NO_LIMIT
    score = (rows, keys)
    if mode > 1:
        arguments["atten_mask"] = COMPRESSED.to(draw(st.sampled_from([torch.bool, torch.uint8])))
    elif mode == 1 or draw(st.booleans()):
        shape = draw(st.sampled_from([score, (1, 1, *score), (batch, 1, *score), (batch, heads, *score)]))
        masks = random_mask(shape, draw(st.integers(0, 9)))
        arguments["atten_mask"] = masks
        masks = masks.reshape(-1, shape[1] if len(shape) == 4 else 1, *score).expand(batch, heads, *score)
    if draw(st.booleans()):
        pre, following = (draw(st.one_of(st.integers(0, 4), st.just(NO_LIMIT))) for _ in range(2))
        arguments |= {"pre_tockens": pre, "next_tockens": following}
    inner_precise = draw(st.sampled_from([0, 2]))
    arguments |= {"sparse_mode": mode, "inner_precise": inner_precise}
    shift = None
    if draw(st.booleans()):
        shape = draw(st.sampled_from([(batch, heads, *score), (1, heads, *score), (batch, heads, 1, keys)]))
        (shift,) = random_tensors([shape], dtype, 5)
        arguments["pse"] = shift
        shift = shift.expand(batch, heads, *score)

    out, maximum, total, nothing, seed, offset = compute(arguments)
    assert out.dtype == nothing.dtype == dtype
    assert nothing.shape == (0,)
    assert seed.tolist() == offset.tolist() == [0]
    assert maximum.shape == total.shape == (batch, heads, rows, 8)
    assert maximum.dtype == total.dtype == FLOAT
    out = taken_apart(out, layout, heads)
    for b in range(batch):
        see = torch.stack(
            [seen(mode, rows, keys, None if masks is None else masks[b, h], pre, following) for h in range(heads)]
        )
        wanted, lse = exact(query[b], key[b], value[b], scale, see, None if shift is None else shift[b])
        some = see.any(-1)
        assert_near(out[b][some], wanted[some], dtype)
        for copy in range(8):
            ours = maximum[b, ..., copy] + total[b, ..., copy].log()
            torch.testing.assert_close(ours[some].double(), lse[some][:, 0], rtol=1e-5, atol=1e-5)
        fixed = inner_precise == 2 or (mode == 3 and rows > keys)
        assert (out[b][~some] == 0).all() if fixed else out[b][~some].isnan().all()
        assert maximum[b][~some].isnan().all()


@pytest.mark.parametrize("dtype", [HALF, BRAIN, FLOAT])
@pytest.mark.parametrize(("rows", "keys"), [(5, 5), (3, 7), (7, 3), (1, 4)])
def test_what_torch_npu_makes_of_each_call_of_torch_gives_its_result(dtype, rows, keys):
    """The three calls in which it puts the op, by position and by its names."""
    shapes = [(2, 4, rows, 16), (2, 4, keys, 16), (2, 4, keys, 16)]
    query, key, value = random_tensors(shapes, dtype)
    wide = [tensor.double() for tensor in (query, key, value)]
    plain = V3.op(query, key, value, 4, "BNSD", None, None, None, 0.25)[0]
    assert_near(plain, scaled_dot_product_attention(*wide), dtype)

    causal = V3.op(
        query, key, value, 4, "BNSD", None, None, COMPRESSED, 0.25, 1.0, NO_LIMIT, 0, 0, None, None, None, 2
    )[0]
    assert_near(causal, scaled_dot_product_attention(*wide, is_causal=True), dtype)

    keep = ~random_mask((2, 1, rows, keys))
    keep[0, 0, 0] = False  # torch gives zeros for a row without keys
    masked = V3.op(query, key, value, 4, "BNSD", None, None, keep.logical_not(), 0.25, 1.0, NO_LIMIT, NO_LIMIT, 2)[0]
    assert_near(masked, scaled_dot_product_attention(*wide, attn_mask=keep), dtype)


def test_the_maximum_is_that_of_the_scaled_and_shown_scores():
    query = torch.tensor([[[[2.0] + [0.0] * 7]]])
    key = torch.tensor([1.0, 3.0, 5.0]).reshape(1, 1, 3, 1) * query / 2.0
    hides_the_last = torch.tensor([[False, False, True]])
    _, maximum, total, *_ = compute(
        {"query": query, "key": key, "value": key, "head_num": 1, "input_layout": "BNSD", "scale": 0.5}
        | {"atten_mask": hides_the_last}
    )
    assert maximum.unique().tolist() == [3.0]
    torch.testing.assert_close(total.unique(), torch.tensor([1 + torch.tensor(-2.0).exp()]))


def test_without_a_mask_a_mode_has_no_effect_and_is_refused():
    query, key, value = random_tensors([(1, 2, 4, 16)] * 3, FLOAT)
    arguments = {"query": query, "key": key, "value": value, "head_num": 2, "input_layout": "BNSD"}
    moded = {**arguments, "sparse_mode": 2, "next_tockens": 0}
    assert V3.refusal(Target(), **moded) == "sparse_mode 2 has no effect without an atten_mask"
    assert torch.equal(V3.op(**moded)[0], compute(arguments)[0])


def packed(rows, keys, dtype=FLOAT):
    query, key, value = random_tensors([(sum(rows), 4, 16), (sum(keys), 2, 16), (sum(keys), 2, 8)], dtype)
    ends = {"actual_seq_qlen": torch.tensor(rows).cumsum(0), "actual_seq_kvlen": torch.tensor(keys).cumsum(0)}
    return {"query": query, "key": key, "value": value, "head_num": 4, "input_layout": "TND", "scale": 0.25, **ends}


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=4),
    mode=st.sampled_from([0, 2, 3, 4]),
    dtype=st.sampled_from([HALF, BRAIN, FLOAT]),
)
def test_packed_sequences_are_the_maths(counts, mode, dtype):
    rows, keys = [row for row, _ in counts], [key for _, key in counts]
    arguments = packed(rows, keys, dtype) | {"softmax_layout": "TND"}
    if mode:
        arguments |= {"sparse_mode": mode, "atten_mask": COMPRESSED, "pre_tockens": 2, "next_tockens": 1}
    out, maximum, total, *_ = compute(arguments)
    assert maximum.shape == total.shape == (sum(rows), 4, 8)
    tensors = [arguments[name] for name in ("query", "key", "value")]
    parts = [tensor.split(count) for tensor, count in zip(tensors, (rows, keys, keys), strict=True)]
    lse = maximum[..., :1] + total[..., :1].log()
    for query, key, value, part, part_lse in zip(*parts, out.split(rows), lse.split(rows), strict=True):
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
        see = seen(mode, query.shape[1], key.shape[1], None, 2, 1)
        wanted, wanted_lse = exact(query, key, value, 0.25, see)
        some = see.any(-1)
        assert_near(part.transpose(0, 1)[:, some], wanted[:, some], dtype)
        torch.testing.assert_close(
            part_lse.transpose(0, 1)[:, some].double(), wanted_lse[:, some], rtol=1e-5, atol=1e-5
        )


def test_trailing_zeros_are_no_sequences_and_a_fall_elsewhere_is_an_error():
    arguments = packed([2, 3], [4, 2])
    padded = {
        **arguments,
        "actual_seq_qlen": torch.tensor([2, 5, 0, 0]),
        "actual_seq_kvlen": torch.tensor([4, 6, 0, 0]),
    }
    assert torch.equal(compute(padded)[0], compute(arguments)[0])
    with pytest.raises(ValueError, match="have a sequence of rows 5 to 2 and keys 4 to 6"):
        V3.op(**{**arguments, "actual_seq_qlen": torch.tensor([5, 2])})
    with pytest.raises(ValueError, match="rows 2 to 6 and keys 4 to 6; there are 5 and 6"):
        V3.op(**{**arguments, "actual_seq_qlen": torch.tensor([2, 6])})
    with pytest.raises(ValueError, match="rows 2 to 5 and keys 6 to 4"):
        V3.op(**{**arguments, "actual_seq_kvlen": torch.tensor([6, 4])})
    with pytest.raises(ValueError, match="rows 2 to 5 and keys 4 to 7; there are 5 and 6"):
        V3.op(**{**arguments, "actual_seq_kvlen": torch.tensor([4, 7])})


def test_statistics_of_packed_sequences_have_another_order_unless_asked_for():
    _, maximum, total, *_ = compute(packed([2, 3], [4, 2]))
    assert maximum.isnan().all()
    assert total.isnan().all()
    assert not compute(packed([2, 3], [4, 2]) | {"softmax_layout": "TND"})[1].isnan().any()


@pytest.mark.parametrize("layout", ["plain", "transposed", "sliced", "expanded"])
def test_any_strides_are_read_as_they_are(make_tensor, assert_same_layout, layout):
    query, key, value = (make_tensor((2, 4, 5, 16), HALF, layout, seed) for seed in range(3))
    out = V3.op(query, key, value, 4, "BNSD")[0]
    assert out.is_contiguous()
    assert torch.equal(out, V3.op(*(tensor.contiguous() for tensor in (query, key, value)), 4, "BNSD")[0])
    assert_same_layout(V3.op, query, key, value, 4, "BNSD")
    mask = random_mask((5, 5)).T
    masked, same = (V3.op(query, key, value, 4, "BNSD", None, None, each)[0] for each in (mask, mask.contiguous()))
    assert torch.equal(masked, same)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck(layout):
    query, key, value = random_tensors([(2, 4, 1, 16), (2, 1, 3, 16), (2, 1, 3, 8)], HALF)
    tensors = [laid_out(tensor, layout) for tensor in (query, key, value)]
    torch.library.opcheck(V3.op, (*tensors, 4, layout), test_utils=("test_schema", "test_faketensor"))


def test_opcheck_of_packed_sequences():
    torch.library.opcheck(V3.op, (), packed([2, 3], [4, 2]), test_utils=("test_schema", "test_faketensor"))


def test_symbolic_batch_and_tokens_are_kept_and_not_refused(symbolic):
    query, key = symbolic(("B", 4, "S", 64), HALF), symbolic(("B", 2, "T", 64), HALF)
    arguments = {"query": query, "key": key, "value": key, "head_num": 4, "input_layout": "BNSD"}
    assert V3.refusal(Target(), **arguments) is None
    for shape in (("S", "T"), (1, 1, "S", "T"), ("B", 1, "S", "T")):
        mask = symbolic(shape, torch.bool)
        assert V3.refusal(Target(), **arguments, atten_mask=mask) is None
    out, maximum, *_ = V3.op(**arguments)
    assert out.shape == query.shape
    assert maximum.shape == (query.shape[0], 4, query.shape[2], 8)
    in_bsh = {"query": symbolic(("B", "S", 256)), "head_num": 4, "input_layout": "BSH"}
    in_bsh |= {"key": symbolic(("B", "T", 128)), "value": symbolic(("B", "T", 64))}
    assert V3.refusal(Target(), **in_bsh) is None
    assert V3.op(**in_bsh)[0].shape == (query.shape[0], query.shape[2], 128)
    assert "is not known to have heads" in V3.refusal(Target(), **in_bsh | {"key": symbolic(("B", "T", "S"))})


def batched(query=(2, 4, 5, 32), key=(2, 2, 7, 32), value=None, *, dtype=HALF, device="cpu", **rest):
    arguments = {
        "query": torch.zeros(query, dtype=dtype, device=device),
        "key": torch.zeros(key, dtype=dtype, device=device),
        "value": torch.zeros(value or key, dtype=dtype, device=device),
        "head_num": 4,
        "input_layout": "BNSD",
    }
    return arguments | rest


def mask(*shape, dtype=torch.bool):
    return torch.zeros(shape, dtype=dtype)


ENDS = {"actual_seq_qlen": torch.tensor([2, 5]), "actual_seq_kvlen": torch.tensor([4, 6])}


@pytest.mark.parametrize(
    ("outside", "reason", "inside"),
    [
        (batched(input_layout="NTD"), "input_layout 'NTD' is unknown; known: BSH, SBH, BSND, BNSD, TND", batched()),
        (batched(dtype=torch.float64), "query is float64 (the kernel takes float16, bfloat16, float32)", batched()),
        (batched() | {"key": mask(2, 2, 7, 32, dtype=BRAIN)}, "key is bfloat16 but query is float16", batched()),
        (batched((2, 5, 128)), "query has 3 dims", batched()),
        (batched((0, 4, 5, 32), (0, 2, 7, 32)), "query [0, 4, 5, 32] is empty", batched((1, 4, 5, 32), (1, 2, 7, 32))),
        (batched(key=(2, 2, 0, 32)), "key [2, 2, 0, 32] is empty", batched(key=(2, 2, 1, 32))),
        (batched(head_num=0), "head_num is 0 (the kernel takes 1 to 256)", batched()),
        (
            batched((1, 257, 2, 8), (1, 1, 2, 8), head_num=257),
            "head_num is 257 (the kernel takes 1 to 256)",
            batched((1, 256, 2, 8), (1, 1, 2, 8), head_num=256),
        ),
        (batched(head_num=2), "query [2, 4, 5, 32] is not known to have 2 heads in BNSD", batched()),
        (
            batched(key=(2, 3, 7, 32)),
            "key [2, 3, 7, 32] is not known to have heads that divide head_num 4",
            batched(key=(2, 4, 7, 32)),
        ),
        (
            batched((2, 5, 128), (2, 7, 16), input_layout="BSH"),
            "key [2, 7, 16] is not known to have heads that divide head_num 4",
            batched((2, 5, 128), (2, 7, 32), input_layout="BSH"),
        ),
        (batched(value=(2, 4, 7, 32)), "value [2, 4, 7, 32] is not known to have 2 heads in BNSD", batched()),
        (batched(key=(3, 2, 7, 32)), "key [3, 2, 7, 32] has a batch of 3 and head_dim 32, query", batched()),
        (batched(key=(2, 2, 7, 16)), "has a batch of 2 and head_dim 16, query [2, 4, 5, 32] 2 and 32", batched()),
        (batched(value=(2, 2, 8, 32)), "value [2, 2, 8, 32] has other tokens or heads than key", batched()),
        (
            batched(value=(2, 2, 7, 40)),
            "head_dim is 32 and 40 of value (the kernel takes 768, and no larger one of value)",
            batched(value=(2, 2, 7, 24)),
        ),
        (
            batched((1, 4, 2, 769), (1, 4, 2, 769)),
            "head_dim is 769 and 769 of value",
            batched((1, 4, 2, 768), (1, 4, 2, 768)),
        ),
        (batched(**ENDS), "actual_seq_qlen is given, which layout BNSD doesn't take", batched()),
        (
            packed([2, 3], [4, 2]) | {"actual_seq_qlen": None},
            "actual_seq_qlen is missing, which packed sequences need",
            packed([2, 3], [4, 2]),
        ),
        (
            packed([2, 3], [4, 2]) | {"actual_seq_kvlen": None},
            "actual_seq_kvlen is missing, which packed sequences need",
            packed([2, 3], [4, 2]),
        ),
        (
            packed([2, 3], [4, 2]) | {"actual_seq_kvlen": torch.tensor([4, 6]).int()},
            "actual_seq_kvlen is int32 (the kernel takes int64)",
            packed([2, 3], [4, 2]),
        ),
        (
            packed([2, 3], [4, 2]) | {"actual_seq_qlen": torch.tensor([[2, 5]])},
            "actual_seq_qlen has 2 dims",
            packed([2, 3], [4, 2]),
        ),
        (
            packed([2, 3], [4, 2]) | {"actual_seq_qlen": torch.tensor([5])},
            "actual_seq_qlen [1] and actual_seq_kvlen [2] must have an end for each sequence",
            packed([5], [6]),
        ),
        (batched(softmax_layout="TND"), "softmax_layout is 'TND' (layout BNSD takes '')", batched()),
        (
            packed([2, 3], [4, 2]) | {"softmax_layout": "NTD"},
            "softmax_layout is 'NTD' (layout TND takes '' and 'TND')",
            packed([2, 3], [4, 2]) | {"softmax_layout": "TND"},
        ),
        (
            batched(atten_mask=mask(5, 7, dtype=torch.int8)),
            "atten_mask is int8 (the kernel takes bool, uint8)",
            batched(atten_mask=mask(5, 7, dtype=torch.uint8)),
        ),
        (batched(atten_mask=mask(1, 7)), "atten_mask [1, 7] is not known", batched(atten_mask=mask(5, 7))),
        (batched(atten_mask=mask(1, 4, 5, 7)), "atten_mask [1, 4, 5, 7] is not", batched(atten_mask=mask(2, 4, 5, 7))),
        (batched(atten_mask=mask(2, 1, 1, 7)), "atten_mask [2, 1, 1, 7] is not", batched(atten_mask=mask(2, 1, 5, 7))),
        (batched(sparse_mode=5), "sparse_mode is 5 (0 to 4 are supported)", batched()),
        (
            batched(sparse_mode=6, atten_mask=mask(3072, 2048)),
            "sparse_mode is 6 (0 to 4 are supported)",
            batched(sparse_mode=2, atten_mask=COMPRESSED),
        ),
        (
            batched(sparse_mode=2, atten_mask=mask(5, 7)),
            "atten_mask [5, 7] is not known to have a shape that sparse_mode 2 takes",
            batched(sparse_mode=1, atten_mask=mask(5, 7)),
        ),
        (
            packed([2, 3], [4, 2]) | {"atten_mask": mask(3, 4)},
            "atten_mask [3, 4] is not known to have a shape that sparse_mode 0 takes: none",
            packed([2, 3], [4, 2]) | {"atten_mask": COMPRESSED, "sparse_mode": 3},
        ),
        (
            batched(pse=torch.zeros(1, 4, 5, 7)),
            "pse is float32 but query is float16",
            batched(pse=torch.zeros(1, 4, 5, 7).half()),
        ),
        (
            batched(pse=torch.zeros(1, 4, 1, 7).half()),
            "pse [1, 4, 1, 7] is not known to have a shape that the kernel takes: [2, 4, 5, 7] or [2, 4, 1, 7] or",
            batched(pse=torch.zeros(2, 4, 1, 7).half()),
        ),
        (
            packed([2, 3], [4, 2]) | {"pse": torch.zeros(1, 4, 5, 6)},
            "pse is given, which is not supported for packed sequences",
            packed([2, 3], [4, 2]),
        ),
        (batched(inner_precise=3), "inner_precise is 3 (the kernel takes 0 to 2)", batched(inner_precise=2)),
        (batched(keep_prob=0.9), "keep_prob is 0.9 (npu_fuse supports its default alone, 1.0)", batched(keep_prob=1.0)),
        (batched(padding_mask=mask(5, 7)), "padding_mask is given", batched()),
        (batched(prefix=[1, 2]), "prefix is [1, 2] (npu_fuse supports its default alone, None)", batched()),
        (batched(sink=torch.zeros(4)), "sink is given", batched()),
        (
            batched(gen_mask_parallel=False, sync=True, head_num=0),
            "head_num is 0",
            batched(gen_mask_parallel=False, sync=True),
        ),
    ],
)
def test_borders(outside, reason, inside, assert_border):
    assert_border(V3, outside, reason, inside)


@pytest.mark.parametrize(
    ("outside", "reason", "inside"),
    [
        (
            batched((2 * 2**20 + 1, 4, 5, 8), (2 * 2**20 + 1, 4, 5, 8), device="meta"),
            "has a batch of 2097153 (the kernel takes 2097152)",
            batched((2 * 2**20, 4, 5, 8), (2 * 2**20, 4, 5, 8), device="meta"),
        ),
        (
            batched((2, 4, 2**20 + 1, 8), (2, 4, 7, 8), device="meta"),
            "query has 1048577 tokens (the kernel takes 1048576)",
            batched((2, 4, 2**20, 8), (2, 4, 7, 8), device="meta"),
        ),
        (
            batched((2, 4, 5, 8), (2, 4, 2**20 + 1, 8), device="meta"),
            "key has 1048577 tokens (the kernel takes 1048576)",
            batched((2, 4, 5, 8), (2, 4, 2**20, 8), device="meta"),
        ),
    ],
)
def test_limits_that_take_memory(outside, reason, inside):
    assert reason in V3.refusal(Target(), **outside)
    assert V3.refusal(Target(), **inside) is None


def test_a_compressed_mask_that_is_inverted_is_an_error():
    with pytest.raises(ValueError, match="atten_mask of sparse_mode 2 is not True above the diagonal"):
        V3.op(**batched(sparse_mode=2, atten_mask=~COMPRESSED))


@pytest.mark.parametrize("soc", ["ascend910b", "ascend910_93", "ascend950", "ascend310p"])
def test_socs(soc):
    assert (V3.refusal(Target(soc), **batched()) is None) == (soc in ("ascend910b", "ascend910_93"))
