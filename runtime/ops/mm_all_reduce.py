"""A matmul whose result is added up over ranks while it is computed:  y = sum over ranks of (x1 @ x2 + bias)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .. import ranks
from ..sizes import known_equal, known_same_shape
from ..target import Target
from .contract import OpContract
from .layout import row_major
from .partly_covered import PartlyCovered
from .reasons import dtype_among, dtype_name, emptiness, raise_first, rank_between, shape_text

__all__ = ["NPU_MM_ALL_REDUCE_BASE"]

_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class _Call:
    """What the contract covers; the rest is for other sums, for quantised operands, or not known well enough.

    Args:
        x1: [m, k] or [b, s, k], float16 or bfloat16; not transposed, not empty.
        x2: [k, n], of x1's dtype; may be a transposed view.
        hcom: the name of the group of ranks, on an NPU that of HCCL. Every rank has to call this.
        bias: [n], of x1's dtype: added on each rank, before the sum.
    """

    x1: torch.Tensor
    x2: torch.Tensor
    hcom: str
    bias: torch.Tensor | None


_PART = PartlyCovered(
    "npu::npu_mm_all_reduce_base",
    "npu_mm_all_reduce_base(Tensor x1, Tensor x2, str hcom, *, str reduce_op='sum', Tensor? bias=None,"
    " Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, Tensor? x3=None, Tensor? dequant_scale=None,"
    " Tensor? pertoken_scale=None, Tensor? comm_quant_scale_1=None, Tensor? comm_quant_scale_2=None,"
    " int antiquant_group_size=0, int comm_turn=0, int[]? group_sizes=None, int? y_dtype=None, int? x1_dtype=None,"
    " int? x2_dtype=None, int? dequant_scale_dtype=None, int? pertoken_scale_dtype=None, int comm_quant_mode=0,"
    " str? comm_mode=None) -> Tensor",
    _Call,
)


def _invalid(call: _Call) -> Iterator[str]:
    x1, x2, bias = call.x1, call.x2, call.bias
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
        if not known_same_shape(bias.shape, x2.shape[1:]):
            yield f"bias {shape_text(bias.shape)} is not one row of x2 {shape_text(x2.shape)}"


@_PART.refuse
def _refuse(target: Target, call: _Call) -> Iterator[str]:
    yield from _invalid(call)


@_PART.kernel
def mm_all_reduce_base_reference(call: _Call) -> torch.Tensor:
    """What `npu::npu_mm_all_reduce_base` computes, in the roundings of torch's matmul and all_reduce.

    Args:
        call: x1 [m, k] or [b, s, k], x2 [k, n] and the rest.

    Returns:
        [m, n] or [b, s, n], of x1's dtype: alike on all ranks.

    Raises:
        ValueError: dtypes or shapes don't fit, or another argument is given.

    Source: torch_npu 2.13.0 (schema, document): A2 alone; 1, 2, 4 or 8 ranks that are all linked; not for decoding.
    """
    raise_first(_PART.name, _invalid(call))
    product = row_major(torch.nn.functional.linear(call.x1, call.x2.t(), call.bias))
    torch.distributed.all_reduce(product, group=ranks.process_group(call.hcom))
    return product


@_PART.kernel
def mm_all_reduce_base_fake(call: _Call) -> torch.Tensor:
    """Shape of `mm_all_reduce_base_reference`."""
    return call.x1.new_empty((*call.x1.shape[:-1], call.x2.shape[1]))


NPU_MM_ALL_REDUCE_BASE = OpContract(
    name=_PART.name,
    schema=_PART.schema,
    reference=mm_all_reduce_base_reference,
    fake=mm_all_reduce_base_fake,
    refuse=_refuse,
    socs=frozenset({"ascend910b"}),
    source="torch_npu 2.13.0 (schema, document)",
    group="hcom",
)
