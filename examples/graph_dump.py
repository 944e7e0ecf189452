"""Look at one layer of Qwen3 before and after, and run what was dumped.

    python examples/graph_dump.py [--to FOLDER]

Every stage of a compilation can be kept as a Python file that runs alone, with the module and the line of the model
that wrote each node: `Options(dump=FOLDER)`, or NPU_FUSE_DUMP=FOLDER for a program that you can't change.

The script prints the attention of the layer as the model spells it and as it runs. Then it runs the dumped file of the
model's own graph and that of the last stage, and fails unless both give the same within the rounding of bfloat16, the
last with a third of the launches.

Random weights, no downloads, seconds on a CPU.
"""

import argparse
import runpy
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.syntax import Syntax
from transformers import Qwen3Config, Qwen3ForCausalLM

import npu_fuse

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 256}
BOUND = 0.02  # of the largest logit: eager rounds each step to a 256th

console = Console()


def dump(folder: Path) -> npu_fuse.Report:
    """Compiles one layer, and leaves its stages in a folder."""
    torch.manual_seed(0)
    config = Qwen3Config(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, **SIZES)
    model = Qwen3ForCausalLM(config).eval().bfloat16()
    backend = npu_fuse.Backend(dump=folder, strict=True)
    with torch.no_grad():
        torch.compile(model, backend=backend)(torch.arange(16).unsqueeze(0), use_cache=False)
    return backend.report


def outputs(file: Path) -> list[torch.Tensor]:
    """What a dumped file computes, on inputs drawn from one seed."""
    program = runpy.run_path(str(file))
    torch.manual_seed(0)
    with torch.no_grad():
        found = program["Graph"]()(*program["inputs"]())
    return [value for value in found if isinstance(value, torch.Tensor)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, help="keep the files in this folder")
    to = parser.parse_args(arguments).to
    with tempfile.TemporaryDirectory() as temporary:
        folder = to if to is not None else Path(temporary)
        report = dump(folder)
        for kind in ("qkv", "attention"):
            (site,) = (site for site in report.sites if site.kind == kind)
            console.rule(f"{kind} of {site.module}, as the model spells it")
            console.print(Syntax("\n".join(site.before), "python", word_wrap=True))
            console.rule(f"and as it runs: {site.op}")
            console.print(Syntax("\n".join(site.after), "python", word_wrap=True))
        (graph,) = sorted(folder.glob("graph_*"))[-1:]
        stages = sorted(graph.glob("*.py"))
        console.rule("files")
        console.print("\n".join(f"{path.name}: {len(path.read_text().splitlines())} lines" for path in stages))
        (wanted,), (found,) = outputs(stages[1]), outputs(stages[-1])
        error = ((found.double() - wanted.double()).abs().max() / wanted.double().abs().max()).item()
        console.print(f"{stages[-1].name} differs from {stages[1].name} by {error:.2%} of the largest logit")
        console.print(report.summary())
    is_right = error < BOUND and report.launches_after * 3 < report.launches_before
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
