"""The lengths of sequences as attention ops take them: one for each batch entry, or where packed sequences end."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from ..sizes import Size, known_true

__all__ = ["MAX_PACKED_SEQUENCES", "batch_length_reasons", "batch_lengths", "packed_length_reasons", "packed_spans"]

MAX_PACKED_SEQUENCES = 4096


def batch_length_reasons(name: str, lengths: Sequence[Size] | None, batch: Size, tokens: Size) -> Iterator[str]:
    """There is one length, or one for each batch entry; none is negative or known to exceed `tokens`."""
    if lengths is None:
        return
    if len(lengths) != 1 and not known_true(len(lengths) >= batch):
        yield f"{name} has {len(lengths)} lengths for a batch of {batch} (the kernel takes 1 or all of them)"
    yield from _range(name, lengths, tokens)


def batch_lengths(lengths: Sequence[int] | None, batch: int, tokens: int) -> list[int]:
    """A length for each batch entry: all `tokens` without `lengths`; a single one holds for all; surplus is ignored."""
    if lengths is None:
        return [tokens] * batch
    return list(lengths) * batch if len(lengths) == 1 else list(lengths[:batch])


def packed_length_reasons(name: str, ends: Sequence[Size] | None, tokens: Size) -> Iterator[str]:
    """There are ends of 1 to 4096 packed sequences, none known to fall or to exceed `tokens`."""
    if ends is None:
        yield f"{name} is missing, which packed sequences need"
        return
    if not 1 <= len(ends) <= MAX_PACKED_SEQUENCES:
        yield f"{name} has {len(ends)} sequences (the kernel takes 1 to {MAX_PACKED_SEQUENCES})"
    yield from _range(name, ends, tokens)
    for before, end in pairwise(ends):
        if known_true(end < before):
            yield f"{name} falls from {before} to {end} (it counts the tokens up to the end of each sequence)"


def packed_spans(ends: Sequence[int]) -> list[tuple[int, int]]:
    """First row and row after the last of each sequence."""
    return list(pairwise((0, *ends)))


def _range(name: str, lengths: Sequence[Size], tokens: Size) -> Iterator[str]:
    for length in lengths:
        if known_true(length < 0):
            yield f"{name} holds {length}, which is negative"
        # A length that isn't known is the caller's word: the op itself raises where it is too long.
        if known_true(length > tokens):
            yield f"{name} holds {length}, and there are {tokens} tokens"
