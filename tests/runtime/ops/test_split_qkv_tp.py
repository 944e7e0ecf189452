"""split_qkv_tp_rmsnorm_rope against float64 maths, and its limits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_fuse.runtime.ops.split_qkv_tp import SPLIT_QKV_TP_RMSNORM_ROPE as CONTRACT
from npu_fuse.runtime.target import Target

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2**-8, torch.bfloat16: 2**-5}


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 4),
    groups=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([2, 4, 8, 16]),
    rotary_share=st.sampled_from([1, 2]),
    dtype=st.sampled_from(DTYPES),
    four_dims=st.booleans(),
)
def test_any_geometry_is_the_maths(
    make_tensor, assert_same_layout, pairs_turned, tokens, groups, kv_heads, head_dim, rotary_share, dtype, four_dims
):
    rotary_dim = max(2, head_dim // rotary_share)
    sizes = [groups * kv_heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    x = make_tensor((tokens, sum(sizes)), dtype)
    cos, sin = (make_tensor((tokens, rotary_dim), dtype, seed=seed) for seed in (1, 2))
    weights = [make_tensor((size,), dtype, seed=seed) for size, seed in zip(sizes[:2], (3, 4), strict=True)]
    rows = (tokens, 1, 1, rotary_dim) if four_dims else (tokens, rotary_dim)
    arguments = (x, cos.view(rows), sin.view(rows), *sizes[:2], head_dim, 1e-5, *weights, rotary_dim, 1, None)
    assert CONTRACT.refusal(Target(), *arguments) is None
    assert_same_layout(CONTRACT.op, *arguments)

    *results, v = CONTRACT.op(*arguments)
    parts = x.split(sizes, -1)
    half = rotary_dim // 2
    for actual, part, weight in zip(results, parts, weights, strict=False):
        normed = part.double() / (part.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        wanted = pairs_turned(normed.view(tokens, -1, head_dim), cos[:, :half], sin[:, :half]).flatten(1)
        torch.testing.assert_close(actual.double(), wanted, rtol=TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])
    assert torch.equal(v, parts[2])


def valid(tokens=3, dtype=torch.float32, rotary_dim=8, **changes):
    """Arguments of a call: 4 q heads and 2 kv heads of 8, rotated whole."""
    arguments = {
        "input": torch.ones(tokens, 64, dtype=dtype),
        "cos": torch.ones(tokens, rotary_dim, dtype=dtype),
        "sin": torch.ones(tokens, rotary_dim, dtype=dtype),
        "q_hidden_size": 32,
        "kv_hidden_size": 16,
        "head_dim": 8,
        "eps": 1e-6,
        "q_weight": torch.ones(32, dtype=dtype),
        "k_weight": torch.ones(16, dtype=dtype),
        "rotary_dim": rotary_dim,
    }
    return arguments | changes


def test_normed_values_are_rounded_before_they_are_rotated(make_tensor):
    x = make_tensor((5, 64), torch.bfloat16)
    arguments = valid(tokens=5, dtype=torch.bfloat16, input=x)
    arguments |= {"cos": make_tensor((5, 8), seed=1), "sin": make_tensor((5, 8), seed=2)}
    q, _, _ = CONTRACT.op(**arguments)
    wide = x[:, :32].float()
    rounded = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16().float().view(5, 4, 2, 4)
    cos, sin = (arguments[name][:, None, :4] for name in ("cos", "sin"))
    a, b = rounded.unbind(2)
    wanted = torch.cat((a * cos - b * sin, b * cos + a * sin), -1).bfloat16().flatten(1)
    assert (q == wanted).float().mean() > 0.97  # float32 sums may differ in their last bits
    torch.testing.assert_close(q, wanted, rtol=2**-7, atol=2**-8)


def test_the_second_half_of_the_rows_is_not_read(make_tensor):
    cos, sin = make_tensor((3, 8), seed=1), make_tensor((3, 8), seed=2)
    arguments = valid(input=make_tensor((3, 64)))
    expected = CONTRACT.op(**arguments | {"cos": cos.clone(), "sin": sin.clone()})
    sin[:, 4:] = cos[:, 4:] = float("nan")
    assert all(map(torch.equal, CONTRACT.op(**arguments | {"cos": cos, "sin": sin}), expected))


UNDEFINED = [
    (valid(input=torch.ones(3, 64).double()), "input is float64", valid(dtype=torch.float16)),
    (valid(input=torch.ones(3, 1, 64)), "input has 3 dims", valid()),
    (valid(input=torch.ones(3, 65)), "input is 65 wide, not q_hidden_size + 2 * kv_hidden_size = 32 + 2 * 16", valid()),
    (valid(input=torch.ones(3, 128)[:, :64]), "strides [128, 1] is not contiguous", valid()),
    (valid(q_hidden_size=-32), "q_hidden_size is -32, not positive", valid()),
    (valid(head_dim=24), "head_dim 24 is no power of two", valid(head_dim=16)),
    (valid(q_hidden_size=40), "q_hidden_size 40 is no multiple of kv_hidden_size 16", valid()),
    (
        valid(q_hidden_size=40, kv_hidden_size=20, input=torch.ones(3, 80)),
        "kv_hidden_size 20 is no multiple of head_dim 8",
        valid(),
    ),
    (valid(rotary_dim=10), "rope_dim 10 of cos is not in 1 to head_dim 8", valid(rotary_dim=8)),
    (valid(rotary_dim=0), "rope_dim 0 of cos is not in 1 to head_dim 8", valid(rotary_dim=2)),
    (valid(rotary_dim=5), "rope_dim 5 of cos is odd", valid(rotary_dim=6)),
    (valid() | {"rotary_dim": 4}, "cos and sin are 8 wide, not rotary_dim 4", valid(rotary_dim=4)),
    (valid(sin=torch.ones(3, 4)), "cos is 8 wide but sin is 4", valid()),
    (valid(cos=torch.ones(1, 8)), "cos [1, 8] has 8 elements, not one row of 8 for each of 3 tokens", valid()),
    (valid(sin=torch.ones(3, 16)[:, ::2]), "sin [3, 8] with strides [16, 2] is not contiguous", valid()),
    (valid(q_weight=torch.ones(8)), "q_weight is [8], not [q_hidden_size] = [32]", valid()),
    (valid(k_weight=torch.ones(32)), "k_weight is [32], not [kv_hidden_size] = [16]", valid()),
    (valid(k_weight=torch.ones(16).int()), "k_weight is int32", valid(k_weight=torch.ones(16).half())),
    (valid(q_weight=torch.ones(1).expand(32)), "q_weight [32] with strides [0] is not contiguous", valid()),
    (valid(tp_world=2), "tp_world is 2, and tp_group doesn't say which ranks these are", valid(tp_world=1)),
    (valid(tp_world=2, tp_group="tp"), "tp_world is 2, and the group 'tp' has no ranks", valid(tp_world=1)),
    (valid(tp_world=0), "tp_world is 0", valid(tp_group="tp")),
]


@pytest.mark.parametrize(("outside", "reason", "inside"), UNDEFINED)
def test_undefined_calls_are_refused_and_raise(assert_border, outside, reason, inside):
    assert_border(CONTRACT, outside, reason, inside)


def wide(q_heads, kv_heads, head_dim):
    q, kv = q_heads * head_dim, kv_heads * head_dim
    return valid(
        tokens=1,
        rotary_dim=head_dim,
        input=torch.ones(1, q + 2 * kv),
        q_hidden_size=q,
        kv_hidden_size=kv,
        head_dim=head_dim,
        q_weight=torch.ones(q),
        k_weight=torch.ones(kv),
    )


def test_tiles_must_fit():
    reason = "769 q heads of head_dim 64 for one kv head take 196864 bytes in float32"
    assert reason in CONTRACT.refusal(Target(), **wide(769, 1, 64))
    assert CONTRACT.refusal(Target(), **wide(768, 1, 64)) is None
    reason = "1024 half heads of 64 take 262144 bytes in float32"  # 513 heads are padded to 1024
    assert reason in CONTRACT.refusal(Target(), **wide(513, 513, 128))
    assert CONTRACT.refusal(Target(), **wide(512, 512, 128)) is None


@pytest.mark.parametrize("soc", ["ascend910b", "ascend910_93", "ascend950", "ascend310p"])
def test_socs(soc):
    assert (CONTRACT.refusal(Target(soc), **valid()) is None) == (soc in ("ascend910b", "ascend910_93"))


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, "sgl_kernel_npu, which has the kernel, can't be imported"),
        ("2026.3.30", "has no split_qkv_tp_rmsnorm_rope, 2026.03.31.rc1 brought it"),
        ("2026.3.31.rc1", None),
    ],
)
def test_package_versions(version, reason):
    packages = {"sgl_kernel_npu": version} if version else {}
    found = CONTRACT.refusal(Target("ascend910b", "npu", packages), **valid())
    assert (found is None) if reason is None else (reason in found)
    assert CONTRACT.refusal(Target("ascend910b", "cpu", packages), **valid()) is None


def test_symbolic_tokens_are_kept_and_not_refused(symbolic):
    arguments = valid(
        input=symbolic(("B", "S", 64)).view(-1, 64),
        cos=symbolic(("B", "S", 8)),
        sin=symbolic(("B", "S", 8)),
        q_weight=symbolic((32,)),
        k_weight=symbolic((16,)),
    )
    assert CONTRACT.refusal(Target(), **arguments) is None
    results = CONTRACT.op(**arguments)
    assert [str(result.shape[0]) for result in results] == [str(arguments["input"].shape[0])] * 3
    assert [result.shape[1] for result in results] == [32, 16, 16]


def test_symbolic_geometry_is_refused(symbolic):
    tokens = symbolic(("T", 4)).shape[0]
    assert "kv_hidden_size 16*s" in CONTRACT.refusal(Target(), **valid(kv_hidden_size=tokens * 16))
    assert "cos and sin are 8 wide, not rotary_dim s" in CONTRACT.refusal(Target(), **valid() | {"rotary_dim": tokens})


def test_no_tokens_give_empty_results(assert_same_layout):
    assert CONTRACT.refusal(Target(), **valid(tokens=0)) is None
    assert_same_layout(CONTRACT.op, *valid(tokens=0).values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(make_tensor, dtype):
    arguments = valid(dtype=dtype, input=make_tensor((3, 64), dtype))
    torch.library.opcheck(CONTRACT.op, (), arguments, test_utils=("test_schema", "test_faketensor"))
