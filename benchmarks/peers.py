"""What others recognise in the same graphs: patterns as they spell them, and the passes of npugraph_ex themselves.

A literal pattern is traced once from example tensors, then searched for node by node by Inductor's matcher, which
traces it again with the shapes and dtypes found. It sees a graph at its best: without no-ops, and with any eps.

The patterns are written here anew, after those of

    torchair     RMSNorm and RoPE of its joint-graph passes (torch_npu 2.13, `npu_fx_passes`). It traces its RMSNorm
                 from float32 tensors, whose casts to float32 vanish from the pattern; from bfloat16 ones it is another.
    vLLM         its fusion of QK-norm and RoPE behind one matmul, in the native spelling of its layers
    per tensor   the norm and rotation of one tensor as Qwen3 in transformers spells them
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.fx_passes.post_grad import remove_noop_ops
from torch._inductor.pattern_matcher import Match, PatternMatcherPass, fwd_only, register_replacement

__all__ = [
    *("LITERAL", "NPUGRAPH_EX", "PEERS", "Literal"),
    *("found_by_literal", "found_by_npugraph_ex", "through_npugraph_ex"),
]

Looked = TypeVar("Looked")

NPUGRAPH_EX = "npugraph_ex"

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16  # of nearly all models here; vLLM registers its pattern for each geometry
EPS = 1e-5  # found as a number of its own, so that any other stands for it


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def norm_then_rotary(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    return rotary(rms_norm(x, weight, eps).transpose(1, 2), cos, sin)


def qk_norm_rotary(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.view(*x.shape[:-1], -1, HEAD_DIM).to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return wide.to(x.dtype) * weight

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)

    kv_size = NUM_KV_HEADS * HEAD_DIM
    q, k, v = qkv.split([NUM_HEADS * HEAD_DIM, kv_size, kv_size], dim=-1)
    return rotated(normed(q, q_weight)), rotated(normed(k, k_weight)), v


@dataclass(frozen=True)
class Literal:
    """One pattern of a peer.

    Args:
        kind: what it finds.
        pattern: the function that is traced.
        shapes: of the tensors that it is traced from.
        dtype: likewise.
        sites: how many sites of the kind one match is.
    """

    kind: str
    pattern: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.bfloat16
    sites: int = 1

    def count(self, graph: fx.Graph) -> int:
        """How many sites it finds in a graph, which stays as it is."""
        return len(self._matches(graph)) * self.sites

    def fuse(self, graph: fx.Graph) -> None:
        """Puts one call in the place of all calls of each match. The graph can be counted then, and not run."""
        for match in self._matches(graph):
            inside, outputs = set(match.nodes), [node for node in match.output_nodes() if node is not None]
            inputs = dict.fromkeys(read for node in match.nodes for read in node.all_input_nodes if read not in inside)
            with graph.inserting_before(outputs[0]):
                call = graph.call_function(fused, tuple(inputs))
                results = [graph.call_function(operator.getitem, (call, i)) for i in range(len(outputs))]
            call.meta["val"] = [output.meta["val"] for output in outputs]
            for output, result in zip(outputs, results, strict=True):
                result.meta["val"] = output.meta["val"]
                output.replace_all_uses_with(result)
            graph.eliminate_dead_code()

    def _matches(self, graph: fx.Graph) -> list[Match]:
        patterns, matches = _matcher(self)
        matches.clear()
        patterns.apply(graph)
        return list(matches.values())


def fused(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What stands for a kernel of a peer."""
    raise NotImplementedError


@functools.cache
def _matcher(literal: Literal) -> tuple[PatternMatcherPass, dict[fx.Node, Match]]:
    """A pass that replaces nothing, and to where it puts each match, by its first result."""
    matches: dict[fx.Node, Match] = {}

    def note(match: Match) -> bool:
        matches.update({node: match for node in match.output_nodes()[:1] if node is not None})
        return False

    tensors = [torch.empty(shape, dtype=literal.dtype) for shape in literal.shapes]
    scalars = {"eps": EPS} if "eps" in inspect.signature(literal.pattern).parameters else {}
    patterns = PatternMatcherPass()
    register_replacement(
        literal.pattern,
        literal.pattern,
        [*tensors, *scalars.values()],
        fwd_only,
        patterns,
        extra_check=note,
        scalar_workaround=scalars,
        get_decomp_fn=dict,  # none, as the graph has none; with Inductor's, nothing would be found at all
    )
    return patterns, matches


_WIDTH, _PACKED = NUM_HEADS * HEAD_DIM, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
_WEIGHT, _TABLE, _HALF_TABLE = (HEAD_DIM,), (2, 1, 8, HEAD_DIM), (2, 8, 1, HEAD_DIM // 2)
_NORM = ((2, 8, _WIDTH), (_WIDTH,))

# By peer; one that has several spellings of a kind is as many peers.
LITERAL: dict[str, tuple[Literal, ...]] = {
    "torchair": (
        Literal("rms_norm", rms_norm, _NORM, torch.float32),
        Literal("rope", rotary, ((2, NUM_HEADS, 8, HEAD_DIM), _TABLE, _TABLE)),
    ),
    "torchair, traced in bfloat16": (Literal("rms_norm", rms_norm, _NORM),),
    "vLLM": (
        Literal(
            "norm_rope_chain",
            qk_norm_rotary,
            ((2, 8, _PACKED), _WEIGHT, _WEIGHT, _HALF_TABLE, _HALF_TABLE),
            sites=2,
        ),
    ),
    "per tensor": (
        Literal("norm_rope_chain", norm_then_rotary, ((2, 8, NUM_HEADS, HEAD_DIM), _WEIGHT, _TABLE, _TABLE)),
    ),
}
PEERS = (NPUGRAPH_EX, *LITERAL)


def found_by_literal(module: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[str, Counter[str]]:
    """How many sites of each kind each peer's patterns find in AOTAutograd's graph of one of Dynamo's."""
    found = {peer: Counter[str]() for peer in LITERAL}
    for graph in _inference_graphs(module, example_inputs):
        remove_noop_ops(graph)
        for peer, patterns in LITERAL.items():
            found[peer].update({literal.kind: literal.count(graph) for literal in patterns})
    return found


def _inference_graphs(module: fx.GraphModule, example_inputs: Sequence[Any]) -> list[fx.Graph]:
    graphs: list[fx.Graph] = []

    def keep(graph_module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(graph_module.graph)
        return make_boxed_func(graph_module.forward)

    backend = aot_autograd(fw_compiler=keep, inference_compiler=keep, keep_inference_input_mutations=True)
    backend(module, example_inputs)
    return graphs


# What one fused op of npugraph_ex stands for.
FUSED_OPS = {
    "npu_rms_norm": "rms_norm",
    "npu_gemma_rms_norm": "rms_norm",
    "npu_add_rms_norm": "add_rms_norm",
    "npu_add_rms_norm_cast": "add_rms_norm",
    "npu_add_rms_norm_quant": "add_rms_norm",
    "npu_add_rms_norm_dynamic_quant": "add_rms_norm",
    "npu_rotary_mul": "rope",
    "npu_apply_rotary_pos_emb": "rope",
    "npu_swiglu": "glu:silu",
}


def found_by_npugraph_ex(module: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[str, Counter[str]]:
    """How many fused ops npugraph_ex's own passes bring into its graph of one of Dynamo's, by what they stand for."""

    def ops(graph: fx.Graph) -> Counter[str | None]:
        return Counter(getattr(node.target, "_opname", None) for node in graph.nodes)

    before, after = through_npugraph_ex(module, example_inputs, ops)
    found: Counter[str] = Counter()
    for op, count in (after - before).items():
        if op in FUSED_OPS:
            found[FUSED_OPS[op]] += count
    return {NPUGRAPH_EX: found}


def through_npugraph_ex(
    module: fx.GraphModule, example_inputs: Sequence[Any], look: Callable[[fx.Graph], Looked]
) -> list[Looked]:
    """What `look` sees in npugraph_ex's graph of one of Dynamo's, before its passes and after.

    Its compilation runs on a fake NPU as far as on a real one; what it gives can't be called there.
    """
    import npugraph_ex

    seen: list[Looked] = []

    def stage(graph_module: fx.GraphModule, *_: Any) -> None:
        seen.append(look(graph_module.graph))

    config = npugraph_ex.CompilerConfig()
    config.post_grad_custom_pre_pass = stage
    config.post_grad_custom_post_pass = stage
    npugraph_ex.get_npu_backend(compiler_config=config)(module, example_inputs)
    return seen
