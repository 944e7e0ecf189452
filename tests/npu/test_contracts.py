"""Our contracts of torch_npu's ops, against the schemas and meta kernels of torch_npu itself."""

from collections.abc import Mapping, Sequence

import pytest
import torch
import torch_npu  # noqa: F401  (registers the ops)
from torch._subclasses.fake_tensor import FakeTensorMode

from npu_fuse.runtime.ops import CONTRACTS, OpContract
from npu_fuse.runtime.target import Target

# Of one namespace with torch_npu's, but of another package.
SGL_KERNEL_OPS = {"npu::causal_conv1d"}

NPU_CONTRACTS = {
    name: contract for name, contract in CONTRACTS.items() if contract.namespace == "npu" and name not in SGL_KERNEL_OPS
}

# Asked while tests are collected: later, tests of the backend may have registered kernels of ours.
HAVE_THEIR_META = {name for name in NPU_CONTRACTS if torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta")}

# Shapes of the tensor arguments, in the order of the schema, and what follows them. All are legal calls.
Call = tuple[Sequence[Sequence[int]], Mapping[str, object]]
CALLS: Mapping[str, Sequence[Call]] = {
    "npu::npu_rms_norm": [
        (([16], [16]), {}),
        (([3, 16], [16]), {"epsilon": 1e-5}),
        (([2, 3, 4, 16], [4, 16]), {}),
    ],
    "npu::npu_gemma_rms_norm": [
        (([3, 16], [16]), {}),
        (([2, 3, 4, 16], [16]), {"epsilon": 1e-5}),
    ],
    "npu::npu_add_rms_norm": [
        (([3, 16], [3, 16], [16]), {}),
        (([2, 3, 4, 16], [2, 3, 4, 16], [16]), {"epsilon": 1e-5}),
    ],
    "npu::npu_rotary_mul": [
        (([2, 4, 8, 16], [1, 1, 8, 16], [1, 1, 8, 16]), {}),
        (([2, 8, 4, 16], [1, 8, 1, 16], [1, 8, 1, 16]), {"rotary_mode": "interleave"}),
        (([8, 4, 16], [8, 1, 16], [8, 1, 16]), {}),
    ],
    "npu::npu_swiglu": [
        (([32],), {}),
        (([3, 5, 32],), {}),
        (([3, 6, 8],), {"dim": 1}),
        (([3, 6, 8],), {"dim": -2}),
    ],
    "npu::npu_clipped_swiglu": [
        (([3, 32],), {}),
        (([3, 5, 32],), {"dim": 2, "alpha": 1.0, "limit": 5.0, "bias": 0.0, "interleaved": False}),
    ],
    "npu::npu_fast_gelu": [
        (([32],), {}),
        (([3, 5, 32],), {}),
    ],
    "npu::npu_geglu": [
        (([3, 5, 32],), {}),
        (([3, 6, 8],), {"dim": 1, "approximate": 0, "activate_left": True}),
    ],
    "npu::npu_group_norm_silu": [
        (([2, 8], [8], [8]), {"group": 2}),
        (([2, 8, 5, 5], [8], [8]), {"group": 4, "eps": 1e-6}),
    ],
    "npu::npu_transpose_batchmatmul": [
        (([4, 3, 128], [4, 128, 256]), {}),
        (([3, 4, 128], [4, 128, 256]), {"perm_x1": [1, 0, 2], "perm_x2": [0, 1, 2], "perm_y": [1, 0, 2]}),
    ],
    "npu::npu_moe_gating_top_k_softmax": [
        (([5, 16],), {}),
        (([2, 5, 16],), {"k": 4}),
    ],
    "npu::npu_moe_gating_top_k": [
        (([5, 16],), {"k": 4}),
        (([5, 64],), {"k": 8, "k_group": 2, "group_count": 4, "group_select_mode": 1, "norm_type": 1}),
    ],
}

# Calls whose tensors differ in dtype: shape and dtype of each, by the schema's names. All are legal calls.
HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32
CHAR, INT, LONG, BOOL = torch.int8, torch.int32, torch.int64, torch.bool
MixedCall = tuple[Mapping[str, tuple[Sequence[int], torch.dtype]], Mapping[str, object]]

# Attention in each layout that isn't packed: heads of key, tensors, the first version's other arguments.
INFER_ATTENTION = [
    (
        layout,
        heads,
        {
            name: (
                {
                    "BSH": [2, tokens, num_heads * 64],
                    "BSND": [2, tokens, num_heads, 64],
                    "BNSD": [2, num_heads, tokens, 64],
                }[layout.partition("_")[0]],
                HALF,
            )
            for name, tokens, num_heads in (("query", 5, 8), ("key", 7, heads or 8), ("value", 7, heads or 8))
        },
        {"softmax_lse_flag": heads > 0},
    )
    for layout in ("BSH", "BSND", "BNSD", "BNSD_BSND", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD")
    for heads in (0, 2)
]
CACHE = {"key": ([9, 128, 128], HALF), "value": ([9, 128, 128], HALF)}
# Latent attention's caches, by batch and in blocks: how many tokens a sequence, of the tables, the leading dims.
LATENT_CACHES = [
    (
        {
            "kv": ([2, 1, tokens, 576], BRAIN),
            "gamma": ([512], BRAIN),
            "cos": ([2, 1, rows, 64], BRAIN),
            "sin": ([2, 1, rows, 64], BRAIN),
            "index": ([2, tokens] if mode == "Norm" else [2 * tokens], LONG),
            "k_cache": ([*leading, 64], BRAIN),
            "ckv_cache": ([*leading, 512], BRAIN),
        },
        {"cache_mode": mode, "is_output_kv": mode == "PA"},
    )
    for tokens, rows, mode, leading in ((3, 1, "Norm", [2, 1, 9]), (3, 3, "PA", [4, 16, 1]), (1, 1, "PA", [4, 16, 1]))
]
MIXED_CALLS: Mapping[str, Sequence[MixedCall]] = {
    "npu::npu_mrope": [
        (
            {
                "positions": ([5], torch.int64),
                "query": ([5, 256], BRAIN),
                "key": ([5, 64], BRAIN),
                "cos_sin_cache": ([9, 32], BRAIN),
            },
            {"head_size": 64},
        ),
        (
            {
                "positions": ([3, 5], torch.int64),
                "query": ([5, 256], FLOAT),
                "key": ([5, 128], FLOAT),
                "cos_sin_cache": ([9, 128], FLOAT),
            },
            {"head_size": 128, "mrope_section": [16, 24, 24], "rotary_mode": "interleave"},
        ),
    ],
    "npu::npu_interleave_rope": [
        (
            {"x": ([2, 4, 5, 64], dtype), "cos": ([2, 1, tokens, 64], dtype), "sin": ([2, 1, tokens, 64], dtype)},
            {},
        )
        for dtype in (HALF, BRAIN)
        for tokens in (5, 1)
    ],
    "npu::npu_mm_all_reduce_base": [
        ({"x1": ([*rows, 16], dtype), "x2": ([16, 8], dtype)}, {"hcom": "group"})
        for dtype in (HALF, BRAIN)
        for rows in ([3], [2, 3])
    ],
    "npu::npu_add_rms_norm_cast": [
        ({"x1": ([3, 16], HALF), "x2": ([3, 16], HALF), "gamma": ([16], HALF)}, {}),
        ({"x1": ([2, 3, 16], BRAIN), "x2": ([2, 3, 16], BRAIN), "gamma": ([3, 16], BRAIN)}, {"epsilon": 1e-5}),
    ],
    # Without scales2 their y2 has x1's shape all the same, and so has ours.
    "npu::npu_add_rms_norm_quant": [
        (
            {"x1": ([3, 16], HALF), "x2": ([3, 16], HALF), "gamma": ([16], HALF), "scales1": ([16], FLOAT)},
            {"zero_points1": None},
        ),
        (
            {
                "x1": ([2, 3, 16], BRAIN),
                "x2": ([2, 3, 16], BRAIN),
                "gamma": ([16], BRAIN),
                "scales1": ([16], BRAIN),
                "zero_points1": ([16], BRAIN),
            },
            {"epsilon": 1e-5, "dst_type": 1},
        ),
    ],
    "npu::npu_add_rms_norm_dynamic_quant": [
        ({"x1": ([3, 16], HALF), "x2": ([3, 16], HALF), "gamma": ([16], HALF)}, {}),
        (
            {
                "x1": ([2, 3, 16], BRAIN),
                "x2": ([2, 3, 16], BRAIN),
                "gamma": ([16], BRAIN),
                "smooth_scale1": ([16], BRAIN),
            },
            {"output_mask": [True, False], "y_dtype": 1},
        ),
        (
            {
                "x1": ([3, 16], HALF),
                "x2": ([3, 16], HALF),
                "gamma": ([16], HALF),
                "smooth_scale1": ([16], HALF),
                "smooth_scale2": ([16], HALF),
            },
            {},
        ),
        (
            {"x1": ([3, 16], HALF), "x2": ([3, 16], HALF), "gamma": ([16], HALF), "smooth_scale2": ([16], HALF)},
            {"output_mask": [False, True]},
        ),
    ],
    "npu::npu_rms_norm_quant": [
        (
            {
                "x": ([2, 3, 16], dtype),
                "gamma": ([16], dtype),
                "beta": ([16], dtype),
                "scale": ([1], dtype),
                "offset": ([1], CHAR),
            },
            {},
        )
        for dtype in (HALF, BRAIN)
    ],
    "npu::npu_quantize": [
        ({"input": ([3, 16], BRAIN), "scales": ([16], FLOAT)}, {"zero_points": None, "dtype": 12, "axis": -1}),
        ({"input": ([3, 4, 16], FLOAT), "scales": ([4], FLOAT), "zero_points": ([4], INT)}, {"dtype": 13}),
        ({"input": ([3, 16], HALF), "scales": ([1], FLOAT), "zero_points": ([1], CHAR)}, {"dtype": 3}),
        (
            {"input": ([3, 16], HALF), "scales": ([16], HALF), "zero_points": ([16], HALF)},
            {"dtype": 1, "axis": -1, "div_mode": False},
        ),
    ],
    "npu::npu_dynamic_quant": [
        ({"input": ([3, 16], HALF)}, {}),
        ({"input": ([2, 3, 16], BRAIN), "smooth_scales": ([16], BRAIN)}, {"dst_type": 1}),
    ],
    "npu::npu_fused_infer_attention_score": [
        (attention, {"num_heads": 8, "num_key_value_heads": heads, "input_layout": layout, **rest})
        for layout, heads, attention, rest in INFER_ATTENTION
    ]
    + [
        (
            {"query": ([3, 5, 512], HALF), **CACHE, "block_table": ([3, 4], INT)},
            {
                "num_heads": 8,
                "num_key_value_heads": 2,
                "block_size": 128,
                "actual_seq_lengths_kv": [9, 400, 7],
                "softmax_lse_flag": True,
            },
        ),
        (
            {"query": ([11, 8, 128], BRAIN), "key": ([14, 2, 128], BRAIN), "value": ([14, 2, 128], BRAIN)},
            {
                "num_heads": 8,
                "num_key_value_heads": 2,
                "input_layout": "TND",
                "actual_seq_lengths": [4, 11],
                "actual_seq_lengths_kv": [7, 14],
                "softmax_lse_flag": True,
            },
        ),
    ],
    "npu::npu_fused_infer_attention_score_v2": [
        (attention, {"num_query_heads": 8, "num_key_value_heads": heads, "input_layout": layout})
        for layout, heads, attention, _ in INFER_ATTENTION
    ]
    + [
        (
            {
                "query": ([11, 8, 192], BRAIN),
                "key": ([14, 2, 192], BRAIN),
                "value": ([14, 2, 128], BRAIN),
                "atten_mask": ([2048, 2048], BOOL),
                "learnable_sink": ([8], BRAIN),
            },
            {
                "num_query_heads": 8,
                "num_key_value_heads": 2,
                "input_layout": "TND",
                "sparse_mode": 3,
                "actual_seq_qlen": [4, 11],
                "actual_seq_kvlen": [7, 14],
            },
        )
    ]
    + [
        (
            {"query": ([8, 11, 128], HALF), "key": ([2, 14, 128], HALF), "value": ([2, 14, 128], HALF)},
            {
                "num_query_heads": 8,
                "num_key_value_heads": 2,
                "input_layout": layout,
                "actual_seq_qlen": [4, 11],
                "actual_seq_kvlen": [7, 14],
                "return_softmax_lse": True,
            },
        )
        for layout in ("NTD", "NTD_TND")
    ],
    "npu::npu_prompt_flash_attention": [
        (attention, {"num_heads": 8, "num_key_value_heads": heads, "input_layout": layout})
        for layout, heads, attention, _ in INFER_ATTENTION
        if layout in ("BSH", "BSND", "BNSD", "BNSD_BSND")
    ],
    # What torch_npu makes of scaled_dot_product_attention, and other layouts.
    "npu::npu_fusion_attention_v3": [
        (
            {"query": ([2, 8, 5, 64], BRAIN), "key": ([2, 2, 7, 64], BRAIN), "value": ([2, 2, 7, 32], BRAIN)},
            {"head_num": 8, "input_layout": "BNSD", "scale": 0.125},
        ),
        (
            {
                "query": ([2, 5, 512], HALF),
                "key": ([2, 7, 128], HALF),
                "value": ([2, 7, 128], HALF),
                "atten_mask": ([2048, 2048], BOOL),
            },
            {"head_num": 8, "input_layout": "BSH", "next_tockens": 0, "sparse_mode": 2},
        ),
        (
            {"query": ([5, 2, 512], FLOAT), "key": ([7, 2, 512], FLOAT), "value": ([7, 2, 256], FLOAT)},
            {"head_num": 8, "input_layout": "SBH"},
        ),
        (
            {
                "query": ([2, 5, 8, 64], BRAIN),
                "key": ([2, 7, 8, 64], BRAIN),
                "value": ([2, 7, 8, 64], BRAIN),
                "atten_mask": ([2, 1, 5, 7], BOOL),
            },
            {"head_num": 8, "input_layout": "BSND", "inner_precise": 2},
        ),
        (
            {
                "query": ([11, 8, 64], BRAIN),
                "key": ([14, 2, 64], BRAIN),
                "value": ([14, 2, 64], BRAIN),
                "actual_seq_qlen": ([2], LONG),
                "actual_seq_kvlen": ([2], LONG),
            },
            {"head_num": 8, "input_layout": "TND", "softmax_layout": "TND"},
        ),
    ],
    "npu::npu_kv_rmsnorm_rope_cache": LATENT_CACHES,
    "npu::npu_kv_rmsnorm_rope_cache_v2": LATENT_CACHES,
    "npu::npu_scatter_pa_kv_cache": [
        (
            {
                "key": ([5, 2, 64], HALF),
                "value": ([5, 2, 32], HALF),
                "key_cache": ([4, 8, 16, 16], HALF),
                "value_cache": ([4, 4, 16, 16], HALF),
                "slot_mapping": ([5], INT),
            },
            {},
        ),
        (
            {
                "key": ([5, 2, 64], BRAIN),
                "value": ([5, 2, 32], BRAIN),
                "key_cache": ([4, 16, 2, 64], BRAIN),
                "value_cache": ([4, 16, 2, 32], BRAIN),
                "slot_mapping": ([5], LONG),
            },
            {"cache_mode": "Norm"},
        ),
    ],
    "npu::npu_recurrent_gated_delta_rule": [
        (
            {
                "query": ([5, 2, 64], BRAIN),
                "key": ([5, 2, 64], BRAIN),
                "value": ([5, 4, 32], BRAIN),
                "state": ([9, 4, 32, 64], BRAIN),
                "beta": ([5, 4], BRAIN),
                "actual_seq_lengths": ([2], INT),
                "ssm_state_indices": ([5], INT),
                "num_accepted_tokens": ([2], INT),
                "g": ([5, 4], FLOAT),
            },
            {"scale": 0.125},
        ),
    ],
    "npu::npu_chunk_gated_delta_rule": [
        (
            {
                "query": ([70, 2, 128], BRAIN),
                "key": ([70, 2, 128], BRAIN),
                "value": ([70, 4, 128], BRAIN),
                "beta": ([70, 4], BRAIN),
                "initial_state": ([1, 4, 128, 128], BRAIN),
                "actual_seq_lengths": ([1], INT),
            },
            {"scale": 0.125},
        ),
    ],
}


def test_every_contract_has_calls() -> None:
    assert CALLS.keys().isdisjoint(MIXED_CALLS)
    assert CALLS.keys() | MIXED_CALLS.keys() == NPU_CONTRACTS.keys() == HAVE_THEIR_META


@pytest.mark.parametrize("contract", NPU_CONTRACTS.values(), ids=NPU_CONTRACTS)
def test_the_schema_is_theirs(contract: OpContract) -> None:
    assert str(contract.parsed_schema) == str(contract.op._schema)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("name", "shapes", "rest"),
    [(name, shapes, rest) for name, calls in CALLS.items() for shapes, rest in calls],
)
def test_the_fake_kernel_agrees_with_their_meta_kernel(
    name: str, shapes: Sequence[Sequence[int]], rest: Mapping[str, object], dtype: torch.dtype
) -> None:
    contract = NPU_CONTRACTS[name]
    with FakeTensorMode():
        tensors = [torch.empty(shape, dtype=dtype, device="npu") for shape in shapes]
        theirs = contract.op(*tensors, **rest)
        ours = contract.fake(*tensors, **rest)
        assert contract.refusal(Target(), *tensors, **rest) is None
    assert described(ours) == described(theirs)


@pytest.mark.parametrize(
    ("name", "tensors", "rest"),
    [(name, tensors, rest) for name, calls in MIXED_CALLS.items() for tensors, rest in calls],
)
def test_so_it_does_where_tensors_differ_in_dtype(
    name: str, tensors: Mapping[str, tuple[Sequence[int], torch.dtype]], rest: Mapping[str, object]
) -> None:
    contract = NPU_CONTRACTS[name]
    with FakeTensorMode():
        fakes = {key: torch.empty(shape, dtype=dtype, device="npu") for key, (shape, dtype) in tensors.items()}
        arguments = contract.bind(**fakes, **rest)
        theirs = contract.op(**arguments)
        ours = contract.fake(**arguments)
        assert contract.refusal(Target(), **arguments) is None
    assert described(ours) == described(theirs)


@pytest.mark.parametrize(
    ("layout", "query", "key"),
    [
        ("BSH_BNSD", [2, 5, 512], [2, 7, 128]),
        ("BSND_BNSD", [2, 5, 8, 64], [2, 7, 2, 64]),
        ("TND_NTD", [11, 8, 128], [14, 2, 128]),
        ("NSD", [8, 5, 64], [2, 7, 64]),
    ],
)
def test_so_it_does_in_layouts_that_are_refused(layout: str, query: Sequence[int], key: Sequence[int]) -> None:
    contract = NPU_CONTRACTS["npu::npu_fused_infer_attention_score"]
    lengths = {"actual_seq_lengths": [4, 11], "actual_seq_lengths_kv": [7, 14]} if "T" in layout else {}
    with FakeTensorMode():
        tensors = [torch.empty(shape, dtype=HALF, device="npu") for shape in (query, key, key)]
        rest = {"num_heads": 8, "num_key_value_heads": 2, "input_layout": layout, "softmax_lse_flag": True, **lengths}
        assert contract.refusal(Target(), *tensors, **rest) is not None
        assert described(contract.fake(*tensors, **rest)) == described(contract.op(*tensors, **rest))


def test_their_meta_kernel_gives_the_statistics_of_a_group_norm_the_type_of_its_weight() -> None:
    """The kernel gives them the type of its input, says its documentation; nothing that fuses reads them."""
    contract = NPU_CONTRACTS["npu::npu_group_norm_silu"]
    with FakeTensorMode():
        x = torch.empty(2, 8, 5, dtype=torch.bfloat16, device="npu")
        weight = torch.empty(8, device="npu")
        assert contract.refusal(Target(), x, weight, weight, 4) is None
        y, *theirs = described(contract.op(x, weight, weight, 4))
        our_y, *ours = described(contract.fake(x, weight, weight, 4))
    assert our_y == y
    assert [dtype for _, dtype, _ in theirs] == [torch.float32, torch.float32]
    assert [dtype for _, dtype, _ in ours] == [torch.bfloat16, torch.bfloat16]
    assert [(shape, device) for shape, _, device in ours] == [(shape, device) for shape, _, device in theirs]


def described(result: torch.Tensor | tuple[torch.Tensor, ...] | None) -> list[tuple[torch.Size, torch.dtype, str]]:
    """What must agree of a result, as values that are safe to print."""
    results = (result,) if isinstance(result, torch.Tensor) else result or ()
    return [(tensor.shape, tensor.dtype, tensor.device.type) for tensor in results]
