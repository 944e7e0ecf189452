"""split_qkvgate_gemma_rmsnorm_rope against float64 maths, and its limits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_fuse.runtime.ops.split_qkvgate import SPLIT_QKVGATE_GEMMA_RMSNORM_ROPE as CONTRACT
from npu_fuse.runtime.target import Target

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 4),
    groups=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([4, 8, 16]),
    rope_dim=st.sampled_from([2, 4, 6, 14]),
    dtype=st.sampled_from(DTYPES),
    four_dims=st.booleans(),
)
def test_any_geometry_is_the_maths(
    make_tensor, assert_same_layout, pairs_turned, tokens, groups, kv_heads, head_dim, rope_dim, dtype, four_dims
):
    rope_dim = min(rope_dim, head_dim - 2)
    q_heads = groups * kv_heads
    x = make_tensor((tokens, (2 * q_heads + 2 * kv_heads) * head_dim), dtype)
    angles = torch.rand(tokens, rope_dim // 2) * 3
    sin, cos = (torch.cat((half, half), -1).to(dtype) for half in (angles.sin(), angles.cos()))
    if four_dims:
        sin, cos = sin[:, None, None], cos[:, None, None]
    weights = [make_tensor((head_dim,), dtype, seed=seed) for seed in (3, 4)]
    arguments = (x, sin, cos, q_heads * head_dim, kv_heads * head_dim, head_dim, rope_dim, 1e-5, *weights)
    assert CONTRACT.refusal(Target(), *arguments) is None
    assert_same_layout(CONTRACT.op, *arguments)

    q, k, v, gate = (result.view(tokens, -1, head_dim) for result in CONTRACT.op(*arguments))
    heads = x.view(tokens, -1, head_dim)
    halves = [table.reshape(tokens, rope_dim)[:, : rope_dim // 2] for table in (cos, sin)]
    parts = (heads[:, : 2 * q_heads : 2], heads[:, 2 * q_heads : 2 * q_heads + kv_heads])
    for actual, part, weight in zip((q, k), parts, weights, strict=True):
        normed = part.double() / (part.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (1 + weight.double())
        wanted = pairs_turned(normed, *halves)
        torch.testing.assert_close(actual.double(), wanted, rtol=TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])
    assert torch.equal(gate, heads[:, 1 : 2 * q_heads : 2])
    assert torch.equal(v, heads[:, 2 * q_heads + kv_heads :])


def valid(tokens=3, dtype=torch.float32, rope_dim=4, **changes):
    """Arguments of a call: 4 q heads and 2 kv heads of 8, half of each rotated."""
    arguments = {
        "input": torch.ones(tokens, 96, dtype=dtype),
        "sin": torch.ones(tokens, rope_dim, dtype=dtype),
        "cos": torch.ones(tokens, rope_dim, dtype=dtype),
        "q_hidden_size": 32,
        "kv_hidden_size": 16,
        "head_dim": 8,
        "rope_dim": rope_dim,
        "eps": 1e-6,
        "q_weight": torch.ones(8, dtype=dtype),
        "k_weight": torch.ones(8, dtype=dtype),
    }
    return arguments | changes


UNDEFINED = [
    (valid(input=torch.ones(3, 96).double()), "input is float64", valid(dtype=torch.float16)),
    (valid(input=torch.ones(3, 1, 96)), "input has 3 dims", valid()),
    (valid(input=torch.ones(3, 64)), "input is 64 wide, not 2 * (q_hidden_size + kv_hidden_size) = 2 *", valid()),
    (valid(input=torch.ones(3, 192)[:, :96]), "strides [192, 1] is not contiguous", valid()),
    (valid(kv_hidden_size=0), "kv_hidden_size is 0, not positive", valid()),
    (valid(head_dim=12), "head_dim 12 is no power of two", valid()),
    (valid(q_hidden_size=40), "q_hidden_size 40 is no multiple of kv_hidden_size 16", valid()),
    (
        valid(q_hidden_size=24, kv_hidden_size=12, input=torch.ones(3, 72)),
        "kv_hidden_size 12 is no multiple of head_dim 8",
        valid(q_hidden_size=24, kv_hidden_size=8, input=torch.ones(3, 64)),
    ),
    (valid(rope_dim=8), "rope_dim 8 is not in 1 to head_dim 8 - 1 (the kernel has no rotation of", valid(rope_dim=6)),
    (valid(rope_dim=0), "rope_dim 0 is not in 1 to head_dim 8 - 1", valid(rope_dim=2)),
    (valid(rope_dim=5), "rope_dim 5 of sin is odd", valid(rope_dim=4)),
    (valid() | {"rope_dim": 6}, "sin and cos are 4 wide, not rope_dim 6", valid()),
    (valid(cos=torch.ones(3, 2)), "sin is 4 wide but cos is 2", valid()),
    (valid(sin=torch.ones(1, 4)), "sin [1, 4] has 4 elements, not one row of 4 for each of 3 tokens", valid()),
    (valid(cos=torch.ones(3, 8)[:, ::2]), "cos [3, 4] with strides [8, 2] is not contiguous", valid()),
    (valid(cos=torch.ones(3, 4).int()), "cos is int32", valid(cos=torch.ones(3, 4).bfloat16())),
    (valid(q_weight=torch.ones(16)), "q_weight is [16], not [head_dim] = [8]", valid()),
    (valid(k_weight=torch.ones(1, 8)), "k_weight is [1, 8], not [head_dim] = [8]", valid()),
    (valid(k_weight=torch.ones(8).int()), "k_weight is int32", valid(k_weight=torch.ones(8).half())),
    (valid(q_weight=torch.ones(1).expand(8)), "q_weight [8] with strides [0] is not contiguous", valid()),
]


@pytest.mark.parametrize(("outside", "reason", "inside"), UNDEFINED)
def test_undefined_calls_are_refused_and_raise(assert_border, outside, reason, inside):
    assert_border(CONTRACT, outside, reason, inside)


def test_a_kv_head_has_only_so_many_q_heads():
    def wide(heads):
        return valid(
            input=torch.ones(1, (2 * heads + 2) * 32),
            q_hidden_size=heads * 32,
            kv_hidden_size=32,
            head_dim=32,
            q_weight=torch.ones(32),
            k_weight=torch.ones(32),
            tokens=1,
        )

    reason = "769 q heads and gates of 32 for one kv head take 196864 bytes in float32"
    assert reason in CONTRACT.refusal(Target(), **wide(769))
    assert CONTRACT.refusal(Target(), **wide(768)) is None


@pytest.mark.parametrize("soc", ["ascend910b", "ascend910_93", "ascend950", "ascend310p"])
def test_socs(soc):
    assert (CONTRACT.refusal(Target(soc), **valid()) is None) == (soc != "ascend310p")


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, "sgl_kernel_npu, which has the kernel, can't be imported"),
        ("2026.4.14", "has no split_qkvgate_gemma_rmsnorm_rope, 2026.04.15.rc1 brought it"),
        ("2026.4.15.rc1", None),
        ("unknown", None),
    ],
)
def test_package_versions(version, reason):
    packages = {"sgl_kernel_npu": version} if version else {}
    found = CONTRACT.refusal(Target("ascend910b", "npu", packages), **valid())
    assert (found is None) if reason is None else (reason in found)
    assert CONTRACT.refusal(Target("ascend910b", "cpu", packages), **valid()) is None


def test_symbolic_tokens_are_kept_and_not_refused(symbolic):
    arguments = valid(
        input=symbolic(("B", "S", 96)).view(-1, 96),
        sin=symbolic(("B", "S", 4)),
        cos=symbolic(("B", "S", 4)),
        q_weight=symbolic((8,)),
        k_weight=symbolic((8,)),
    )
    assert CONTRACT.refusal(Target(), **arguments) is None
    results = CONTRACT.op(**arguments)
    assert [str(result.shape[0]) for result in results] == [str(arguments["input"].shape[0])] * 4
    assert [result.shape[1] for result in results] == [32, 16, 16, 32]


def test_symbolic_geometry_is_refused(symbolic):
    tokens = symbolic(("T", 4)).shape[0]
    assert "q_hidden_size 32*s" in CONTRACT.refusal(Target(), **valid(q_hidden_size=tokens * 32))
    assert "is not static" in CONTRACT.refusal(Target(), **valid() | {"rope_dim": tokens})


def test_no_tokens_give_empty_results(assert_same_layout):
    assert CONTRACT.refusal(Target(), **valid(tokens=0)) is None
    assert_same_layout(CONTRACT.op, *valid(tokens=0).values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(make_tensor, dtype):
    arguments = valid(dtype=dtype, input=make_tensor((3, 96), dtype))
    torch.library.opcheck(CONTRACT.op, (), arguments, test_utils=("test_schema", "test_faketensor"))
