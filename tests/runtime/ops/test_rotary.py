"""npu_rotary_mul against float64 maths, its layouts and its limits."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_fuse.runtime.ops.rotary import NPU_ROTARY_MUL, rotate_half, rotate_interleaved
from npu_fuse.runtime.target import Target

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}

# Which dims of a cos or sin of ones may be 1, by mode; "f" is a full dim.
TAKEN = {
    "half": {"11f", "f1f", "fff", "1f1", "ff1", "f11", "f1", "ff"},
    "interleave": {"11f", "1f1", "f11", "f1"},
}


def exact(x, cos, sin, mode):
    """Each pair of coordinates is rotated by itself, coordinate by coordinate, in float64."""
    x, cos, sin = (tensor.double() for tensor in torch.broadcast_tensors(x, cos, sin))
    half = x.shape[-1] // 2
    y = torch.empty_like(x)
    for pair in range(half):
        a, b = (pair, pair + half) if mode == "half" else (2 * pair, 2 * pair + 1)
        y[..., a] = x[..., a] * cos[..., a] - x[..., b] * sin[..., a]
        y[..., b] = x[..., b] * cos[..., b] + x[..., a] * sin[..., b]
    return y


def test_rotations():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert rotate_half(x).tolist() == [-3.0, -4.0, 1.0, 2.0]
    assert rotate_interleaved(x).tolist() == [-2.0, 1.0, -4.0, 3.0]


@pytest.mark.parametrize("mode", ["half", "interleave"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_mul_is_the_maths(make_tensor, mode, dtype):
    x = make_tensor((2, 3, 5, 16), dtype)
    cos, sin = (make_tensor((1, 1, 5, 16), dtype, seed=seed) for seed in (1, 2))
    torch.testing.assert_close(
        NPU_ROTARY_MUL.op(x, cos, sin, mode).double(),
        exact(x, cos, sin, mode),
        rtol=TOLERANCE[dtype],
        atol=TOLERANCE[dtype],
    )


def test_default_mode_is_half(make_tensor):
    x, cos, sin = (make_tensor((5, 2, 16), seed=seed) for seed in range(3))
    assert torch.equal(NPU_ROTARY_MUL.op(x, cos, sin), NPU_ROTARY_MUL.op(x, cos, sin, "half"))


def test_bfloat16_rounds_once_and_casts_cos_and_sin_first(make_tensor):
    x, cos, sin = make_tensor((64, 2, 16), torch.bfloat16), make_tensor((64, 1, 16), seed=1), make_tensor((64, 1, 16))
    wide = x.float() * cos.bfloat16().float() + rotate_half(x.float()) * sin.bfloat16().float()
    assert torch.equal(NPU_ROTARY_MUL.op(x, cos, sin), wide.bfloat16())
    assert not torch.equal(wide.bfloat16(), (x.float() * cos + rotate_half(x.float()) * sin).bfloat16())


@settings(max_examples=60, deadline=None)
@given(
    dims=st.tuples(*[st.integers(1, 5)] * 3),
    half=st.integers(1, 8),
    cos_dims=st.sampled_from(["11f", "f1f", "fff", "1f1", "ff1", "f11"]),
    dtype=st.sampled_from(DTYPES),
    cos_dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["plain", "transposed", "sliced"]),
)
def test_any_shape_and_layout(make_tensor, assert_same_layout, dims, half, cos_dims, dtype, cos_dtype, layout):
    x = make_tensor((*dims, 2 * half), dtype, layout)
    cos_shape = tuple(size if dim == "f" else 1 for size, dim in zip(dims, cos_dims, strict=True))
    cos, sin = (make_tensor((*cos_shape, 2 * half), cos_dtype, layout, seed) for seed in (1, 2))
    assert NPU_ROTARY_MUL.refusal(Target(), x, cos, sin) is None
    assert_same_layout(NPU_ROTARY_MUL.op, x, cos, sin, "half")
    torch.testing.assert_close(
        NPU_ROTARY_MUL.op(x, cos, sin).double(),
        exact(x, cos.to(dtype), sin.to(dtype), "half"),
        rtol=TOLERANCE[dtype],
        atol=4 * TOLERANCE[dtype],
    )


@pytest.mark.parametrize("mode", ["half", "interleave"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(make_tensor, mode, dtype):
    arguments = (make_tensor((2, 3, 5, 16), dtype), *(make_tensor((1, 1, 5, 16), dtype, seed=s) for s in (1, 2)), mode)
    torch.library.opcheck(NPU_ROTARY_MUL.op, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("mode", ["half", "interleave"])
@pytest.mark.parametrize(
    "cos_dims", ["".join(dims) for rank in (2, 3) for dims in itertools.product("1f", repeat=rank)]
)
def test_broadcast_layouts(mode, cos_dims):
    shape = (2, 3, 5)[: len(cos_dims)]
    cos = torch.ones(*(size if dim == "f" else 1 for size, dim in zip(shape, cos_dims, strict=True)), 16)
    reason = NPU_ROTARY_MUL.refusal(Target(), torch.ones(*shape, 16), cos, cos, mode)
    assert (reason is None) == (cos_dims in TAKEN[mode])
    assert reason is None or f"is not broadcast to input {[*shape, 16]} in mode {mode!r}" in reason


@pytest.mark.parametrize(
    ("shape", "cos_shape"),
    [
        (("B", 4, "S", 64), ("B", 1, "S", 64)),
        (("B", 4, "S", 64), (1, 1, "S", 64)),
        (("B", "S", 4, 64), (1, "S", 1, 64)),
        (("S", "B", 4, 64), ("S", 1, 1, 64)),
        (("T", 4, 64), ("T", 1, 64)),
    ],
)
def test_symbolic_batch_and_token_dims_are_kept_and_not_refused(symbolic, shape, cos_shape):
    x, cos = symbolic(shape, torch.bfloat16), symbolic(cos_shape, torch.bfloat16)
    assert NPU_ROTARY_MUL.refusal(Target(), x, cos, cos) is None
    assert NPU_ROTARY_MUL.op(x, cos, cos).shape == x.shape


def test_a_symbol_is_not_broadcast_by_another(symbolic):
    x, cos = symbolic(("B", 4, "S", 64)), symbolic((1, 1, "T", 64))
    assert "is not broadcast" in NPU_ROTARY_MUL.refusal(Target(), x, cos, cos)


def test_a_symbolic_head_dim_is_refused(symbolic):
    x, cos = symbolic((2, 4, 3, "S")), symbolic((1, 1, 3, "S"))
    assert "not known to be even" in NPU_ROTARY_MUL.refusal(Target(), x, cos, cos)
    x, cos = torch.cat([x, x], -1), torch.cat([cos, cos], -1)
    assert NPU_ROTARY_MUL.refusal(Target(), x, cos, cos) == f"head_dim {x.shape[-1]} is not static"


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


def rotated(shape, cos_shape, mode="half"):
    return (ones(*shape), ones(*cos_shape), ones(*cos_shape), mode)


UNDEFINED = [
    (rotated((5, 2, 8), (5, 1, 8), "quarter"), "rotary_mode 'quarter' is unknown; known: half, interleave"),
    ((*rotated((5, 2, 8), (5, 1, 8)), ones(8, 8)), "a rotate matrix is given"),
    (rotated((5, 8), (5, 8)), "input has 2 dims [5, 8] (the kernel takes 3 to 4)"),
    (rotated((1, 1, 5, 2, 8), (1, 1, 5, 1, 8)), "input has 5 dims"),
    ((ones(5, 2, 8).double(), ones(5, 1, 8), ones(5, 1, 8)), "input is float64"),
    ((ones(5, 2, 8), ones(5, 1, 8).double(), ones(5, 1, 8)), "r1 is float64"),
    ((ones(5, 2, 8), ones(5, 1, 8), ones(5, 1, 8).int()), "r2 is int32"),
    (rotated((0, 2, 8), (0, 1, 8)), "input [0, 2, 8] is empty"),
    ((ones(5, 2, 8), ones(5, 1, 8), ones(1, 1, 8)), "r1 [5, 1, 8] and r2 [1, 1, 8] differ in shape"),
    (rotated((2, 5, 2, 8), (5, 1, 8)), "r1 has 3 dims [5, 1, 8] (the kernel takes 4)"),
    (rotated((5, 2, 8), (5, 1, 6)), "r1 is 6 wide but head_dim is 8 (the kernel has no partial rotation)"),
    (rotated((5, 2, 7), (5, 1, 7)), "head_dim 7 is not known to be even"),
    (rotated((5, 2, 8), (3, 1, 8)), "r1 [3, 1, 8] is not broadcast to input [5, 2, 8]"),
]
JUST_INSIDE = [
    rotated((5, 2, 8), (5, 1, 8), "interleave"),
    (*rotated((5, 2, 8), (5, 1, 8)), None),
    rotated((1, 2, 8), (1, 1, 8)),
    (ones(5, 2, 8).half(), ones(5, 1, 8), ones(5, 1, 8).bfloat16()),
    rotated((5, 2, 2), (5, 1, 2)),
]


@pytest.mark.parametrize(("arguments", "reason"), UNDEFINED)
def test_undefined_calls_are_refused_and_raise(arguments, reason):
    assert reason in NPU_ROTARY_MUL.refusal(Target(), *arguments)
    with pytest.raises(ValueError, match="npu::npu_rotary_mul: ") as raised:
        NPU_ROTARY_MUL.op(*arguments)
    assert reason in str(raised.value)


@pytest.mark.parametrize("arguments", JUST_INSIDE)
def test_defined_calls_are_taken(arguments):
    assert NPU_ROTARY_MUL.refusal(Target(), *arguments) is None
    NPU_ROTARY_MUL.op(*arguments)


@pytest.mark.parametrize(
    ("outside", "reason", "inside"),
    [
        (rotated((1, 1, 1, 896), (1, 1, 1, 896)), "head_dim 896 is too large", rotated((1, 1, 1, 894), (1, 1, 1, 894))),
        (rotated((1000, 2, 3, 2), (1000, 1, 3, 2)), "B is 1000 in input", rotated((999, 2, 3, 2), (999, 1, 3, 2))),
        (rotated((2, 1000, 3, 2), (1, 1, 3, 2)), "N is 1000 in input", rotated((2, 999, 3, 2), (1, 1, 3, 2))),
        (rotated((2, 3, 1000, 2), (1, 3, 1, 2)), "read as BSND", rotated((2, 1000, 3, 2), (1, 1000, 1, 2))),
        (rotated((3, 1000, 2, 2), (3, 1, 1, 2)), "read as SBND", rotated((1000, 3, 2, 2), (1000, 1, 1, 2))),
        (rotated((3, 1000, 2), (3, 1, 2)), "read as TND", rotated((1000, 3, 2), (1000, 1, 2))),
        (
            rotated((2, 500, 3, 2), (1, 1, 3, 2), "interleave"),
            "B * N is 1000 in input",
            rotated((2, 499, 3, 2), (1, 1, 3, 2), "interleave"),
        ),
        # Half takes the same product.
        (rotated((2, 500, 3, 2), (1, 1, 3, 2), "interleave"), "'interleave'", rotated((2, 500, 3, 2), (1, 1, 3, 2))),
    ],
)
def test_limits(outside, reason, inside):
    assert reason in NPU_ROTARY_MUL.refusal(Target(), *outside)
    assert NPU_ROTARY_MUL.refusal(Target(), *inside) is None


def test_one_layout_within_its_limits_is_enough():
    # As BSND it has 1000 tokens, which is fine; as SBND it would have a batch of 1000.
    x, cos = ones(2, 1000, 3, 2), ones(2, 1000, 1, 2)
    assert NPU_ROTARY_MUL.refusal(Target(), x, cos, cos) is None


def test_limits_hold_for_what_is_static_beside_a_symbolic_batch(symbolic):
    cos = symbolic((1, 1, "S", 64))
    assert "N is 1000" in NPU_ROTARY_MUL.refusal(Target(), symbolic(("B", 1000, "S", 64)), cos, cos)
    assert NPU_ROTARY_MUL.refusal(Target(), symbolic(("B", 999, "S", 64)), cos, cos, "interleave") is None


@pytest.mark.parametrize(
    ("soc", "taken"), [("ascend910b", 1), ("ascend910_93", 1), ("ascend310p", 1), ("ascend950", 0)]
)
def test_socs(soc, taken):
    assert (NPU_ROTARY_MUL.refusal(Target(soc), *rotated((5, 2, 8), (5, 1, 8))) is None) == bool(taken)


def test_ascend310p_has_no_bfloat16():
    x, cos, sin, _ = rotated((5, 2, 8), (5, 1, 8))
    assert "r1 is bfloat16, which ascend310p" in NPU_ROTARY_MUL.refusal(Target("ascend310p"), x, cos.bfloat16(), sin)
    assert NPU_ROTARY_MUL.refusal(Target("ascend310p"), x.half(), cos.half(), sin.half()) is None
