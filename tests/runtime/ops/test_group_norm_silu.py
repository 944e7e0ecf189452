"""npu_group_norm_silu against float64 maths and its limits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_fuse.runtime.ops.group_norm_silu import NPU_GROUP_NORM_SILU
from npu_fuse.runtime.target import Target

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}


def exact(x, weight, bias, group, eps):
    grouped = x.double().reshape(x.shape[0], group, -1)
    mean = grouped.mean(-1)
    rstd = 1 / (((grouped - mean[..., None]) ** 2).mean(-1) + eps).sqrt()
    per_channel = (1, -1, *(1 for _ in x.shape[2:]))
    normed = ((grouped - mean[..., None]) * rstd[..., None]).reshape(x.shape)
    normed = normed * weight.double().reshape(per_channel) + bias.double().reshape(per_channel)
    return normed / (1 + torch.exp(-normed)), mean, rstd


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 3),
    group=st.integers(1, 4),
    group_size=st.integers(1, 3),
    rest=st.lists(st.integers(2, 4), max_size=2),
    dtype=st.sampled_from(DTYPES),
    wide_weight=st.booleans(),
    layout=st.sampled_from(["plain", "transposed", "sliced", "expanded"]),
    eps=st.sampled_from([1e-5, 1e-3]),
)
def test_it_is_the_maths(
    make_tensor, assert_same_layout, batch, group, group_size, rest, dtype, wide_weight, layout, eps
):
    channels = group * group_size
    x = make_tensor((batch, channels, *rest), dtype, layout)
    weight, bias = (make_tensor((channels,), torch.float32 if wide_weight else dtype, seed=s) for s in (1, 2))
    assert NPU_GROUP_NORM_SILU.refusal(Target(), x, weight, bias, group, eps) is None
    results = NPU_GROUP_NORM_SILU.op(x, weight, bias, group, eps)
    y, mean, rstd = exact(x, weight, bias, group, eps)
    tolerance = TOLERANCE[dtype]
    # Values of a group may lie close together: what float32 loses of them is magnified by rstd.
    scale = float(rstd.max())
    for result, wanted, factor in zip(results, (y, mean, rstd), (scale, 1.0, scale**2), strict=True):
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), wanted, rtol=tolerance, atol=tolerance * max(factor, 1.0))
    assert_same_layout(NPU_GROUP_NORM_SILU.op, x, weight, bias, group, eps)


def test_default_eps_is_1e_5(make_tensor):
    x, weight, bias = 1e-2 * make_tensor((2, 4, 8)), make_tensor((4,), seed=1), make_tensor((4,), seed=2)
    default, given_ = NPU_GROUP_NORM_SILU.op(x, weight, bias, 2), NPU_GROUP_NORM_SILU.op(x, weight, bias, 2, 1e-5)
    assert torch.equal(default[0], given_[0])
    assert not torch.equal(default[0], NPU_GROUP_NORM_SILU.op(x, weight, bias, 2, 1e-6)[0])


def test_it_rounds_once(make_tensor):
    x, weight, bias = (make_tensor(s, torch.bfloat16, seed=i) for i, s in enumerate([(2, 32, 8, 8), (32,), (32,)]))
    y = NPU_GROUP_NORM_SILU.op(x, weight, bias, 4)[0]
    assert torch.equal(y, NPU_GROUP_NORM_SILU.op(x.float(), weight.float(), bias.float(), 4)[0].bfloat16())
    assert not torch.equal(y, torch.nn.functional.silu(torch.nn.functional.group_norm(x, 4, weight, bias)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(make_tensor, dtype):
    arguments = (make_tensor((2, 8, 3), dtype), make_tensor((8,), dtype), make_tensor((8,), dtype), 4)
    torch.library.opcheck(NPU_GROUP_NORM_SILU.op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_symbolic_batch_and_image_dims_are_kept_and_not_refused(symbolic):
    x, vector = symbolic(("B", 8, "S", "T"), torch.bfloat16), symbolic((8,), torch.bfloat16)
    assert NPU_GROUP_NORM_SILU.refusal(Target(), x, vector, vector, 4) is None
    y, mean, rstd = NPU_GROUP_NORM_SILU.op(x, vector, vector, 4)
    assert y.shape == x.shape
    for statistics in (mean, rstd):
        assert [str(size) for size in statistics.shape] == [str(x.shape[0]), "4"]


def test_symbolic_channels_must_be_known_to_fit(symbolic):
    x, vector = symbolic((2, "S")), symbolic(("S",))
    assert "not known to be a multiple of group 2" in NPU_GROUP_NORM_SILU.refusal(Target(), x, vector, vector, 2)
    assert NPU_GROUP_NORM_SILU.refusal(Target(), x, vector, vector, 1) is None
    assert "does not cover dim 1" in NPU_GROUP_NORM_SILU.refusal(Target(), x, symbolic(("B",)), vector, 1)


ones = torch.ones
X, W = ones(2, 8, 3), ones(8)


@pytest.mark.parametrize(
    ("outside", "reason", "inside"),
    [
        ((X.double(), W, W, 4), "input is float64 (the kernel takes float16, bfloat16, float32)", (X, W, W, 4)),
        ((ones(8), W, W, 4), "input has 1 dims [8] (the kernel takes 2 to 8)", (ones(1, 8), W, W, 4)),
        ((ones(2, 8, *[1] * 7), W, W, 4), "input has 9 dims", (ones(2, 8, *[1] * 6), W, W, 4)),
        ((X, W, W, 3), "dim 1 of input [2, 8, 3] is 8, not known to be a multiple of group 3", (X, W, W, 2)),
        ((X, W, W, 0), "not known to be a multiple of group 0", (X, W, W, 1)),
        ((X, None, W, 4), "weight is missing", (X, W, W, 4)),
        ((X, W, None, 4), "bias is missing", (X, W, W, 4)),
        ((X, ones(4), W, 4), "weight [4] does not cover dim 1 of input [2, 8, 3]", (X, W, W, 4)),
        ((X, W, ones(1, 8), 4), "bias [1, 8] does not cover dim 1 of input [2, 8, 3]", (X, W, W, 4)),
        (
            (X, W.half(), W.half(), 4),
            "weight is float16 but input is float32 (the kernel takes float32 or float32)",
            (X.half(), W, W, 4),
        ),
        (
            (X.bfloat16(), W.bfloat16(), W, 4),
            "weight is bfloat16 but bias is float32 (they must be equal)",
            (X.bfloat16(), W.bfloat16(), W.bfloat16(), 4),
        ),
        ((X, W, W, 4, 0.0), "eps is 0, not positive", (X, W, W, 4, 1e-9)),
        ((ones(0, 8, 3), W, W, 4), "input [0, 8, 3] is empty", (ones(1, 8, 3), W, W, 4)),
    ],
)
def test_borders(outside, reason, inside):
    assert reason in NPU_GROUP_NORM_SILU.refusal(Target(), *outside)
    assert NPU_GROUP_NORM_SILU.refusal(Target(), *inside) is None
    with pytest.raises(ValueError, match="npu::npu_group_norm_silu: ") as raised:
        NPU_GROUP_NORM_SILU.op(*outside)
    assert reason in str(raised.value)
    NPU_GROUP_NORM_SILU.op(*inside)


@pytest.mark.parametrize("soc", ["ascend910b", "ascend910_93", "ascend950", "ascend310p"])
def test_socs(soc):
    taken = NPU_GROUP_NORM_SILU.refusal(Target(soc), X, W, W, 4) is None
    assert taken == (soc in ("ascend910b", "ascend310p"))
    if soc == "ascend310p":
        narrow = [tensor.bfloat16() for tensor in (X, W, W)]
        assert "input is bfloat16, which ascend310p" in NPU_GROUP_NORM_SILU.refusal(Target(soc), *narrow, 4)
