"""npu_prompt_flash_attention against scaled_dot_product_attention in float64, and its limits."""

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

from npu_fuse.runtime.ops.attention_mask import compressed_causal_mask
from npu_fuse.runtime.ops.prompt_flash_attention import NPU_PROMPT_FLASH_ATTENTION
from npu_fuse.runtime.target import Target

PFA = NPU_PROMPT_FLASH_ATTENTION
HALF, BRAIN = torch.float16, torch.bfloat16
COMPRESSED = compressed_causal_mask("cpu")
LAYOUTS = ("BSH", "BSND", "BNSD", "BNSD_BSND")


def compute(arguments):
    assert PFA.refusal(Target(), **arguments) is None
    return PFA.op(**arguments)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_every_layout_and_mode_is_the_maths(data):
    def draw(strategy):
        return data.draw(strategy)

    layout, dtype = draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from([HALF, BRAIN]))
    batch, rows, keys = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 6))
    heads_of_key, group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    heads, scale = heads_of_key * group, draw(st.sampled_from([1.0, 0.25]))
    of_key = (batch, heads_of_key, keys, 16)
    query, key, value = random_tensors([(batch, heads, rows, 16), of_key, of_key], dtype, draw(st.integers(0, 99)))
    arguments = {
        "query": laid_out(query, layout),
        "key": laid_out(key, layout),
        "value": laid_out(value, layout),
        "num_heads": heads,
        "num_key_value_heads": heads_of_key,
        "scale_value": scale,
        "input_layout": layout,
    }
    mode = draw(st.integers(0, 4))
    masks, pre, following = None, NO_LIMIT, 0
    if mode > 1:
        arguments["atten_mask"] = COMPRESSED
    elif mode == 1 or draw(st.booleans()):
        score = (rows, keys)
        shape = draw(st.sampled_from([score, (1, *score), (batch, *score), (1, 1, *score), (batch, 1, *score)]))
        masks = random_mask(shape, draw(st.integers(0, 9)))
        arguments["atten_mask"] = masks
        masks = masks.reshape(-1, rows, keys).expand(batch, rows, keys)
    if draw(st.booleans()):
        pre, following = (draw(st.one_of(st.integers(0, 4), st.just(NO_LIMIT))) for _ in range(2))
        arguments |= {"pre_tokens": pre, "next_tokens": following}
    arguments["sparse_mode"] = mode
    row_counts, key_counts = [rows] * batch, [keys] * batch
    if draw(st.booleans()):
        row_counts = draw(st.lists(st.integers(0, rows), min_size=batch, max_size=batch))
        key_counts = draw(st.lists(st.integers(0, keys), min_size=batch, max_size=batch))
        arguments |= {"actual_seq_lengths": row_counts, "actual_seq_lengths_kv": key_counts}
    shift = None
    if draw(st.booleans()):
        (shift,) = random_tensors([(batch, heads, rows, 16)], dtype, 5)
        arguments["pse_shift"] = shift

    out = compute(arguments)
    assert out.dtype == dtype
    out = taken_apart(out, layout, heads)
    for b, (r, k) in enumerate(zip(row_counts, key_counts, strict=True)):
        assert out[b, :, r:].isnan().all()
        if k == 0:
            assert (out[b, :, :r] == 0).all()
            continue
        see = seen(mode, r, k, None if masks is None else masks[b], pre, following)
        some = see.any(-1)
        wanted, _ = exact(
            query[b, :, :r], key[b, :, :k], value[b, :, :k], scale, see, None if shift is None else shift[b, :, :r, :k]
        )
        assert_near(out[b, :, :r][:, some], wanted[:, some], dtype)
        assert out[b, :, :r][:, ~some].isnan().all()


def test_by_default_a_mask_shows_nothing_after_the_row_itself():
    """next_tokens is 0, and without a mask it has no effect."""
    query, key, value = random_tensors([(1, 2, 4, 16)] * 3, HALF)
    arguments = {"query": query, "key": key, "value": value, "num_heads": 2, "input_layout": "BNSD"}
    shows_all = torch.zeros(4, 4, dtype=torch.bool)
    causal, _ = exact(query[0], key[0], value[0], 1.0, seen(2, 4, 4))
    whole, _ = exact(query[0], key[0], value[0], 1.0)
    assert_near(compute({**arguments, "atten_mask": shows_all})[0], causal, HALF)
    assert_near(compute({**arguments, "atten_mask": shows_all, "next_tokens": NO_LIMIT})[0], whole, HALF)
    assert_near(compute(arguments)[0], whole, HALF)


def test_one_token_obeys_modes_as_any_other_here():
    query, key, value = random_tensors([(1, 2, 1, 16), (1, 2, 6, 16), (1, 2, 6, 16)], HALF)
    arguments = {"query": query, "key": key, "value": value, "num_heads": 2, "input_layout": "BNSD"}
    out = compute({**arguments, "sparse_mode": 2, "atten_mask": COMPRESSED})
    assert torch.equal(out[0, :, 0], value[0, :, 0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck(layout):
    query, key, value = random_tensors([(2, 4, 1, 16), (2, 1, 3, 16), (2, 1, 3, 16)], HALF)
    arguments = {name: laid_out(tensor, layout) for name, tensor in (("query", query), ("key", key), ("value", value))}
    arguments |= {"num_heads": 4, "num_key_value_heads": 1, "input_layout": layout}
    torch.library.opcheck(PFA.op, (), arguments, test_utils=("test_schema", "test_faketensor"))


def test_symbolic_batch_and_tokens_are_kept_and_not_refused(symbolic):
    query, key = symbolic(("B", "S", 256), HALF), symbolic(("B", "T", 256), HALF)
    arguments = {"query": query, "key": key, "value": key, "num_heads": 4}
    for soc in ("ascend910b", "ascend310p"):
        assert PFA.refusal(Target(soc), **arguments) is None
        mask = symbolic(("B", 1, "S", "T"), torch.bool)
        assert PFA.refusal(Target(soc), **arguments, atten_mask=mask) is None
    assert PFA.op(**arguments).shape == query.shape


def batched(query=(2, 4, 5, 32), key=(2, 4, 7, 32), *, dtype=HALF, device="cpu", **rest):
    arguments = {
        "query": torch.zeros(query, dtype=dtype, device=device),
        "key": torch.zeros(key, dtype=dtype, device=device),
        "value": torch.zeros(key, dtype=dtype, device=device),
        "num_heads": 4,
        "input_layout": "BNSD",
    }
    return arguments | rest


def mask(*shape, dtype=torch.bool):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("outside", "reason", "inside"),
    [
        (batched(input_layout="TND"), "input_layout 'TND' is not supported; known: BSH, BSND, BNSD", batched()),
        (batched(dtype=torch.float32), "query is float32 (the kernel takes float16, bfloat16)", batched()),
        (batched((2, 5, 128)), "query has 3 dims", batched()),
        (batched() | {"key": torch.zeros(2, 4, 32, 7).half().mT}, "key [2, 4, 7, 32] with strides", batched()),
        (batched(num_heads=2), "is not known to have 2 heads", batched()),
        (
            batched(num_key_value_heads=2),
            "key [2, 4, 7, 32] in layout BNSD is not known to have 2",
            batched(key=(2, 2, 7, 32), num_key_value_heads=2),
        ),
        (batched((2, 4, 5, 40), (2, 4, 7, 40)), "head_dim is 40", batched((2, 4, 5, 48), (2, 4, 7, 48))),
        (batched(key=(3, 4, 7, 32)), "has a batch of 3 and head_dim 32", batched()),
        (
            batched(actual_seq_lengths=[6]),
            "actual_seq_lengths holds 6, and there are 5",
            batched(actual_seq_lengths=[5]),
        ),
        (
            batched((2, 4, 1, 32), actual_seq_lengths=[2]),
            "actual_seq_lengths holds 2, and there are 1",
            batched((2, 4, 1, 32), actual_seq_lengths=[1]),
        ),
        (batched(actual_seq_lengths_kv=[8]), "actual_seq_lengths_kv holds 8", batched(actual_seq_lengths_kv=[7])),
        (batched(atten_mask=mask(5, 7, dtype=HALF)), "atten_mask is float16", batched(atten_mask=mask(5, 7))),
        (batched(atten_mask=mask(2, 4, 5, 7)), "atten_mask [2, 4, 5, 7] is not", batched(atten_mask=mask(2, 1, 5, 7))),
        (batched(atten_mask=mask(1, 7)), "atten_mask [1, 7] is not known", batched(atten_mask=mask(2, 5, 7))),
        (batched(sparse_mode=5), "sparse_mode is 5 (0 to 4", batched()),
        (batched(sparse_mode=1), "sparse_mode 1 needs an atten_mask", batched(sparse_mode=1, atten_mask=mask(5, 7))),
        (
            batched(sparse_mode=3, atten_mask=mask(5, 7)),
            "[2048, 2048] or [1, 2048, 2048] or [1, 1, 2048, 2048]",
            batched(sparse_mode=3, atten_mask=COMPRESSED),
        ),
        (
            batched(sparse_mode=3, atten_mask=~COMPRESSED),
            "atten_mask of sparse_mode 3 is not True above the diagonal and False elsewhere",
            batched(sparse_mode=3, atten_mask=COMPRESSED),
        ),
        (
            batched(pse_shift=torch.zeros(1, 1, 5, 16).half()),
            "pse_shift [1, 1, 5, 16] is not known to be",
            batched(pse_shift=torch.zeros(1, 4, 5, 16).half()),
        ),
        (batched(padding_mask=mask(5, 7)), "padding_mask is given (npu_fuse supports its default alone", batched()),
        (batched(quant_scale2=torch.ones(1)), "quant_scale2 is given (npu_fuse supports its default alone", batched()),
    ],
)
def test_borders(outside, reason, inside):
    with pytest.raises(ValueError, match="npu::npu_prompt_flash_attention: ") as raised:
        PFA.op(**outside)
    assert reason in str(raised.value)
    PFA.op(**inside)
    assert PFA.refusal(Target(), **inside) is None
    if "is not True above" not in reason:  # which only the values show
        assert reason in PFA.refusal(Target(), **outside)


@pytest.mark.parametrize(
    ("outside", "reason", "inside"),
    [
        (batched(dtype=BRAIN), "query is bfloat16, which ascend310p does not compute", batched()),
        (
            batched(num_key_value_heads=4),
            "num_key_value_heads is 4 (ascend310p takes 0: a key head for each of query)",
            batched(num_key_value_heads=0),
        ),
        (
            batched(key=(2, 2, 7, 32), num_key_value_heads=2),
            "num_key_value_heads is 2 (ascend310p takes 0",
            batched(),
        ),
        (
            batched(sparse_mode=2, atten_mask=COMPRESSED),
            "sparse_mode is 2 (ascend310p takes 0)",
            batched(sparse_mode=0, atten_mask=mask(5, 7)),
        ),
        (batched(pre_tokens=3), "pre_tokens is 3 and next_tokens 0", batched(pre_tokens=NO_LIMIT)),
        (batched(next_tokens=1), "and next_tokens 1", batched(next_tokens=NO_LIMIT)),
        (
            batched(pse_shift=torch.zeros(1, 4, 5, 16).half()),
            "pse_shift is given, which ascend310p doesn't take",
            batched(),
        ),
        (batched(actual_seq_lengths=[5]), "actual_seq_lengths is given, which ascend310p", batched()),
        (batched(actual_seq_lengths_kv=[7]), "actual_seq_lengths_kv is given, which ascend310p", batched()),
        (
            batched((129, 4, 5, 32), (129, 4, 7, 32)),
            "the batch is 129 (ascend310p takes 128)",
            batched((128, 4, 5, 32), (128, 4, 7, 32)),
        ),
        (
            batched((2, 4, 65536, 32), device="meta"),
            "the length of query is 65536 (ascend310p takes 65535)",
            batched((2, 4, 65535, 32), device="meta"),
        ),
        (
            batched(key=(2, 4, 65536, 32), device="meta"),
            "the length of key is 65536 (ascend310p takes 65535)",
            batched(key=(2, 4, 65535, 32), device="meta"),
        ),
    ],
)
def test_borders_of_310p(outside, reason, inside):
    assert reason in PFA.refusal(Target("ascend310p"), **outside)
    assert PFA.refusal(Target("ascend310p"), **inside) is None
    assert PFA.refusal(Target("ascend910b"), **outside) is None


@pytest.mark.parametrize("soc", ["ascend910b", "ascend910_93", "ascend950", "ascend310p"])
def test_socs(soc):
    assert (PFA.refusal(Target(soc), **batched()) is None) == (soc != "ascend950")
