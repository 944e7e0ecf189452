"""The kinds that options and reports speak of, and what is meant by a word that is none of them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from ..patterns import KINDS

IN_PLACE = "in_place"
ENCODER_ONLY = "encoder_only"
REPEATED = "repeated_projection"

ALL = (*KINDS, IN_PLACE, ENCODER_ONLY, REPEATED)


def check_kind(asked_by: str, kind: str, known: Sequence[str] = ALL) -> None:
    """Checks a word that is to be a kind.

    Args:
        asked_by: who was given it, `Options.disable`.
        kind: the word.
        known: the kinds there are.

    Raises:
        ValueError: it is none of them.
    """
    if kind not in known:
        raise ValueError(f"{asked_by}: unknown kind {kind!r}{hint(kind, known)}; known: {', '.join(known)}")


def hint(word: str, known: Sequence[str]) -> str:
    """` (did you mean 'qkv'?)`, or nothing where no known word is like it."""
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
