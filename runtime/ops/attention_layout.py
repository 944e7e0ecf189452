"""The layouts of attention ops: how `input_layout` orders the dims of query, key and value, and of the result.

One letter a dim: B batch, S tokens of a sequence, N heads, D head_dim, H = N * D, T tokens of all sequences one after
another. What stands behind an underscore is the layout of the result where it differs, as in "BNSD_BSND".
"""

from typing import NamedTuple

import torch

from ..sizes import Size, known_equal, known_true
from .layout import row_major

__all__ = ["AttentionSizes", "fits_heads", "heads_first", "is_packed", "read_dims", "result_shape", "sizes", "written"]


class AttentionSizes(NamedTuple):
    """Sizes of a query, a key or a value. Where sequences are packed, `batch` is 1 and `tokens` those of all."""

    batch: Size
    tokens: Size
    heads: Size
    head_dim: Size


def read_dims(input_layout: str) -> str:
    """The dims of query, key and value."""
    return input_layout.partition("_")[0]


def _written_dims(input_layout: str) -> str:
    return input_layout.rpartition("_")[2]


def is_packed(input_layout: str) -> bool:
    """Whether sequences of any length stand one after another."""
    return "T" in input_layout


def fits_heads(tensor: torch.Tensor, input_layout: str, heads: int) -> bool:
    """Whether a tensor of the layout's rank is known to have `heads` heads."""
    dims = read_dims(input_layout)
    if "H" in dims:
        return known_true(tensor.shape[dims.index("H")] % heads == 0)
    return known_equal(tensor.shape[dims.index("N")], heads)


def sizes(tensor: torch.Tensor, input_layout: str, heads: int) -> AttentionSizes:
    """The sizes of a query, key or value that has `heads` heads."""
    of = dict(zip(read_dims(input_layout), tensor.shape, strict=True))
    tokens = of["T" if is_packed(input_layout) else "S"]
    if "H" in of:
        return AttentionSizes(of.get("B", 1), tokens, heads, of["H"] // heads)
    return AttentionSizes(of.get("B", 1), tokens, of["N"], of["D"])


def heads_first(tensor: torch.Tensor, input_layout: str, heads: int) -> torch.Tensor:
    """A view as [batch, heads, tokens, head_dim]."""
    dims = read_dims(input_layout).replace("T", "S")
    if "H" in dims:  # always the last dim
        tensor = tensor.reshape(*tensor.shape[:-1], heads, tensor.shape[-1] // heads)
        dims = dims.replace("H", "ND")
    if "B" not in dims:
        tensor, dims = tensor.unsqueeze(0), f"B{dims}"
    return tensor.permute([dims.index(dim) for dim in "BNSD"])


def result_shape(input_layout: str, result: AttentionSizes) -> list[Size]:
    """The shape of the result, `head_dim` being that of the value."""
    batch, tokens, heads, head_dim = result
    of = {"B": batch, "S": tokens, "T": tokens, "N": heads, "D": head_dim, "H": heads * head_dim}
    return [of[dim] for dim in _written_dims(input_layout)]


def written(result: torch.Tensor, input_layout: str) -> torch.Tensor:
    """[batch, heads, tokens, head_dim] in the layout of the result, freshly laid out."""
    batch, heads, tokens, head_dim = result.shape
    order = _written_dims(input_layout).replace("H", "ND").replace("T", "S")
    if "B" not in order:
        order = f"B{order}"
    shape = result_shape(input_layout, AttentionSizes(batch, tokens, heads, head_dim))
    return row_major(result.permute(["BNSD".index(dim) for dim in order]).reshape(shape))
