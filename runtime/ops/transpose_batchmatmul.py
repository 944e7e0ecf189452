"""A batched matmul whose operands and result are transposed on the way:  y[m, b, n] = sum_k x[b, m, k] weight[b, k, n].

Multi-head latent attention absorbs its projections of the latent with it: a weight a head, and tokens before heads.
"""

from collections.abc import Iterator, Sequence

import torch

from ..sizes import Size, known_equal, known_true
from ..target import Target
from .contract import OpContract
from .layout import row_major
from .reasons import dtype_among, dtype_name, emptiness, first_reason, raise_first, rank_between, shape_text

__all__ = ["BATCH_FIRST", "BATCH_SECOND", "NPU_TRANSPOSE_BATCHMATMUL"]

BATCH_FIRST = (0, 1, 2)
BATCH_SECOND = (1, 0, 2)

# Newer CANN takes multiples of 16; which one is installed is not known.
_ALIGNMENT = 128
_MAX_SIZE = 65535


def _invalid(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    perm_x1: Sequence[int] | None,
    perm_x2: Sequence[int] | None,
    perm_y: Sequence[int] | None,
    batch_split_factor: int | None,
) -> Iterator[str]:
    for name, tensor in (("input", input), ("weight", weight)):
        yield from dtype_among(name, tensor)
        yield from rank_between(name, tensor, 3, 3)
    if input.dtype != weight.dtype:
        yield f"weight is {dtype_name(weight.dtype)} but input is {dtype_name(input.dtype)} (they must be equal)"
    if bias is not None:
        yield "bias is given, which the kernel does not add yet"
    if scale is not None:
        yield "scale is given, which makes the result int8"
    if batch_split_factor not in (None, 1):
        yield f"batch_split_factor is {batch_split_factor}, whose result CANN's versions lay out differently"
    if tuple(perm_x1 or BATCH_FIRST) not in (BATCH_FIRST, BATCH_SECOND):
        yield f"perm_x1 is {list(perm_x1 or ())} (the kernel takes [0, 1, 2] and [1, 0, 2])"
    if tuple(perm_x2 or BATCH_FIRST) == (0, 2, 1):
        yield "perm_x2 is [0, 2, 1], which needs CANN 8.5 or newer, and which one is installed is not known"
    if tuple(perm_x2 or BATCH_FIRST) != BATCH_FIRST:
        yield f"perm_x2 is {list(perm_x2 or ())} (the kernel takes [0, 1, 2])"
    if tuple(perm_y or BATCH_SECOND) != BATCH_SECOND:
        yield f"perm_y is {list(perm_y or ())} (the kernel takes [1, 0, 2])"
    yield from emptiness("input", input)
    yield from emptiness("weight", weight)
    batch, _, k = _sizes(input, perm_x1)
    if not known_equal(batch, weight.shape[0]) or not known_equal(k, weight.shape[1]):
        yield f"weight {shape_text(weight.shape)} does not fit input of batch {batch} and last dim {k}"
    n = weight.shape[2]
    for name, size in (("last dim of input", k), ("last dim of weight", n)):
        if not known_true(size % _ALIGNMENT == 0):
            yield f"the {name} is {size}, not known to be a multiple of {_ALIGNMENT}"
    row = batch * k if tuple(perm_x1 or BATCH_FIRST) == BATCH_SECOND else k
    for name, size in (("batch", batch), ("row of input", row), ("last dim of weight", n)):
        if not known_true(size <= _MAX_SIZE):
            yield f"the {name} takes {size} elements, not known to be at most {_MAX_SIZE}"


def _sizes(input: torch.Tensor, perm_x1: Sequence[int] | None) -> tuple[Size, ...]:
    """Batch, rows and columns of input."""
    return tuple(input.shape[axis] for axis in perm_x1 or BATCH_FIRST)


@first_reason
def _refuse(
    target: Target,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    perm_x1: Sequence[int] | None,
    perm_x2: Sequence[int] | None,
    perm_y: Sequence[int] | None,
    batch_split_factor: int | None,
) -> Iterator[str]:
    yield from _invalid(input, weight, bias, scale, perm_x1, perm_x2, perm_y, batch_split_factor)


def transpose_batchmatmul_reference(
    input: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
    batch_split_factor: int | None = 1,
) -> torch.Tensor:
    """What `npu::npu_transpose_batchmatmul` computes: the sums of `torch.bmm`, laid out anew.

    Args:
        input: [B, M, K], or [M, B, K] with a perm_x1 of [1, 0, 2]; float16, bfloat16 or float32. K is a multiple of
            128, and K, or B * K where it is transposed, at most 65535.
        weight: [B, K, N], of input's dtype; N a multiple of 128, B and N at most 65535.
        bias: has to be None.
        scale: likewise.
        perm_x1: [0, 1, 2] or [1, 0, 2]; None is the former.
        perm_x2: [0, 1, 2] or None.
        perm_y: [1, 0, 2] or None.
        batch_split_factor: 1 or None.

    Returns:
        [M, B, N], of input's dtype.

    Raises:
        ValueError: dtypes, shapes or permutations don't fit, or an argument is given that has to be None.

    Source: torch_npu 2.13.0 (permutations, dtypes), its torchair (sizes); float32 sums are inferred.
    """
    raise_first(
        "npu::npu_transpose_batchmatmul",
        _invalid(input, weight, bias, scale, perm_x1, perm_x2, perm_y, batch_split_factor),
    )
    batched = input.permute(*(perm_x1 or BATCH_FIRST))
    return row_major(torch.bmm(batched, weight).transpose(0, 1))


def transpose_batchmatmul_fake(
    input: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    perm_x1: Sequence[int] | None = None,
    perm_x2: Sequence[int] | None = None,
    perm_y: Sequence[int] | None = None,
    batch_split_factor: int | None = 1,
) -> torch.Tensor:
    """Shape of `transpose_batchmatmul_reference`."""
    batch, rows, _ = _sizes(input, perm_x1)
    return input.new_empty((rows, batch, weight.shape[2]))


NPU_TRANSPOSE_BATCHMATMUL = OpContract(
    name="npu::npu_transpose_batchmatmul",
    schema=(
        "npu_transpose_batchmatmul(Tensor input, Tensor weight, *, Tensor? bias=None, Tensor? scale=None,"
        " int[]? perm_x1=None, int[]? perm_x2=None, int[]? perm_y=None, int? batch_split_factor=1) -> Tensor"
    ),
    reference=transpose_batchmatmul_reference,
    fake=transpose_batchmatmul_fake,
    refuse=_refuse,
    socs=frozenset({"ascend910b", "ascend910_93"}),
    source="torch_npu 2.13.0 (schema, permutations, dtypes, SoCs), its torchair (sizes)",
)
