"""Which layers declare that their attention is bidirectional, whatever mask they are given.

The declaration is the module's own `attn_type`, as serving frameworks set it, or the option `encoder_only`. Other signs
are none.
"""

from __future__ import annotations

import enum
import fnmatch
from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from .owners import Owner, Owners

# Patterns of module paths; or what says of the path and the class of a module whether it is such a layer.
EncoderOnly = tuple[str, ...] | Callable[[str, type], bool]

ATTRIBUTE = "attn_type"


@dataclass(frozen=True, slots=True)
class Declaration:
    """That a layer is bidirectional.

    Args:
        layer: its path; "" for the compiled module.
        by: what says so.
    """

    layer: str
    by: str


class Declarations:
    """Of one graph.

    Args:
        option: `Options.encoder_only`.
        owners: of the graph's nodes.
    """

    def __init__(self, option: EncoderOnly, owners: Owners) -> None:
        self._option = option
        self._owners = owners
        self._known: dict[tuple[str, ...], Declaration | None] = {}

    def of(self, node: fx.Node, *, guard: bool = False) -> Declaration | None:
        """The declaration that holds for a node: that of the innermost module which has one.

        Args:
            node: of the graph.
            guard: whether the graph will depend on it. Then it is compiled anew for other instances of the layer that
                say something else.
        """
        stack = tuple(node.meta.get("nn_module_stack") or ())
        if guard or stack not in self._known:
            self._known[stack] = self._of(self._owners.of(node, sources=guard), guard=guard)
        return self._known[stack]

    def _of(self, owners: list[Owner], *, guard: bool) -> Declaration | None:
        for owner in owners or [Owner("", object)]:
            by = self._by_option(owner)
            if by is not None:
                return Declaration(owner.path, by)
        for owner in owners:
            given = owner.read(ATTRIBUTE, guard=guard)
            if given is not None:
                said = f"{ATTRIBUTE} of {owner.path or 'the compiled module'} is {given}"
                return Declaration(owner.path, said) if _is_encoder_only(given) else None
        return None

    def hint(self, node: fx.Node) -> Declaration | None:
        """What looks like a declaration, and is none: `is_causal` of the innermost module that has it is False."""
        for owner in self._owners.of(node):
            given = owner.read("is_causal", guard=False)
            if given is not None:
                said = f"is_causal of {owner.path or 'the compiled module'} is False"
                return Declaration(owner.path, said) if given is False else None
        return None

    def _by_option(self, owner: Owner) -> str | None:
        if callable(self._option):
            return "Options.encoder_only says so" if self._option(owner.path, owner.type) else None
        pattern = next((pattern for pattern in self._option if fnmatch.fnmatchcase(owner.path, pattern)), None)
        return None if pattern is None else f"Options.encoder_only has {pattern!r}"


def _is_encoder_only(attn_type: object) -> bool:
    """Whether an attn_type is ENCODER_ONLY, as a member of an enumeration or as a string."""
    named = {attn_type.name, attn_type.value} if isinstance(attn_type, enum.Enum) else {attn_type}
    return any(isinstance(name, str) and name.upper() == "ENCODER_ONLY" for name in named)
