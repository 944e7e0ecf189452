"""Calls ops that write undeclared by ops that say so, before AOTAutograd has to know what is written."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from ..runtime.effects import Effect, effect_of


def tell_writes(graph: fx.Graph) -> None:
    """Puts ops that say what they write in place of those that don't, in a Dynamo graph.

    A result that is an argument itself becomes that argument. `in_place` puts the ops themselves back.
    """
    for node in list(graph.nodes):
        effect = effect_of(node.target) if node.op == "call_function" else None
        if effect is not None and effect.truthful is not None:
            _tell(node, effect)


def _tell(node: fx.Node, effect: Effect) -> None:
    assert effect.truthful is not None
    results = len(effect.op._schema.returns)
    items = [node] if results == 1 else list(node.users)
    if results > 1 and any(user.target is not operator.getitem for user in items):
        return  # the results are handed on as they are; registered as an effect, the op is kept
    kept = [i for i in range(results) if i not in effect.returns]
    for item in items:
        index: Any = 0 if item is node else item.args[1]
        if index in effect.returns:
            item.replace_all_uses_with(_argument(node, effect, effect.returns[index]))
        elif len(kept) == 1:
            item.replace_all_uses_with(node)
        else:
            item.args = (node, kept.index(index))
        if item is not node and not item.users:
            node.graph.erase_node(item)
    node.target = effect.truthful


def _argument(node: fx.Node, effect: Effect, name: str) -> fx.Node:
    if name in node.kwargs:
        return node.kwargs[name]  # type: ignore[return-value]  # a tensor
    place = [argument.name for argument in effect.op._schema.arguments].index(name)
    return node.args[place]  # type: ignore[return-value]  # likewise
