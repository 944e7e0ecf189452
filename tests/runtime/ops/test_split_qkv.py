"""split_qkv_rmsnorm_rope against recorded kernel results, float64 maths, its limits, and the package's own function."""

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_fuse.runtime.ops import sgl_kernel
from npu_fuse.runtime.ops.split_qkv import SPLIT_QKV_RMSNORM_ROPE as CONTRACT
from npu_fuse.runtime.target import Target

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}

RECORDED = Path(__file__).parents[2] / "data" / "split_qkv_rmsnorm_rope"
CALLS = json.loads(RECORDED.with_suffix(".json").read_text())


@pytest.fixture(scope="module")
def recorded():
    with np.load(RECORDED.with_suffix(".npz")) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


@pytest.mark.parametrize("call", CALLS)
def test_the_kernels_own_results(recorded, call):
    def tensors(kind):
        prefix = f"{call}.{kind}."
        return {name.removeprefix(prefix): tensor for name, tensor in recorded.items() if name.startswith(prefix)}

    expected = tensors("out")
    results = dict(zip("qkv", CONTRACT.op(**tensors("in"), **CALLS[call]), strict=True))
    assert torch.equal(results["v"], expected["v"])
    for name in "qk":
        actual, wanted = results[name], expected[name]
        assert actual.dtype == wanted.dtype
        if wanted.dtype == torch.float32:
            torch.testing.assert_close(actual, wanted, rtol=0, atol=2e-6)
        else:
            # Neighbouring float16 numbers of one sign are neighbours as integers too; ±0 are equal.
            apart = (actual.view(torch.int16).int() - wanted.view(torch.int16).int()).abs()
            assert bool(((apart <= 1) | (actual == wanted)).all())


def exact(x, sin, cos, q_size, kv_size, head_dim, eps, weights, biases, is_neox_style):
    """Head by head and pair by pair in float64."""
    x, sin, cos = x.double(), sin.double(), cos.double()
    rope_dim = sin.shape[-1]
    sin, cos = sin.reshape(-1, rope_dim), cos.reshape(-1, rope_dim)
    results = []
    q, k = x[:, :q_size], x[:, q_size : q_size + kv_size]
    for part, weight, bias in zip((q, k), weights, biases, strict=True):
        heads = []
        for head in part.split(head_dim, -1):
            if eps is not None:
                head = head / ((head**2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()
                head = head if bias is None else head + bias.double()
            out = head.clone()
            for pair in range(rope_dim // 2):
                a, b = (pair, pair + rope_dim // 2) if is_neox_style else (2 * pair, 2 * pair + 1)
                angle_a, angle_b = (a, b) if is_neox_style else (pair, pair)
                out[:, a] = head[:, a] * cos[:, angle_a] - head[:, b] * sin[:, angle_a]
                out[:, b] = head[:, b] * cos[:, angle_b] + head[:, a] * sin[:, angle_b]
            heads.append(out)
        results.append(torch.cat(heads, -1))
    return results


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 4),
    groups=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([2, 4, 8, 16]),
    rope_share=st.sampled_from([1, 2]),
    dtype=st.sampled_from(DTYPES),
    mode=st.sampled_from(["plain", "norm", "bias"]),
    is_neox_style=st.booleans(),
    four_dims=st.booleans(),
)
def test_any_geometry_is_the_maths(
    make_tensor,
    assert_same_layout,
    tokens,
    groups,
    kv_heads,
    head_dim,
    rope_share,
    dtype,
    mode,
    is_neox_style,
    four_dims,
):
    rope_dim = max(2, head_dim // rope_share)
    q_size, kv_size = groups * kv_heads * head_dim, kv_heads * head_dim
    x = make_tensor((tokens, q_size + 2 * kv_size), dtype)
    rows = (tokens, 1, 1, rope_dim) if four_dims else (tokens, rope_dim)
    sin, cos = make_tensor(rows, dtype, seed=1), make_tensor(rows, dtype, seed=2)
    eps = None if mode == "plain" else 1e-5
    weights = [make_tensor((head_dim,), dtype, seed=seed) if mode != "plain" else None for seed in (3, 4)]
    biases = [make_tensor((head_dim,), dtype, seed=seed) if mode == "bias" else None for seed in (5, 6)]
    arguments = (x, sin, cos, q_size, kv_size, head_dim, eps, *weights, *biases, is_neox_style)

    assert CONTRACT.refusal(Target(), *arguments) is None
    assert_same_layout(CONTRACT.op, *arguments)
    q, k, v = CONTRACT.op(*arguments)
    expected = exact(x, sin, cos, q_size, kv_size, head_dim, eps, weights, biases, is_neox_style)
    for actual, wanted in zip((q, k), expected, strict=True):
        torch.testing.assert_close(actual.double(), wanted, rtol=TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])
    assert torch.equal(v, x[:, q_size + kv_size :])


def valid(tokens=3, dtype=torch.float32, **changes):
    """Arguments of a call with norm: 4 q heads and 2 kv heads of 8, rotated whole."""
    arguments = {
        "input": torch.ones(tokens, 64, dtype=dtype),
        "sin": torch.ones(tokens, 8, dtype=dtype),
        "cos": torch.ones(tokens, 8, dtype=dtype),
        "q_hidden_size": 32,
        "kv_hidden_size": 16,
        "head_dim": 8,
        "eps": 1e-6,
        "q_weight": torch.ones(8, dtype=dtype),
        "k_weight": torch.ones(8, dtype=dtype),
    }
    return arguments | changes


def rows(*shape, dtype=torch.float32):
    return {"sin": torch.ones(shape, dtype=dtype), "cos": torch.ones(shape, dtype=dtype)}


def without_norm(**changes):
    return valid(eps=None, q_weight=None, k_weight=None, **changes)


def square(head_dim, heads=1):
    """One kv head for each `heads` q heads of `head_dim`, without norm."""
    return without_norm(
        input=torch.ones(3, (heads + 2) * head_dim),
        q_hidden_size=heads * head_dim,
        kv_hidden_size=head_dim,
        head_dim=head_dim,
        **rows(3, 2),
    )


bias = {"q_bias": torch.ones(8), "k_bias": torch.ones(8)}

UNDEFINED = [
    (valid(input=torch.ones(3, 64).double()), "input is float64", valid(dtype=torch.float16)),
    (valid(input=torch.ones(3, 1, 64)), "input has 3 dims [3, 1, 64] (the kernel takes 2)", valid()),
    (valid(input=torch.ones(3, 65)), "input is 65 wide, not q_hidden_size + 2 * kv_hidden_size = 32 + 2 * 16", valid()),
    (
        valid(input=torch.ones(3, 128)[:, :64]),
        "input [3, 64] with strides [128, 1] is not contiguous",
        valid(input=torch.ones(3, 64)[:, :64]),
    ),
    (valid(q_hidden_size=0), "q_hidden_size is 0, not positive", valid()),
    (valid(head_dim=-8), "head_dim is -8, not positive", valid()),
    (square(80), "head_dim 80 is no power of two (the kernel tiles by it)", square(64)),
    (valid(q_hidden_size=40), "q_hidden_size 40 is no multiple of kv_hidden_size 16", valid()),
    (
        valid(q_hidden_size=40, kv_hidden_size=20, input=torch.ones(3, 80)),
        "kv_hidden_size 20 is no multiple of head_dim 8",
        valid(q_hidden_size=32, kv_hidden_size=32, input=torch.ones(3, 96)),
    ),
    (valid(sin=torch.ones(3, 8).int()), "sin is int32", valid(sin=torch.ones(3, 8).bfloat16())),
    (valid(cos=torch.ones(())), "cos has no dims", valid(cos=torch.ones(3, 1, 8))),
    (valid(**rows(3, 16)), "rope_dim 16 of sin is not in 1 to head_dim 8", valid(**rows(3, 8))),
    (valid(**rows(3, 7)), "rope_dim 7 of sin is odd", valid(**rows(3, 6))),
    (valid(**rows(3, 0)), "rope_dim 0 of sin is not in 1 to head_dim 8", valid(**rows(3, 2))),
    (
        valid(**rows(1, 8)),
        "sin [1, 8] has 8 elements, not one row of 8 for each of 3 tokens",
        valid(**rows(3, 1, 1, 8)),
    ),
    (valid(cos=torch.ones(3, 4, 8)), "cos [3, 4, 8] has 96 elements", valid(cos=torch.ones(1, 3, 8))),
    (valid(cos=torch.ones(3, 16)[:, ::2]), "cos [3, 8] with strides [16, 2] is not contiguous", valid()),
    (valid(cos=torch.ones(3, 4)), "sin is 8 wide but cos is 4", valid(**rows(3, 4))),
    (
        without_norm() | {"q_weight": torch.ones(8)},
        "q_weight given without eps (the kernel would ignore",
        without_norm(),
    ),
    (without_norm(**bias), "q_bias, k_bias given without eps", valid(**bias)),
    (valid(q_weight=None), "eps is given without q_weight", valid()),
    (valid(k_weight=None), "eps is given without k_weight", valid()),
    (valid(q_bias=torch.ones(8)), "q_bias is given without k_bias", valid(**bias)),
    (valid(k_bias=torch.ones(8)), "k_bias is given without q_bias", valid(**bias)),
    (valid(q_weight=torch.ones(1)), "q_weight is [1], not [head_dim] = [8]", valid()),
    (valid(k_weight=torch.ones(1, 8)), "k_weight is [1, 8], not [head_dim] = [8]", valid()),
    (valid(q_weight=torch.ones(8).int()), "q_weight is int32", valid(q_weight=torch.ones(8).half())),
    (valid(k_weight=torch.ones(1).expand(8)), "k_weight [8] with strides [0] is not contiguous", valid()),
]


@pytest.mark.parametrize(("outside", "reason", "inside"), UNDEFINED)
def test_undefined_calls_are_refused_and_raise(outside, reason, inside):
    assert reason in CONTRACT.refusal(Target(), **outside)
    assert CONTRACT.refusal(Target(), **inside) is None
    with pytest.raises(ValueError, match=f"{CONTRACT.name}: ") as raised:
        CONTRACT.op(**outside)
    assert reason in str(raised.value)
    CONTRACT.op(**inside)


def test_a_kv_head_has_only_so_many_q_heads():
    reason = CONTRACT.refusal(Target(), **square(32, heads=1537))
    assert "1537 q heads of head_dim 32 for one kv head take 196736 bytes in float32" in reason
    assert CONTRACT.refusal(Target(), **square(32, heads=1536)) is None


@pytest.mark.parametrize("soc", ["ascend910b", "ascend910_93", "ascend950", "ascend310p"])
def test_socs(soc):
    assert (CONTRACT.refusal(Target(soc), **valid()) is None) == (soc != "ascend310p")


@pytest.mark.parametrize(
    ("version", "dtype", "reason"),
    [
        (None, torch.bfloat16, "sgl_kernel_npu, which has the kernel, can't be imported"),
        ("2026.4.15", torch.bfloat16, "sgl_kernel_npu 2026.4.15 has no is_neox_style, 2026.05.01.post3 brought it"),
        ("2026.5.1.post2", torch.bfloat16, "has no is_neox_style"),
        ("2026.5.1.post3", torch.bfloat16, None),
        ("2026.5.1.post3", torch.float16, "rounds normed float16 heads to bfloat16; 2026.6.0 and later do not"),
        ("2026.6.0", torch.float16, None),
        ("unknown", torch.float32, None),
    ],
)
def test_package_versions(version, dtype, reason):
    target = Target("ascend910b", "npu", {"sgl_kernel_npu": version} if version else {})
    found = CONTRACT.refusal(target, **valid(dtype=dtype))
    assert (found is None) if reason is None else (reason in found)


def test_an_old_package_does_not_matter_without_norm_or_on_a_cpu():
    old = {"sgl_kernel_npu": "2026.5.1.post3"}
    assert CONTRACT.refusal(Target("ascend910b", "npu", old), **without_norm()) is None
    assert CONTRACT.refusal(Target("ascend910b", "cpu", {"sgl_kernel_npu": "2026.1"}), **valid()) is None


def test_symbolic_tokens_are_kept_and_not_refused(symbolic):
    arguments = valid(
        input=symbolic(("T", 64)),
        sin=symbolic(("T", 1, 1, 8)),
        cos=symbolic(("T", 1, 1, 8)),
        q_weight=symbolic((8,)),
        k_weight=symbolic((8,)),
    )
    assert CONTRACT.refusal(Target(), **arguments) is None
    q, k, v = CONTRACT.op(**arguments)
    assert [str(tensor.shape[0]) for tensor in (q, k, v)] == [str(arguments["input"].shape[0])] * 3
    assert [tensor.shape[1] for tensor in (q, k, v)] == [32, 16, 16]


def test_batch_and_sequence_are_tokens_together(symbolic):
    x, sin = symbolic(("B", "S", 64)).view(-1, 64), symbolic(("B", "S", 8))
    assert CONTRACT.refusal(Target(), **without_norm(input=x, sin=sin, cos=sin)) is None
    rows_for_one_batch = symbolic((1, "S", 8))
    reason = CONTRACT.refusal(Target(), **without_norm(input=x, sin=rows_for_one_batch, cos=rows_for_one_batch))
    assert "not one row of 8 for each of" in reason


def test_symbolic_geometry_is_refused(symbolic):
    tokens = symbolic(("T", 64)).shape[0]
    assert "is not static" in CONTRACT.refusal(Target(), **valid(q_hidden_size=tokens * 16))
    assert "of sin is not static" in CONTRACT.refusal(Target(), **valid(sin=symbolic((3, "T"))))


def test_no_tokens_give_empty_results(assert_same_layout):
    assert CONTRACT.refusal(Target(), **valid(tokens=0)) is None
    assert_same_layout(CONTRACT.op, *valid(tokens=0).values())


def test_the_second_half_of_the_rows_is_not_read_for_neighbours(make_tensor):
    sin, cos = make_tensor((3, 8), seed=1), make_tensor((3, 8), seed=2)
    arguments = without_norm(input=make_tensor((3, 64)), is_neox_style=False)
    expected = CONTRACT.op(**arguments | {"sin": sin.clone(), "cos": cos.clone()})
    sin[:, 4:] = cos[:, 4:] = float("nan")
    assert all(map(torch.equal, CONTRACT.op(**arguments | {"sin": sin, "cos": cos}), expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_neox_style", [True, False])
def test_opcheck(make_tensor, dtype, is_neox_style):
    arguments = valid(dtype=dtype, input=make_tensor((3, 64), dtype), is_neox_style=is_neox_style)
    torch.library.opcheck(CONTRACT.op, (), arguments, test_utils=("test_schema", "test_faketensor"))


# The package's function, played by a module of the test's own.


@pytest.fixture
def play_package(monkeypatch):
    def play(function):
        names = ("sgl_kernel_npu", "sgl_kernel_npu.norm", "sgl_kernel_npu.norm.split_qkv_rmsnorm_rope")
        modules = [ModuleType(name) for name in names]
        modules[0].__version__ = "2026.3.1"
        modules[-1].split_qkv_rmsnorm_rope = function
        for name, module in zip(names, modules, strict=True):
            monkeypatch.setitem(sys.modules, name, module)
        sgl_kernel._checked.cache_clear()

    yield play
    sgl_kernel._checked.cache_clear()


def test_the_device_kernel_calls_the_package_by_keyword(play_package):
    def split_qkv_rmsnorm_rope(
        input,
        sin,
        cos,
        q_weight,
        k_weight,
        q_hidden_size,
        kv_hidden_size,
        head_dim,
        eps=None,
        q_bias=None,
        k_bias=None,
        is_neox_style=True,
        later_addition=None,
    ):
        return input, sin, (cos, q_hidden_size, kv_hidden_size, head_dim, eps, q_weight, k_weight, is_neox_style)

    play_package(split_qkv_rmsnorm_rope)
    arguments = valid(is_neox_style=False)
    by_place = CONTRACT.device_kernel(*CONTRACT.bind(**arguments).values())
    assert by_place[0] is arguments["input"]
    assert by_place[1] is arguments["sin"]
    names = ("cos", "q_hidden_size", "kv_hidden_size", "head_dim", "eps", "q_weight", "k_weight", "is_neox_style")
    assert all(got is arguments[name] for got, name in zip(by_place[2], names, strict=True))


def test_the_device_kernel_names_what_an_old_package_lacks(play_package):
    def split_qkv_rmsnorm_rope(input, sin, cos, q_hidden_size, kv_hidden_size, head_dim, eps=None, q_weight=None):
        raise AssertionError("must not be called")

    play_package(split_qkv_rmsnorm_rope)
    with pytest.raises(RuntimeError) as raised:
        CONTRACT.device_kernel(*CONTRACT.bind(**valid()).values())
    message = str(raised.value)
    assert "sgl_kernel_npu 2026.3.1: split_qkv_rmsnorm_rope takes other parameters" in message
    assert "k_weight, q_bias, k_bias, is_neox_style), found (input, sin, cos, q_hidden_size" in message
    assert "2026.05.01.post3" in message


def test_a_new_parameter_that_must_be_given_is_a_mismatch(play_package):
    parameters = ", ".join(CONTRACT.device_kernel.parameters)
    namespace = {}
    exec(f"def split_qkv_rmsnorm_rope({parameters}, rope_dim): ...", namespace)
    play_package(namespace["split_qkv_rmsnorm_rope"])
    with pytest.raises(RuntimeError, match="is_neox_style, rope_dim"):
        CONTRACT.device_kernel(*CONTRACT.bind(**valid()).values())
