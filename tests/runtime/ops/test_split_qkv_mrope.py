"""triton_split_qkv_rmsnorm_mrope against float64 maths, its choice of positions, and its limits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_fuse.runtime.ops.split_qkv_mrope import TRITON_SPLIT_QKV_RMSNORM_MROPE as CONTRACT
from npu_fuse.runtime.target import Target

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}
TIME, HEIGHT, WIDTH, NONE = range(4)


def position_of(column, sections, is_interleaved):
    """Which of the three positions a column is of."""
    _, height, width = sections
    if is_interleaved:
        if column % 3 == 1 and column < 3 * height:
            return HEIGHT
        return WIDTH if column % 3 == 2 and column < 3 * width else TIME
    return next((i for i in range(3) if column < sum(sections[: i + 1])), NONE)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 4),
    heads=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    head_size=st.sampled_from([8, 12, 16]),
    rope_dim=st.sampled_from([None, 6, 8]),
    sections=st.lists(st.integers(0, 4), min_size=3, max_size=3),
    is_interleaved=st.booleans(),
    has_bias=st.booleans(),
    has_gate=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_any_geometry_is_the_maths(
    make_tensor,
    assert_same_layout,
    pairs_turned,
    tokens,
    heads,
    head_size,
    rope_dim,
    sections,
    is_interleaved,
    has_bias,
    has_gate,
    dtype,
):
    q_heads, kv_heads = heads
    all_heads = (2 if has_gate else 1) * q_heads + 2 * kv_heads
    qkv = make_tensor((tokens, all_heads * head_size), dtype)
    width = head_size if rope_dim is None else rope_dim
    cos_sin = make_tensor((3, tokens, width), dtype, seed=1)
    weights = [make_tensor((head_size,), dtype, seed=seed) for seed in (2, 3)]
    biases = [make_tensor((head_size,), dtype, seed=seed) if has_bias else None for seed in (4, 5)]
    sizes = (q_heads, kv_heads, head_size, 1e-5, sections, is_interleaved, rope_dim)
    arguments = (qkv, *weights, cos_sin, *sizes, *biases, has_gate)
    assert CONTRACT.refusal(Target(), *arguments) is None
    assert_same_layout(CONTRACT.op, *arguments)

    q, k, v, gate = CONTRACT.op(*arguments)
    half = width // 2
    owners = [position_of(column, sections, is_interleaved) for column in range(half)]
    tables = torch.cat((cos_sin, torch.zeros(1, tokens, width, dtype=dtype)))
    cos, sin = (
        torch.stack([tables[owner, :, first + column] for column, owner in enumerate(owners)], -1)
        for first in (0, half)
    )
    split = qkv.view(tokens, all_heads, head_size)
    step = 2 if has_gate else 1
    parts = (split[:, : step * q_heads : step], split[:, step * q_heads : step * q_heads + kv_heads])
    for actual, part, weight, bias in zip((q, k), parts, weights, biases, strict=True):
        normed = part.double() / (part.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        normed = normed if bias is None else normed + bias.double()
        wanted = pairs_turned(normed, cos, sin).flatten(1)
        torch.testing.assert_close(actual.double(), wanted, rtol=TOLERANCE[dtype], atol=8 * TOLERANCE[dtype])
    assert torch.equal(v.view(tokens, kv_heads, head_size), split[:, step * q_heads + kv_heads :])
    gates = split[:, 1 : 2 * q_heads : 2].flatten(1) if has_gate else qkv[:, :0]
    assert torch.equal(gate, gates)


def valid(tokens=3, dtype=torch.float32, rope_dim=16, **changes):
    """Arguments of a call: 4 q heads and 2 kv heads of 16, rotated whole."""
    arguments = {
        "qkv": torch.ones(tokens, 128, dtype=dtype),
        "q_weight": torch.ones(16, dtype=dtype),
        "k_weight": torch.ones(16, dtype=dtype),
        "cos_sin": torch.ones(3, tokens, rope_dim, dtype=dtype),
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "head_size": 16,
        "eps": 1e-6,
        "mrope_section": [2, 3, 3],
        "is_interleaved": False,
        "rope_dim": rope_dim,
    }
    return arguments | changes


def test_columns_beyond_the_sections_are_zero(make_tensor):
    """Neither cos nor sin is there: such pairs become zero, they don't pass."""
    qkv = make_tensor((3, 128))
    q, _, _, _ = CONTRACT.op(**valid(qkv=qkv, mrope_section=[2, 0, 1]))
    heads = q.view(3, 4, 16)
    zero = [column in (*range(3, 8), *range(11, 16)) for column in range(16)]
    assert (heads == 0).all(0).all(0).tolist() == zero


UNDEFINED = [
    (valid(qkv=torch.ones(3, 128).double()), "qkv is float64", valid(dtype=torch.float16)),
    (valid(qkv=torch.ones(3, 1, 128)), "qkv has 3 dims", valid()),
    (
        valid(has_gate=True),
        "qkv is 128 wide, not (2 * num_q_heads + 2 * num_kv_heads) * head_size = 192",
        valid(has_gate=True, qkv=torch.ones(3, 192)),
    ),
    (
        valid(qkv=torch.ones(3, 192)),
        "qkv is 192 wide, not (num_q_heads + 2 * num_kv_heads) * head_size = 128",
        valid(),
    ),
    (valid(qkv=torch.ones(3, 256)[:, :128]), "strides [256, 1] is not contiguous", valid()),
    (valid(num_kv_heads=0), "num_kv_heads is 0, not positive", valid()),
    (valid(rope_dim=18), "rope_dim 18 is not in 1 to head_size 16", valid(rope_dim=16)),
    (valid(rope_dim=0), "rope_dim 0 is not in 1 to head_size 16", valid(rope_dim=2)),
    (valid(rope_dim=5), "rope_dim 5 is odd", valid(rope_dim=6)),
    (
        valid(rope_dim=8) | {"rope_dim": None},
        "cos_sin is [3, 3, 8], not [3, tokens, rope_dim] = [3, 3, 16]",
        valid() | {"rope_dim": None},
    ),
    (valid(cos_sin=torch.ones(3, 2, 16)), "cos_sin is [3, 2, 16], not", valid()),
    (valid(cos_sin=torch.ones(4, 3, 16)), "cos_sin is [4, 3, 16], not", valid()),
    (valid(cos_sin=torch.ones(3, 16)), "cos_sin has 2 dims", valid()),
    (valid(cos_sin=torch.ones(3, 3, 16).int()), "cos_sin is int32", valid(cos_sin=torch.ones(3, 3, 16).half())),
    (valid(cos_sin=torch.ones(3, 3, 32)[..., ::2]), "strides [96, 32, 2] is not contiguous", valid()),
    (valid(mrope_section=[2, 3]), "mrope_section [2, 3] is no three numbers", valid(mrope_section=[8, 0, 0])),
    (valid(mrope_section=[2, 2, 2, 2]), "mrope_section [2, 2, 2, 2] is no three numbers", valid()),
    (valid(mrope_section=[9, -1, 0]), "mrope_section [9, -1, 0] is no three numbers", valid(mrope_section=[9, 1, 0])),
    (valid(q_weight=torch.ones(64)), "q_weight is [64], not [head_dim] = [16]", valid()),
    (
        valid(q_bias=torch.ones(16)),
        "q_bias is given without k_bias",
        valid(q_bias=torch.ones(16), k_bias=torch.ones(16)),
    ),
    (valid(k_weight=torch.ones(1).expand(16)), "k_weight [16] with strides [0] is not contiguous", valid()),
]


@pytest.mark.parametrize(("outside", "reason", "inside"), UNDEFINED)
def test_undefined_calls_are_refused_and_raise(assert_border, outside, reason, inside):
    assert_border(CONTRACT, outside, reason, inside)


def test_a_token_must_fit():
    def wide(q_heads, kv_heads, has_gate=False):
        width = ((2 if has_gate else 1) * q_heads + 2 * kv_heads) * 64
        sizes = {"num_q_heads": q_heads, "num_kv_heads": kv_heads, "head_size": 64, "has_gate": has_gate}
        weights = {"q_weight": torch.ones(64), "k_weight": torch.ones(64)}
        return valid(tokens=1, rope_dim=64, qkv=torch.ones(1, width), **sizes, **weights)

    assert "769 q heads of head_size 64 take 196864 bytes" in CONTRACT.refusal(Target(), **wide(769, 1))
    assert CONTRACT.refusal(Target(), **wide(768, 1)) is None
    assert "770 q heads and gates of head_size 64 take" in CONTRACT.refusal(Target(), **wide(385, 1, has_gate=True))
    assert CONTRACT.refusal(Target(), **wide(384, 1, has_gate=True)) is None
    assert "769 k heads of head_size 64 take 196864 bytes" in CONTRACT.refusal(Target(), **wide(1, 769))
    assert CONTRACT.refusal(Target(), **wide(1, 768)) is None


@pytest.mark.parametrize("soc", ["ascend910b", "ascend910_93", "ascend950", "ascend310p"])
def test_socs(soc):
    assert (CONTRACT.refusal(Target(soc), **valid()) is None) == (soc in ("ascend910b", "ascend910_93"))


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, "sgl_kernel_npu, which has the kernel, can't be imported"),
        ("2026.8.20", "has no triton_split_qkv_rmsnorm_mrope, 2026.08.21 brought it"),
        ("2026.8.21", None),
    ],
)
def test_package_versions(version, reason):
    packages = {"sgl_kernel_npu": version} if version else {}
    found = CONTRACT.refusal(Target("ascend910b", "npu", packages), **valid())
    assert (found is None) if reason is None else (reason in found)
    assert CONTRACT.refusal(Target("ascend910b", "cpu", packages), **valid()) is None


def test_symbolic_tokens_are_kept_and_not_refused(symbolic):
    arguments = valid(
        qkv=symbolic(("T", 128)),
        cos_sin=symbolic((3, "T", 16)),
        q_weight=symbolic((16,)),
        k_weight=symbolic((16,)),
    )
    assert CONTRACT.refusal(Target(), **arguments) is None
    results = CONTRACT.op(**arguments)
    assert [str(result.shape[0]) for result in results] == [str(arguments["qkv"].shape[0])] * 4
    assert [result.shape[1] for result in results] == [64, 32, 32, 0]


def test_symbolic_geometry_is_refused(symbolic):
    tokens = symbolic(("T", 4)).shape[0]
    assert "num_q_heads s" in CONTRACT.refusal(Target(), **valid(num_q_heads=tokens))
    assert "rope_dim s" in CONTRACT.refusal(Target(), **valid() | {"rope_dim": tokens})


def test_no_tokens_give_empty_results(assert_same_layout):
    assert CONTRACT.refusal(Target(), **valid(tokens=0)) is None
    assert_same_layout(CONTRACT.op, *valid(tokens=0).values())


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(make_tensor, dtype):
    arguments = valid(dtype=dtype, qkv=make_tensor((3, 128), dtype))
    torch.library.opcheck(CONTRACT.op, (), arguments, test_utils=("test_schema", "test_faketensor"))
