"""The gating ops against float64 maths, their order among equal scores, and their limits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_fuse.runtime.ops.moe_gating import NPU_MOE_GATING_TOP_K, NPU_MOE_GATING_TOP_K_SOFTMAX, SIGMOID, SOFTMAX
from npu_fuse.runtime.target import Target

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def assert_near(actual, expected, dtype):
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def best(scores, k):
    """The k best of a list, the lower index first among equals."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]


# npu_moe_gating_top_k_softmax


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 16), (2, 5, 16)])
@pytest.mark.parametrize("k", [1, 4, 16])
def test_softmax_is_the_maths(make_tensor, assert_same_layout, dtype, shape, k):
    x = make_tensor(shape, dtype)
    assert NPU_MOE_GATING_TOP_K_SOFTMAX.refusal(Target(), x, k=k) is None
    y, experts, _ = NPU_MOE_GATING_TOP_K_SOFTMAX.op(x, None, k)
    scores = x.double().exp() / x.double().exp().sum(-1, keepdim=True)
    wanted = [best(row, k) for row in x.flatten(0, -2).tolist()]
    assert experts.dtype == torch.int32
    assert experts.flatten(0, -2).tolist() == wanted
    assert_near(y, scores.gather(-1, experts.long()), dtype)
    assert_same_layout(NPU_MOE_GATING_TOP_K_SOFTMAX.op, x, None, k)


def test_softmax_weights_are_not_divided_by_their_sum(make_tensor):
    y = NPU_MOE_GATING_TOP_K_SOFTMAX.op(make_tensor((7, 16)), None, 4)[0]
    assert (y.sum(-1) < 0.99).all()


def test_of_equal_scores_the_lower_index_comes_first():
    x = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0], [2.0, 2.0, 2.0, 2.0, 2.0]])
    assert NPU_MOE_GATING_TOP_K_SOFTMAX.op(x, None, 4)[1].tolist() == [[1, 3, 0, 2], [0, 1, 2, 3]]
    many = torch.zeros(2, 512)
    assert NPU_MOE_GATING_TOP_K_SOFTMAX.op(many, None, 8)[1].tolist() == [list(range(8))] * 2
    assert NPU_MOE_GATING_TOP_K.op(many, 8)[1].tolist() == [list(range(8))] * 2
    assert NPU_MOE_GATING_TOP_K.op(many, 8, k_group=2, group_count=8)[1].tolist() == [list(range(8))] * 2


def test_rows_are_numbered_down_the_columns():
    rows = NPU_MOE_GATING_TOP_K_SOFTMAX.op(torch.randn(3, 8), None, 2)[2]
    assert rows.dtype == torch.int32
    assert rows.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert NPU_MOE_GATING_TOP_K_SOFTMAX.op(torch.randn(1, 3, 8), None, 2)[2].tolist() == [[[0, 3], [1, 4], [2, 5]]]


# npu_moe_gating_top_k


def exact(x, k, bias, k_group, group_count, mode, norm_type, scale, eps):
    """Row by row, group by group, in float64."""
    weights, experts = [], []
    size = x.shape[-1] // group_count
    for row in x.double():
        scores = 1 / (1 + torch.exp(-row)) if norm_type == SIGMOID else row.exp() / row.exp().sum()
        choice = (scores if bias is None else scores + bias.double()).tolist()
        groups = [choice[g * size : (g + 1) * size] for g in range(group_count)]
        kept = best([sum(sorted(group)[-2:]) if mode else max(group) for group in groups], k_group)
        masked = [c if i // size in kept else -math.inf for i, c in enumerate(choice)]
        chosen = best(masked, k)
        weight = scores[chosen]
        weights.append((weight / (weight.sum() + eps) if norm_type == SIGMOID else weight) * scale)
        experts.append(chosen)
    return torch.stack(weights), experts


@settings(max_examples=80, deadline=None)
@given(
    group_count=st.sampled_from([1, 2, 4, 8]),
    group_size=st.integers(3, 9),
    dtype=st.sampled_from(DTYPES),
    with_bias=st.booleans(),
    mode=st.integers(0, 1),
    norm_type=st.sampled_from([SOFTMAX, SIGMOID]),
    scale=st.sampled_from([1.0, 2.5]),
    eps=st.sampled_from([1e-20, 1e-2]),
    data=st.data(),
)
def test_top_k_is_the_maths(make_tensor, group_count, group_size, dtype, with_bias, mode, norm_type, scale, eps, data):
    num_experts = group_count * group_size
    k_group = data.draw(st.integers(1, group_count))
    k = data.draw(st.integers(1, k_group * group_size))
    x = make_tensor((5, num_experts), dtype, seed=num_experts)
    bias = make_tensor((num_experts,), dtype, seed=1) if with_bias else None
    groups = {"k_group": k_group, "group_count": group_count, "group_select_mode": mode, "norm_type": norm_type}
    arguments = {"bias": bias, "routed_scaling_factor": scale, "eps": eps, "out_flag": True, **groups}
    assert NPU_MOE_GATING_TOP_K.refusal(Target(), x, k, **arguments) is None
    y, experts, scores = NPU_MOE_GATING_TOP_K.op(x, k, **arguments)
    # Rounded inputs may be equal, whose scores float64 and float32 order alike; nearly equal sums they may not.
    weights, wanted = exact(x, k, bias, k_group, group_count, mode, norm_type, scale, eps)
    assert experts.dtype == torch.int32
    assert experts.tolist() == wanted
    assert_near(y, weights, dtype)
    assert scores.dtype == torch.float32
    wide = x.double()
    assert_near(scores, wide.sigmoid() if norm_type == SIGMOID else wide.softmax(-1), torch.float32)


def test_the_bias_chooses_and_does_not_weigh():
    x = torch.zeros(1, 4)
    bias = torch.tensor([0.0, 0.0, 5.0, -5.0])
    y, experts, _ = NPU_MOE_GATING_TOP_K.op(x, 2, bias=bias, norm_type=SIGMOID)
    assert experts.tolist() == [[2, 0]]
    assert y.tolist() == [[0.5, 0.5]]


def test_experts_of_other_groups_are_never_chosen():
    x = torch.tensor([[9.0, 9.0, 9.0, -9.0, -9.0, -9.0, 1.0, 1.0, 8.0]])
    bias = torch.tensor([-9.0, -9.0, -9.0, -8.0, -8.0, -8.0, -9.0, -9.0, -9.0])
    arguments = {"bias": bias, "k_group": 1, "group_count": 3, "norm_type": SIGMOID}
    assert NPU_MOE_GATING_TOP_K.op(x, 3, group_select_mode=0, **arguments)[1].tolist() == [[3, 4, 5]]
    assert NPU_MOE_GATING_TOP_K.op(x[:, [8, 6, 7, 3, 4, 5, 0, 1, 2]], 3, group_count=3)[1].tolist() == [[6, 7, 8]]


def test_the_scores_of_all_mean_nothing_unless_asked_for(make_tensor):
    assert NPU_MOE_GATING_TOP_K.op(make_tensor((3, 8)), 2)[2].isnan().all()


@pytest.mark.parametrize("layout", ["plain", "transposed", "sliced", "expanded"])
def test_top_k_takes_any_layout_and_gives_one(make_tensor, assert_same_layout, layout):
    x = make_tensor((5, 16), torch.bfloat16, layout)
    assert_same_layout(NPU_MOE_GATING_TOP_K.op, x, 4)
    assert torch.equal(NPU_MOE_GATING_TOP_K.op(x, 4)[0], NPU_MOE_GATING_TOP_K.op(x.contiguous(), 4)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(make_tensor, dtype):
    x = make_tensor((5, 16), dtype)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(NPU_MOE_GATING_TOP_K_SOFTMAX.op, (x, None, 4), test_utils=tests)
    torch.library.opcheck(NPU_MOE_GATING_TOP_K.op, (x, 4), {"bias": x[0], "out_flag": True}, test_utils=tests)


def test_symbolic_tokens_are_kept_and_not_refused(symbolic):
    x, bias = symbolic(("T", 16)), symbolic((16,))
    assert NPU_MOE_GATING_TOP_K_SOFTMAX.refusal(Target(), x, k=4) is None
    assert NPU_MOE_GATING_TOP_K.refusal(Target(), x, 4, bias=bias, k_group=2, group_count=4) is None
    for contract in (NPU_MOE_GATING_TOP_K_SOFTMAX, NPU_MOE_GATING_TOP_K):
        for result in contract.op(x, k=4)[:2]:
            assert [str(size) for size in result.shape] == [str(x.shape[0]), "4"]


def test_a_symbolic_number_of_experts_is_refused(symbolic):
    x = symbolic((4, "S"))
    assert "not known to hold k = 4 experts" in NPU_MOE_GATING_TOP_K_SOFTMAX.refusal(Target(), x, k=4)
    assert "not known to have at most 2048 experts" in NPU_MOE_GATING_TOP_K.refusal(Target(), x, 4)


ones = torch.ones
X = ones(4, 16)
TOP_K, TOP_K_SOFTMAX = NPU_MOE_GATING_TOP_K, NPU_MOE_GATING_TOP_K_SOFTMAX


@pytest.mark.parametrize(
    ("contract", "outside", "reason", "inside"),
    [
        (TOP_K_SOFTMAX, (X.double(), {}), "x is float64", (X, {})),
        (TOP_K_SOFTMAX, (X[0], {}), "x has 1 dims [16] (the kernel takes 2 to 3)", (X, {})),
        (TOP_K_SOFTMAX, (X[None, None], {}), "x has 4 dims", (X[None], {})),
        (TOP_K_SOFTMAX, (X, {"finished": ones(4).bool()}), "finished is given", (X, {"finished": None})),
        (TOP_K_SOFTMAX, (X, {"k": 0}), "k is 0 (the kernel takes 1 to 1024)", (X, {"k": 1})),
        (TOP_K_SOFTMAX, (X, {"k": 17}), "is not known to hold k = 17 experts", (X, {"k": 16})),
        (TOP_K_SOFTMAX, (ones(1, 2000), {"k": 1025}), "k is 1025", (ones(1, 2000), {"k": 1024})),
        (TOP_K_SOFTMAX, (ones(0, 16), {}), "x [0, 16] is empty", (ones(1, 16), {})),
        (TOP_K, (X.double(), {"k": 2}), "x is float64", (X, {"k": 2})),
        (TOP_K, (X[None], {"k": 2}), "x has 3 dims", (X, {"k": 2})),
        (TOP_K, (X, {"k": 2, "input_ids": ones(4).int()}), "input_ids or tid2eid is given", (X, {"k": 2})),
        (TOP_K, (X, {"k": 2, "group_select_mode": 2}), "group_select_mode is 2", (X, {"k": 2, "group_select_mode": 1})),
        (TOP_K, (X, {"k": 2, "renorm": 1}), "renorm is 1 (the kernel takes 0)", (X, {"k": 2, "renorm": 0})),
        (
            TOP_K,
            (X, {"k": 2, "norm_type": 2}),
            "norm_type is 2 (the kernel takes 0 or 1)",
            (X, {"k": 2, "norm_type": 1}),
        ),
        (TOP_K, (X, {"k": 2, "bias": ones(8)}), "bias [8] does not cover the experts", (X, {"k": 2, "bias": ones(16)})),
        (
            TOP_K,
            (X.half(), {"k": 2, "bias": ones(16)}),
            "bias is float32 but x is float16 (they must be equal)",
            (X.half(), {"k": 2, "bias": ones(16).half()}),
        ),
        (TOP_K, (ones(1, 2049), {"k": 2}), "not known to have at most 2048 experts", (ones(1, 2048), {"k": 2})),
        (TOP_K, (X, {"k": 2, "group_count": 3}), "group_count is 3 for 16 experts", (X, {"k": 2, "group_count": 4})),
        (TOP_K, (X, {"k": 2, "group_count": 8}), "group_count is 8 for 16 experts", (X, {"k": 2, "group_count": 4})),
        (TOP_K, (X, {"k": 2, "group_count": 0}), "group_count is 0", (X, {"k": 2, "group_count": 1})),
        (
            TOP_K,
            (ones(1, 66 * 4), {"k": 2, "group_count": 66}),
            "66 groups of 4 experts, each padded to a multiple of 32, take 2112 places (the kernel has 2048)",
            (ones(1, 64 * 4), {"k": 2, "group_count": 64}),
        ),
        (
            TOP_K,
            (X, {"k": 2, "group_count": 4, "k_group": 5}),
            "k_group is 5 for 4 groups",
            (X, {"k": 2, "group_count": 4, "k_group": 4}),
        ),
        (TOP_K, (X, {"k": 2, "k_group": 0}), "k_group is 0 for 1 groups", (X, {"k": 2, "k_group": 1})),
        (
            TOP_K,
            (X, {"k": 9, "group_count": 4, "k_group": 2}),
            "k is 9 for 2 groups of 4 experts",
            (X, {"k": 8, "group_count": 4, "k_group": 2}),
        ),
        (TOP_K, (X, {"k": 0}), "k is 0 for 1 groups of 16 experts", (X, {"k": 1})),
        (TOP_K, (ones(0, 16), {"k": 2}), "x [0, 16] is empty", (ones(1, 16), {"k": 2})),
    ],
)
def test_borders(contract, outside, reason, inside):
    x, arguments = outside
    assert reason in contract.refusal(Target(), x, **arguments)
    with pytest.raises(ValueError, match=f"{contract.name}: ") as raised:
        contract.op(x, **arguments)
    assert reason in str(raised.value)
    x, arguments = inside
    assert contract.refusal(Target(), x, **arguments) is None
    contract.op(x, **arguments)


@pytest.mark.parametrize("contract", [TOP_K, TOP_K_SOFTMAX], ids=lambda c: c.name)
@pytest.mark.parametrize("soc", ["ascend910b", "ascend910_93", "ascend950", "ascend310p"])
def test_socs(contract, soc):
    taken = contract.refusal(Target(soc), X, k=2) is None
    assert taken == (soc in ("ascend910b", "ascend910_93"))
