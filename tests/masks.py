"""What tests of masks share: the mask of one attention as the analysis sees it, and the table that it is said to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from helpers import Compiled, compiled
from npu_fuse.passes.preserve import restore
from npu_fuse.patterns.mask import Mask, classify
from npu_fuse.patterns.masks.integers import Entry, Length, Linear, Quotient

Tensor = torch.Tensor


@dataclass(frozen=True)
class Analysed:
    """One mask: what it is found to be, and the table [batch, heads, queries, keys] of what it lets be seen."""

    found: Mask
    table: Tensor
    values: dict[fx.Node, Any]

    def described(self) -> Tensor:
        """The table that `found` says it is."""
        return described(self.found, self.values, self.table.shape)


def analysed(
    mask: Callable[..., Tensor],
    q_len: int = 6,
    kv_len: int = 6,
    *inputs: Tensor,
    batch: int = 2,
    heads: int = 2,
    dynamic: bool = False,
) -> Analysed:
    """Compiles attention with `mask(q_len, kv_len, *inputs)`, and analyses the mask in its graph."""

    def attention(q: Tensor, k: Tensor, *inputs: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, k, attn_mask=mask(q.shape[-2], k.shape[-2], *inputs))

    q, k = torch.randn(batch, heads, q_len, 4), torch.randn(batch, heads, kv_len, 4)
    return of_attention(compiled(attention, q, k, *inputs, dynamic=dynamic))[0]


def of_attention(call: Compiled) -> list[Analysed]:
    """The masks of all attentions of a call that have one."""
    values = snapshots(call)
    found = []
    for node in attentions(call.before.graph):
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        if mask is None:
            continue
        q, k = (node.args[i].meta["val"] for i in (0, 1))
        table = values[mask] if values[mask].dtype is torch.bool else values[mask] == 0
        sizes = (*values[node.args[0]].shape[:-1], values[node.args[1]].shape[-2])
        found.append(Analysed(classify(mask, q.shape[-2], k.shape[-2]), table.expand(sizes), values))
    return found


class Snapshots(fx.Interpreter):
    """Keeps the value of every node as it is when it is computed: a cache that is written to later has another."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.taken: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.taken[n] = value.clone() if isinstance(value, Tensor) else value
        return value


def snapshots(call: Compiled) -> dict[fx.Node, Any]:
    """What each node of a call's graph is when the graph runs eagerly."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(call.before.graph, copies))
    restore(graph)
    interpreter = Snapshots(fx.GraphModule(call.before, graph))
    with torch.no_grad():
        interpreter.run(*call.inputs)
    return {node: interpreter.taken[copy] for node, copy in copies.items()}


def attentions(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if "scaled_dot_product_attention" in str(node.target)]


def described(found: Mask, values: dict[fx.Node, Any], shape: torch.Size) -> Tensor:
    """The table that an analysed mask says it is, computed from its description alone."""
    seen = found.visibility
    assert seen is not None
    *_, q_len, kv_len = shape
    query, key = torch.arange(q_len)[:, None], torch.arange(kv_len)
    table = torch.ones(shape, dtype=torch.bool)
    lower, upper = (None if bound is None else number(bound, values) for bound in (seen.band.lower, seen.band.upper))
    if lower is not None:
        table = table & (key >= query + lower)
    if upper is not None:
        table = table & (key <= query + upper)
    if seen.chunk is not None:
        table = table & ((query + (upper or 0)) // seen.chunk == key // seen.chunk)
    if seen.segments is not None:
        segments = values[seen.segments]
        table = table & (segments[..., :, None] == segments[..., None, :]).reshape(-1, 1, q_len, kv_len)
    if seen.padding is not None:
        padding = values[seen.padding.node]
        table = table & (padding.reshape(-1, 1, 1, kv_len) == seen.padding.visible)
    return table


def number(form: Linear, values: dict[fx.Node, Any]) -> int:
    """The value of a form when the graph has run."""
    symbols = {
        node.meta["val"].node.expr: int(value)
        for node, value in values.items()
        if isinstance(node.meta.get("val"), torch.SymInt)
    }
    total = form.constant
    for atom, coefficient in form.terms:
        match atom:
            case Entry(node, index):
                value = int(values[node][tuple(number(at, values) for at in index)])
            case Length(expression):
                value = int(expression.subs(symbols))
            case Quotient(dividend, divisor):
                value = number(dividend, values) // divisor
        total += coefficient * value
    return total
