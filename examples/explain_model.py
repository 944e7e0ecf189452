"""From a model of your own to its report, from a refusal to its reason, and from there to the fix.

    python examples/explain_model.py [--html FILE]

A block is written as many are. Three of its places don't fuse, and the report says of each what it stumbled over:

* its norm adds eps to the root instead of what is under it,
* its gate and up projections are laid out in turn, as one weight with a column of each after the other,
* its attention caps its scores softly.

The first two are put right by what the reason says. The third is what the model computes: it stays, and so does its
reason. The script fails unless the reports say just that.

Random weights, no downloads, seconds on a CPU.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import nn
from torch.nn import functional

import npu_fuse

HIDDEN, HEADS, HEAD_DIM, TOKENS = 64, 4, 16, 24

console = Console()


class Norm(nn.Module):
    """An RMSNorm; `eps` under the root, or added to it."""

    def __init__(self, is_right: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN) + 0.5)
        self.is_right = is_right

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        square = wide.pow(2).mean(-1, keepdim=True)
        root = (square + 1e-6).sqrt() if self.is_right else square.sqrt() + 1e-6
        return self.weight * (wide / root).to(x.dtype)


class Attention(nn.Module):
    """Causal attention whose scores are capped smoothly."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HEADS * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
        scores = 50 * torch.tanh(q @ k.transpose(-1, -2) * HEAD_DIM**-0.5 / 50)
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        weights = scores.masked_fill(~causal, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """A gated unit; its gate and up are halves of one projection, or take turns in it."""

    def __init__(self, is_right: bool) -> None:
        super().__init__()
        self.gate_up = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.is_right = is_right

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.gate_up(x)
        gate, up = both.chunk(2, -1) if self.is_right else (both[..., ::2], both[..., 1::2])
        return self.down(functional.silu(gate) * up)


class Block(nn.Module):
    """One layer of a decoder."""

    def __init__(self, is_right: bool) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = Norm(is_right), Attention(), Mlp(is_right)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.mlp(self.norm(x))


def report(is_right: bool) -> npu_fuse.Report:
    """What npu_fuse makes of the block."""
    torch.manual_seed(0)
    block = Block(is_right).eval().bfloat16()
    return npu_fuse.explain(block, torch.randn(2, TOKENS, HIDDEN, dtype=torch.bfloat16))


def reasons(found: npu_fuse.Report) -> dict[str, str]:
    """Why a kind did not fuse, by kind."""
    return {site.kind: site.reason for site in found.sites if site.reason is not None}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--html", type=Path, help="write the second report as a page")
    html = parser.parse_args(arguments).html
    before, after = report(is_right=False), report(is_right=True)
    for title, found in (("as it was written", before), ("with two of three put right", after)):
        console.rule(title)
        console.print(found)
    if html is not None:
        html.write_text(after.to_html(), encoding="utf-8")
    is_told = "eps" in reasons(before).get("rms_norm", "") and "take turns" in reasons(before).get("glu", "")
    is_left = reasons(after).keys() == {"attention"} and "cap" in reasons(after)["attention"]
    is_fused = set(after.ops) >= {"npu::npu_swiglu", "npu::npu_add_rms_norm"}
    return 0 if is_told and is_left and is_fused else 1


if __name__ == "__main__":
    sys.exit(main())
