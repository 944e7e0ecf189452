"""Keeps ops whole that AOTAutograd would take apart, and differently on each device.

Before AOTAutograd each becomes an opaque op of ours; what no fusion has used is put back after it, as the op that the
model called. So a CPU and an NPU give the same graph, and one rule sees both.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..patterns.preserved import ORIGINALS, original

aten = torch.ops.aten

_SCHEMAS = {
    "linear": "linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor",
    "matmul": "matmul(Tensor self, Tensor other) -> Tensor",
    "scaled_dot_product_attention": (
        "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
        "float dropout_p=0.0, bool is_causal=False, *, float? scale=None, bool enable_gqa=False) -> Tensor"
    ),
}
_CALLED_AS: Mapping[Any, str] = {
    torch.nn.functional.linear: "linear",
    torch.matmul: "matmul",
    operator.matmul: "matmul",
    "matmul": "matmul",  # a method
    torch.nn.functional.scaled_dot_product_attention: "scaled_dot_product_attention",
    **{op: name for name, op in ORIGINALS.items()},
    **{op.overloadpacket: name for name, op in ORIGINALS.items()},
}


@cache
def _library() -> torch.library.Library:
    """Defines the opaque ops, once a process. They have shapes and no kernel: none is left in a graph that runs."""
    library = torch.library.Library("npu_fuse", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own
    for name, schema in _SCHEMAS.items():
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]  # torch's own
        torch.library.register_fake(f"npu_fuse::{name}", ORIGINALS[name], lib=library)
    return library


def preserve(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a Dynamo graph in which the ops that are to stay whole are opaque; the caller's module is untouched.

    Under autocast nothing is preserved: it is the original ops that autocast knows. So it is with ops of a tensor
    subclass, such as a DTensor, which knows how each of torch's ops is shared among ranks.
    """
    _library()
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    copy = _LazyGraphModule(module, graph)  # AOTAutograd interprets it
    copy.meta.update(module.meta)
    if torch._C._is_any_autocast_enabled() or any(_enters_autocast(node) for node in graph.nodes):
        return copy
    for node in graph.nodes:
        name = _CALLED_AS.get(node.target) if node.op in ("call_function", "call_method") else None
        if name is not None and "out" not in node.kwargs and not _is_random(node) and not _is_of_a_subclass(node):
            node.op = "call_function"
            node.target = getattr(torch.ops.npu_fuse, name).default
    copy.recompile()
    return copy


def _enters_autocast(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "_enter_autocast"


def _is_of_a_subclass(node: fx.Node) -> bool:
    return any(is_traceable_wrapper_subclass(n.meta.get("example_value")) for n in node.all_input_nodes)


def _is_random(node: fx.Node) -> bool:
    """Dropout in attention draws random numbers, in an order that only the original op keeps."""
    dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    return not (isinstance(dropout, (int, float)) and dropout == 0)


def restore(graph: fx.Graph) -> None:
    """Puts back the ops of the model where no fusion has taken them."""
    for node in graph.nodes:
        node.target = original(node.target)
