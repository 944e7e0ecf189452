"""A matmul whose result is added up over ranks while it is computed:  y = sum over ranks of (x1 @ x2 + bias)."""

from collections.abc import Iterator, Sequence

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
# What the others say is not known well enough, or belongs to quantised weights: they have to be these.
_OTHERS = {
    "reduce_op": "sum",
    "antiquant_scale": None,
    "antiquant_offset": None,
    "x3": None,
    "dequant_scale": None,
    "pertoken_scale": None,
    "comm_quant_scale_1": None,
    "comm_quant_scale_2": None,
    "antiquant_group_size": 0,
    "comm_turn": 0,
    "group_sizes": None,
    "y_dtype": None,
    "x1_dtype": None,
    "x2_dtype": None,
    "dequant_scale_dtype": None,
    "pertoken_scale_dtype": None,
    "comm_quant_mode": 0,
    "comm_mode": None,
}


def _invalid(
    x1: torch.Tensor, x2: torch.Tensor, hcom: str, bias: torch.Tensor | None, others: Sequence[object]
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
    for (name, default), value in zip(_OTHERS.items(), others, strict=True):
        if value != default:
            yield f"{name} is given, which is for other sums or for quantised operands"


@first_reason
def _refuse(
    target: Target,
    x1: torch.Tensor,
    x2: torch.Tensor,
    hcom: str,
    reduce_op: str,
    bias: torch.Tensor | None,
    antiquant_scale: torch.Tensor | None,
    antiquant_offset: torch.Tensor | None,
    x3: torch.Tensor | None,
    dequant_scale: torch.Tensor | None,
    pertoken_scale: torch.Tensor | None,
    comm_quant_scale_1: torch.Tensor | None,
    comm_quant_scale_2: torch.Tensor | None,
    antiquant_group_size: int,
    comm_turn: int,
    group_sizes: list[int] | None,
    y_dtype: int | None,
    x1_dtype: int | None,
    x2_dtype: int | None,
    dequant_scale_dtype: int | None,
    pertoken_scale_dtype: int | None,
    comm_quant_mode: int,
    comm_mode: str | None,
) -> Iterator[str]:
    others = (
        *(reduce_op, antiquant_scale, antiquant_offset, x3, dequant_scale, pertoken_scale),
        *(comm_quant_scale_1, comm_quant_scale_2, antiquant_group_size, comm_turn, group_sizes),
        *(y_dtype, x1_dtype, x2_dtype, dequant_scale_dtype, pertoken_scale_dtype, comm_quant_mode, comm_mode),
    )
    yield from _invalid(x1, x2, hcom, bias, others)


def mm_all_reduce_base_reference(  # noqa: D417  # one line tells of those that have to be their defaults
    x1: torch.Tensor,
    x2: torch.Tensor,
    hcom: str,
    *,
    reduce_op: str = "sum",
    bias: torch.Tensor | None = None,
    antiquant_scale: torch.Tensor | None = None,
    antiquant_offset: torch.Tensor | None = None,
    x3: torch.Tensor | None = None,
    dequant_scale: torch.Tensor | None = None,
    pertoken_scale: torch.Tensor | None = None,
    comm_quant_scale_1: torch.Tensor | None = None,
    comm_quant_scale_2: torch.Tensor | None = None,
    antiquant_group_size: int = 0,
    comm_turn: int = 0,
    group_sizes: list[int] | None = None,
    y_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    dequant_scale_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    comm_quant_mode: int = 0,
    comm_mode: str | None = None,
) -> torch.Tensor:
    """What `npu::npu_mm_all_reduce_base` computes, in the roundings of torch's matmul and all_reduce.

    Args:
        x1: [m, k] or [b, s, k], float16 or bfloat16; not transposed, not empty.
        x2: [k, n], of x1's dtype; may be a transposed view.
        hcom: the name of the group of ranks, on an NPU that of HCCL. Every rank has to call this.
        bias: [n], of x1's dtype: added on each rank, before the sum.
        reduce_op: "sum"; this and all that follow have to be their defaults, but for `bias`.

    Returns:
        [m, n] or [b, s, n], of x1's dtype: alike on all ranks.

    Raises:
        ValueError: dtypes or shapes don't fit, or another argument is given.

    Source: torch_npu 2.13.0 (schema, document): A2 alone; 1, 2, 4 or 8 ranks that are all linked; not for decoding.
    """
    others = (
        *(reduce_op, antiquant_scale, antiquant_offset, x3, dequant_scale, pertoken_scale),
        *(comm_quant_scale_1, comm_quant_scale_2, antiquant_group_size, comm_turn, group_sizes),
        *(y_dtype, x1_dtype, x2_dtype, dequant_scale_dtype, pertoken_scale_dtype, comm_quant_mode, comm_mode),
    )
    raise_first(_NAME, _invalid(x1, x2, hcom, bias, others))
    product = row_major(torch.nn.functional.linear(x1, x2.t(), bias))
    torch.distributed.all_reduce(product, group=ranks.process_group(hcom))
    return product


def mm_all_reduce_base_fake(
    x1: torch.Tensor,
    x2: torch.Tensor,
    hcom: str,
    *,
    reduce_op: str = "sum",
    bias: torch.Tensor | None = None,
    antiquant_scale: torch.Tensor | None = None,
    antiquant_offset: torch.Tensor | None = None,
    x3: torch.Tensor | None = None,
    dequant_scale: torch.Tensor | None = None,
    pertoken_scale: torch.Tensor | None = None,
    comm_quant_scale_1: torch.Tensor | None = None,
    comm_quant_scale_2: torch.Tensor | None = None,
    antiquant_group_size: int = 0,
    comm_turn: int = 0,
    group_sizes: list[int] | None = None,
    y_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    dequant_scale_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    comm_quant_mode: int = 0,
    comm_mode: str | None = None,
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
