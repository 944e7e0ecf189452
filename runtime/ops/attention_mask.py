"""Which keys a query must not see: the masks of attention ops, and the modes that make them.

A mask's True (or 1) hides a key, the opposite of torch's boolean masks. Of s1 rows and s2 keys, row i may see key j if

    0  mask given: not mask[i, j] and i - pre_tokens <= j <= i + next_tokens;  no mask: always
    1  not mask[i, j]
    2  j <= i                                   aligned top left, as torch's is_causal
    3  j <= i + s2 - s1                         aligned bottom right, as decoding with a cache
    4  i + s2 - s1 - pre_tokens <= j <= i + s2 - s1 + next_tokens

Modes 2 to 4 take the mask of `compressed_causal_mask`, whatever s1 and s2 are: the kernel cuts its tiles from it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from ..sizes import Size, known_equal, known_true
from .reasons import dtype_among, shape_text

__all__ = [
    "ALL_MASK",
    "BAND",
    "COMPRESSED",
    "DEFAULT_MASK",
    "LEFT_UP_CAUSAL",
    "RIGHT_DOWN_CAUSAL",
    "UNLIMITED",
    "BlankRows",
    "Masking",
    "compressed_causal_mask",
    "four_dims",
    "is_compressed_causal_mask",
    "mask_reasons",
]

# Values of sparse_mode. 5 to 8 are unsupported by the kernels, 9 (of the v2 op) by us.
DEFAULT_MASK, ALL_MASK, LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL, BAND = range(5)

# What a kernel writes for a row that sees no key. "zeros if causal": zeros in mode 3 where there are more rows than
# keys, which turns the repair of such rows on; else something undefined.
BlankRows = Literal["undefined", "zeros", "zeros if causal"]

# The modes that take the compressed mask.
COMPRESSED = (LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL, BAND)

# What pre_tokens and next_tokens are when they limit nothing.
UNLIMITED = 2**31 - 1

_COMPRESSED_SIZE = 2048


def compressed_causal_mask(device: torch.device | str) -> torch.Tensor:
    """The mask that sparse modes 2, 3 and 4 take: bool [2048, 2048], True strictly above the diagonal."""
    return torch.ones(_COMPRESSED_SIZE, _COMPRESSED_SIZE, dtype=torch.bool, device=device).triu(1)


def is_compressed_causal_mask(mask: torch.Tensor) -> bool:
    """Whether a mask of the right shape has the right values: a lower triangle, say, is inverted and hides the past."""
    return torch.equal(mask.reshape(_COMPRESSED_SIZE, _COMPRESSED_SIZE).bool(), compressed_causal_mask(mask.device))


def mask_reasons(
    mask: torch.Tensor | None,
    sparse_mode: int,
    pre_tokens: int,
    next_tokens: int,
    full_shapes: Sequence[Sequence[Size]],
    *,
    dtypes: Sequence[torch.dtype] = (torch.bool, torch.int8, torch.uint8),
    may_be_wider: bool = False,
) -> Iterator[str]:
    """A mask is there where its mode needs one, of a type and shape that the kernel takes.

    Args:
        mask: `atten_mask`.
        sparse_mode: 0 to 4.
        pre_tokens: as the op's.
        next_tokens: as the op's.
        full_shapes: the shapes that a mask of mode 0 or 1 may have.
        dtypes: the types that it may have.
        may_be_wider: whether the last dim of such a shape is a minimum.
    """
    if not DEFAULT_MASK <= sparse_mode <= BAND:
        yield f"sparse_mode is {sparse_mode} (0 to {BAND} are supported)"
    if mask is None:
        if sparse_mode != DEFAULT_MASK:
            yield f"sparse_mode {sparse_mode} needs an atten_mask (the kernel raises without one)"
        return
    yield from dtype_among("atten_mask", mask, dtypes)
    if sparse_mode in (DEFAULT_MASK, BAND) and pre_tokens + next_tokens < 0:
        yield f"pre_tokens {pre_tokens} and next_tokens {next_tokens} leave no key between them"
    wider = may_be_wider and sparse_mode not in COMPRESSED
    if sparse_mode in COMPRESSED:
        full_shapes = [(*(1,) * ones, _COMPRESSED_SIZE, _COMPRESSED_SIZE) for ones in range(3)]
    if not any(_has_shape(mask, shape, wider) for shape in full_shapes):
        allowed = " or ".join(map(shape_text, full_shapes)) or "none"
        yield (
            f"atten_mask {shape_text(mask.shape)} is not known to have a shape that sparse_mode {sparse_mode} takes:"
            f" {allowed}{', the last dim or more' if wider else ''}"
        )


def _has_shape(mask: torch.Tensor, shape: Sequence[Size], wider: bool) -> bool:
    if mask.dim() != len(shape):
        return False
    *sizes, last = mask.shape
    *wanted, last_wanted = shape
    fits = known_true(last >= last_wanted) if wider else known_equal(last, last_wanted)
    return fits and all(map(known_equal, sizes, wanted))


def four_dims(mask: torch.Tensor | None, *, by_batch: bool = False) -> torch.Tensor | None:
    """A full mask of any allowed shape as bool [batch or 1, heads or 1, rows, keys].

    Args:
        mask: `atten_mask`.
        by_batch: whether two dims are batch and keys, as they are for a query of one token; else rows and keys.
    """
    if mask is None:
        return None
    if mask.dim() == 2:
        mask = mask[:, None] if by_batch else mask[None]
    return (mask if mask.dim() == 4 else mask[:, None]).bool()


@dataclass(frozen=True, slots=True, kw_only=True)
class Masking:
    """What hides keys in one call.

    Args:
        sparse_mode: 0 to 4.
        mask: bool, of four dims that broadcast to [batch, heads, rows, keys] or exceed rows and keys; None without a
            mask and for modes 2 to 4.
        pre_tokens: as the op's.
        next_tokens: as the op's.
        blank_rows: what a row gets that sees no key.
    """

    sparse_mode: int
    mask: torch.Tensor | None
    pre_tokens: int
    next_tokens: int
    blank_rows: BlankRows

    def hidden(self, batch: int, rows: int, keys: int, device: torch.device) -> torch.Tensor | None:
        """True where a key is hidden, to broadcast to [heads, rows, keys]; None where all are seen."""
        i = torch.arange(rows, device=device)[:, None]
        j = torch.arange(keys, device=device)
        if self.sparse_mode == LEFT_UP_CAUSAL:
            return j > i
        if self.sparse_mode == RIGHT_DOWN_CAUSAL:
            return j > i + keys - rows
        if self.sparse_mode == BAND:
            return self._beyond(i + keys - rows, j)
        if self.mask is None:
            return None
        mask = self.mask[batch if len(self.mask) > 1 else 0, :, :rows, :keys]
        return mask | self._beyond(i, j) if self.sparse_mode == DEFAULT_MASK else mask

    def zeroes(self, rows: int, keys: int) -> bool:
        """Whether rows that see no key become zeros."""
        if self.blank_rows == "zeros if causal":
            return self.sparse_mode == RIGHT_DOWN_CAUSAL and rows > keys
        return self.blank_rows == "zeros"

    def _beyond(self, centre: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return (j < centre - self.pre_tokens) | (j > centre + self.next_tokens)
