"""A fused block as MLIR: in torch's dialect, as calls with named arguments, and as linalg that a JIT runs.

    python examples/mlir_export.py [--print]

The block is that of a decoder: a residual add and its norm, a gated unit, and a cache that keeps the last rows. The
script compiles it, writes its graph in three forms, and fails unless

- the first two have each fused op as often as the report does,
- they overwrite the cache, as the block does,
- the third, compiled by MLIR's execution engine and run, gives the numbers of the block run eagerly: its result, and
  what the cache then holds.

Needs ``pip install ".[mlir]"``.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from torch.nn import functional

import npu_fuse
from npu_fuse.runtime.mlir.jit import Jit

TOKENS, WIDTH, INNER, ROWS = 6, 64, 128, 16
# Both sides compute in float32, and sum up in other orders.
MOST_ERROR = 1e-5

console = Console()


class Block(torch.nn.Module):
    """The second half of a decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(WIDTH, eps=1e-6)
        self.gate, self.up = (torch.nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, residual: torch.Tensor, cache: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """x and residual [tokens, width]; what it gives is written to `rows` of cache [rows, width] too."""
        residual = x + residual
        hidden = self.norm(residual)
        out = residual + self.down(functional.silu(self.gate(hidden)) * self.up(hidden))
        cache[rows] = out
        return out


@dataclass(frozen=True)
class Exported:
    """What came of the block.

    Args:
        texts: its graph, by form.
        report: on its compilation.
        off_by: of the result and of the cache, the largest difference between eager and the JIT.
    """

    texts: dict[str, str]
    report: npu_fuse.Report
    off_by: tuple[float, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; return the exit status."""
    parser = argparse.ArgumentParser(description="Write a fused block as MLIR, and run it by MLIR's JIT.")
    parser.add_argument("--print", action="store_true", help="print all of the three texts")
    whole = parser.parse_args(argv).print
    exported = export()
    console.print(exported.report)
    for form, text in exported.texts.items():
        console.rule(form)
        lines = text.splitlines() if whole else list(telling(text))
        console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    console.print(f"the JIT's result and cache are off by {exported.off_by[0]:.1e} and {exported.off_by[1]:.1e}")
    failures = list(check(exported))
    for failure in failures:
        console.print(f"[bold red]FAILED[/] {failure}")
    return 1 if failures else 0


@torch.no_grad()
def export() -> Exported:
    """Compile the block, write it in each form, and run the last one."""
    torch.manual_seed(0)
    block = Block().eval()
    x, residual = torch.randn(2, TOKENS, WIDTH)
    given = x, residual, torch.zeros(ROWS, WIDTH), torch.arange(3, 3 + TOKENS)
    seen: list[tuple[torch.Tensor, ...]] = []
    backend = npu_fuse.Backend(keep_graphs=True)

    def keeping(module: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> object:
        compiled = backend(module, inputs)

        def run(*inputs: torch.Tensor) -> object:
            seen.append(tuple(value.clone() for value in inputs))
            return compiled(*inputs)

        return run

    torch.compile(block, backend=keeping, fullgraph=True)(*(value.clone() for value in given))
    ((_, graph),) = backend.graphs
    texts = {form: npu_fuse.export_mlir(graph, form=form) for form in ("torch", "calls", "linalg")}
    found = Jit(texts["linalg"])(*seen[0])
    eager = block(*given)
    differences = tuple((one - other).abs().max().item() for one, other in zip(found, (eager, given[2]), strict=True))
    return Exported(texts, backend.report, differences)


def fused_ops(text: str) -> Counter[str]:
    """How often each fused op is in a text, as an operator or as a call."""
    declared = dict(re.findall(r'private @([\w.]+)\(.*npu_fuse\.op = "([^"]+)"', text))
    found = Counter(declared[name] for name in re.findall(r"call @([\w.]+)\(", text))
    found.update(name.replace(".", "::", 1) for name in re.findall(r'torch\.operator "torch\.([\w.]+)"', text))
    return found


def telling(text: str) -> Iterator[str]:
    """The lines with fused ops, and those that write."""
    for line in text.splitlines():
        if re.search(r"torch\.operator|call @|private @|overwrite|func\.func|linalg\.matmul|return", line):
            yield line


def check(exported: Exported) -> Iterator[str]:
    """Yield what is not as it should be."""
    if not exported.report.ops:
        yield "nothing is fused"
    for form in ("torch", "calls"):
        text = exported.texts[form]
        if fused_ops(text) != exported.report.ops:
            yield f"{form} has {dict(fused_ops(text))}, and the report {dict(exported.report.ops)}"
        if text.count("torch.overwrite.tensor.contents") != 1:
            yield f"{form} does not write the cache"
    if fused_ops(exported.texts["linalg"]):
        yield "linalg has fused ops"
    for name, error in zip(("result", "cache"), exported.off_by, strict=True):
        if not error <= MOST_ERROR:
            yield f"the JIT's {name} is off by {error:.1e}"


if __name__ == "__main__":
    sys.exit(main())
