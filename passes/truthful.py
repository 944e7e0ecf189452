"""Tells AOTAutograd what it can't see: what ops write undeclared, and which results are arguments themselves."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..runtime.effects import Effect, effect_of

# Dropout by the names of its arguments.
_DROPOUTS: dict[Any, tuple[str, ...]] = {
    torch.nn.functional.dropout: ("input", "p", "training"),
    torch.dropout: ("input", "p", "train"),
}


def tell_writes(graph: fx.Graph) -> None:
    """Puts ops that say what they write in place of those that don't, in a Dynamo graph.

    A result that is an argument itself becomes that argument. `in_place` puts the ops themselves back.
    """
    for node in list(graph.nodes):
        if node.target in _DROPOUTS and _drops_nothing(node):
            node.replace_all_uses_with(_given(node, "input"))
            graph.erase_node(node)
            continue
        effect = effect_of(node.target) if node.op == "call_function" else None
        if effect is not None and effect.truthful is not None:
            _tell(node, effect)


def _drops_nothing(node: fx.Node) -> bool:
    """Whether dropout gives its input itself; AOTAutograd takes it for a new tensor (pytorch/pytorch#195422)."""
    p, training = _given(node, "p", 0.5), _given(node, _DROPOUTS[node.target][2], True)
    return training is False or (isinstance(p, (int, float)) and p == 0)


def _given(node: fx.Node, name: str, default: Any = None) -> Any:
    place = _DROPOUTS[node.target].index(name)
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


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
