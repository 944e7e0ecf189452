"""What a compilation has asked of the model's modules: a kept one asks the same again, and sets the same guards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx

from ...patterns import values
from ..declarations import Declaration, Declarations
from .encoding import Unreadable


class Asked(Declarations):
    """Declarations that note what is asked, and what was said."""

    def __init__(self, declarations: Declarations) -> None:
        self._declarations = declarations
        self._noted: dict[tuple[Any, ...], list[Any]] = {}

    @property
    def notes(self) -> list[list[Any]]:
        """For `ask_again`: a node of each stack of modules, what was asked of it, and the answer."""
        return list(self._noted.values())

    def of(self, node: fx.Node, *, guard: bool = False) -> Declaration | None:
        said = self._declarations.of(node, guard=guard)
        return self._note(node, "guarded" if guard else "of", said)

    def hint(self, node: fx.Node) -> Declaration | None:
        return self._note(node, "hint", self._declarations.hint(node))

    def _note(self, node: fx.Node, what: str, said: Declaration | None) -> Declaration | None:
        stack = tuple(key for key, _, _ in values.module_stack(node))
        self._noted.setdefault((stack, what), [node.name, what, _answer(said)])
        return said


def ask_again(notes: Iterable[list[Any]], nodes: Mapping[str, fx.Node], declarations: Declarations) -> None:
    """Asks what `Asked` has noted.

    Raises:
        Unreadable: a module says something else by now.
    """
    for name, what, answer in notes:
        node = nodes[name]
        said = declarations.hint(node) if what == "hint" else declarations.of(node, guard=what == "guarded")
        if _answer(said) != answer:
            raise Unreadable(f"what a module declares has changed, around {name}")


def _answer(said: Declaration | None) -> list[str] | None:
    return None if said is None else [said.layer, said.by]
