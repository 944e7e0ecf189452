"""How long a second start takes to compile, against the first: `python benchmarks/compile_cache.py [--layers 16]`.

Each start is a process of its own with one cache, after one start that is thrown away, so that all of them find the
files of torch and transformers in memory. Told apart are the passes, which the cache is for, and all of the
compilation, most of which is torch's own: Dynamo and AOTAutograd run again in each process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "compile_cache.json"
_STARTS = 3


def main() -> None:
    """Prints the two ratios, medians of a few starts."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--layers", type=int, default=16)
    arguments.add_argument("--folder", help="of the cache: then this process is one start, and says its times as JSON")
    arguments.add_argument("--json", type=Path, default=RESULTS, help="a file to keep the times in")
    given = arguments.parse_args()
    if given.folder is not None:
        print(json.dumps(start(given.layers, given.folder)))
        return
    firsts, seconds = [], []
    with tempfile.TemporaryDirectory() as unread:
        run(given.layers, unread)
    for _ in range(_STARTS):
        with tempfile.TemporaryDirectory() as folder:
            firsts.append(run(given.layers, folder, "1 kept"))
            seconds.append(run(given.layers, folder, "1 taken"))
    kept = {}
    for what in ("passes", "compilation"):
        first, second = (statistics.median(times[what] for times in starts) for starts in (firsts, seconds))
        print(f"{what}: first start {first:.2f} s, second start {second:.2f} s, ratio {second / first:.2f}")
        kept[what] = {"first": round(first, 3), "second": round(second, 3), "ratio": round(second / first, 2)}
    given.json.write_text(json.dumps({"layers": given.layers, "seconds": kept}, indent=1) + "\n")


def run(layers: int, folder: str, expected: str | None = None) -> dict[str, float]:
    """One start in a process of its own."""
    command = [sys.executable, str(Path(__file__)), "--layers", str(layers), "--folder", folder]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    times: dict[str, float] = json.loads(done.stdout)
    if expected is not None and times.pop("cache") != expected:
        raise RuntimeError(f"the cache should have said {expected}")
    return times


def start(layers: int, folder: str) -> dict[str, float | str | None]:
    """Compiles one prefill of a small Qwen3, and its times in seconds."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    import npu_fuse

    config = Qwen3Config(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=1000,
    )
    model = Qwen3ForCausalLM(config).bfloat16().eval()
    backend = npu_fuse.Backend(cache=folder, strict=True)
    compiled = torch.compile(model, backend=backend)
    begun = time.perf_counter()
    with torch.no_grad():
        compiled(torch.zeros(2, 16, dtype=torch.long), use_cache=False)
    took = time.perf_counter() - begun
    return {"passes": backend.report.seconds, "compilation": took, "cache": backend.report.cache}


if __name__ == "__main__":
    main()
