"""What the kernels that split rows [q | k | v] and norm and rotate q and k have in common: their limits and maths.

sgl_kernel_npu has them as Python functions that launch Triton kernels, no torch ops; the ops around them are ours.
"""

from collections.abc import Callable, Iterator

import torch

from ..sizes import Size, known_equal, known_same_shape, static_int
from .layout import row_major
from .reasons import contiguity, dtype_among, rank_between, shape_text
from .rotary import rotate_half

__all__ = [
    "head_sizes",
    "norm_of_heads",
    "normed",
    "packed_heads",
    "packed_rows",
    "positive_sizes",
    "rotated",
    "split_rows",
    "token_rows",
    "unified_buffer",
    "vector",
]

# A tile lives in the unified buffer, 192 KiB on an ascend910b.
_BUFFER_BYTES = 192 * 1024


# Limits -----------------------------------------------------------------------------------------------------------


def positive_sizes(**sizes: int) -> Iterator[str]:
    """Every size is a number that is known, and positive."""
    for name, size in sizes.items():
        if (static := static_int(size)) is None:
            yield f"{name} {size} is not static (the kernel is compiled for it)"
        elif static <= 0:
            yield f"{name} is {static}, not positive"


def head_sizes(q_hidden_size: int, kv_hidden_size: int, head_dim: int) -> Iterator[str]:
    """q and k are whole heads, as many of q for each of k, of a size that is a power of two."""
    yield from positive_sizes(q_hidden_size=q_hidden_size, kv_hidden_size=kv_hidden_size, head_dim=head_dim)
    if head_dim & (head_dim - 1):
        yield f"head_dim {head_dim} is no power of two (the kernel tiles by it)"
    if q_hidden_size % kv_hidden_size:
        yield f"q_hidden_size {q_hidden_size} is no multiple of kv_hidden_size {kv_hidden_size}"
    if kv_hidden_size % head_dim:
        yield f"kv_hidden_size {kv_hidden_size} is no multiple of head_dim {head_dim}"


def packed_rows(name: str, packed: torch.Tensor, width: int, formula: str) -> Iterator[str]:
    """The tensor is rows of exactly `width`, without gaps; `formula` says how the width comes about."""
    yield from dtype_among(name, packed)
    yield from rank_between(name, packed, 2, 2)
    if not known_equal(packed.shape[1], width):
        yield f"{name} is {packed.shape[1]} wide, not {formula} = {width}"
    yield from contiguity(name, packed)


def token_rows(tokens: Size, head_dim: int, **tables: torch.Tensor) -> Iterator[str]:
    """Each table has one row for each token, all are as wide, at most head_dim."""
    for name, rows in tables.items():
        yield from dtype_among(name, rows)
        if not rows.dim():
            yield f"{name} has no dims (its last one is rope_dim)"
        rope_dim = static_int(rows.shape[-1])
        if rope_dim is None:
            yield f"the last dim {rows.shape[-1]} of {name} is not static"
        elif not 0 < rope_dim <= head_dim:
            yield f"rope_dim {rope_dim} of {name} is not in 1 to head_dim {head_dim}"
        elif rope_dim % 2:
            yield f"rope_dim {rope_dim} of {name} is odd (the kernel rotates pairs)"
        elif not known_equal(rows.numel(), tokens * rope_dim):
            yield (
                f"{name} {shape_text(rows.shape)} has {rows.numel()} elements, not one row of {rope_dim}"
                f" for each of {tokens} tokens"
            )
        yield from contiguity(name, rows)
    (name, first), *others = tables.items()
    for other, rows in others:
        if not known_equal(first.shape[-1], rows.shape[-1]):
            yield f"{name} is {first.shape[-1]} wide but {other} is {rows.shape[-1]}"


def vector(name: str, parameter: torch.Tensor, length: int, length_name: str) -> Iterator[str]:
    """A weight or bias has one dim, of that length."""
    yield from dtype_among(name, parameter)
    if not known_same_shape(parameter.shape, (length,)):
        yield f"{name} is {shape_text(parameter.shape)}, not [{length_name}] = [{length}]"
    yield from contiguity(name, parameter)


def norm_of_heads(
    head_dim: int,
    eps: float | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    q_bias: torch.Tensor | None,
    k_bias: torch.Tensor | None,
) -> Iterator[str]:
    """Either all that a norm per head takes is given, or nothing."""
    parameters = {"q_weight": q_weight, "k_weight": k_weight, "q_bias": q_bias, "k_bias": k_bias}
    given = {name: parameter for name, parameter in parameters.items() if parameter is not None}
    if eps is None and given:
        yield f"{', '.join(given)} given without eps (the kernel would ignore them)"
    if eps is not None:
        for name in ("q_weight", "k_weight"):
            if name not in given:
                yield f"eps is given without {name} (the kernel would read a null pointer)"
        if (q_bias is None) != (k_bias is None):
            there, missing = ("q_bias", "k_bias") if k_bias is None else ("k_bias", "q_bias")
            yield f"{there} is given without {missing} (the kernel reads both or none)"
    for name, parameter in given.items():
        yield from vector(name, parameter, head_dim, "head_dim")


def unified_buffer(what: str, elements: int) -> Iterator[str]:
    """So many elements of a tile fit the buffer in float32; `what` names them, in the plural."""
    if 4 * elements > _BUFFER_BYTES:
        yield f"{what} take {4 * elements} bytes in float32 (the kernel's buffer holds {_BUFFER_BYTES})"


# Maths ------------------------------------------------------------------------------------------------------------


def split_rows(input: torch.Tensor, head_dim: int, *widths: int) -> tuple[torch.Tensor, ...]:
    """The columns of each row, cut by `widths`, as heads [T, heads, head_dim] in float32."""
    return tuple(
        columns.reshape(input.shape[0], width // head_dim, head_dim).float()
        for columns, width in zip(torch.split(input, list(widths), dim=-1), widths, strict=True)
    )


def packed_heads(heads: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Heads [T, heads, head_dim] as rows of a type, in memory of their own."""
    return row_major(heads.flatten(-2).to(dtype, copy=True))


def normed(
    heads: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None = None, *, offset: float = 0.0
) -> torch.Tensor:
    """heads * (mean(heads^2) + eps)^-1/2 * (offset + weight) + bias over the last dim, in float32."""
    scaled = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + eps) * (weight.float() + offset)
    return scaled if bias is None else scaled + bias.float()


def rotated(
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotate: Callable[[torch.Tensor], torch.Tensor] = rotate_half,
) -> torch.Tensor:
    """The first columns of each head, as many as cos and sin have, turned; the others as they are."""
    first, rest = heads[..., : cos.shape[-1]], heads[..., cos.shape[-1] :]
    return torch.cat((first * cos + rotate(first) * sin, rest), dim=-1)
