"""npu_transpose_batchmatmul against float64 maths and its limits."""

import pytest
import torch

from npu_fuse.runtime.ops.transpose_batchmatmul import NPU_TRANSPOSE_BATCHMATMUL
from npu_fuse.runtime.target import Target

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
B, M, K, N = 3, 5, 128, 256


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["plain", "transposed", "sliced", "expanded"])
@pytest.mark.parametrize("perm_x1", [None, [0, 1, 2], [1, 0, 2]])
def test_it_is_the_maths(make_tensor, dtype, layout, perm_x1):
    batch_second = perm_x1 == [1, 0, 2]
    x = make_tensor((M, B, K) if batch_second else (B, M, K), dtype, layout)
    weight = make_tensor((B, K, N), dtype, layout, seed=1)
    assert NPU_TRANSPOSE_BATCHMATMUL.refusal(Target(), x, weight, perm_x1=perm_x1) is None
    y = NPU_TRANSPOSE_BATCHMATMUL.op(x, weight, perm_x1=perm_x1, perm_x2=[0, 1, 2], perm_y=[1, 0, 2])
    wanted = torch.einsum("mbk,bkn->mbn" if batch_second else "bmk,bkn->mbn", x.double(), weight.double())
    assert y.shape == (M, B, N)
    assert y.is_contiguous()
    torch.testing.assert_close(y.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * K**0.5)
    assert torch.equal(y, torch.bmm(x.transpose(0, 1) if batch_second else x, weight).transpose(0, 1))


def test_the_permutations_are_those_of_multi_head_latent_attention_by_default(make_tensor):
    x, weight = make_tensor((B, M, K)), make_tensor((B, K, N), seed=1)
    given = NPU_TRANSPOSE_BATCHMATMUL.op(x, weight, perm_x1=[0, 1, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2])
    assert torch.equal(NPU_TRANSPOSE_BATCHMATMUL.op(x, weight), given)


def test_the_fake_has_the_layout_of_the_real(make_tensor, assert_same_layout):
    for x in (make_tensor((B, M, K)), make_tensor((B, 1, K)), make_tensor((B, M, K), layout="transposed")):
        assert_same_layout(NPU_TRANSPOSE_BATCHMATMUL.op, x, make_tensor((B, K, N), seed=1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(make_tensor, dtype):
    arguments = (make_tensor((B, M, K), dtype), make_tensor((B, K, N), dtype))
    torch.library.opcheck(NPU_TRANSPOSE_BATCHMATMUL.op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_symbolic_tokens_are_kept_and_not_refused(symbolic):
    weight = symbolic((B, K, N), torch.bfloat16)
    for shape, perm_x1 in (((B, "S", K), None), (("S", B, K), [1, 0, 2])):
        x = symbolic(shape, torch.bfloat16)
        assert NPU_TRANSPOSE_BATCHMATMUL.refusal(Target(), x, weight, perm_x1=perm_x1) is None
        y = NPU_TRANSPOSE_BATCHMATMUL.op(x, weight, perm_x1=perm_x1)
        assert [str(size) for size in y.shape] == [str(x.shape[1 if perm_x1 is None else 0]), str(B), str(N)]


def test_a_symbolic_batch_has_no_known_bound(symbolic):
    x, weight = symbolic(("B", 5, K)), symbolic(("B", K, N))
    assert "the batch takes" in NPU_TRANSPOSE_BATCHMATMUL.refusal(Target(), x, weight)
    reason = NPU_TRANSPOSE_BATCHMATMUL.refusal(Target(), symbolic((B, 5, "S")), symbolic((B, "S", N)))
    assert "not known to be a multiple of 128" in reason


ones = torch.ones
X, W = ones(B, M, K), ones(B, K, N)


@pytest.mark.parametrize(
    ("outside", "reason", "inside"),
    [
        ((X.double(), W.double(), {}), "input is float64", (X, W, {})),
        ((X[0], W, {}), "input has 2 dims", (X, W, {})),
        ((X, W[0], {}), "weight has 2 dims", (X, W, {})),
        ((X.half(), W, {}), "weight is float32 but input is float16 (they must be equal)", (X.half(), W.half(), {})),
        ((X, W, {"bias": ones(N)}), "bias is given", (X, W, {"bias": None})),
        ((X, W, {"scale": ones(B * N).long()}), "scale is given", (X, W, {"scale": None})),
        ((X, W, {"batch_split_factor": 3}), "batch_split_factor is 3", (X, W, {"batch_split_factor": None})),
        ((X, W, {"perm_x1": [0, 2, 1]}), "perm_x1 is [0, 2, 1]", (X, W, {"perm_x1": [0, 1, 2]})),
        (
            (X, ones(B, N, K), {"perm_x2": [0, 2, 1]}),
            "perm_x2 is [0, 2, 1], which needs CANN 8.5 or newer",
            (X, W, {"perm_x2": [0, 1, 2]}),
        ),
        ((X, W, {"perm_x2": [1, 0, 2]}), "perm_x2 is [1, 0, 2] (the kernel takes [0, 1, 2])", (X, W, {})),
        ((X, W, {"perm_y": [0, 1, 2]}), "perm_y is [0, 1, 2] (the kernel takes [1, 0, 2])", (X, W, {})),
        ((ones(B, 0, K), W, {}), "input [3, 0, 128] is empty", (ones(B, 1, K), W, {})),
        ((X, ones(B, K, 0), {}), "weight [3, 128, 0] is empty", (X, W, {})),
        ((ones(B + 1, M, K), W, {}), "weight [3, 128, 256] does not fit input of batch 4", (X, W, {})),
        ((ones(B, M, 2 * K), W, {}), "does not fit input of batch 3 and last dim 256", (X, W, {})),
        (
            (X, W, {"perm_x1": [1, 0, 2]}),
            "does not fit input of batch 5",
            (X.mT.mT.transpose(0, 1), W, {"perm_x1": [1, 0, 2]}),
        ),
        (
            (ones(B, M, 64), ones(B, 64, N), {}),
            "the last dim of input is 64, not known to be a multiple of 128",
            (X, W, {}),
        ),
        ((X, ones(B, K, 192), {}), "the last dim of weight is 192, not known to be a multiple of 128", (X, W, {})),
    ],
)
def test_borders(outside, reason, inside):
    x, weight, arguments = outside
    assert reason in NPU_TRANSPOSE_BATCHMATMUL.refusal(Target(), x, weight, **arguments)
    with pytest.raises(ValueError, match="npu::npu_transpose_batchmatmul: ") as raised:
        NPU_TRANSPOSE_BATCHMATMUL.op(x, weight, **arguments)
    assert reason in str(raised.value)
    x, weight, arguments = inside
    assert NPU_TRANSPOSE_BATCHMATMUL.refusal(Target(), x, weight, **arguments) is None
    NPU_TRANSPOSE_BATCHMATMUL.op(x, weight, **arguments)


@pytest.mark.parametrize(
    ("outside", "reason", "inside"),
    [
        (((65536, 1, 128), (65536, 128, 128)), "the batch takes 65536 elements", ((65535, 1, 128), (65535, 128, 128))),
        (((1, 1, 65536), (1, 65536, 128)), "the row of input takes 65536 elements", ((1, 1, 65408), (1, 65408, 128))),
        (((1, 1, 128), (1, 128, 65536)), "the last dim of weight takes 65536", ((1, 1, 128), (1, 128, 65408))),
    ],
)
def test_borders_of_size(outside, reason, inside):
    def refusal(shapes, **arguments):
        return NPU_TRANSPOSE_BATCHMATMUL.refusal(
            Target(), *(torch.empty(shape, device="meta") for shape in shapes), **arguments
        )

    assert reason in refusal(outside)
    assert refusal(inside) is None


def test_a_transposed_input_bounds_batch_and_row_together():
    def refusal(batch, perm_x1):
        shape = (1, batch, 512) if perm_x1 == [1, 0, 2] else (batch, 1, 512)
        operands = torch.empty(shape, device="meta"), torch.empty((batch, 512, 128), device="meta")
        return NPU_TRANSPOSE_BATCHMATMUL.refusal(Target(), *operands, perm_x1=perm_x1)

    assert refusal(127, [1, 0, 2]) is None
    assert "the row of input takes 65536 elements" in refusal(128, [1, 0, 2])
    assert refusal(128, [0, 1, 2]) is None


@pytest.mark.parametrize("soc", ["ascend910b", "ascend910_93", "ascend950", "ascend310p"])
def test_socs(soc):
    taken = NPU_TRANSPOSE_BATCHMATMUL.refusal(Target(soc), X, W) is None
    assert taken == (soc in ("ascend910b", "ascend910_93"))
