"""A gated delta net that decodes on its states in place: tiny Qwen3-Next, random, prefill and then token by token.

    python examples/gdn_decode.py [--steps N]

Each of its linear layers keeps the last columns of a causal convolution, which transformers writes anew in each step:
it joins state and token, cuts, copies and convolves. Compiled by npu_fuse that is one op, which writes the state.
``conv_state.adopt`` moves the states of the cache once, into memory that the kernel can use.

The same tokens run in float32, which is the truth here, then in bfloat16, eagerly and compiled. The script prints the
convolution of one layer before and after, and fails unless every one of them is lowered, no state is copied, the first
layer's state is eager's bit for bit after every step, and all other states and the logits are as near to the truth as
eager's are.

Needs ``pip install ".[demo]"``, and no weights.
"""

import argparse
import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from rich.console import Console
from rich.table import Table
from torch import fx
from transformers import PreTrainedModel, Qwen3NextConfig, Qwen3NextForCausalLM, StaticCache

import npu_fuse
from npu_fuse.runtime import conv_state

LAYERS = ["linear_attention", "linear_attention", "full_attention"]
BATCH, PROMPT, VOCABULARY = 2, 9, 128

# How much farther from the truth than eager's values the compiled ones may be: both are a matter of rounding.
MOST_ERROR = 1.25

console = Console()


@dataclass(frozen=True)
class Step:
    """What one call leaves behind.

    Args:
        logits: of its last token, [batch, vocabulary].
        columns: the state of each convolution, [batch, channels, columns].
        memories: the state of each delta rule, [batch, heads, key_dim, value_dim], in float32.
    """

    logits: torch.Tensor
    columns: list[torch.Tensor]
    memories: list[torch.Tensor]


NAMES = tuple(field.name for field in fields(Step))


@dataclass(frozen=True)
class Runs:
    """The same steps in float32, in bfloat16, and compiled."""

    truth: list[Step]
    eager: list[Step]
    compiled: list[Step]

    def error(self, steps: list[Step], name: str) -> float:
        """The root of the mean squared difference from the truth, over all steps and layers."""
        found, wanted = (torch.cat([_flat(getattr(step, name)) for step in each]) for each in (steps, self.truth))
        return (found - wanted).square().mean().sqrt().item()


def _flat(values: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.flatten().float() for value in (values if isinstance(values, list) else [values])])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; return the exit status."""
    parser = argparse.ArgumentParser(description="Decode with states in place, and compare them with eager's.")
    parser.add_argument("--steps", type=int, default=20)
    tokens = prompt(parser.parse_args(argv).steps)
    backend = npu_fuse.Backend(keep_graphs=True)
    runs = compare(tiny(), tokens, backend)
    _, decode = backend.graphs
    for title, module in zip(("before", "after"), decode, strict=True):
        console.print(f"[bold]A convolution of the decode step, {title}[/]")
        for line in convolution(module.graph):
            console.print(f"    {line}", markup=False, highlight=False, soft_wrap=True)
    for phase, report in zip(("prefill", "decode step"), backend.reports, strict=True):
        console.print(f"{phase}: {report.launches_before} launches became {report.launches_after}")
    console.print(table(runs))
    failures = [*check_graphs(backend), *check_values(runs)]
    for failure in failures:
        console.print(f"[bold red]FAILED[/] {failure}")
    return 1 if failures else 0


def tiny() -> PreTrainedModel:
    """A Qwen3-Next of three layers, in float32."""
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=len(LAYERS),
        layer_types=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        mlp_only_layers=list(range(len(LAYERS))),
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return Qwen3NextForCausalLM(config).eval()


def prompt(steps: int) -> torch.Tensor:
    """Token ids of a prompt and of what is decoded behind it."""
    return torch.randint(3, VOCABULARY, (BATCH, PROMPT + steps), generator=torch.Generator().manual_seed(1))


def compare(model: PreTrainedModel, tokens: torch.Tensor, backend: npu_fuse.Backend) -> Runs:
    """All steps three times. The model is left in bfloat16, whose weights are those of the truth too."""
    model.to(torch.bfloat16)
    truth = list(run(copy.deepcopy(model).float(), tokens))
    return Runs(truth, eager=list(run(model, tokens)), compiled=list(run(model, tokens, backend)))


@torch.no_grad()
def run(model: PreTrainedModel, tokens: torch.Tensor, backend: npu_fuse.Backend | None = None) -> Iterator[Step]:
    """The prompt in one call, then each token in one of its own."""
    cache = StaticCache(config=model.config, max_cache_len=PROMPT + tokens.shape[1])
    call = model
    if backend is not None:
        model(tokens[:, :1], past_key_values=cache)  # makes the states
        cache.reset()
        conv_state.adopt(cache)
        call = torch.compile(model, backend=backend, fullgraph=True)
    linear = [layer for layer, kind in zip(cache.layers, LAYERS, strict=True) if kind == "linear_attention"]
    for part in (tokens[:, :PROMPT], *tokens[:, PROMPT:].split(1, dim=1)):
        logits = call(part, past_key_values=cache).logits[:, -1]
        columns = [layer.conv_states[0].clone() for layer in linear]
        yield Step(logits.clone(), columns, [layer.recurrent_states[0].clone() for layer in linear])


def convolution(graph: fx.Graph) -> Iterator[str]:
    """What a graph does for the convolution of the first layer, a line an op."""
    own: set[fx.Node] = set()
    for node in graph.nodes:
        modules = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
        is_written_there = modules and "layers.0." in modules[-1] and "conv1d" in node.meta.get("stack_trace", "")
        is_write_back = node.target is torch.ops.aten.copy_.default and node.args[1] in own
        if is_written_there or is_write_back:
            own.add(node)
            arguments = ", ".join(str(fx.map_arg(argument, _named)) for argument in node.args)
            yield f"{node.name} = {getattr(node.target, '__name__', node.target)}({arguments})"


def _named(node: fx.Node) -> str | fx.Node:
    """An input of the graph by its shape too: [channels, 1, taps] or [batch, channels, columns]."""
    return f"{node}{list(node.meta['val'].shape)}" if node.op == "placeholder" else node


def check_graphs(backend: npu_fuse.Backend) -> Iterator[str]:
    """Yield what is not as it should be in what was compiled."""
    for site in backend.report.sites:
        if site.kind == "causal_conv1d" and site.status != "lowered":
            yield f"the convolution in {site.module} is {site.status}: {site.reason}"
    for _, module in backend.graphs:
        ops = module.graph.find_nodes(op="call_function", target=torch.ops.npu_fuse.causal_conv1d_columns.default)
        if len(ops) != LAYERS.count("linear_attention"):
            yield f"there are {len(ops)} convolutions"
        for op in ops:
            state = op.args[2]
            if state.op != "placeholder" or list(state.users) != [op]:
                yield f"the state of {op} is copied: it is {state.op}, read by {', '.join(map(str, state.users))}"


def check_values(runs: Runs) -> Iterator[str]:
    """Yield what is not as it should be in what was computed."""
    for number, (eager, compiled) in enumerate(zip(runs.eager, runs.compiled, strict=True)):
        if not torch.equal(eager.columns[0], compiled.columns[0]):
            yield f"step {number}: the first layer's columns are not eager's"
    for name in NAMES:
        ours, theirs = runs.error(runs.compiled, name), runs.error(runs.eager, name)
        if not ours <= MOST_ERROR * theirs:
            yield f"{name}: compiled is off by {ours:.2e}, eager by {theirs:.2e}"


def table(runs: Runs) -> Table:
    """How near to the truth the values are."""
    rows = Table("over all steps", "error, eager", "error, compiled")
    for name in NAMES:
        rows.add_row(name, *(f"{runs.error(steps, name):.2e}" for steps in (runs.eager, runs.compiled)))
    return rows


if __name__ == "__main__":
    sys.exit(main())
