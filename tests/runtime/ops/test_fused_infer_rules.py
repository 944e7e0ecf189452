"""What npu_fused_infer_attention_score takes: one call just outside of each border, and one just inside."""

import pytest
import torch
from attention_cases import NO_LIMIT, in_version_2
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from npu_fuse.runtime.ops.attention_mask import compressed_causal_mask
from npu_fuse.runtime.ops.fused_infer_attention_score import (
    NPU_FUSED_INFER_ATTENTION_SCORE,
    NPU_FUSED_INFER_ATTENTION_SCORE_V2,
)
from npu_fuse.runtime.target import Target

V1, V2 = NPU_FUSED_INFER_ATTENTION_SCORE, NPU_FUSED_INFER_ATTENTION_SCORE_V2
HALF, BRAIN = torch.float16, torch.bfloat16
COMPRESSED = compressed_causal_mask("cpu")


def zeros(*shape, dtype=HALF, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def batched(query=(2, 4, 5, 32), key=(2, 2, 7, 32), *, dtype=HALF, device="cpu", **rest):
    """A legal call in BNSD, changed."""
    arguments = {
        "query": zeros(*query, dtype=dtype, device=device),
        "key": zeros(*key, dtype=dtype, device=device),
        "value": zeros(*key, dtype=dtype, device=device),
        "num_heads": 4,
        "num_key_value_heads": 2,
        "input_layout": "BNSD",
    }
    return arguments | rest


def decoding(**rest):
    """Likewise, with a query of one token."""
    return batched((2, 4, 1, 32), **rest)


def packed(query=(6, 4, 128), key=(9, 2, 128), value=None, *, dtype=HALF, **rest):
    """Likewise, of two packed sequences."""
    arguments = {
        "query": zeros(*query, dtype=dtype),
        "key": zeros(*key, dtype=dtype),
        "value": zeros(*(value or key), dtype=dtype),
        "num_heads": 4,
        "num_key_value_heads": 2,
        "input_layout": "TND",
        "actual_seq_lengths": [2, 6],
        "actual_seq_lengths_kv": [4, 9],
    }
    return arguments | rest


def paged(query=(2, 4, 5, 32), cache=(8, 128, 64), *, device="cpu", **rest):
    """Likewise, with a cache in blocks."""
    table = {"block_table": torch.zeros(2, 3, dtype=torch.int32), "block_size": 128, "actual_seq_lengths_kv": [300, 7]}
    return batched(query, cache, device=device) | table | rest


def packed_paged(cache=(8, 128, 256), **rest):
    """Likewise, of packed sequences."""
    table = {"block_table": torch.zeros(2, 3, dtype=torch.int32), "block_size": 128, "actual_seq_lengths_kv": [300, 7]}
    return packed(key=cache) | table | rest


def in_its_words(reason, contract):
    """A reason of the first version, by the names of the version asked for."""
    if contract is V2:
        for old, new in (
            ("actual_seq_lengths_kv", "actual_seq_kvlen"),
            ("actual_seq_lengths", "actual_seq_qlen"),
            ("num_heads", "num_query_heads"),
        ):
            reason = reason.replace(old, new)
    return reason


def assert_refused(outside, reason, inside, *, raises=True):
    """Both versions refuse the one call, which also raises, and take the other."""
    for contract, renamed in ((V1, dict), (V2, in_version_2)):
        refusal = contract.refusal(Target(), **renamed(outside))
        assert in_its_words(reason, contract) in str(refusal)
        assert contract.refusal(Target(), **renamed(inside)) is None
        if raises:
            with pytest.raises(ValueError, match="attention_score") as raised:
                contract.op(**renamed(outside))
            assert str(raised.value) == f"{contract.name}: {refusal}"
            contract.op(**renamed(inside))


@pytest.mark.parametrize(
    ("outside", "reason", "inside"),
    [
        (batched(input_layout="NBSD"), "input_layout 'NBSD' is unknown; known: BSH, ", batched()),
        (batched(dtype=torch.float32), "query is float32 (the kernel takes float16, bfloat16)", batched(dtype=BRAIN)),
        (batched(key=(2, 2, 7, 32)) | {"key": zeros(2, 2, 7, 32, dtype=BRAIN)}, "key is bfloat16 but query", batched()),
        (batched(value=zeros(2, 2, 7, 32, dtype=BRAIN)), "value is bfloat16 but query is float16", batched()),
        (batched(query=(2, 5, 128)), "query has 3 dims [2, 5, 128] (the kernel takes 4)", batched()),
        (batched(value=zeros(2, 7, 64)), "value has 3 dims [2, 7, 64] (the kernel takes 4)", batched()),
        (batched(query=(2, 5, 4, 32)) | {"input_layout": "TND"}, "query has 4 dims", packed()),
        (
            batched() | {"query": zeros(2, 4, 32, 5).mT},
            "query [2, 4, 5, 32] with strides",
            batched(),
        ),
        (batched() | {"key": zeros(2, 2, 32, 7).mT}, "key [2, 2, 7, 32] with strides", batched()),
        (batched(value=zeros(2, 7, 2, 32).transpose(1, 2)), "value [2, 2, 7, 32] with strides", batched()),
    ],
)
def test_tensors(outside, reason, inside):
    assert_refused(outside, reason, inside)


@pytest.mark.parametrize(
    ("outside", "reason", "inside"),
    [
        (batched(num_heads=0), "num_heads is 0 (the kernel takes 1 to 256)", batched()),
        (
            batched((1, 257, 2, 16), (1, 257, 2, 16), num_heads=257, num_key_value_heads=0),
            "num_heads is 257 (the kernel takes 1 to 256)",
            batched((1, 256, 2, 16), (1, 256, 2, 16), num_heads=256, num_key_value_heads=0),
        ),
        (
            batched(num_key_value_heads=3),
            "num_heads 4 is no multiple of num_key_value_heads 3",
            batched(),
        ),
        (batched(num_key_value_heads=-2), "num_heads 4 is no multiple of num_key_value_heads -2", batched()),
        (
            batched((1, 65, 2, 16), (1, 1, 2, 16), num_heads=65, num_key_value_heads=1),
            "65 heads of query share one of key (the kernel takes 64)",
            batched((1, 64, 2, 16), (1, 1, 2, 16), num_heads=64, num_key_value_heads=1),
        ),
        (
            batched(num_heads=2),
            "query [2, 4, 5, 32] in layout BNSD is not known to have 2 heads",
            batched((2, 2, 5, 32), num_heads=2),
        ),
        (
            batched((2, 5, 130), (2, 7, 64), input_layout="BSH"),
            "query [2, 5, 130] in layout BSH is not known to have 4 heads",
            batched((2, 5, 128), (2, 7, 64), input_layout="BSH"),
        ),
        (
            batched(num_key_value_heads=0),
            "key [2, 2, 7, 32] in layout BNSD is not known to have 4 heads",
            batched(key=(2, 4, 7, 32), num_key_value_heads=0),
        ),
        (
            batched(value=zeros(2, 4, 7, 32)),
            "value [2, 4, 7, 32] in layout BNSD is not known to have 2 heads",
            batched(),
        ),
        (
            batched((2, 4, 5, 24), (2, 2, 7, 24)),
            "head_dim is 24 (the kernel takes multiples of 16 up to 512)",
            batched((2, 4, 5, 16), (2, 2, 7, 16)),
        ),
        (batched((2, 4, 5, 0), (2, 2, 7, 0)), "head_dim is 0 (the kernel takes", batched((2, 4, 5, 16), (2, 2, 7, 16))),
        (
            batched((1, 4, 2, 528), (1, 2, 2, 528)),
            "head_dim is 528 (the kernel takes multiples of 16 up to 512)",
            batched((1, 4, 2, 512), (1, 2, 2, 512)),
        ),
        (
            batched((1, 2, 128, 512), (1, 2, 2, 512), num_heads=128, input_layout="BSND"),
            "a token of query takes 65536 elements (layout BSND takes less than 65535)",
            batched((1, 128, 2, 512), (1, 2, 2, 512), num_heads=128),
        ),
        (
            batched((1, 2, 65536), (1, 2, 1024), num_heads=128, input_layout="BSH"),
            "a token of query takes 65536 elements (layout BSH takes less than 65535)",
            batched((1, 2, 65024), (1, 2, 512), num_heads=127, num_key_value_heads=127, input_layout="BSH")
            | {"key": zeros(1, 2, 65024), "value": zeros(1, 2, 65024)},
        ),
        (
            batched(key=(3, 2, 7, 32)),
            "key [3, 2, 7, 32] has a batch of 3 and head_dim 32, query [2, 4, 5, 32] 2",
            batched(),
        ),
        (batched(key=(2, 2, 7, 48)), "has a batch of 2 and head_dim 48, query [2, 4, 5, 32] 2 and 32", batched()),
        (
            batched(value=zeros(2, 2, 8, 32)),
            "value [2, 2, 8, 32] and key [2, 2, 7, 32] must have the same shape",
            batched(),
        ),
        (
            batched(value=zeros(2, 2, 7, 16)),
            "value [2, 2, 7, 16] and key [2, 2, 7, 32] must have the same shape",
            batched(),
        ),
    ],
)
def test_heads_and_sizes(outside, reason, inside):
    assert_refused(outside, reason, inside)


MANY = 20 * 2**20


@pytest.mark.parametrize(
    ("outside", "reason", "inside"),
    [
        (
            batched((65537, 4, 5, 32), (65537, 2, 7, 32), device="meta"),
            "has a batch of 65537 (the kernel takes 65536)",
            batched((65536, 4, 5, 32), (65536, 2, 7, 32), device="meta"),
        ),
        (
            batched((2, 4, MANY + 1, 32), device="meta"),
            f"has {MANY + 1} tokens (the kernel takes {MANY})",
            batched((2, 4, MANY, 32), device="meta"),
        ),
        (
            batched(key=(2, 2, MANY + 1, 32), device="meta"),
            f"has {MANY + 1} tokens (the kernel takes {MANY})",
            batched(key=(2, 2, MANY, 32), device="meta"),
        ),
        (
            decoding(key=(2, 2, 262145, 32), device="meta"),
            "key has 262145 tokens (the kernel takes 262144 for a query of 1)",
            batched(key=(2, 2, 262145, 32), device="meta"),
        ),
        (
            decoding(key=(2, 2, 262145, 32), device="meta"),
            "key has 262145 tokens",
            decoding(key=(2, 2, 262144, 32), device="meta"),
        ),
        (
            paged((2, 128, 5, 512), (8, 128, 65536), device="meta", num_heads=128, num_key_value_heads=128),
            "a token of key takes 65536 elements",
            paged((2, 128, 5, 512), (8, 128, 128, 512), device="meta", num_heads=128, num_key_value_heads=128),
        ),
        (
            packed(actual_seq_lengths=[6] * 4097, actual_seq_lengths_kv=[9] * 4097),
            "actual_seq_lengths has 4097 sequences (the kernel takes 1 to 4096)",
            packed(actual_seq_lengths=[6] * 4096, actual_seq_lengths_kv=[9] * 4096),
        ),
    ],
)
def test_limits_that_take_memory(outside, reason, inside):
    assert_refused(outside, reason, inside, raises=False)


@pytest.mark.parametrize(
    ("outside", "reason", "inside"),
    [
        (
            batched((3, 4, 5, 32), (3, 2, 7, 32), actual_seq_lengths=[1, 2]),
            "actual_seq_lengths has 2 lengths for a batch of 3 (the kernel takes 1 or all of them)",
            batched((3, 4, 5, 32), (3, 2, 7, 32), actual_seq_lengths=[1, 2, 3, 4]),
        ),
        (
            batched((3, 4, 5, 32), (3, 2, 7, 32), actual_seq_lengths_kv=[1, 2]),
            "actual_seq_lengths_kv has 2 lengths for a batch of 3",
            batched((3, 4, 5, 32), (3, 2, 7, 32), actual_seq_lengths_kv=[2]),
        ),
        (batched(actual_seq_lengths=[]), "actual_seq_lengths has 0 lengths for a batch of 2", batched()),
        (
            batched(actual_seq_lengths=[5, 6]),
            "actual_seq_lengths holds 6, and there are 5 tokens",
            batched(actual_seq_lengths=[5, 5]),
        ),
        (
            batched(actual_seq_lengths_kv=[8]),
            "actual_seq_lengths_kv holds 8, and there are 7 tokens",
            batched(actual_seq_lengths_kv=[7]),
        ),
        (
            batched(actual_seq_lengths_kv=[-1]),
            "actual_seq_lengths_kv holds -1, which is negative",
            batched(actual_seq_lengths_kv=[0]),
        ),
        (batched(actual_seq_lengths=[9]), "actual_seq_lengths holds 9", decoding(actual_seq_lengths=[9])),
        (packed(actual_seq_lengths=None), "actual_seq_lengths is missing, which packed sequences need", packed()),
        (packed(actual_seq_lengths=[]), "actual_seq_lengths has 0 sequences (the kernel takes 1 to 4096)", packed()),
        (packed(actual_seq_lengths_kv=None), "actual_seq_lengths_kv is missing, which packed sequences need", packed()),
        (packed(actual_seq_lengths=[]), "actual_seq_lengths has 0 sequences", packed()),
        (packed_paged(actual_seq_lengths=None), "actual_seq_lengths is missing", packed_paged()),
        (
            packed(actual_seq_lengths=[6]),
            "actual_seq_lengths has 1 sequences and actual_seq_lengths_kv 2",
            packed(actual_seq_lengths=[6], actual_seq_lengths_kv=[9]),
        ),
        (
            packed(actual_seq_lengths=[6, 2]),
            "actual_seq_lengths falls from 6 to 2",
            packed(actual_seq_lengths=[6, 6]),
        ),
        (
            packed(actual_seq_lengths_kv=[4, 10]),
            "actual_seq_lengths_kv holds 10, and there are 9 tokens",
            packed(actual_seq_lengths_kv=[4, 9]),
        ),
        (packed(actual_seq_lengths=[-1, 6]), "actual_seq_lengths holds -1", packed(actual_seq_lengths=[0, 6])),
    ],
)
def test_lengths(outside, reason, inside):
    assert_refused(outside, reason, inside)


def mask(*shape, dtype=torch.bool):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("outside", "reason", "inside"),
    [
        (
            batched(atten_mask=mask(5, 7, dtype=HALF)),
            "atten_mask is float16 (the kernel takes bool, int8, uint8)",
            batched(atten_mask=mask(5, 7, dtype=torch.int8)),
        ),
        (batched(atten_mask=mask(7, 5).T), "atten_mask [5, 7] with strides", batched(atten_mask=mask(5, 7))),
        (
            batched(atten_mask=mask(5, 8)),
            "atten_mask [5, 8] is not known to have a shape that",
            batched(atten_mask=mask(5, 7)),
        ),
        (batched(atten_mask=mask(1, 7)), "atten_mask [1, 7] is not known", batched(atten_mask=mask(1, 5, 7))),
        # A mask of one row that is meant for all is what a kernel was seen to read wrongly.
        (batched(atten_mask=mask(1, 1, 1, 7)), "atten_mask [1, 1, 1, 7] is not", batched(atten_mask=mask(1, 1, 5, 7))),
        (batched(atten_mask=mask(2, 1, 1, 7)), "atten_mask [2, 1, 1, 7] is not", batched(atten_mask=mask(2, 1, 5, 7))),
        (batched(atten_mask=mask(1, 4, 5, 7)), "atten_mask [1, 4, 5, 7] is not", batched(atten_mask=mask(1, 1, 5, 7))),
        (batched(atten_mask=mask(2, 5, 7)), "atten_mask [2, 5, 7] is not known", batched(atten_mask=mask(2, 1, 5, 7))),
        (batched(atten_mask=mask(2, 7)), "atten_mask [2, 7] is not known", decoding(atten_mask=mask(2, 7))),
        (decoding(atten_mask=mask(1, 7)), "atten_mask [1, 7] is not known", decoding(atten_mask=mask(1, 1, 7))),
        (
            batched(atten_mask=mask(5, 7), input_layout="BNSD_NBSD"),
            "atten_mask [5, 7] is not known to have a shape that sparse_mode 0 takes",
            batched(atten_mask=mask(1, 5, 7), input_layout="BNSD_NBSD"),
        ),
        (batched(sparse_mode=5), "sparse_mode is 5 (0 to 4 are supported)", batched(sparse_mode=0)),
        (batched(sparse_mode=9), "sparse_mode is 9 (0 to 4 are supported)", batched()),
        (batched(sparse_mode=-1), "sparse_mode is -1", batched()),
        *[
            (
                batched(sparse_mode=mode),
                f"sparse_mode {mode} needs an atten_mask",
                batched(sparse_mode=mode, atten_mask=mask(5, 7) if mode == 1 else COMPRESSED),
            )
            for mode in (1, 2, 3, 4)
        ],
        *[
            (
                batched(sparse_mode=mode, atten_mask=mask(*shape)),
                f"is not known to have a shape that sparse_mode {mode} takes:"
                " [2048, 2048] or [1, 2048, 2048] or [1, 1, 2048, 2048]",
                batched(sparse_mode=mode, atten_mask=COMPRESSED[None]),
            )
            for mode in (2, 3, 4)
            for shape in ((5, 7), (2047, 2048), (2048, 2047), (2, 1, 2048, 2048), (1, 1, 1, 2048, 2048))
        ],
        (
            batched(sparse_mode=1, atten_mask=COMPRESSED),
            "atten_mask [2048, 2048] is not known to have a shape that sparse_mode 1 takes",
            batched((2, 4, 2048, 16), (2, 2, 2048, 16), sparse_mode=1, atten_mask=COMPRESSED),
        ),
        (
            batched(atten_mask=mask(5, 7), pre_tokens=2, next_tokens=-3),
            "pre_tokens 2 and next_tokens -3 leave no key between them",
            batched(atten_mask=mask(5, 7), pre_tokens=3, next_tokens=-3),
        ),
        (
            batched(sparse_mode=4, atten_mask=COMPRESSED, pre_tokens=-1, next_tokens=0),
            "leave no key between them",
            batched(sparse_mode=3, atten_mask=COMPRESSED, pre_tokens=-1, next_tokens=0),
        ),
        (
            packed(atten_mask=mask(6, 9)),
            "atten_mask [6, 9] is not known to have a shape that sparse_mode 0 takes: none",
            packed(),
        ),
        *[
            (
                packed(sparse_mode=mode, atten_mask=COMPRESSED),
                f"sparse_mode is {mode} (packed sequences take 0, 3 and 4)",
                packed(sparse_mode=allowed, atten_mask=COMPRESSED),
            )
            for mode, allowed in ((1, 3), (2, 4))
        ],
        (packed(sparse_mode=3), "sparse_mode 3 needs an atten_mask", packed(sparse_mode=3, atten_mask=COMPRESSED)),
    ],
)
def test_masks(outside, reason, inside):
    assert_refused(outside, reason, inside)


@pytest.mark.parametrize(
    ("outside", "reason", "inside"),
    [
        (
            batched(pse_shift=zeros(2, 4, 5, 16, dtype=BRAIN)),
            "pse_shift is bfloat16 but query is float16",
            batched(pse_shift=zeros(2, 4, 5, 16)),
        ),
        (
            batched(pse_shift=zeros(4, 5, 16)),
            "pse_shift has 3 dims [4, 5, 16] (the kernel takes 4)",
            batched(pse_shift=zeros(1, 4, 5, 16)),
        ),
        (
            batched(pse_shift=zeros(1, 4, 16, 5).mT),
            "pse_shift [1, 4, 5, 16] with strides",
            batched(pse_shift=zeros(1, 4, 5, 16)),
        ),
        (
            batched(pse_shift=zeros(1, 1, 5, 16)),
            "pse_shift [1, 1, 5, 16] is not known to be [1 or 2, 4, 5, 7 or more]",
            batched(pse_shift=zeros(1, 4, 5, 16)),
        ),
        (
            batched(pse_shift=zeros(1, 4, 1, 16)),
            "pse_shift [1, 4, 1, 16] is not known to be [1 or 2, 4, 5, 7 or more]",
            decoding(pse_shift=zeros(1, 4, 1, 16)),
        ),
        (
            batched((3, 4, 5, 32), (3, 2, 7, 32), pse_shift=zeros(2, 4, 5, 16)),
            "pse_shift [2, 4, 5, 16] is not known to be [1 or 3, 4, 5, 7 or more]",
            batched((3, 4, 5, 32), (3, 2, 7, 32), pse_shift=zeros(3, 4, 5, 16)),
        ),
        (
            batched(key=(2, 2, 17, 32), pse_shift=zeros(1, 4, 5, 16)),
            "rows of pse_shift [1, 4, 5, 16] are not known to cover 17 keys",
            batched(key=(2, 2, 16, 32), pse_shift=zeros(1, 4, 5, 16)),
        ),
        (
            batched(pse_shift=zeros(1, 4, 5, 24)),
            "rows of pse_shift [1, 4, 5, 24] are not known to take multiples of 32 bytes",
            batched(pse_shift=zeros(1, 4, 5, 32)),
        ),
        (packed(pse_shift=zeros(1, 4, 6, 16)), "pse_shift is given, which packed sequences don't take", packed()),
        (
            batched(inner_precise=4),
            "inner_precise is 4 (the kernel takes 0 to 3 for a query of 5)",
            batched(inner_precise=3),
        ),
        (batched(inner_precise=-1), "inner_precise is -1", batched(inner_precise=0)),
        (
            decoding(inner_precise=2),
            "inner_precise is 2 (the kernel takes 0 to 1 for a query of 1)",
            decoding(inner_precise=1),
        ),
        (
            packed(inner_precise=2),
            "inner_precise is 2 (packed float16 sequences take 0 and 1)",
            packed(inner_precise=1),
        ),
        (packed(inner_precise=-1), "inner_precise is -1", packed(inner_precise=0)),
        (
            packed(inner_precise=1, dtype=BRAIN),
            "inner_precise is 1 (packed bfloat16 sequences take 0)",
            packed(inner_precise=0, dtype=BRAIN),
        ),
        (
            batched((2, 4, 1, 32), input_layout="BNSD_BSND"),
            "query [2, 4, 1, 32] is not known to have more than one token, as BNSD_BSND needs",
            batched((2, 4, 2, 32), input_layout="BNSD_BSND"),
        ),
        (
            batched((2, 4, 1, 32), input_layout="BNSD_NBSD"),
            "query [2, 4, 1, 32] is not known to have 2 to 16 tokens, as BNSD_NBSD needs",
            batched((2, 4, 2, 32), input_layout="BNSD_NBSD"),
        ),
        (
            batched((2, 17, 128), (2, 7, 64), input_layout="BSH_NBSD"),
            "query [2, 17, 128] is not known to have 2 to 16 tokens, as BSH_NBSD needs",
            batched((2, 16, 128), (2, 7, 64), input_layout="BSH_NBSD"),
        ),
    ],
)
def test_shifts_precision_and_layouts_of_several_tokens(outside, reason, inside):
    assert_refused(outside, reason, inside)


@pytest.mark.parametrize(
    ("outside", "reason", "inside"),
    [
        (
            packed((6, 4, 64), (9, 2, 64)),
            "head_dim is 64 and 64 of value (TND takes 128/128, 192/128 here)",
            packed(),
        ),
        (packed((6, 4, 256), (9, 2, 256)), "head_dim is 256 and 256 of value", packed()),
        (
            packed((6, 4, 192), (9, 2, 192)),
            "head_dim is 192 and 192 of value (TND takes 128/128, 192/128 here)",
            packed((6, 4, 192), (9, 4, 192), num_key_value_heads=4),
        ),
        (
            packed((6, 4, 128), (9, 2, 128), (9, 2, 64)),
            "head_dim is 128 and 64 of value",
            packed((6, 4, 192), (9, 2, 192), (9, 2, 128)),
        ),
        (
            packed((4, 6, 192), (4, 9, 192), input_layout="NTD", num_key_value_heads=4),
            "head_dim is 192 and 192 of value (NTD takes 128/128, 192/128 here)",
            packed((4, 6, 192), (4, 9, 192), (4, 9, 128), input_layout="NTD", num_key_value_heads=4),
        ),
        (
            packed((4, 6, 192), (4, 9, 192), input_layout="NTD_TND", num_key_value_heads=4),
            "head_dim is 192 and 192 of value (NTD_TND takes 128/128, 192/128 here)",
            packed((4, 6, 128), (4, 9, 128), input_layout="NTD_TND", num_key_value_heads=4),
        ),
        (
            packed((6, 4, 192), (9, 2, 192), (9, 1, 128)),
            "value [9, 1, 128] in layout TND is not known to have 2 heads",
            packed((6, 4, 192), (9, 2, 192), (9, 2, 128)),
        ),
    ],
)
def test_head_dims_of_packed_sequences(outside, reason, inside):
    assert_refused(outside, reason, inside)


def table(*shape, dtype=torch.int32):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("outside", "reason", "inside"),
    [
        (paged(block_table=table(2, 3, dtype=torch.int64)), "block_table is int64 (the kernel takes int32)", paged()),
        (paged(block_table=table(2, 3, 1)), "block_table has 3 dims", paged()),
        (paged(block_table=table(3, 2).T), "block_table [2, 3] with strides", paged()),
        (paged(block_table=table(3, 3)), "block_table [3, 3] has no row for each of 2 sequences", paged()),
        (
            packed_paged(block_table=table(3, 3)),
            "block_table [3, 3] has no row for each of 2 sequences",
            packed_paged(),
        ),
        (paged(cache=(8, 2, 128, 2, 16)), "key has 5 dims", paged(cache=(8, 2, 128, 32))),
        (
            paged(cache=(8, 64, 64)),
            "key [8, 64, 64] does not hold blocks of 128 tokens with 2 heads of head_dim 32",
            paged(),
        ),
        (paged(cache=(8, 128, 128)), "key [8, 128, 128] does not hold blocks of 128 tokens", paged()),
        (paged(cache=(8, 128, 2, 32)), "which take [2, 128, 32]", paged(cache=(8, 2, 128, 32))),
        (
            paged((2, 5, 128), cache=(8, 2, 128, 32), input_layout="BSH"),
            "key is a cache of 4 dims (BSH takes [blocks, block_size, heads * head_dim])",
            paged((2, 5, 128), input_layout="BSH"),
        ),
        (
            paged(cache=(8, 2, 128, 32), input_layout="BNSD_BSND"),
            "key is a cache of 4 dims (BNSD_BSND takes",
            paged(input_layout="BNSD_BSND"),
        ),
        (paged(value=zeros(7, 128, 64)), "value [7, 128, 64] and key [8, 128, 64] must have the same shape", paged()),
        (paged(value=zeros(8, 2, 128, 32)), "value [8, 2, 128, 32] and key [8, 128, 64] must have the same", paged()),
        (paged(actual_seq_lengths_kv=None), "actual_seq_lengths_kv is missing, which a block_table needs", paged()),
        (
            paged(actual_seq_lengths_kv=[385, 1]),
            "actual_seq_lengths_kv holds 385, and there are 384 tokens",
            paged(actual_seq_lengths_kv=[384, 1]),
        ),
        (
            packed_paged(actual_seq_lengths_kv=[385, 1]),
            "actual_seq_lengths_kv holds 385, and there are 384 tokens",
            # The second is shorter than the first: they are lengths here, not ends.
            packed_paged(actual_seq_lengths_kv=[384, 1]),
        ),
        (
            packed_paged(actual_seq_lengths_kv=[7]),
            "actual_seq_lengths has 2 sequences and actual_seq_lengths_kv 1",
            packed_paged(),
        ),
        *[
            (
                paged(block_size=size, cache=(8, size, 64)),
                f"block_size is {size} (the kernel takes multiples of 128 up to 512 here)",
                paged(block_size=allowed, cache=(8, allowed, 64)),
            )
            for size, allowed in ((0, 128), (16, 128), (192, 256), (640, 512))
        ],
        *[
            (
                paged((2, 4, 1, 32), block_size=size, cache=(99, size, 64), actual_seq_lengths_kv=[3 * size, 1]),
                f"block_size is {size} (the kernel takes multiples of 16 up to 512 here)",
                paged((2, 4, 1, 32), block_size=allowed, cache=(99, allowed, 64), actual_seq_lengths_kv=[3, 1]),
            )
            for size, allowed in ((8, 16), (24, 48), (528, 512))
        ],
        *[
            (
                packed_paged(cache=(8, size, 256), block_size=size, actual_seq_lengths_kv=[3, 1]),
                f"block_size is {size} (the kernel takes multiples of 16 up to 1024 here)",
                packed_paged(cache=(8, allowed, 256), block_size=allowed, actual_seq_lengths_kv=[3, 1]),
            )
            for size, allowed in ((8, 16), (40, 48), (1040, 1024))
        ],
        (
            packed_paged(cache=(8, 4, 128, 128), num_key_value_heads=4),
            "key is a cache of 4 dims (packed sequences with a key head for each take [blocks, block_size, H])",
            packed_paged(cache=(8, 2, 128, 128)),
        ),
        (
            paged(atten_mask=mask(5, 383)),
            "atten_mask [5, 383] is not known to have a shape that sparse_mode 0 takes: [2, 1, 5, 384] or ",
            paged(atten_mask=mask(5, 384)),
        ),
        (
            paged(pse_shift=zeros(1, 4, 5, 368)),
            "rows of pse_shift [1, 4, 5, 368] are not known to cover 384 keys",
            paged(pse_shift=zeros(1, 4, 5, 384)),
        ),
    ],
)
def test_caches_in_blocks(outside, reason, inside):
    assert_refused(outside, reason, inside)


@pytest.mark.parametrize(
    ("outside", "reason", "inside"),
    [
        (
            batched((2, 5, 128), (2, 7, 64), input_layout="BSH_BNSD"),
            "input_layout BSH_BNSD is documented for",
            batched(),
        ),
        (batched((2, 5, 4, 32), (2, 7, 2, 32), input_layout="BSND_BNSD"), "input_layout BSND_BNSD is", batched()),
        (batched((4, 5, 32), (2, 7, 32), input_layout="NSD"), "input_layout NSD is documented for latent", batched()),
        (packed(input_layout="TND_NTD"), "input_layout TND_NTD is documented for latent attention alone", packed()),
        *[
            (
                decoding(sparse_mode=mode, atten_mask=COMPRESSED),
                f"sparse_mode {mode} has no effect for a query of one token, and query may have 1",
                batched(sparse_mode=mode, atten_mask=COMPRESSED),
            )
            for mode in (2, 3, 4)
        ],
        (
            decoding(atten_mask=mask(2, 7), pre_tokens=3),
            f"pre_tokens 3 and next_tokens {NO_LIMIT} have no effect for a query of one token",
            decoding(atten_mask=mask(2, 7)),
        ),
        (
            decoding(atten_mask=mask(2, 7), next_tokens=0),
            f"pre_tokens {NO_LIMIT} and next_tokens 0 have no effect for a query of one token",
            decoding(atten_mask=mask(2, 7), sparse_mode=1, next_tokens=0),
        ),
        (
            paged((2, 4, 1, 32), block_table=table(2, 5), atten_mask=mask(2, 1, 1, 640)),
            "atten_mask [2, 1, 1, 640] covers more than 512 keys of a cache in blocks",
            paged((2, 4, 1, 32), block_table=table(2, 4), atten_mask=mask(2, 1, 1, 512)),
        ),
        (
            paged((2, 4, 1, 32), block_table=table(2, 4), atten_mask=mask(2, 1, 1, 513)),
            "atten_mask [2, 1, 1, 513] covers more than 512 keys of a cache in blocks",
            paged((2, 4, 2, 32), block_table=table(2, 5), atten_mask=mask(2, 1, 2, 640)),
        ),
    ],
)
def test_what_the_kernel_takes_and_had_better_not_get(outside, reason, inside):
    assert_refused(outside, reason, inside, raises=False)
    for contract, renamed in ((V1, dict), (V2, in_version_2)):
        contract.op(**renamed(outside))


@pytest.mark.parametrize(
    ("outside", "reason", "inside"),
    [
        (
            in_version_2(batched(learnable_sink=zeros(4, dtype=BRAIN))),
            "learnable_sink is given (layouts TND and NTD_TND take it, not BNSD)",
            in_version_2(batched()),
        ),
        (
            in_version_2(packed(learnable_sink=zeros(4))),
            "learnable_sink is float16 [4] (the kernel takes bfloat16 [4])",
            in_version_2(packed(learnable_sink=zeros(4, dtype=BRAIN))),
        ),
        (
            in_version_2(packed(learnable_sink=zeros(2, dtype=BRAIN))),
            "learnable_sink is bfloat16 [2] (the kernel takes bfloat16 [4])",
            in_version_2(packed(learnable_sink=zeros(4, dtype=BRAIN))),
        ),
        (
            in_version_2(packed((6, 4, 192), (9, 4, 192), num_key_value_heads=4, learnable_sink=zeros(4, dtype=BRAIN))),
            "head_dim of value is 192 (with learnable_sink the kernel takes 128)",
            in_version_2(
                packed((6, 4, 192), (9, 4, 192), (9, 4, 128), num_key_value_heads=4)
                | {"learnable_sink": zeros(4, dtype=BRAIN)}
            ),
        ),
        (
            in_version_2(packed(learnable_sink=zeros(4, dtype=BRAIN), softmax_lse_flag=True)),
            "return_softmax_lse is given with learnable_sink, and whether the sums count the sink is not documented",
            in_version_2(packed(softmax_lse_flag=True)),
        ),
        (
            in_version_2(packed((6, 4, 64), (9, 2, 64))),
            "head_dim is 64 and 64 of value (TND takes 128/128, 192/128 here)",
            in_version_2(packed((6, 4, 64), (9, 4, 64), num_key_value_heads=4)),
        ),
        (
            in_version_2(packed((4, 6, 64), (4, 9, 64), num_key_value_heads=4, input_layout="NTD")),
            "head_dim is 64 and 64 of value (NTD takes 128/128, 192/128 here)",
            in_version_2(packed((6, 4, 64), (9, 4, 64), num_key_value_heads=4)),
        ),
        (
            in_version_2(batched(return_softmax_lse=True, query_quant_mode=3)),
            "query_quant_mode is 3 (npu_fuse supports its default alone, 0)",
            in_version_2(batched(return_softmax_lse=True)),
        ),
        (
            in_version_2(batched(out_dtype=1)),
            "out_dtype is 1 (npu_fuse supports its default alone, None)",
            in_version_2(batched()),
        ),
    ],
)
def test_the_second_version_alone(outside, reason, inside, assert_border):
    assert_border(V2, outside, reason, inside)


COVERED_TENSORS = {"query", "key", "value", "pse_shift", "atten_mask", "block_table", "learnable_sink"}


@pytest.mark.parametrize(
    ("contract", "name"),
    [
        (contract, argument.name)
        for contract in (V1, V2)
        for argument in contract.parsed_schema.arguments
        if "Tensor" in str(argument.type) and argument.name not in COVERED_TENSORS
    ],
)
def test_every_other_tensor_is_refused_by_its_name(contract, name):
    arguments = (dict if contract is V1 else in_version_2)(batched())
    reason = f"{name} is given (npu_fuse supports its default alone, None)"
    assert contract.refusal(Target(), **arguments, **{name: torch.ones(1)}) == reason
    with pytest.raises(ValueError, match=f"{name} is given"):
        contract.op(**arguments, **{name: torch.ones(1)})


@pytest.mark.parametrize("name", ["antiquant_mode", "key_antiquant_mode", "value_antiquant_mode"])
def test_so_is_every_other_number(name, assert_border):
    assert_border(V1, batched(**{name: 1}), f"{name} is 1", batched(**{name: 0}))


def test_so_is_the_length_of_a_shared_prefix():
    assert "actual_shared_prefix_len is [3]" in V1.refusal(Target(), **batched(actual_shared_prefix_len=[3]))


@pytest.mark.parametrize("contract", [V1, V2], ids=lambda contract: contract.name)
@pytest.mark.parametrize("soc", ["ascend910b", "ascend910_93", "ascend950", "ascend310p"])
def test_socs(contract, soc):
    arguments = (dict if contract is V1 else in_version_2)(batched())
    assert (contract.refusal(Target(soc), **arguments) is None) == (soc in ("ascend910b", "ascend910_93"))


# symbolic sizes


def judged(arguments):
    """The refusal of both versions, which have to agree, and the shapes of the first one's results."""
    refusal = V1.refusal(Target(), **arguments)
    assert (V2.refusal(Target(), **in_version_2(arguments)) is None) == (refusal is None)
    return refusal, [tuple(result.shape) for result in V1.op(**arguments)]


def test_batch_and_tokens_may_be_symbols(symbolic):
    query = symbolic(("B", 4, "S", 64), HALF)
    key = symbolic(("B", 2, "T", 64), HALF)
    batch, _, tokens, _ = query.shape
    arguments = {"query": query, "key": key, "value": key, "num_heads": 4, "num_key_value_heads": 2}
    arguments |= {"input_layout": "BNSD", "softmax_lse_flag": True, "inner_precise": 2}
    shapes = [(batch, 4, tokens, 64), (batch, 4, tokens, 1)]
    assert judged(arguments) == (None, shapes)
    for shape in (("B", 1, "S", "T"), (1, 1, "S", "T"), (1, "S", "T"), ("S", "T")):
        for mode in (0, 1):
            masked = {**arguments, "atten_mask": symbolic(shape, torch.bool), "sparse_mode": mode, "pre_tokens": 3}
            assert judged(masked) == (None, shapes)
    for mode in (2, 3, 4):
        masked = {**arguments, "atten_mask": symbolic((2048, 2048), torch.bool), "sparse_mode": mode}
        assert judged(masked) == (None, shapes)
    assert judged({**arguments, "actual_seq_lengths_kv": [3]}) == (None, shapes)


def test_so_they_may_in_bsh_whose_result_has_the_sizes_of_query(symbolic):
    query, key = symbolic(("B", "S", 256), BRAIN), symbolic(("B", "T", 128), BRAIN)
    arguments = {"query": query, "key": key, "value": key, "num_heads": 4, "num_key_value_heads": 2}
    assert judged(arguments) == (None, [tuple(query.shape), (0,)])
    assert judged({**arguments, "input_layout": "BSH_NBSD"})[0] == (
        f"query [{query.shape[0]}, {query.shape[1]}, 256] is not known to have 2 to 16 tokens, as BSH_NBSD needs"
    )


def test_a_mask_of_other_symbols_may_not_fit(symbolic):
    query, key = symbolic(("B", 4, "S", 64), HALF), symbolic(("B", 4, "S", 64), HALF)
    arguments = {"query": query, "key": key, "value": key, "num_heads": 4, "input_layout": "BNSD"}
    assert "is not known to have a shape" in V1.refusal(
        Target(), **arguments, atten_mask=symbolic(("S", "T"), torch.bool)
    )
    assert V1.refusal(Target(), **arguments, atten_mask=symbolic(("S", "S"), torch.bool)) is None


def test_heads_and_columns_have_to_be_known(symbolic):
    key = symbolic((2, 4, 7, 64), HALF)
    arguments = {"key": key, "value": key, "num_heads": 4, "input_layout": "BNSD"}
    assert "is not known to have 4 heads" in V1.refusal(Target(), query=symbolic((2, "S", 5, 64), HALF), **arguments)
    assert "head_dim is s" in V1.refusal(Target(), query=symbolic((2, 4, 5, "S"), HALF), **arguments)


def test_one_length_is_everyones_and_more_may_be_too_few_for_a_symbolic_batch(symbolic):
    query, key = symbolic(("B", 4, 5, 64), HALF), symbolic(("B", 4, 7, 64), HALF)
    arguments = {"query": query, "key": key, "value": key, "num_heads": 4, "input_layout": "BNSD"}
    assert "actual_seq_lengths_kv has 3 lengths for a batch of s" in V1.refusal(
        Target(), **arguments, actual_seq_lengths_kv=[1, 2, 3]
    )
    batch = query.shape[0]
    assert V1.refusal(Target(), **arguments, actual_seq_lengths_kv=[batch]) is None


def test_packed_sequences_may_have_symbolic_tokens_and_ends(symbolic):
    query, key = symbolic(("S", 4, 128), HALF), symbolic(("T", 2, 128), HALF)
    tokens, tokens_of_key = query.shape[0], key.shape[0]
    arguments = {"query": query, "key": key, "value": key, "num_heads": 4, "num_key_value_heads": 2}
    arguments |= {"input_layout": "TND", "softmax_lse_flag": True}
    arguments |= {"actual_seq_lengths": [tokens], "actual_seq_lengths_kv": [tokens_of_key]}
    assert judged(arguments) == (None, [(tokens, 4, 128), (tokens, 4, 1)])
    longer = {**arguments, "actual_seq_lengths": [tokens + 1]}
    assert "actual_seq_lengths holds" in V1.refusal(Target(), **longer)


def test_a_cache_in_blocks_may_have_symbolic_batch_and_blocks(symbolic):
    query, cache = symbolic(("B", 4, "S", 64), HALF), symbolic(("T", 128, 128), HALF)
    arguments = {"query": query, "key": cache, "value": cache, "num_heads": 4, "num_key_value_heads": 2}
    arguments |= {"input_layout": "BNSD", "block_size": 128, "actual_seq_lengths_kv": [9]}
    arguments["block_table"] = symbolic(("B", 3), torch.int32)
    assert judged(arguments) == (None, [tuple(query.shape), (0,)])


def test_a_query_that_may_have_one_token_gets_nothing_that_depends_on_it(unbacked):
    query, key = unbacked(1, None, 4, 64), unbacked(1, 7, 4, 64)
    arguments = {"query": query, "key": key, "value": key, "num_heads": 4, "input_layout": "BSND"}
    assert V1.refusal(Target(), **arguments) is None
    masked = {**arguments, "atten_mask": torch.empty(2048, 2048, dtype=torch.bool, device="meta"), "sparse_mode": 3}
    wanted = "sparse_mode 3 has no effect for a query of one token, and query may have u"
    assert wanted in V1.refusal(Target(), **masked)
    assert "inner_precise is 2 (the kernel takes 0 to 1" in V1.refusal(Target(), **arguments, inner_precise=2)
    cache = {"key": unbacked(9, 16, 256), "value": unbacked(9, 16, 256), "block_size": 16}
    cache |= {"block_table": torch.zeros(1, 2, dtype=torch.int32, device="meta"), "actual_seq_lengths_kv": [9]}
    assert "block_size is 16 (the kernel takes multiples of 128" in V1.refusal(Target(), **arguments | cache)


@pytest.fixture
def unbacked():
    """Fake float16 tensors; None stands for a size that only running the program tells."""
    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env):
        yield lambda *sizes: torch.empty(
            [shape_env.create_unbacked_symint() if size is None else size for size in sizes], dtype=HALF
        )
    assert not shape_env.guards
