"""Ranges for a profiler: each fused op runs within one that bears the name of its site."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

# Set by `fuse` on the nodes that it makes for a site.
SITE = "npu_fuse_site"


def add_ranges(graph: fx.Graph, ops: Collection[object]) -> None:
    """Wraps each call of one of `ops` that stands for a site in a range `qkv: model.layers.0.self_attn`.

    Nothing may be removed or moved in the graph afterwards.
    """
    profiler = torch.ops.profiler
    for node in list(graph.nodes):
        if node.target not in ops or SITE not in node.meta:
            continue
        with graph.inserting_before(node):
            handle = graph.call_function(profiler._record_function_enter_new.default, (node.meta[SITE], None))
        with graph.inserting_after(node):
            graph.call_function(profiler._record_function_exit._RecordFunction, (handle,))
