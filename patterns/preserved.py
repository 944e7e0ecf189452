"""The ops that passes/preserve keeps whole: in a graph under recognition each is an opaque op of ours."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

aten = torch.ops.aten

# By the name that the opaque op has under `torch.ops.npu_fuse`.
ORIGINALS: Mapping[str, Any] = {
    "linear": aten.linear.default,
    "matmul": aten.matmul.default,
    "scaled_dot_product_attention": aten.scaled_dot_product_attention.default,
}
_BY_TARGET = {f"npu_fuse.{name}.default": op for name, op in ORIGINALS.items()}


@cache
def original(target: Any) -> Any:
    """The op that the model called, of an opaque one; any other target as it is."""
    return _BY_TARGET.get(str(target), target)
