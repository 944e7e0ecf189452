"""Measures one model in its phases, and writes a line of JSON for each. `coverage.py` runs one process a model.

    python benchmarks/measure.py cpu llama prefill decode
"""

from __future__ import annotations

import json
import sys
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

import npu_fuse
from fake import on_fake
from kinds import KINDS
from models import MODELS
from peers import found_by_literal, found_by_npugraph_ex

Row = dict[str, Any]
Peer = Callable[[fx.GraphModule, Sequence[Any]], dict[str, Counter[str]]]

# One SoC in both halves, with all that its ops need; on the fake NPU the kernels' own schemas and shapes are in force.
TARGETS = {
    "cpu": npu_fuse.Target("ascend910b"),
    "npu": npu_fuse.Target("ascend910b", "npu", {"torch_npu": "2.13.0", "sgl_kernel_npu": "2026.05.01.post3"}),
}


# By graph. npugraph_ex needs the NPU's.
PEERS: dict[str, tuple[Peer, ...]] = {"cpu": (found_by_literal,), "npu": (found_by_literal, found_by_npugraph_ex)}
PEER_PHASES = ("prefill", "decode")  # the others would cost time and say nothing new


class Measuring(npu_fuse.Backend):
    """Counts in each graph what peers find; a graph that runs twice counts twice, in its report too.

    Args:
        device: whose graphs they are.
        peers: whom to ask as well.

    Attributes:
        failures: why a peer gave a graph up.
    """

    def __init__(self, device: str, peers: Sequence[Peer]) -> None:
        super().__init__(strict=True, target=TARGETS[device])
        self.failures: dict[str, str] = {}
        self._peers = peers
        self._found: list[dict[str, Counter[str]]] = []
        self._runs: list[int] = []

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled = super().__call__(module, example_inputs)
        index = len(self._runs)
        self._runs.append(0)
        self._found.append({})
        for peer in self._peers:
            try:
                self._found[index] |= peer(module, example_inputs)
            except Exception as error:
                self.failures[peer.__name__.removeprefix("found_by_")] = _in_a_line(error)

        def counting(*inputs: Any) -> Any:
            self._runs[index] += 1
            return compiled(*inputs)

        return counting

    @property
    def total(self) -> npu_fuse.Report:
        """The report of all that ran."""
        assert len(self.reports) == len(self._runs)
        return npu_fuse.Report.merged(r for r, runs in zip(self.reports, self._runs, strict=True) for _ in range(runs))

    @property
    def peers(self) -> dict[str, Counter[str]]:
        """What peers found in all that ran, by peer and kind."""
        total: dict[str, Counter[str]] = defaultdict(Counter)
        for found, runs in zip(self._found, self._runs, strict=True):
            for peer, counts in found.items():
                total[peer].update({kind: count * runs for kind, count in counts.items()})
        return total


def measure(model: str, phase: str, device: str) -> Row:
    """One row of the results: what was found and fused in one call, or the error that came instead."""
    start = time.perf_counter()
    row: Row = {"model": model, "phase": phase}
    try:
        row |= _measured(model, phase, device)
    except Exception as error:
        row["error"] = _in_a_line(error)
        traceback.print_exc()
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def _measured(model: str, phase: str, device: str) -> Row:
    torch._dynamo.reset()
    single = phase.endswith("_fp32")
    module = MODELS[model].build(torch.float32 if single else torch.bfloat16)
    for parameter in module.parameters():
        if parameter.dim() == 1:  # norms and biases that differ by element, so that one taken for another shows
            nn.init.uniform_(parameter, 0.5, 1.5)
    if phase == "eager":
        module.set_attn_implementation("eager")
    backend = Measuring(device, PEERS[device] if phase in PEER_PHASES else ())
    compiled = torch.compile(module, backend=backend)
    row: Row = {}
    with torch.no_grad():
        inputs = MODELS[model].inputs(module, phase.removesuffix("_fp32"))
        if device == "npu":
            with on_fake("npu:0", module, inputs) as moved:
                compiled(**moved)
        elif single:
            wanted = module(**inputs)
            row["difference"] = _difference(compiled(**inputs), wanted)
        else:
            compiled(**inputs)
    return row | _counts(backend)


def _counts(backend: Measuring) -> Row:
    report = backend.total
    if report.remark is not None:
        raise RuntimeError(report.remark)
    reasons: dict[str, dict[str, Counter[str]]] = {"refused": {}, "missed": {}}
    for site in report.sites:
        if site.status != "lowered":
            reasons[site.status].setdefault(site.kind, Counter())[site.reason or ""] += 1
    return {
        "graphs": len(backend.reports),
        "found": _nonzero({label: kind.count(report) for label, kind in KINDS.items()}),
        "lowered": _nonzero({label: kind.count_lowered(report) for label, kind in KINDS.items()}),
        **reasons,
        "ops": report.ops,
        "peers": backend.peers,
        "peer_failures": backend.failures,
    }


def _difference(found: Any, wanted: Any) -> float:
    """The largest difference of a number, as a part of the largest number of its tensor."""
    pairs = [
        (a.double(), b.double())
        for a, b in zip(tree_leaves(found), tree_leaves(wanted), strict=True)
        if isinstance(b, torch.Tensor) and b.numel()
    ]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def _nonzero(counts: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}


def _in_a_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def main(argv: Sequence[str]) -> None:
    warnings.filterwarnings("ignore")
    device, model, *phases = argv
    for phase in phases:
        print(json.dumps(measure(model, phase, device)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
