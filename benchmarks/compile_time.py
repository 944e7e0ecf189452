"""What a match costs at compile time, ours and one of Inductor's matcher: `python benchmarks/compile_time.py`.

Both work on the graphs of one small Qwen3 in bfloat16, of ever more layers. Ours is all that npu_fuse does to a graph
after AOTAutograd, divided by the sites that became ops. Inductor's is its PatternMatcherPass with the one pattern that
finds the model's norms, and one op in their place; what it costs to trace the pattern at first is left out. Times are
of the processor, so that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.fx_passes.post_grad import remove_noop_ops
from torch._inductor.pattern_matcher import PatternMatcherPass, fwd_only, register_replacement
from transformers import Qwen3Config, Qwen3ForCausalLM

import npu_fuse
from npu_fuse.passes.report import Report
from npu_fuse.runtime.ops.register import register
from peers import EPS, rms_norm

HIDDEN = 64


class Timed(npu_fuse.Backend):
    """A backend that takes the processor's time of its passes."""

    passes = 0.0

    def _optimised(self, *arguments: Any) -> fx.GraphModule:
        start = time.process_time()
        try:
            return super()._optimised(*arguments)
        finally:
            self.passes += time.process_time() - start


def model(layers: int) -> torch.nn.Module:
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    return Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def compile_once(layers: int, backend: Callable[..., Any], *, dynamic: bool) -> float:
    """Seconds of the processor that the whole compilation of one prompt takes."""
    torch._dynamo.reset()
    ids = torch.zeros(2, 16, dtype=torch.long)
    compiled = torch.compile(model(layers), backend=backend, dynamic=dynamic or None)
    start = time.process_time()
    with torch.no_grad():
        compiled(input_ids=ids, use_cache=False)
    return time.process_time() - start


def ours(layers: int, *, dynamic: bool) -> dict[str, float]:
    """Seconds of our passes for a match, and their share of the whole compilation."""
    backend = Timed(strict=True)
    whole = compile_once(layers, backend, dynamic=dynamic)
    report: Report = backend.report
    lowered = sum(site.status == "lowered" for site in report.sites)
    return {"matches": lowered, "per match": backend.passes / lowered, "share": backend.passes / whole}


def inductors(layers: int, *, dynamic: bool) -> dict[str, float]:
    """Seconds of Inductor's pass for a match."""
    patterns, found = _norms(), {}

    def compiler(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        remove_noop_ops(module.graph)
        with timed(found):
            found["matches"] = patterns.apply(module.graph)
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=compiler, inference_compiler=compiler, keep_inference_input_mutations=True)
    compile_once(layers, backend, dynamic=dynamic)
    return {"matches": found["matches"], "per match": found["seconds"] / found["matches"]}


@contextmanager
def timed(into: dict[str, float]) -> Iterator[None]:
    start = time.process_time()
    yield
    into["seconds"] = time.process_time() - start


def _norms() -> PatternMatcherPass:
    def fused(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return torch.ops.npu.npu_rms_norm(x, weight, EPS)[0]  # as the matcher hands eps over as a tensor

    patterns = PatternMatcherPass()
    tensors = [torch.empty(2, 8, HIDDEN, dtype=torch.bfloat16), torch.empty(HIDDEN, dtype=torch.bfloat16)]
    scalars = {"eps": EPS}
    register_replacement(
        rms_norm, fused, [*tensors, EPS], fwd_only, patterns, scalar_workaround=scalars, get_decomp_fn=dict
    )
    return patterns


def main() -> None:
    """Prints a line for each size, and all as JSON."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--layers", type=int, nargs="+", default=[2, 8, 32, 64])
    arguments.add_argument("--json", help="a file to write the numbers to")
    given = arguments.parse_args()
    register(npu_fuse.Target.detect())
    rows = []
    ours(1, dynamic=False)  # what is imported and made at first
    for dynamic in (False, True):
        for layers in given.layers:
            row = {"layers": layers, "dynamic": dynamic}
            row |= {"ours": ours(layers, dynamic=dynamic), "inductor": inductors(layers, dynamic=dynamic)}
            rows.append(row)
            mine, theirs = row["ours"], row["inductor"]
            print(
                f"{'dynamic' if dynamic else 'static'}, {layers} layers: {mine['per match'] * 1e3:.2f} ms for each of"
                f" {mine['matches']} matches, {mine['share']:.1%} of the compilation; Inductor's matcher"
                f" {theirs['per match'] * 1e3:.0f} ms for each of {theirs['matches']},"
                f" {theirs['per match'] / mine['per match']:.0f} times as long",
                flush=True,
            )
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
