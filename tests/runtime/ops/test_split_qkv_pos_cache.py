"""split_qkv_rmsnorm_rope_pos_cache_half_npu against float64 maths, its roundings, and its limits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_fuse.runtime.ops.split_qkv_pos_cache import SPLIT_QKV_RMSNORM_ROPE_POS_CACHE_HALF as CONTRACT
from npu_fuse.runtime.target import Target

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 4),
    groups=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([2, 4, 8, 16]),
    rope_share=st.sampled_from([None, 1, 2]),
    dtype=st.sampled_from(DTYPES),
    cache_dtype=st.sampled_from(DTYPES),
    mode=st.sampled_from(["plain", "norm", "bias"]),
    cast=st.booleans(),
)
def test_any_geometry_is_the_maths(
    make_tensor,
    assert_same_layout,
    pairs_turned,
    tokens,
    groups,
    kv_heads,
    head_dim,
    rope_share,
    dtype,
    cache_dtype,
    mode,
    cast,
):
    rope_dim = head_dim if rope_share is None else max(2, head_dim // rope_share)
    sizes = [groups * kv_heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    x = make_tensor((tokens, sum(sizes)), dtype)
    cache = make_tensor((7, rope_dim), cache_dtype, seed=1)
    positions = torch.randint(7, (tokens,), generator=torch.Generator().manual_seed(2))
    eps = None if mode == "plain" else 1e-5
    weights = [make_tensor((head_dim,), dtype, seed=seed) if mode != "plain" else None for seed in (3, 4)]
    biases = [make_tensor((head_dim,), dtype, seed=seed) if mode == "bias" else None for seed in (5, 6)]
    arguments = (x, positions, cache, *sizes[:2], head_dim, eps, *weights, *biases, rope_share and rope_dim, cast)
    assert_same_layout(CONTRACT.op, *arguments)
    assert (CONTRACT.refusal(Target(), *arguments) is None) == (dtype == torch.bfloat16)

    *results, v = CONTRACT.op(*arguments)
    parts = x.split(sizes, -1)
    for actual, part, weight, bias in zip(results, parts, weights, biases, strict=False):
        heads = part.double().view(tokens, -1, head_dim)
        if eps is not None:
            heads = heads / (heads.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()
            heads = heads if bias is None else heads + bias.double()
        wanted = pairs_turned(heads, *cache[positions].chunk(2, -1)).flatten(1)
        torch.testing.assert_close(actual.double(), wanted, rtol=2**-6, atol=2**-4)
    assert torch.equal(v, parts[2])


def valid(tokens=3, dtype=torch.bfloat16, rope_dim=8, **changes):
    """Arguments of a call with norm: 4 q heads and 2 kv heads of 8, rotated whole, a cache of 9 positions."""
    arguments = {
        "input_tensor": torch.ones(tokens, 64, dtype=dtype),
        "positions": torch.arange(tokens),
        "cos_sin_cache": torch.ones(9, rope_dim, dtype=dtype),
        "q_hidden_size": 32,
        "kv_hidden_size": 16,
        "head_dim": 8,
        "eps": 1e-6,
        "q_weight": torch.ones(8, dtype=dtype),
        "k_weight": torch.ones(8, dtype=dtype),
        "rope_dim": rope_dim,
    }
    return arguments | changes


def without_norm(**changes):
    return valid(eps=None, q_weight=None, k_weight=None, **changes)


def test_positions_outside_of_the_cache_read_its_edges(make_tensor):
    arguments = valid(input_tensor=make_tensor((3, 64), torch.bfloat16), cos_sin_cache=make_tensor((9, 8), seed=1))
    outside = CONTRACT.op(**arguments | {"positions": torch.tensor([-1, 4, 100])})
    inside = CONTRACT.op(**arguments | {"positions": torch.tensor([0, 4, 8])})
    assert all(map(torch.equal, outside, inside))


@pytest.mark.parametrize("cast", [True, False])
def test_where_it_rounds(make_tensor, cast):
    """Unturned (cos is 1, sin 0), only the casts of the normed value are left; turned, its rounding shows."""
    x = make_tensor((64, 64), torch.bfloat16)
    cache = torch.tensor([[1.0] * 4 + [0.0] * 4, [0.6] * 4 + [0.8] * 4])
    arguments = valid(64, input_tensor=x, cos_sin_cache=cache, cast_norm_to_bf16=cast)
    heads = x[:, :32].float().view(64, 4, 8)
    normed = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + 1e-6)
    still, _, _ = CONTRACT.op(**arguments | {"positions": torch.zeros(64, dtype=torch.int32)})
    assert torch.equal(still, normed.bfloat16().flatten(1))
    turned, _, _ = CONTRACT.op(**arguments | {"positions": torch.ones(64, dtype=torch.int64)})
    for rounds in (True, False):
        a, b = (normed.bfloat16().float() if rounds else normed).chunk(2, -1)
        wanted = torch.cat((a * 0.6 - b * 0.8, b * 0.6 + a * 0.8), -1).bfloat16().flatten(1)
        agreeing = (turned == wanted).float().mean()
        assert agreeing > 0.99 if rounds == cast else agreeing < 0.9


def test_wide_inputs_pass_through_bfloat16(make_tensor):
    q, k, v = CONTRACT.op(**without_norm(dtype=torch.float32, input_tensor=make_tensor((3, 64))))
    for result in (q, k):
        assert torch.equal(result, result.bfloat16().float())
    assert not torch.equal(v, v.bfloat16().float())


bias = {"q_bias": torch.ones(8), "k_bias": torch.ones(8)}

UNDEFINED = [
    (valid(input_tensor=torch.ones(3, 64).double()), "input_tensor is float64", valid()),
    (valid(input_tensor=torch.ones(3, 1, 64).bfloat16()), "input_tensor has 3 dims", valid()),
    (
        valid(input_tensor=torch.ones(3, 65).bfloat16()),
        "input_tensor is 65 wide, not q_hidden_size + 2 * kv_hidden_size = 32 + 2 * 16",
        valid(),
    ),
    (valid(input_tensor=torch.ones(3, 128).bfloat16()[:, :64]), "strides [128, 1] is not contiguous", valid()),
    (valid(kv_hidden_size=0), "kv_hidden_size is 0, not positive", valid()),
    (valid(head_dim=24), "head_dim 24 is no power of two", valid()),
    (valid(q_hidden_size=40), "q_hidden_size 40 is no multiple of kv_hidden_size 16", valid()),
    (
        valid(q_hidden_size=40, kv_hidden_size=20, input_tensor=torch.ones(3, 80).bfloat16()),
        "kv_hidden_size 20 is no multiple of head_dim 8",
        valid(),
    ),
    (
        valid(positions=torch.ones(3).short()),
        "positions is int16 (the kernel takes int32, int64)",
        valid(positions=torch.ones(3).int()),
    ),
    (
        valid(positions=torch.arange(2)),
        "positions [2] has 2 elements, not one for each of 3",
        valid(positions=torch.arange(3).view(1, 3)),
    ),
    (valid(rope_dim=10), "rope_dim 10 is not in 1 to head_dim 8", valid(rope_dim=8)),
    (valid(rope_dim=0), "rope_dim 0 is not in 1 to head_dim 8", valid(rope_dim=2)),
    (valid(rope_dim=5), "rope_dim 5 is odd", valid(rope_dim=6)),
    (valid() | {"rope_dim": 4}, "cos_sin_cache is 8 wide, not rope_dim 4", valid(rope_dim=4)),
    (valid(rope_dim=4) | {"rope_dim": None}, "cos_sin_cache is 4 wide, not rope_dim 8", valid() | {"rope_dim": None}),
    (valid(cos_sin_cache=torch.ones(1, 9, 8)), "cos_sin_cache has 3 dims", valid(cos_sin_cache=torch.ones(9, 8))),
    (valid(cos_sin_cache=torch.ones(9, 8).int()), "cos_sin_cache is int32", valid(cos_sin_cache=torch.ones(8, 9).T)),
    (
        valid(cos_sin_cache=torch.ones(0, 8)),
        "cos_sin_cache [0, 8] may have no row to look up",
        valid(cos_sin_cache=torch.ones(1, 8)),
    ),
    (without_norm() | {"k_weight": torch.ones(8)}, "k_weight given without eps", without_norm()),
    (without_norm(**bias), "q_bias, k_bias given without eps", valid(**bias)),
    (valid(q_weight=None), "eps is given without q_weight", valid()),
    (valid(q_bias=torch.ones(8)), "q_bias is given without k_bias", valid(**bias)),
    (valid(k_bias=torch.ones(8)), "k_bias is given without q_bias", valid(**bias)),
    (valid(q_weight=torch.ones(16)), "q_weight is [16], not [head_dim] = [8]", valid(q_weight=torch.ones(8))),
    (valid(k_weight=torch.ones(1).expand(8)), "k_weight [8] with strides [0] is not contiguous", valid()),
]


@pytest.mark.parametrize(("outside", "reason", "inside"), UNDEFINED)
def test_undefined_calls_are_refused_and_raise(assert_border, outside, reason, inside):
    assert_border(CONTRACT, outside, reason, inside)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_only_bfloat16_is_taken(dtype):
    reason = CONTRACT.refusal(Target(), **valid(dtype=dtype))
    assert "the kernel rounds its results to bfloat16" in reason
    assert CONTRACT.refusal(Target(), **valid(cos_sin_cache=torch.ones(9, 8, dtype=dtype))) is None


def test_a_kv_head_has_only_so_many_q_heads():
    def wide(heads):
        sizes = {"q_hidden_size": heads * 32, "kv_hidden_size": 32, "head_dim": 32}
        return without_norm(tokens=1, input_tensor=torch.ones(1, (heads + 2) * 32).bfloat16(), **sizes)

    reason = "1537 q heads of head_dim 32 for one kv head take 196736 bytes in float32"
    assert reason in CONTRACT.refusal(Target(), **wide(1537))
    assert CONTRACT.refusal(Target(), **wide(1536)) is None


@pytest.mark.parametrize("soc", ["ascend910b", "ascend910_93", "ascend950", "ascend310p"])
def test_socs(soc):
    assert (CONTRACT.refusal(Target(soc), **valid()) is None) == (soc in ("ascend910b", "ascend910_93"))


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, "sgl_kernel_npu, which has the kernel, can't be imported"),
        ("2026.3.1", "has no split_qkv_rmsnorm_rope_pos_cache_half_npu, 2026.03.01.post1 brought it"),
        ("2026.3.1.post1", None),
    ],
)
def test_package_versions(version, reason):
    packages = {"sgl_kernel_npu": version} if version else {}
    found = CONTRACT.refusal(Target("ascend910b", "npu", packages), **valid())
    assert (found is None) if reason is None else (reason in found)
    assert CONTRACT.refusal(Target("ascend910b", "cpu", packages), **valid()) is None


def test_symbolic_tokens_and_positions_are_kept_and_not_refused(symbolic):
    arguments = without_norm(
        input_tensor=symbolic(("B", "S", 64), torch.bfloat16).view(-1, 64),
        positions=symbolic(("B", "S"), torch.int64),
        cos_sin_cache=symbolic(("T", 8), torch.bfloat16),
    )
    assert CONTRACT.refusal(Target(), **arguments) is None
    results = CONTRACT.op(**arguments)
    assert [str(result.shape[0]) for result in results] == [str(arguments["input_tensor"].shape[0])] * 3
    assert [result.shape[1] for result in results] == [32, 16, 16]


def test_symbolic_geometry_is_refused(symbolic):
    tokens = symbolic(("T", 4)).shape[0]
    assert "head_dim s" in CONTRACT.refusal(Target(), **valid(head_dim=tokens))
    assert "rope_dim s" in CONTRACT.refusal(Target(), **valid() | {"rope_dim": tokens})


def test_no_tokens_give_empty_results(assert_same_layout):
    assert CONTRACT.refusal(Target(), **valid(tokens=0)) is None
    assert_same_layout(CONTRACT.op, *CONTRACT.bind(**valid(tokens=0)).values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(make_tensor, dtype):
    arguments = valid(dtype=dtype, input_tensor=make_tensor((3, 64), dtype))
    torch.library.opcheck(CONTRACT.op, (), arguments, test_utils=("test_schema", "test_faketensor"))
