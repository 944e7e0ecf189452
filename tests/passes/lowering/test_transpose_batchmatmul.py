"""A batched matmul and the transposition behind it become one op, where its result is copied row by row anyway."""

import pytest
import torch

from helpers import compiled
from npu_fuse import Target

Tensor = torch.Tensor
OP = {"npu::npu_transpose_batchmatmul": 1}
B, M, K, N = 4, 5, 128, 256

BATCH_FIRST = {
    "copied": lambda x, w: torch.bmm(x, w).transpose(0, 1).contiguous(),
    "flattened": lambda x, w: torch.matmul(x, w).transpose(0, 1).flatten(1),
    "einsum": lambda x, w: torch.einsum("bmk,bkn->mbn", x, w).contiguous(),
    "by a linear": lambda x, w: torch.bmm(x, w).transpose(0, 1).reshape(-1, 2 * N) @ w[0, :2].repeat(2, 1).mT,
}
BATCH_SECOND = {
    "absorbed": lambda x, w: torch.bmm(x.transpose(0, 1), w).transpose(0, 1).flatten(1),
    "absorbed by einsum": lambda x, w: torch.einsum("mbk,bkn->mbn", x, w).contiguous(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", ["copied", "flattened", "einsum", *BATCH_SECOND])
def test_it_is_one_launch(name: str, dtype: torch.dtype, dynamic: bool | None) -> None:
    function = (BATCH_FIRST | BATCH_SECOND)[name]
    x = torch.randn((M, B, K) if name in BATCH_SECOND else (B, M, K), dtype=dtype)
    weight = torch.randn(B, K, N, dtype=dtype)
    torch._dynamo.mark_static(x, 1 if name in BATCH_SECOND else 0)
    torch._dynamo.mark_static(x, 2)
    torch._dynamo.mark_static(weight)
    found = compiled(function, x, weight, dynamic=dynamic)
    assert found.report.ops == OP
    assert found.report.launches_after == 1
    assert torch.equal(found.output, function(x, weight))
    (call,) = found.after.graph.find_nodes(op="call_function", target=torch.ops.npu.npu_transpose_batchmatmul.default)
    assert call.kwargs == {
        "perm_x1": [1, 0, 2] if name in BATCH_SECOND else [0, 1, 2],
        "perm_x2": [0, 1, 2],
        "perm_y": [1, 0, 2],
    }


def test_of_one_token_the_view_is_row_major_already() -> None:
    x, weight = torch.randn(B, 1, K), torch.randn(B, K, N)
    found = compiled(lambda x, w: torch.bmm(x, w).transpose(0, 1), x, weight)
    assert found.report.ops == OP
    assert torch.equal(found.output, torch.bmm(x, weight).transpose(0, 1))


def test_several_copies_stay_tensors_of_their_own() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        product = torch.bmm(x, w).transpose(0, 1)
        return product.contiguous(), product.flatten(1)

    x, weight = torch.randn(B, M, K), torch.randn(B, K, N)
    found = compiled(function, x, weight)
    assert found.report.ops == OP
    assert found.report.launches_after == 2
    for result, wanted in zip(found.output, function(x, weight), strict=True):
        assert torch.equal(result, wanted)
    first, second = found.output
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


def matmul_used_elsewhere(x: Tensor, w: Tensor) -> Tensor:
    product = torch.bmm(x, w)
    return product.transpose(0, 1).flatten(1) + product.sum()


@pytest.mark.parametrize(
    ("function", "shapes", "reason"),
    [
        (lambda x, w: torch.bmm(x, w).transpose(0, 1), (M, K, N), "its result is read as the view that it is"),
        (lambda x, w: torch.bmm(x, w).transpose(0, 1).cos(), (M, K, N), "its result is read as the view that it is"),
        (matmul_used_elsewhere, (M, K, N), "the matmul is used elsewhere too"),
        (BATCH_FIRST["flattened"], (M, 64, N), "the last dim of input is 64, not known to be a multiple of 128"),
        (BATCH_FIRST["flattened"], (M, K, 192), "the last dim of weight is 192"),
        (BATCH_FIRST["flattened"], (0, K, N), "is empty"),
    ],
)
def test_what_the_op_does_not_do_is_refused(function, shapes: tuple[int, int, int], reason: str) -> None:
    m, k, n = shapes
    x, weight = torch.randn(B, m, k), torch.randn(B, k, n)
    found = compiled(function, x, weight)
    assert not found.report.ops
    assert reason in found.report.sites[0].reason
    wanted = function(x, weight)
    assert torch.equal(found.output, wanted)
    assert found.output.stride() == wanted.stride()


def test_float64_is_refused() -> None:
    x, weight = torch.randn(B, M, K).double(), torch.randn(B, K, N).double()
    found = compiled(BATCH_FIRST["flattened"], x, weight)
    assert "input is float64" in found.report.sites[0].reason


def test_a_weight_of_another_layout_is_given_as_the_view_that_it_is() -> None:
    x, weight = torch.randn(B, M, K), torch.randn(B, N, K)
    found = compiled(lambda x, w: torch.bmm(x, w.mT).transpose(0, 1).flatten(1), x, weight)
    assert found.report.ops == OP
    assert torch.equal(found.output, torch.bmm(x, weight.mT).transpose(0, 1).flatten(1))


@pytest.mark.parametrize("soc", ["ascend910b", "ascend910_93", "ascend950", "ascend310p"])
def test_it_is_chosen_by_soc(soc: str) -> None:
    found = compiled(BATCH_FIRST["flattened"], torch.randn(B, M, K), torch.randn(B, K, N), target=Target(soc))
    assert found.report.ops == (OP if soc in ("ascend910b", "ascend910_93") else {})
