"""Rotary position embedding of one tensor:  y = x * cos + rotate(x) * sin, over the full last dim.

    half        rotate([a | b]) = [-b | a]
    interleave  rotate([a0, b0, a1, b1, …]) = [-b0, a0, -b1, a1, …]

cos and sin are as wide as x: whatever one angle stands for is repeated by the caller.
"""

from collections.abc import Callable, Iterator, Mapping

import torch

from ..sizes import Size, known_equal, known_same_shape, known_true, static_int
from ..target import Target
from .contract import OpContract
from .layout import row_major
from .reasons import dtype_among, emptiness, first_reason, raise_first, rank_between, shape_text

__all__ = ["NPU_ROTARY_MUL", "rotate_half", "rotate_interleaved"]

_HEAD_DIM_LIMIT = 896
_BATCH_AND_HEADS_LIMIT = 1000

# mode → layout of input → layouts of cos and sin that the kernel broadcasts: "1" stands for a dim of size 1.
_LAYOUTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "half": {
        "BNSD": ("11SD", "B1SD", "BNSD"),
        "BSND": ("1S1D", "BS1D", "BSND"),
        "SBND": ("S11D", "SB1D", "SBND"),
        "TND": ("T1D", "TND"),
    },
    "interleave": {
        "BNSD": ("11SD",),
        "BSND": ("1S1D",),
        "SBND": ("S11D",),
        "TND": ("T1D",),
    },
}


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """[a | b] → [-b | a] over the last dim."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate_interleaved(x: torch.Tensor) -> torch.Tensor:
    """[a0, b0, a1, b1, …] → [-b0, a0, -b1, a1, …] over the last dim."""
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


_ROTATE: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {"half": rotate_half, "interleave": rotate_interleaved}


def _reads_as(layout: str, shape: tuple[Size, ...], input_shape: tuple[Size, ...]) -> bool:
    return len(layout) == len(shape) and all(
        known_equal(size, 1 if axis == "1" else input_size)
        for axis, size, input_size in zip(layout, shape, input_shape, strict=True)
    )


def _readings(input: torch.Tensor, r1: torch.Tensor, rotary_mode: str) -> list[str]:
    """The layouts of input under which the kernel broadcasts r1; dims of size 1 may allow several."""
    return [
        input_layout
        for input_layout, layouts in _LAYOUTS[rotary_mode].items()
        if any(_reads_as(layout, r1.shape, input.shape) for layout in layouts)
    ]


def _invalid(
    input: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str, rotate: torch.Tensor | None
) -> Iterator[str]:
    if rotary_mode not in _LAYOUTS:
        yield f"rotary_mode {rotary_mode!r} is unknown; known: {', '.join(_LAYOUTS)}"
    if rotate is not None:
        yield "a rotate matrix is given; only rotary_mode says how to rotate"
    yield from rank_between("input", input, 3, 4)
    for name, tensor in (("input", input), ("r1", r1), ("r2", r2)):
        yield from dtype_among(name, tensor)
        yield from emptiness(name, tensor)
    if not known_same_shape(r1.shape, r2.shape):
        yield f"r1 {shape_text(r1.shape)} and r2 {shape_text(r2.shape)} differ in shape"
    yield from rank_between("r1", r1, input.dim(), input.dim())
    head_dim = input.shape[-1]
    if not known_equal(r1.shape[-1], head_dim):
        yield f"r1 is {r1.shape[-1]} wide but head_dim is {head_dim} (the kernel has no partial rotation)"
    if not known_true(head_dim % 2 == 0):
        yield f"head_dim {head_dim} is not known to be even (the kernel rotates pairs)"
    if not _readings(input, r1, rotary_mode):
        allowed = (layout for layouts in _LAYOUTS[rotary_mode].values() for layout in layouts)
        yield (
            f"r1 {shape_text(r1.shape)} is not broadcast to input {shape_text(input.shape)} in mode {rotary_mode!r}"
            f" (the kernel takes {', '.join(layout for layout in allowed if len(layout) == input.dim())})"
        )


def _too_large(layout: str, shape: tuple[Size, ...], rotary_mode: str) -> str | None:
    sizes = {axis: static_int(shape[layout.index(axis)]) for axis in "BN" if axis in layout}
    for axis, size in sizes.items():
        if size is not None and size >= _BATCH_AND_HEADS_LIMIT:
            return f"{axis} is {size} in input {shape_text(shape)} read as {layout} (the kernel takes less than 1000)"
    batch, heads = sizes.get("B"), sizes["N"]
    if rotary_mode == "interleave" and batch and heads and batch * heads >= _BATCH_AND_HEADS_LIMIT:
        return (
            f"B * N is {batch * heads} in input {shape_text(shape)} read as {layout}"
            " (the kernel takes less than 1000 in mode 'interleave')"
        )
    return None


@first_reason
def _refuse(
    target: Target,
    input: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str,
    rotate: torch.Tensor | None,
) -> Iterator[str]:
    yield from _invalid(input, r1, r2, rotary_mode, rotate)
    head_dim = static_int(input.shape[-1])
    if head_dim is None:
        yield f"head_dim {input.shape[-1]} is not static"
    elif head_dim >= _HEAD_DIM_LIMIT:
        yield f"head_dim {head_dim} is too large (the kernel takes less than {_HEAD_DIM_LIMIT})"
    # A layout that the shapes allow and the limits too is enough: the kernel reads no names.
    limits = [_too_large(layout, input.shape, rotary_mode) for layout in _readings(input, r1, rotary_mode)]
    if limits and all(limits):
        yield from filter(None, limits)


def rotary_mul_reference(
    input: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `npu::npu_rotary_mul` computes: cos and sin are rounded to input's dtype, all else is float32, one rounding.

    Args:
        input: [B, N, S, D], [B, S, N, D], [S, B, N, D] or [T, N, D]; float16, bfloat16 or float32; any strides; D even.
        r1: cos, full D wide, of input's rank with 1 for the dims that it is broadcast over; any float dtype. In mode
            "interleave" each value stands twice in a row.
        r2: sin, of r1's shape.
        rotary_mode: "half" or "interleave".
        rotate: not supported, None.

    Returns:
        The rotated tensor, of input's shape and dtype.

    Raises:
        ValueError: dtypes or shapes don't fit, or the mode is unknown.

    Source: op-plugin 517f2e7d (formula, cast of cos and sin); float32 inside is inferred, CANN's kernel is closed.
    """
    raise_first("npu::npu_rotary_mul", _invalid(input, r1, r2, rotary_mode, rotate))
    wide = input.float()
    cos = r1.to(input.dtype).float()
    sin = r2.to(input.dtype).float()
    return row_major((wide * cos + _ROTATE[rotary_mode](wide) * sin).to(input.dtype))


def rotary_mul_fake(
    input: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Shape of `rotary_mul_reference`."""
    return input.new_empty(input.shape)


NPU_ROTARY_MUL = OpContract(
    name="npu::npu_rotary_mul",
    schema="npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? rotate=None) -> Tensor",
    reference=rotary_mul_reference,
    fake=rotary_mul_fake,
    refuse=_refuse,
    socs=frozenset({"ascend910b", "ascend910_93", "ascend310p"}),
    source="torch_npu 2.13.0 (schema), op-plugin 517f2e7d (modes, layouts, limits, SoCs)",
)
