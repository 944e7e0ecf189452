"""fused_rope_qk_mqa against float64 maths, its roundings, its layouts, its limits, and how it is launched."""

import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_fuse.runtime.ops import fused_rope_qk, sgl_kernel
from npu_fuse.runtime.ops.fused_rope_qk import FUSED_ROPE_QK_MQA as CONTRACT
from npu_fuse.runtime.target import Target

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2**-8, torch.bfloat16: 2**-5}
LAYOUTS = ("plain", "transposed", "sliced", "expanded")


# No axis of size one here: torch.empty_like gives it one stride eagerly and another under fake tensors.
@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(2, 4),
    q_heads=st.sampled_from([2, 8]),
    k_heads=st.sampled_from([2, 4]),
    sizes=st.sampled_from([(8, 4), (8, 8), (12, 8), (6, 4)]),
    is_neox_style=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    table_dtype=st.sampled_from(DTYPES),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 3),
)
def test_any_geometry_is_the_maths(
    make_tensor,
    assert_same_layout,
    pairs_turned,
    tokens,
    q_heads,
    k_heads,
    sizes,
    is_neox_style,
    dtype,
    table_dtype,
    layouts,
):
    head_dim, rotary_dim = sizes
    query = make_tensor((tokens, q_heads, head_dim), dtype, layouts[0])
    key = make_tensor((tokens, k_heads, head_dim), dtype, layouts[1], seed=1)
    cos_sin = make_tensor((tokens, rotary_dim), table_dtype, layouts[2], seed=2)
    arguments = (query, key, cos_sin, rotary_dim, is_neox_style)
    assert CONTRACT.refusal(Target(), *arguments) is None
    assert_same_layout(CONTRACT.op, *arguments)
    tolerance = max(TOLERANCE[dtype], TOLERANCE[table_dtype])
    for actual, x in zip(CONTRACT.op(*arguments), (query, key), strict=True):
        assert actual.dtype == dtype
        wanted = pairs_turned(x, *cos_sin.chunk(2, -1), is_neox_style)
        torch.testing.assert_close(actual.double(), wanted, rtol=tolerance, atol=4 * tolerance)
        assert torch.equal(actual[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.parametrize(("tokens", "q_heads", "k_heads"), [(3, 4, 1), (1, 1, 1), (1, 8, 2)])
def test_axes_of_size_one(make_tensor, assert_same_layout, pairs_turned, tokens, q_heads, k_heads):
    query, key = make_tensor((tokens, q_heads, 8)), make_tensor((tokens, k_heads, 8), seed=1)
    cos_sin = make_tensor((tokens, 4), seed=2)
    assert_same_layout(CONTRACT.op, query, key, cos_sin, 4, True)
    for actual, x in zip(CONTRACT.op(query, key, cos_sin, 4, True), (query, key), strict=True):
        torch.testing.assert_close(actual.double(), pairs_turned(x, *cos_sin.chunk(2, -1)), rtol=4e-6, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_neox_style", [True, False])
def test_a_narrow_table_rounds_each_product_and_a_wide_one_none(make_tensor, dtype, is_neox_style):
    query, key = make_tensor((5, 8, 64), dtype), make_tensor((5, 1, 64), dtype, seed=1)
    narrow = make_tensor((5, 64), dtype, seed=2)
    picks = (lambda t: t.chunk(2, -1)) if is_neox_style else (lambda t: (t[..., ::2], t[..., 1::2]))
    join = (
        (lambda a, b: torch.cat((a, b), -1)) if is_neox_style else (lambda a, b: torch.stack((a, b), -1).flatten(-2))
    )
    for cos_sin in (narrow, narrow.float()):
        cos, sin = cos_sin[:, None].chunk(2, -1)
        for actual, x in zip(CONTRACT.op(query, key, cos_sin, 64, is_neox_style), (query, key), strict=True):
            a, b = picks(x)
            assert torch.equal(actual, join(a * cos - b * sin, a * sin + b * cos).to(dtype))


def valid(tokens=3, dtype=torch.float32, heads=4, **changes):
    arguments = {
        "query": torch.ones(tokens, heads, 16, dtype=dtype),
        "key": torch.ones(tokens, 1, 16, dtype=dtype),
        "cos_sin": torch.ones(tokens, 8, dtype=dtype),
        "rotary_dim": 8,
        "is_neox_style": True,
    }
    return arguments | changes


UNDEFINED = [
    (valid(query=torch.ones(3, 4, 16).double()), "query is float64", valid(dtype=torch.float16)),
    (valid(key=torch.ones(3, 16)), "key has 2 dims [3, 16] (the kernel takes 3)", valid()),
    (valid(cos_sin=torch.ones(3, 1, 8)), "cos_sin has 3 dims", valid()),
    (valid(cos_sin=torch.ones(3, 8).int()), "cos_sin is int32", valid(cos_sin=torch.ones(3, 8).bfloat16())),
    (valid(tokens=0), "query [0, 4, 16] is empty", valid(tokens=1)),
    (valid(query=torch.ones(3, 4, 16).half()), "query is float16 but key is float32", valid(dtype=torch.float16)),
    (valid(key=torch.ones(2, 1, 16)), "query [3, 4, 16] and key [2, 1, 16] differ in tokens or head_dim", valid()),
    (valid(key=torch.ones(3, 1, 8)), "query [3, 4, 16] and key [3, 1, 8] differ in tokens or head_dim", valid()),
    (valid(cos_sin=torch.ones(1, 8)), "cos_sin is [1, 8], not [tokens, rotary_dim] = [3, 8]", valid()),
    (
        valid(rotary_dim=16),
        "cos_sin is [3, 8], not [tokens, rotary_dim] = [3, 16]",
        valid(rotary_dim=16, cos_sin=torch.ones(3, 16)),
    ),
    (
        valid(rotary_dim=32, cos_sin=torch.ones(3, 32)),
        "rotary_dim 32 is no even number in 2 to head_dim 16",
        valid(rotary_dim=16, cos_sin=torch.ones(3, 16)),
    ),
    (valid(rotary_dim=7, cos_sin=torch.ones(3, 7)), "rotary_dim 7 is no even number in 2 to", valid()),
]


@pytest.mark.parametrize(("outside", "reason", "inside"), UNDEFINED)
def test_undefined_calls_are_refused_and_raise(assert_border, outside, reason, inside):
    assert_border(CONTRACT, outside, reason, inside)


UNTILED = [
    (valid(heads=6), "the number of q heads is 6, no power of two", valid(heads=8)),
    (valid(key=torch.ones(3, 3, 16)), "the number of k heads is 3, no power of two", valid(key=torch.ones(3, 2, 16))),
    (
        valid(rotary_dim=12, cos_sin=torch.ones(3, 12)),
        "half of rotary_dim is 6, no power of two",
        valid(rotary_dim=16, cos_sin=torch.ones(3, 16)),
    ),
    (
        valid(rotary_dim=4, cos_sin=torch.ones(3, 4)),
        "head_dim - rotary_dim is 12, no power of two",
        valid(rotary_dim=8),
    ),
]


@pytest.mark.parametrize(("outside", "reason", "inside"), UNTILED)
def test_tiles_are_powers_of_two(outside, reason, inside):
    assert reason in CONTRACT.refusal(Target(), **outside)
    assert CONTRACT.refusal(Target(), **inside) is None


@pytest.mark.parametrize("soc", ["ascend910b", "ascend910_93", "ascend950", "ascend310p"])
def test_socs(soc):
    assert (CONTRACT.refusal(Target(soc), **valid()) is None) == (soc in ("ascend910b", "ascend910_93"))


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, "sgl_kernel_npu, which has the kernel, can't be imported"),
        ("2026.2.28", "has no fused_rope_qk_mqa, 2026.03.01 brought it"),
        ("2026.3.1", None),
    ],
)
def test_package_versions(version, reason):
    packages = {"sgl_kernel_npu": version} if version else {}
    found = CONTRACT.refusal(Target("ascend910b", "npu", packages), **valid())
    assert (found is None) if reason is None else (reason in found)
    assert CONTRACT.refusal(Target("ascend910b", "cpu", packages), **valid()) is None


def test_symbolic_tokens_are_kept_and_not_refused(symbolic):
    arguments = valid(query=symbolic(("T", 4, 16)), key=symbolic(("T", 1, 16)), cos_sin=symbolic(("T", 8)))
    assert CONTRACT.refusal(Target(), **arguments) is None
    query, key = CONTRACT.op(**arguments)
    assert query.shape == arguments["query"].shape
    assert key.shape == arguments["key"].shape


def test_symbolic_heads_are_refused(symbolic):
    arguments = valid(query=symbolic((3, "S", 16)), key=symbolic((3, 1, 16)), cos_sin=symbolic((3, 8)))
    assert "the number of q heads, s" in CONTRACT.refusal(Target(), **arguments)


def test_so_is_what_else_the_kernel_is_compiled_for(symbolic):
    size = symbolic(("S",)).shape[0]
    wide = valid(cos_sin=symbolic((3, "S")), rotary_dim=size)
    assert CONTRACT.refusal(Target(), **wide) == f"rotary_dim {size} is not static (the kernel is compiled for it)"
    long = valid(query=symbolic((3, 4, "S")), key=symbolic((3, 1, "S")), cos_sin=symbolic((3, 8)))
    assert CONTRACT.refusal(Target(), **long) == f"head_dim {size} is not static (the kernel is compiled for it)"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_neox_style", [True, False])
def test_opcheck(make_tensor, dtype, is_neox_style):
    arguments = valid(dtype=dtype, query=make_tensor((3, 4, 16), dtype), is_neox_style=is_neox_style)
    torch.library.opcheck(CONTRACT.op, (), arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.fixture
def launches(monkeypatch):
    """The package's function, played by the reference; how many tokens and heads each launch had."""
    seen = []

    def fused_rope_qk_mqa(query, key, cos_sin, rotary_dim, is_neox_style):
        seen.append(tuple(query.shape[:2]))
        return CONTRACT.reference(query, key, cos_sin, rotary_dim, is_neox_style)

    names = ("sgl_kernel_npu", "sgl_kernel_npu.norm", "sgl_kernel_npu.norm.fused_rope_qk_mqa")
    modules = [ModuleType(name) for name in names]
    modules[-1].fused_rope_qk_mqa = fused_rope_qk_mqa
    for name, module in zip(names, modules, strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    sgl_kernel._checked.cache_clear()
    yield seen
    sgl_kernel._checked.cache_clear()


@pytest.mark.parametrize(
    ("tokens", "pieces"),
    [(15, [(15, 4)]), (16, [(15, 4), (1, 4)]), (45, [(15, 4)] * 3), (46, [*[(15, 4)] * 3, (1, 4)])],
)
def test_a_launch_has_only_so_many_programs(make_tensor, monkeypatch, launches, tokens, pieces):
    monkeypatch.setattr(fused_rope_qk, "_PROGRAM_LIMIT", 63)
    query = make_tensor((tokens, 4, 16), layout="transposed")
    arguments = (query, make_tensor((tokens, 1, 16), seed=1), make_tensor((tokens, 8), seed=2), 8, True)
    results = CONTRACT.device_kernel(*arguments)
    assert launches == pieces
    for result, wanted in zip(results, CONTRACT.op(*arguments), strict=True):
        assert torch.equal(result, wanted)
        assert result.stride() == wanted.stride()
