"""Tracks: what the columns of a tensor along time are, as columns of the tensors that they come from.

`cat(state, x)[..., -4:]` is a track of the last columns of state and x, joined; padding is columns of zeros. Lengths
may be symbols: a cut whose place among the pieces can't be told for every size is kept as it is, and still compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from ...runtime.sizes import Size, known_equal, known_true

# What an axis counts: "time" at most once; "unit" for an axis of one that stands for nothing.
Roles = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor whose columns are taken as they are.

    Args:
        number: equal for nodes that hold the same bits.
        time: which axis columns lie along; None where the tensor is one column.
        node: it.
        roles: what its axes count.
    """

    number: int
    time: int | None
    node: fx.Node = field(compare=False)
    roles: Roles = field(compare=False)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """`length` columns of a source from column `start` on; of zeros where there is no source."""

    source: Source | None
    start: Size
    length: Size

    def is_same(self, other: Piece) -> bool:
        same = self.source == other.source and known_equal(self.length, other.length)
        return same and (self.source is None or known_equal(self.start, other.start))

    def followed_by(self, other: Piece) -> Piece | None:
        """Both as one piece, where they are neighbours in one source."""
        if self.source != other.source:
            return None
        if self.source is not None and not known_equal(self.start + self.length, other.start):
            return None
        return replace(self, length=self.length + other.length)


@dataclass(frozen=True, slots=True, eq=False)
class Track:
    """Pieces, one behind the other, from column `low` of them up to column `high`."""

    pieces: tuple[Piece, ...]
    low: Size
    high: Size

    @property
    def length(self) -> Size:
        return self.high - self.low

    def cut(self, low: Size, high: Size) -> Track:
        """Columns `low` up to `high` of this track."""
        return _placed(Track(self.pieces, self.low + low, self.low + high))

    def is_same(self, other: Track) -> bool:
        """Whether two tracks are known to be of the same columns."""
        return (
            len(self.pieces) == len(other.pieces)
            and known_equal(self.low, other.low)
            and known_equal(self.high, other.high)
            and all(a.is_same(b) for a, b in zip(self.pieces, other.pieces, strict=True))
        )

    @property
    def is_whole(self) -> bool:
        """Whether all its pieces are there to their ends."""
        return known_equal(self.low, 0) and known_equal(self.high, total(self.pieces))

    @property
    def only(self) -> Piece | None:
        """Its one piece; None where there are more, or none."""
        return self.pieces[0] if len(self.pieces) == 1 and self.is_whole else None


def track(*pieces: Piece) -> Track:
    """A track of whole pieces; neighbours are made one."""
    joined: list[Piece] = []
    for piece in pieces:
        if known_equal(piece.length, 0):
            continue
        both = joined[-1].followed_by(piece) if joined else None
        joined[-1:] = [both] if both is not None else [*joined[-1:], piece]
    return Track(tuple(joined), 0, total(joined))


def zeros(length: Size) -> Track:
    return track(Piece(None, 0, length))


def joined(tracks: Sequence[Track]) -> Track | None:
    """Tracks one behind the other; None where one ends at a place that can't be told."""
    if not all(part.is_whole for part in tracks):
        return None
    return track(*(piece for part in tracks for piece in part.pieces))


def total(pieces: Sequence[Piece]) -> Size:
    length: Size = 0
    for piece in pieces:
        length = length + piece.length
    return length


def _placed(cut: Track) -> Track:
    """The track without the columns that are cut away, as far as it can be told whose they are."""
    pieces, low, high = list(cut.pieces), cut.low, cut.high
    while pieces and not known_equal(low, 0):
        first = pieces[0]
        if known_true(low >= first.length):
            pieces.pop(0)
            low, high = low - first.length, high - first.length
        elif known_true(low <= first.length):
            pieces[0] = replace(first, start=first.start + low, length=first.length - low)
            low, high = 0, high - low
        else:
            break
    behind = total(pieces) - high
    while pieces and not known_equal(behind, 0):
        last = pieces[-1]
        if known_true(behind >= last.length):
            pieces.pop()
            behind = behind - last.length
        elif known_true(behind <= last.length):
            pieces[-1] = replace(last, length=last.length - behind)
            behind = 0
        else:
            break
    return Track(tuple(pieces), low, total(pieces) - behind)
