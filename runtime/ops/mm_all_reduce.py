"""A matmul whose result is added up over ranks while it is computed:  y = sum over ranks of (x1 @ x2 + bias)."""

from collections.abc import Iterator

import torch

from .. import ranks
from ..sizes import known_equal
from ..target import Target
from .contract import OpContract
from .layout import row_major
from .reasons import dtype_among, dtype_name, emptiness, first_reason, raise_first, rank_between, shape_text

__all__ = ["NPU_MM_ALL_REDUCE_BASE"]

_NAME = "npu::npu_mm_all_reduce_base"
_DTYPES = (torch.float16, torch.bfloat16)
# What these say is not known well enough, or belongs to quantised weights.
_DEFAULTS = {
    "reduce_op": "sum",
    "antiquant_group_size": 0,
    "comm_turn": 0,
    "comm_quant_mode": 0,
}


def _invalid(
    x1: torch.Tensor, x2: torch.Tensor, hcom: str, bias: torch.Tensor | None, others: dict[str, object]
) -> Iterator[str]:
    for name, tensor in (("x1", x1), ("x2", x2)):
        yield from dtype_among(name, tensor, _DTYPES)
        yield from emptiness(name, tensor)
    yield from rank_between("x1", x1, 2, 3)
    yield from rank_between("x2", x2, 2, 2)
    if x1.dtype != x2.dtype:
        yield f"x2 is {dtype_name(x2.dtype)} but x1 is {dtype_name(x1.dtype)} (they must be equal)"
    if not known_equal(x1.shape[-1], x2.shape[0]):
        yield f"x2 {shape_text(x2.shape)} does not fit x1 {shape_text(x1.shape)}"
    if bias is not None:
        if bias.dtype != x1.dtype:
            yield f"bias is {dtype_name(bias.dtype)} but x1 is {dtype_name(x1.dtype)} (they must be equal)"
        if bias.dim() != 1 or not known_equal(bias.shape[0], x2.shape[1]):
            yield f"bias {shape_text(bias.shape)} is not one row of x2 {shape_text(x2.shape)}"
    for name, value in others.items():
        if value != _DEFAULTS.get(name):
            yield f"{name} is given, which is for other sums or for quantised operands"


@first_reason
def _refuse(
    target: Target, x1: torch.Tensor, x2: torch.Tensor, hcom: str, bias: torch.Tensor | None, **others: object
) -> Iterator[str]:
    yield from _invalid(x1, x2, hcom, bias, others)


def mm_all_reduce_base_reference(
    x1: torch.Tensor, x2: torch.Tensor, hcom: str, *, bias: torch.Tensor | None = None, **others: object
) -> torch.Tensor:
    """What `npu::npu_mm_all_reduce_base` computes, in the roundings of torch's matmul and all_reduce.

    Args:
        x1: [m, k] or [b, s, k], float16 or bfloat16; not transposed, not empty.
        x2: [k, n], of x1's dtype; may be a transposed view.
        hcom: the name of the group of ranks, on an NPU that of HCCL. Every rank has to call this.
        bias: [n], of x1's dtype: added on each rank, before the sum.
        others: the schema's other arguments, which have to be their defaults.

    Returns:
        [m, n] or [b, s, n], of x1's dtype: alike on all ranks.

    Raises:
        ValueError: dtypes or shapes don't fit, or another argument is given.

    Source: torch_npu 2.13.0 (schema, document): A2 alone; 1, 2, 4 or 8 ranks that are all linked; not for decoding.
    """
    raise_first(_NAME, _invalid(x1, x2, hcom, bias, others))
    product = row_major(torch.nn.functional.linear(x1, x2.t(), bias))
    torch.distributed.all_reduce(product, group=ranks.process_group(hcom))
    return product


def mm_all_reduce_base_fake(
    x1: torch.Tensor, x2: torch.Tensor, hcom: str, *, bias: torch.Tensor | None = None, **others: object
) -> torch.Tensor:
    """Shape of `mm_all_reduce_base_reference`."""
    return x1.new_empty((*x1.shape[:-1], x2.shape[1]))


NPU_MM_ALL_REDUCE_BASE = OpContract(
    name=_NAME,
    schema=(
        "npu_mm_all_reduce_base(Tensor x1, Tensor x2, str hcom, *, str reduce_op='sum', Tensor? bias=None,"
        " Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, Tensor? x3=None, Tensor? dequant_scale=None,"
        " Tensor? pertoken_scale=None, Tensor? comm_quant_scale_1=None, Tensor? comm_quant_scale_2=None,"
        " int antiquant_group_size=0, int comm_turn=0, int[]? group_sizes=None, int? y_dtype=None, int? x1_dtype=None,"
        " int? x2_dtype=None, int? dequant_scale_dtype=None, int? pertoken_scale_dtype=None, int comm_quant_mode=0,"
        " str? comm_mode=None) -> Tensor"
    ),
    reference=mm_all_reduce_base_reference,
    fake=mm_all_reduce_base_fake,
    refuse=_refuse,
    socs=frozenset({"ascend910b"}),
    source="torch_npu 2.13.0 (schema, document)",
    group="hcom",
)
