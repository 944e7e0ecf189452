"""npu_mrope against float64 maths, and its limits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_fuse.runtime.ops.mrope import NPU_MROPE as CONTRACT
from npu_fuse.runtime.target import Target

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 4),
    heads=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    sizes=st.sampled_from([(32, 32), (64, 32), (96, 64)]),
    mode=st.sampled_from(["half", "interleave"]),
    dtype=st.sampled_from(DTYPES),
    sections=st.sampled_from([None, [0, 0, 0]]),
)
def test_any_geometry_is_the_maths(
    make_tensor, assert_same_layout, pairs_turned, tokens, heads, sizes, mode, dtype, sections
):
    head_size, rotary_dim = sizes
    query, key = (make_tensor((tokens, n * head_size), dtype, seed=n) for n in heads)
    cache = make_tensor((9, rotary_dim), dtype, seed=7)
    positions = torch.randint(9, (tokens,), generator=torch.Generator().manual_seed(8))
    arguments = (positions, query, key, cache, head_size)
    keywords = {"mrope_section": sections, "rotary_mode": mode}
    assert CONTRACT.refusal(Target(), *arguments, **keywords) is None
    assert_same_layout(CONTRACT.op, *arguments)
    for actual, x in zip(CONTRACT.op(*arguments, **keywords), (query, key), strict=True):
        heads_of_x = x.view(tokens, -1, head_size)
        wanted = pairs_turned(heads_of_x, *cache[positions].chunk(2, -1), mode == "half").flatten(1)
        torch.testing.assert_close(actual.double(), wanted, rtol=TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])


@pytest.mark.parametrize("sections", [[16, 24, 24], [24, 20, 20], [16, 16, 16, 16]])
def test_each_section_has_a_position_of_its_own(make_tensor, pairs_turned, sections):
    positions = torch.randint(9, (len(sections), 5), generator=torch.Generator().manual_seed(0))
    query, key, cache = (make_tensor(shape, seed=i) for i, shape in enumerate([(5, 512), (5, 128), (9, 128)]))
    arguments = (positions, query, key, cache, 128)
    assert CONTRACT.refusal(Target(), *arguments, mrope_section=sections) is None
    row_of_column = torch.tensor([row for row, section in enumerate(sections) for _ in range(section)])
    looked_up = positions[row_of_column]  # [64, 5]
    cos, sin = (cache[looked_up, torch.arange(first, first + 64)[:, None]].T for first in (0, 64))
    for actual, x in zip(CONTRACT.op(*arguments, mrope_section=sections), (query, key), strict=True):
        wanted = pairs_turned(x.view(5, -1, 128), cos, sin).flatten(1)
        torch.testing.assert_close(actual.double(), wanted, rtol=4e-6, atol=2e-5)


def valid(tokens=3, dtype=torch.float32, **changes):
    arguments = {
        "positions": torch.arange(tokens),
        "query": torch.ones(tokens, 128, dtype=dtype),
        "key": torch.ones(tokens, 64, dtype=dtype),
        "cos_sin_cache": torch.ones(9, 32, dtype=dtype),
        "head_size": 32,
    }
    return arguments | changes


def three(tokens=3, **changes):
    """A call with a position each in time, height and width."""
    arguments = {
        "positions": torch.ones(3, tokens, dtype=torch.int64),
        "query": torch.ones(tokens, 128),
        "key": torch.ones(tokens, 128),
        "cos_sin_cache": torch.ones(9, 64),
        "head_size": 64,
        "mrope_section": [8, 12, 12],
    }
    return arguments | changes


UNDEFINED = [
    (valid(rotary_mode="interleaved"), "rotary_mode 'interleaved' is unknown; known: half, interleave", valid()),
    (valid(rotary_mode=None), "rotary_mode None is unknown", valid(rotary_mode="interleave")),
    (valid(cache_mode="interleave"), "cache_mode 'interleave' is not supported", valid(cache_mode="default")),
    (three(mrope_section=[12, 10, 10]), "mrope_section [12, 10, 10] is not documented", three()),
    (valid(query=torch.ones(3, 128).double()), "query is float64 (the kernel takes", valid(dtype=torch.float16)),
    (valid(key=torch.ones(3, 64).half()), "key is float16 but query is float32", valid(dtype=torch.float16)),
    (valid(cos_sin_cache=torch.ones(9, 32).half()), "cos_sin_cache is float16 but query is float32", valid()),
    (valid(query=torch.ones(3, 4, 32)), "query has 3 dims [3, 4, 32] (the kernel takes 2)", valid()),
    (valid(tokens=0), "positions [0] is empty", valid(tokens=1)),
    (valid(cos_sin_cache=torch.ones(0, 32)), "cos_sin_cache [0, 32] is empty", valid()),
    (valid(query=torch.ones(3, 256)[:, ::2]), "query [3, 128] with strides [256, 2] is not contiguous", valid()),
    (valid(key=torch.ones(64, 3).T), "key [3, 64] with strides [1, 3] is not contiguous", valid()),
    (valid(positions=torch.arange(6)[::2]), "positions [3] with strides [2] is not contiguous", valid()),
    (
        valid(positions=torch.arange(3).int()),
        "positions is int32 (the kernel reads int64)",
        valid(positions=torch.arange(3)),
    ),
    (valid(positions=torch.arange(2)), "positions is [2], not [3]", valid()),
    (valid(positions=torch.ones(1, 3).long()), "positions is [1, 3], not [3]", valid()),
    (three(positions=torch.arange(3)), "positions is [3], not [3, 3]", three()),
    (valid(key=torch.ones(2, 64)), "query has 3 rows but key has 2", valid()),
    (
        valid(cos_sin_cache=torch.ones(9, 64)),
        "rotary_dim 64, the width of cos_sin_cache, is not in 1 to head_size 32",
        valid(cos_sin_cache=torch.ones(9, 16)),
    ),
    (
        valid(cos_sin_cache=torch.ones(9, 24)),
        "rotary_dim 24 is no multiple of 16 (the kernel moves float32 in such blocks)",
        valid(cos_sin_cache=torch.ones(9, 16)),
    ),
    (
        valid(dtype=torch.float16, cos_sin_cache=torch.ones(9, 16).half()),
        "rotary_dim 16 is no multiple of 32 (the kernel moves float16 in such blocks)",
        valid(dtype=torch.float16),
    ),
    (
        valid(head_size=40, query=torch.ones(3, 80), key=torch.ones(3, 40)),
        "head_size 40 is no multiple of 16",
        valid(head_size=48, query=torch.ones(3, 96), key=torch.ones(3, 48)),
    ),
    (valid(key=torch.ones(3, 48)), "key is 48 wide, not known to be a multiple of head_size 32", valid()),
    (
        three(mrope_section=[16, 24, 24]),
        "mrope_section [16, 24, 24] adds up to 64, not to half of rotary_dim 64",
        three(mrope_section=[8, 12, 12]),
    ),
]


@pytest.mark.parametrize(("outside", "reason", "inside"), UNDEFINED)
def test_undefined_calls_are_refused_and_raise(assert_border, outside, reason, inside):
    assert_border(CONTRACT, outside, reason, inside)


def test_wide_rows_are_refused():
    assert "query is 4128 wide" in CONTRACT.refusal(Target(), **valid(query=torch.ones(3, 4128)))
    assert CONTRACT.refusal(Target(), **valid(query=torch.ones(3, 4096))) is None


def test_a_position_outside_of_the_cache_is_an_error():
    with pytest.raises(IndexError):
        CONTRACT.op(**valid(positions=torch.tensor([0, 9, 1])))


@pytest.mark.parametrize("soc", ["ascend910b", "ascend910_93", "ascend950", "ascend310p"])
def test_socs(soc):
    assert (CONTRACT.refusal(Target(soc), **valid()) is None) == (soc in ("ascend910b", "ascend910_93"))


def test_symbolic_tokens_are_kept_and_not_refused(symbolic):
    arguments = {
        "positions": symbolic(("T",), torch.int64),
        "query": symbolic(("T", 128)),
        "key": symbolic(("T", 64)),
        "cos_sin_cache": symbolic(("S", 32)),
        "head_size": 32,
    }
    assert CONTRACT.refusal(Target(), **arguments) is None
    query, key = CONTRACT.op(**arguments)
    assert query.shape == arguments["query"].shape
    assert key.shape == arguments["key"].shape


def test_symbolic_widths_are_refused(symbolic):
    cache = symbolic((9, "S"))
    arguments = valid(query=symbolic((3, 128)), key=symbolic((3, 64)), positions=symbolic((3,), torch.int64))
    assert "is not static" in CONTRACT.refusal(Target(), **arguments | {"cos_sin_cache": cache})
    assert "is not static" in CONTRACT.refusal(Target(), **valid(head_size=cache.shape[1]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_opcheck(make_tensor, dtype, mode):
    arguments = valid(dtype=dtype, query=make_tensor((3, 128), dtype), rotary_mode=mode)
    torch.library.opcheck(CONTRACT.op, (), arguments, test_utils=("test_schema", "test_faketensor"))
