"""What a match costs at compile time, ours and one of Inductor's matcher: `python benchmarks/compile_time.py`.

Both work on the graphs of one small Qwen3 in bfloat16, of ever more layers. Ours is all that npu_fuse does to a graph
after AOTAutograd, divided by the sites that became ops. Inductor's is its PatternMatcherPass with one pattern for each
fusion of a layer (`equivalents.py`); what it costs to trace the patterns at first is left out. Times are of the
processor, and the least of a few, so that other work on the machine counts little. Kept in `results/compile_time.json`,
where rows that aren't measured again stay.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.fx_passes.post_grad import remove_noop_ops
from transformers import Qwen3Config, Qwen3ForCausalLM

from equivalents import EQUIVALENTS, HIDDEN, INTERMEDIATE, matcher
from npu_fuse.passes.report import Report
from peers import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS
from timed import Timed

RESULTS = Path(__file__).parent / "results" / "compile_time.json"
LAYERS = (2, 8, 28, 32, 64, 128)


def model(layers: int) -> torch.nn.Module:
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
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
    """Seconds of our passes for each site that became an op, and their share of the whole compilation."""
    backend = Timed(strict=True)
    whole = compile_once(layers, backend, dynamic=dynamic)
    report: Report = backend.report
    lowered = sum(site.status == "lowered" for site in report.sites)
    return {"sites": lowered, "seconds": backend.passes, "whole": whole}


def inductors(layers: int, *, dynamic: bool) -> dict[str, dict[str, float]]:
    """Seconds of Inductor's pass of each pattern, and what it finds."""
    passes, found = matcher(list(EQUIVALENTS))
    seconds = Counter[str]()

    def compiler(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        # The ops that stand for kernels can't run.
        runs = fx.Graph()
        runs.output(runs.graph_copy(module.graph, {}))
        remove_noop_ops(module.graph)
        for name, patterns in zip(EQUIVALENTS, passes, strict=True):
            with timed(seconds, name):
                patterns.apply(module.graph)
        return make_boxed_func(fx.GraphModule(module, runs).forward)

    backend = aot_autograd(fw_compiler=compiler, inference_compiler=compiler, keep_inference_input_mutations=True)
    compile_once(layers, backend, dynamic=dynamic)
    return {name: {"matches": found[name], "seconds": seconds[name]} for name in EQUIVALENTS}


@contextmanager
def timed(into: Counter[str], name: str) -> Iterator[None]:
    start = time.process_time()
    yield
    into[name] += time.process_time() - start


def least(measured: Callable[[], dict[str, Any]], times: int) -> dict[str, Any]:
    """The least number of each that some measurements give, part by part."""
    first, *others = (measured() for _ in range(times))

    def smaller(a: Any, b: Any) -> Any:
        return {key: smaller(a[key], b[key]) for key in a} if isinstance(a, dict) else min(a, b)

    for other in others:
        first = smaller(first, other)
    return first


def told(row: Mapping[str, Any]) -> str:
    """One row in words: ratios but for what Inductor's own matches take."""
    mine, theirs, layers = row["ours"], row["inductor"], row["layers"]
    each = mine["seconds"] / mine["sites"]
    matches = sum(pattern["matches"] for pattern in theirs.values())
    taken = sum(pattern["seconds"] for pattern in theirs.values())
    by_kind = ", ".join(
        f"{name} {pattern['seconds'] / pattern['matches'] / each:.0f}" if pattern["matches"] else f"{name} none"
        for name, pattern in theirs.items()
    )
    return (
        f"{'dynamic' if row['dynamic'] else 'static'}, {layers} layers: {mine['sites'] / layers:.0f} sites a layer,"
        f" {each * 1e3:.2f} ms each, {mine['seconds'] / mine['whole']:.1%} of the compilation; as many of ours as one"
        f" match of Inductor's takes: {taken / matches / each:.0f} ({by_kind}); Inductor's {matches / layers:.1f}"
        f" fusions of a layer take {taken / mine['seconds']:.1f} times as long as all of ours"
    )


def main() -> None:
    """Prints a line for each size, and keeps all as JSON."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--layers", type=int, nargs="*", default=LAYERS)
    arguments.add_argument("--dynamic-layers", type=int, nargs="*", default=LAYERS)
    arguments.add_argument("--times", type=int, default=3, help="that each is measured")
    given = arguments.parse_args()
    kept: list[dict[str, Any]] = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    rows = {(row["dynamic"], row["layers"]): row for row in kept}
    for dynamic, sizes in ((False, given.layers), (True, given.dynamic_layers)):
        ours(2, dynamic=dynamic)  # what is imported and made at first
        for layers in sizes:
            row: dict[str, Any] = {"layers": layers, "dynamic": dynamic}
            for name, measured in (("ours", ours), ("inductor", inductors)):
                row[name] = least(partial(measured, layers, dynamic=dynamic), given.times)
            rows[dynamic, layers] = row
            print(told(row), flush=True)
            content = {"rows": [rows[place] for place in sorted(rows)]}
            RESULTS.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
