"""All that a user may set."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..patterns import KINDS
from .target import Target

IN_PLACE = "in_place"
_KINDS = (*KINDS, IN_PLACE)


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of one backend.

    Args:
        disable: kinds of fusion that are left alone, such as `{"qkv"}`. Their sites are recognised and reported still.
            "in_place" leaves writes into buffers as the copies that AOTAutograd makes of them.
        exact_rounding: refuse a fusion where the op rounds elsewhere than the model does, as the report notes it.
        pack_weights: let separate projections of one input (q, k, v; gate, up) share one storage and one matmul.
        strict: raise on an internal failure, instead of running the graph unfused with a warning.
        target: the machine to compile for; by default the one this process runs on.

    Raises:
        ValueError: `disable` names a kind that doesn't exist.
    """

    disable: frozenset[str] = frozenset()
    exact_rounding: bool = False
    pack_weights: bool = True
    strict: bool = False
    target: Target | None = None

    def __post_init__(self) -> None:
        if isinstance(self.disable, str):
            raise ValueError(f"Options.disable: give a set of kinds, such as {{{self.disable!r}}}, not a string")
        object.__setattr__(self, "disable", frozenset(self.disable))
        for kind in sorted(self.disable - set(_KINDS)):
            raise ValueError(f"Options.disable: unknown kind {kind!r}{_hint(kind, _KINDS)}; known: {', '.join(_KINDS)}")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Options:
        """Options from `torch.compile(options={…})`.

        Raises:
            ValueError: a key is unknown.
        """
        known = [field.name for field in fields(cls)]
        for key in settings:
            if key not in known:
                raise ValueError(f"Options: unknown option {key!r}{_hint(key, known)}; known: {', '.join(known)}")
        return cls(**settings)


def _hint(word: str, known: tuple[str, ...] | list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
