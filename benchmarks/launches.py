"""Launches of a decoder's layer and the bytes they move: eager, fused, with peers' patterns, and written by hand.

    python benchmarks/launches.py run cpu [MODEL …]    measure on the CPU's graphs
    python benchmarks/launches.py run npu [MODEL …]    on a fake NPU's; needs torch_npu, and stand-ins for CANN
    python benchmarks/launches.py table                print what was measured

A model has the full size of its config in transformers, in bfloat16, and no weights. It is compiled in two depths, and
the difference is what the layers launch: embeddings, masks, cos, sin and the head are the same in both. A prompt is one
sequence of 512 tokens without a cache, a decoding step one token over a static cache of 512.

A launch is a call that is no view. Bytes are what the launches read and write, each tensor once a launch: a model of
memory's traffic, not a measurement. With a peer's patterns, one launch stands for all that one of their matches covers.
How many launches a layer has that was written by hand for an NPU is in `handwritten.py`.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import fx
from torch._inductor.fx_passes.post_grad import remove_noop_ops

import handwritten
import npu_fuse
from fake import on_fake
from measure import TARGETS
from npu_fuse.passes.launches import cost
from npu_fuse.runtime.cli.calls import calls
from peers import LITERAL, NPUGRAPH_EX, PEERS, Literal, through_npugraph_ex
from results import DEVICES, Row, load, save

_NAME = "launches"
PHASES = ("prefill", "decode")
EAGER, OURS = "eager", "npu_fuse"
DEPTHS = (2, 4)  # an even number of layers between them, as some models have two kinds of layers in turns
TOKENS = 512
FAKE = {"cpu": "cpu", "npu": "npu:0"}

Moved = Counter[tuple[str, str]]  # by who and what: ("eager", "launches"), ("torchair", "bytes"), …


class Counting(npu_fuse.Backend):
    """Counts in each graph what all move. Peers' patterns are searched while it is compiled, as they are at theirs."""

    def __init__(self, device: str) -> None:
        super().__init__(strict=True, target=TARGETS[device], keep_graphs=True)
        self.moved: Moved = Counter()
        self._is_npu = device == "npu"

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any], **mode: Any) -> Callable[..., Any]:
        compiled = super().__call__(module, example_inputs, **mode)
        before, after = self.graphs[-1]
        self.moved += moved(EAGER, before.graph) + moved(OURS, after.graph)
        for peer, patterns in LITERAL.items():
            self.moved += moved(peer, with_patterns(before, patterns))
        if self._is_npu:
            _, theirs = through_npugraph_ex(module, example_inputs, lambda graph: moved(NPUGRAPH_EX, graph))
            self.moved += theirs
        return compiled


def with_patterns(module: fx.GraphModule, patterns: Iterable[Literal]) -> fx.Graph:
    """A copy of a graph with a peer's patterns in it, at its best: without no-ops."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    fx.GraphModule(module, graph)  # Inductor's matcher asks a graph for its module
    remove_noop_ops(graph)
    for pattern in patterns:
        pattern.fuse(graph)
    return graph


def moved(who: str, graph: fx.Graph) -> Moved:
    """Launches and bytes of a graph."""
    found = cost(graph)
    return Counter({(who, "launches"): found.launches, (who, "bytes"): found.bytes})


def of_depth(model: str, phase: str, device: str, layers: int) -> Moved:
    """Launches and bytes of one call of a model of so many layers, in all its graphs."""
    torch._dynamo.reset()
    given = Namespace(model=model, layers=layers, dtype="bfloat16", batch=1, tokens=TOKENS, phase=phase)
    (call,) = calls(given)
    inputs = dict(call.kwargs)
    backend = Counting(device)
    with torch.no_grad():
        if phase == "decode":  # into a cache that is there: one token is still to come
            prompt = torch.zeros(1, TOKENS - 1, dtype=torch.long, device="meta")
            call.model(input_ids=prompt, past_key_values=inputs["past_key_values"])
        compiled = torch.compile(call.model, backend=backend)
        with on_fake(FAKE[device], call.model, inputs) as there:
            compiled(**there)
    return backend.moved


def measured(model: str, phase: str, device: str) -> Row:
    """One row of the results: of one layer, by who."""
    few, many = (of_depth(model, phase, device, layers) for layers in DEPTHS)
    row: Row = {"model": model, "phase": phase, "device": device, "launches": {}, "bytes": {}}
    for who, what in many:
        row[what][who] = (many[who, what] - few[who, what]) / (DEPTHS[1] - DEPTHS[0])
    row["launches"]["by hand"] = handwritten.launches(model, has_cache=phase == "decode")
    return row


def table(rows: Iterable[Row]) -> Table:
    """A row a line: launches of each, and bytes as a part of eager's."""
    columns = (EAGER, OURS, *PEERS, "by hand")
    shown = Table("graphs", "model", "phase", title="Launches of a layer (bytes moved, as a part of eager's)")
    for who in columns:
        shown.add_column(who, justify="right", max_width=14)
    for row in rows:
        shown.add_row(row["device"], row["model"], row["phase"], *(_cell(row, who) for who in columns))
    return shown


def _cell(row: Row, who: str) -> str:
    launches, size = row["launches"].get(who), row["bytes"].get(who)
    if launches is None:
        return ""
    part = f" ({size / row['bytes'][EAGER]:.2f})" if size is not None and who != EAGER else ""
    return f"{launches:g}{part}"


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and keeps, or prints what is kept."""
    parser = argparse.ArgumentParser(description="Launches of a decoder's layer, and bytes moved.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure")
    run.add_argument("device", choices=DEVICES)
    run.add_argument("models", nargs="*", choices=[*handwritten.LAYERS, []], metavar="MODEL")
    commands.add_parser("table", help="print the results")
    options = parser.parse_args(argv)
    console = Console(width=160)
    rows: dict[tuple[str, str, str], Mapping[str, Any]] = {
        (row["device"], row["model"], row["phase"]): row for row in load(_NAME)
    }
    if options.command == "run":
        warnings.filterwarnings("ignore")
        logging.getLogger("transformers").setLevel(logging.ERROR)
        places = [(model, phase) for model in options.models or handwritten.LAYERS for phase in PHASES]
        for model, phase in track(places, f"Counting on {options.device}", console=console):
            rows[options.device, model, phase] = measured(model, phase, options.device)
            save(_NAME, rows.values())
    console.print(table(rows[place] for place in sorted(rows)))


if __name__ == "__main__":
    sys.exit(main())
