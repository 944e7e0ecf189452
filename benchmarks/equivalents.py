"""The fusions of a decoder layer of Qwen3 as Inductor's matcher can be told them: one pattern each, in one spelling.

Each match becomes the same number of calls as npu_fuse makes of the site. Only the ops' shapes are there: the graphs
are not run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._inductor.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement
from torch.nn.functional import linear, silu

from peers import EPS, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, norm_then_rotary, rms_norm

__all__ = ["EQUIVALENTS", "HIDDEN", "INTERMEDIATE", "matcher"]

HIDDEN, INTERMEDIATE = NUM_HEADS * HEAD_DIM, 128

_SCHEMAS = {
    "prologue": (
        "(Tensor x, Tensor q_proj, Tensor k_proj, Tensor v_proj, Tensor q_weight, Tensor k_weight, Tensor cos,"
        " Tensor sin, float eps) -> (Tensor, Tensor, Tensor)"
    ),
    "add_norm": "(Tensor x1, Tensor x2, Tensor weight, float eps) -> (Tensor, Tensor)",
    "norm": "(Tensor x, Tensor weight, float eps) -> Tensor",
    "gated": "(Tensor x, Tensor gate_proj, Tensor up_proj) -> Tensor",
}


def _heads(x: Tensor, projection: Tensor) -> Tensor:
    return linear(x, projection).view(*x.shape[:-1], -1, HEAD_DIM)


def prologue(
    x: Tensor,
    q_proj: Tensor,
    k_proj: Tensor,
    v_proj: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of attention: three projections of x, norms and rotations of q and k. All are [batch, heads, …]."""
    q = norm_then_rotary(_heads(x, q_proj), q_weight, cos, sin, eps)
    k = norm_then_rotary(_heads(x, k_proj), k_weight, cos, sin, eps)
    return q, k, _heads(x, v_proj).transpose(1, 2)


def add_norm(x1: Tensor, x2: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x1 + x2
    return rms_norm(total, weight, eps), total


def gated(x: Tensor, gate_proj: Tensor, up_proj: Tensor) -> Tensor:
    return silu(linear(x, gate_proj)) * linear(x, up_proj)


@dataclass(frozen=True)
class Equivalent:
    """One pattern.

    Args:
        pattern: the function that is traced.
        shapes: of the tensors that it is traced from.
        has_eps: whether its last argument is eps.
    """

    pattern: Callable[..., Any]
    shapes: Sequence[tuple[int, ...]]
    has_eps: bool = True


_X, _KV = (2, 16, HIDDEN), (NUM_KV_HEADS * HEAD_DIM, HIDDEN)
_TABLE, _MLP = (2, 1, 16, HEAD_DIM), (INTERMEDIATE, HIDDEN)

# The larger ones come first: a norm behind an add is no norm alone.
EQUIVALENTS = {
    "prologue": Equivalent(
        prologue, (_X, (HIDDEN, HIDDEN), _KV, _KV, (HEAD_DIM,), (HEAD_DIM,), _TABLE, _TABLE)
    ),
    "add_norm": Equivalent(add_norm, (_X, _X, (HIDDEN,))),
    "norm": Equivalent(rms_norm, (_X, (HIDDEN,))),
    "gated": Equivalent(gated, (_X, _MLP, _MLP), has_eps=False),
}


@cache
def _library() -> torch.library.Library:
    """The ops that stand for kernels; each has the shapes of its pattern."""
    library = torch.library.Library("equivalents", "FRAGMENT")
    for name, schema in _SCHEMAS.items():
        library.define(name + schema)
        torch.library.register_fake(f"equivalents::{name}", EQUIVALENTS[name].pattern, lib=library)
    return library


def matcher(names: Sequence[str]) -> tuple[list[PatternMatcherPass], Counter[str]]:
    """Passes that find and replace, in order, and what counts the matches of each as they are found."""
    _library()
    found = Counter[str]()
    passes = []
    for name in names:
        equivalent = EQUIVALENTS[name]
        op = getattr(torch.ops.equivalents, name)

        def count(_: Any, name: str = name) -> bool:
            found[name] += 1
            return True

        def replacement(*arguments: Any, op: Any = op, has_eps: bool = equivalent.has_eps) -> Any:
            # The matcher hands eps over as a tensor.
            return op(*arguments[:-1], EPS) if has_eps else op(*arguments)

        tensors = [torch.empty(shape, dtype=torch.bfloat16) for shape in equivalent.shapes]
        scalars = {"eps": EPS} if equivalent.has_eps else {}
        passes.append(PatternMatcherPass())
        register_replacement(
            equivalent.pattern,
            replacement,
            [*tensors, *scalars.values()],
            fwd_only,
            passes[-1],
            extra_check=count,
            scalar_workaround=scalars,
            get_decomp_fn=dict,
        )
    return passes, found
