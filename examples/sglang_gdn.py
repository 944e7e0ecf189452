"""The gated delta net of SGLang on an NPU: convolutions on a pool of states, in each of the ways a server runs them.

    python examples/sglang_gdn.py

SGLang keeps the last columns of each request's convolution in a pool [slots, K - 1, channels] that all requests share;
slot 0 is for padding. With a draft of d tokens a slot has d - 1 rows more, so that tokens can be taken back. A server
then runs four flows, which are written here as SGLang has them, with the activation of the layer, and its weight as it
is at each call:

* decode: one token a request, in place;
* verify: d tokens a request, in place; afterwards the window of each slot moves back to what was accepted;
* extend: prompts of any length behind one another, on a copy of the pool that is written back whole;
* track: extend and decode that also leave states in other slots, from which a later request goes on.

Each is compiled by npu_fuse. The script prints what became of it, and fails unless every convolution is one
``npu::causal_conv1d`` of the right mode, states are those of a reference that goes token by token, bit for bit, and a
weight that is updated between two calls is the one that the next call uses.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional

import npu_fuse
from npu_fuse.patterns.values import storages
from npu_fuse.runtime.ops.register import register

CHANNELS, TAPS, DRAFT, SLOTS = 48, 4, 3, 8
PREFILL, UPDATE = 0, 1  # modes of the op

console = Console()


class Layer(nn.Module):
    """What a linear layer holds for its convolution.

    Args:
        activation: "silu", or None for none.
    """

    def __init__(self, activation: str | None, bias: bool) -> None:
        super().__init__()
        self.activation = activation
        self.weight = nn.Parameter(torch.randn(CHANNELS, TAPS))
        self.bias = nn.Parameter(torch.randn(CHANNELS)) if bias else None

    def conv(self, x: torch.Tensor, pool: torch.Tensor, run_mode: int, **arguments: torch.Tensor) -> torch.Tensor:
        """One call of the op, with the taps first, as it wants them."""
        mode = 1 if self.activation in ("silu", "swish") else 0
        weight = self.weight.transpose(0, 1).contiguous()
        return torch.ops.npu.causal_conv1d(
            x, weight, pool, bias=self.bias, activation_mode=mode, pad_slot_id=-1, run_mode=run_mode, **arguments
        )


@dataclass(frozen=True)
class Batch:
    """What SGLang tells of a batch, besides its tokens.

    Args:
        starts: where each request's tokens begin, and the end of the last; int32 [requests + 1].
        slots: of the pool, one a request; 0 for padding; int32.
        has_state: whether a prompt goes on with a state; extend only.
        tracked: slots to which states are copied, and for extend the tokens of each: [n] and [n, rows].
    """

    starts: torch.Tensor
    slots: torch.Tensor
    has_state: torch.Tensor | None = None
    tracked: tuple[torch.Tensor, torch.Tensor] | None = None


# The flows ------------------------------------------------------------------------------------------------------------


def decode(layer: Layer, x: torch.Tensor, pool: torch.Tensor, batch: Batch) -> torch.Tensor:
    """One token a request."""
    y = layer.conv(x, pool, UPDATE, query_start_loc=batch.starts, cache_indices=batch.slots)
    if batch.tracked is not None:
        target, wanted = batch.tracked
        pool[target] = torch.where(wanted[:, None, None], pool[batch.slots], pool[target])  # as the op has left them
    return y


def verify(layer: Layer, x: torch.Tensor, pool: torch.Tensor, batch: Batch) -> torch.Tensor:
    """A draft of each request; the window that it goes on with is the last of its slot."""
    accepted = torch.full((batch.slots.shape[0],), DRAFT, dtype=torch.int32, device=x.device)
    return layer.conv(
        x, pool, UPDATE, query_start_loc=batch.starts, cache_indices=batch.slots, num_accepted_tokens=accepted
    )


def extend(layer: Layer, x: torch.Tensor, pool: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Prompts behind one another, on a copy of the last rows of all slots."""
    if batch.tracked is not None:
        target, tokens = batch.tracked
        pool[target] = x[tokens]
    states = pool[:, -(TAPS - 1) :, :].contiguous()
    y = layer.conv(
        x,
        states,
        PREFILL,
        query_start_loc=batch.starts,
        cache_indices=batch.slots,
        has_initial_state=batch.has_state,
    )
    pool[:, -(TAPS - 1) :, :] = states
    return y


def roll_back(pool: torch.Tensor, slots: torch.Tensor, accepted: torch.Tensor) -> None:
    """Moves the windows of slots back behind the tokens that were accepted; between two graphs, as in SGLang."""
    for slot, count in zip(slots.tolist(), accepted.tolist(), strict=True):
        if slot:
            pool[slot, DRAFT - 1 :] = pool[slot, count - 1 : count + TAPS - 2].clone()


# The same, token by token ---------------------------------------------------------------------------------------------


def step_by_step(
    layer: Layer, x: torch.Tensor, pool: torch.Tensor, batch: Batch, *, drafts: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a flow gives, in float64, and the pool behind it; tokens that belong to no request give zeros.

    Args:
        layer: with the weight as it is now.
        x: [tokens, channels].
        pool: as it was before the call.
        batch: without what is tracked.
        drafts: whether a slot keeps all columns of a draft, not the last ones.
    """
    pool, y = pool.clone(), torch.zeros_like(x, dtype=torch.float64)
    weight = layer.weight.double()
    for request, slot in enumerate(batch.slots.tolist()):
        begin, end = batch.starts[request : request + 2].tolist()
        if begin == end:
            continue
        known = batch.has_state is None or bool(batch.has_state[request])
        columns = list(pool[slot, -(TAPS - 1) :].clone() if known else torch.zeros_like(pool[slot, : TAPS - 1]))
        for token in range(begin, end):
            columns.append(x[token])
            window = torch.stack(columns[-TAPS:], dim=1).double()
            total = (window * weight).sum(dim=1) + (0 if layer.bias is None else layer.bias.double())
            y[token] = functional.silu(total) if layer.activation == "silu" else total
        rows = columns[1:] if drafts else columns[-(TAPS - 1) :]
        pool[slot, -len(rows) :] = torch.stack(rows)
    return y, pool


# The run --------------------------------------------------------------------------------------------------------------


@dataclass
class Flow:
    """One flow, compiled, and how its calls compare with the reference."""

    name: str
    function: Callable[[Layer, torch.Tensor, torch.Tensor, Batch], torch.Tensor]
    run_mode: int
    backend: npu_fuse.Backend = field(default_factory=lambda: npu_fuse.Backend(strict=True, keep_graphs=True))
    error: float = 0.0
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.compiled = torch.compile(self.function, backend=self.backend, fullgraph=True, dynamic=False)

    def __call__(
        self,
        layer: Layer,
        x: torch.Tensor,
        pool: torch.Tensor,
        batch: Batch,
        wanted: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Runs it on a pool; `wanted` are the outputs and the pool that the reference gives."""
        y = self.compiled(layer, x, pool, batch)
        tokens = int(batch.starts[-1])
        bound = 2**-8 * wanted[0].abs().amax()  # one rounding to bfloat16
        self.error = max(self.error, ((y[:tokens] - wanted[0][:tokens]).abs().amax() / bound).item())
        if not torch.equal(pool, wanted[1]):
            self.failures.append("a state is not that of the reference")

    def calls(self) -> list[dict[str, Any]]:
        """The arguments of the calls of the op, in the graph that runs."""
        op = torch.ops.npu.causal_conv1d.default
        _, graph = self.backend.graphs[-1]
        names = [argument.name for argument in op._schema.arguments]
        nodes = graph.graph.find_nodes(op="call_function", target=op)
        return [dict(zip(names, node.args, strict=False)) | node.kwargs for node in nodes]

    @property
    def site(self) -> npu_fuse.Site:
        """What the report says of its convolution."""
        return next(site for site in self.backend.reports[-1].sites if site.kind == "causal_conv1d")

    def check(self, layer: Layer) -> Iterator[str]:
        """Yields what is not as it should be."""
        yield from self.failures
        if self.error > 1:
            yield f"its outputs are {self.error:.2f} roundings from those of the reference"
        if len(self.backend.graphs) > 2:  # a second time once the weight lies as the op wants it
            yield f"it was compiled {len(self.backend.graphs)} times"
        modes = [(call.get("run_mode", 0), call.get("activation_mode", 0)) for call in self.calls()]
        if modes != [(self.run_mode, int(layer.activation == "silu"))]:
            yield f"its calls have run_mode and activation_mode {modes}"
        _, graph = self.backend.graphs[-1]
        inputs = frozenset().union(*map(storages, graph.graph.find_nodes(op="placeholder")))
        in_place = [storages(call["conv_states"]) <= inputs for call in self.calls()]
        if in_place != [self.site.status == "lowered"]:
            yield f"its states are {'' if any(in_place) else 'not '}the pool itself, and it is {self.site.status}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; return the exit status."""
    argparse.ArgumentParser(description="Run a server's convolutions on its pool of states.").parse_args(argv)
    failures = []
    table = Table("flow", "rows of a slot", "launches", "error in roundings", "its convolution")
    reasons = []
    for layer, pool, flows in (serve(), serve_drafts()):
        for flow in flows:
            report, site = flow.backend.reports[-1], flow.site
            launches = f"{report.launches_before} → {report.launches_after}"
            table.add_row(flow.name, str(pool.shape[1]), launches, f"{flow.error:.2f}", site.status)
            reasons += [f"{flow.name} is {site.status}: {site.reason}"] if site.reason else []
            failures += [f"{flow.name}: {failure}" for failure in flow.check(layer)]
    console.print(table)
    for reason in reasons:
        console.print(reason, highlight=False)
    for failure in failures:
        console.print(f"[bold red]FAILED[/] {failure}")
    return 1 if failures else 0


@torch.no_grad()
def serve() -> tuple[Layer, torch.Tensor, list[Flow]]:
    """Prompts and then tokens of three requests, in batches that are padded to four."""
    layer, pool = fresh("silu", bias=True, rows=TAPS - 1)
    extending, decoding = Flow("extend", extend, PREFILL), Flow("decode", decode, UPDATE)
    tracking = [Flow("extend, tracked", extend, PREFILL), Flow("decode, tracked", decode, UPDATE)]

    prompts = Batch(ints(0, 5, 7, 8), ints(3, 1, 6), torch.tensor([False, True, False]))
    x = tokens(8, seed=1)
    extending(layer, x, pool, prompts, step_by_step(layer, x, pool, prompts))
    batch = Batch(ints(0, 1, 2, 3, 3), ints(3, 1, 6, 0))  # the fourth is padding, and has no token
    for step in range(4):
        if step == 2:
            layer.weight.copy_(torch.randn(CHANNELS, TAPS))  # a server that is given new weights
        x = tokens(4, seed=10 + step)
        decoding(layer, x, pool, batch, step_by_step(layer, x, pool, batch))

    # A prompt of seven tokens leaves the state behind its first four in slot 5 as well.
    target, behind = torch.tensor([5]), torch.tensor([[1, 2, 3]])
    prompts = Batch(ints(0, 7), ints(2), torch.tensor([False]), (target, behind))
    x = tokens(7, seed=2)
    wanted = step_by_step(layer, x, pool, prompts)
    wanted[1][5] = x[1:4]
    tracking[0](layer, x, pool, prompts, wanted)
    # Of two requests the second leaves its state in slot 7, behind the token.
    batch = Batch(ints(0, 1, 2), ints(3, 1), tracked=(torch.tensor([4, 7]), torch.tensor([False, True])))
    x = tokens(2, seed=3)
    wanted = step_by_step(layer, x, pool, batch)
    wanted[1][7] = wanted[1][1]
    tracking[1](layer, x, pool, batch, wanted)
    return layer, pool, [extending, decoding, *tracking]


@torch.no_grad()
def serve_drafts() -> tuple[Layer, torch.Tensor, list[Flow]]:
    """Prompts and then drafts of two requests, some of which are not accepted; a layer without activation."""
    layer, pool = fresh(None, bias=False, rows=TAPS - 1 + DRAFT - 1)
    extending, verifying = Flow("extend, before drafts", extend, PREFILL), Flow("verify", verify, UPDATE)
    prompts = Batch(ints(0, 4, 6), ints(2, 5), torch.tensor([False, False]))
    x = tokens(6, seed=4)
    extending(layer, x, pool, prompts, step_by_step(layer, x, pool, prompts))
    batch = Batch(ints(0, DRAFT, 2 * DRAFT), ints(2, 5))
    for step, accepted in enumerate((ints(2, 3), ints(1, 2), ints(3, 3))):
        if step == 1:
            layer.weight.mul_(-0.5)
        x = tokens(2 * DRAFT, seed=20 + step)
        verifying(layer, x, pool, batch, step_by_step(layer, x, pool, batch, drafts=True))
        roll_back(pool, batch.slots, accepted)
    return layer, pool, [extending, verifying]


def fresh(activation: str | None, *, bias: bool, rows: int) -> tuple[Layer, torch.Tensor]:
    """A layer and a pool [slots, rows, channels] in which every state is another."""
    register(npu_fuse.Target.detect())  # the op itself, where sgl_kernel_npu has not brought it
    torch.manual_seed(0)
    torch._dynamo.reset()
    layer = Layer(activation, bias).bfloat16().requires_grad_(False)
    return layer, torch.randn(SLOTS, rows, CHANNELS).bfloat16()


def tokens(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, CHANNELS, generator=torch.Generator().manual_seed(seed)).bfloat16()


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


if __name__ == "__main__":
    sys.exit(main())
