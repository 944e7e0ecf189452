"""Replay a draft model that takes embeddings in place of tokens, at any batch size.

    python examples/draft_input_embeds.py [--steps N]

A small draft, as in speculative decoding: for each request a block of positions, whose hidden states come either from
tokens or, through `input_embeds`, from the target model. It is compiled by npu_fuse and captured for batches of 1, 2, 4
and 8; requests come in batches of 1 to 9. The script fails unless every step gives what eager gives.
"""

import argparse
import random
import sys
from collections.abc import Sequence

import torch
from rich.console import Console
from torch import nn

import npu_fuse
from npu_fuse import GraphRunner, InputSpec

HEAD_DIM, HEADS, VOCABULARY, BLOCK = 64, 2, 100, 4
WIDTH = HEAD_DIM * HEADS


class Draft(nn.Module):
    """One layer of attention within a block, and the tokens it proposes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.norm, self.last_norm = nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, input_embeds: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.embed(input_ids) if input_embeds is None else input_embeds
        heads = self.qkv(self.norm(hidden)).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*heads)
        return self.head(self.last_norm(hidden + attended.transpose(1, 2).flatten(2)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the steps; 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args(arguments).steps

    torch.manual_seed(0)
    chance, console = random.Random(0), Console()
    draft = Draft().eval()
    backend = npu_fuse.Backend()
    runner = GraphRunner(
        torch.compile(draft, backend=backend),
        buckets=[1, 2, 4, 8],
        inputs={"input_ids": InputSpec("batch"), "input_embeds": InputSpec("batch")},
    )
    with torch.no_grad():
        ids, embeddings = torch.zeros(1, BLOCK, dtype=torch.long), torch.zeros(1, BLOCK, WIDTH)
        runner.capture({"input_ids": ids}, {"input_ids": ids, "input_embeds": embeddings})
        for _ in range(steps):
            batch = chance.randint(1, 9)
            call = {"input_ids": torch.randint(VOCABULARY, (batch, BLOCK))}
            if chance.random() < 0.5:
                call["input_embeds"] = torch.randn(batch, BLOCK, WIDTH)
            if not torch.allclose(runner(**call), draft(**call), rtol=1e-4, atol=1e-4):
                console.print(f"a batch of {batch} differs from eager")
                return 1
    stats, graphs = runner.stats, runner.memory().graphs
    console.print(f"fused: {dict(backend.reports[0].ops)}")
    console.print(f"{graphs} graphs, {stats.bytes / 1024:.0f} KiB; {stats.replays} replays, {stats.eager} eager calls")
    console.print(f"{stats.padded_share:.0%} of the rows replayed were padding; all {steps} steps are eager's")
    return 0


if __name__ == "__main__":
    sys.exit(main())
