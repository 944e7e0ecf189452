"""A program compiled and in eager mode, call by call."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd

from npu_fuse import Backend, Report

from .differences import Call, is_near, of_forms, of_numbers, of_roundings, same, used_strides
from .programs import Program
from .recorded import recorded
from .shadow import Shadow, Shadows, coarsest

Tensor = torch.Tensor
Model = Callable[[int], torch.nn.Module]
Arguments = Callable[..., tuple[Tensor, ...]]
How = Literal["recorded", "Dynamo", "dynamic"]
SEEDS = (1000, 2000)


class MismatchError(AssertionError):
    """A compiled program does something else than the program."""


class Unfit(Exception):  # noqa: N818  # nothing is wrong
    """The program itself raises."""


@dataclass
class Outcome:
    """What a program came to.

    Args:
        report: on what was compiled.
        torchs_own: differences that AOTAutograd alone makes too.
    """

    report: Report
    torchs_own: list[str] = field(default_factory=list)


def check(model: Model, arguments: Arguments, settings: Mapping[str, Any], how: How) -> Outcome:
    """Compares a compiled program with eager, in two calls.

    Args:
        model: makes the module, with the same tensors each time.
        arguments: makes the arguments of a call by a seed, and perhaps for another number of tokens.
        settings: of the backend.
        how: the graph is recorded, or Dynamo's, or Dynamo's with sizes that may vary: then those of the calls do,
            where the program allows it.

    Raises:
        MismatchError: they differ.
        Unfit: the program itself raises.
    """
    backend = Backend(strict=True, **settings)
    arguments, wanted = _wanted(model, arguments, how)
    differences = partial(_differences, model, arguments, how, wanted, settings.get("numerics") == "exact")
    try:
        found = _calls(model, backend, arguments, how)
    except Exception as error:
        if "verification failed" in str(error) and coarsest(_all(wanted)) == torch.float16:
            # A row that the model makes zeros of, as its squares overflow, is to be zeros to a rounding.
            return check(model, arguments, {name: settings[name] for name in settings if name != "verify"}, how)
        own = _alone(model, arguments, how, differences)
        if any(one.startswith("raises") for one in own):
            return Outcome(Report(), own)
        raise MismatchError(f"raises {type(error).__name__}: {error}") from error
    all_told = differences(found, packs=settings.get("pack_weights", True))
    if not all_told:
        return Outcome(backend.report)
    own = _alone(model, arguments, how, differences)
    news = [one for one in all_told if one not in own and not (_LIES in own and ": strides" in one)]
    if news:
        raise MismatchError("\n".join([*news, "", str(backend.report)]))
    return Outcome(backend.report, all_told)


def run_program(program: Program) -> Outcome:
    """`check` of a program."""
    names = program.loaded()
    return check(names["Model"], names["arguments"], names["settings"], program.how)


def told(program: Program) -> str:
    """What a program does otherwise than in eager; nothing where all is as it is to be."""
    try:
        run_program(program)
    except MismatchError as mismatch:
        return str(mismatch)
    except Exception:  # a part was left out that another one needs
        return ""
    return ""


def _wanted(model: Model, arguments: Arguments, how: How) -> tuple[Arguments, list[Call]]:
    """What eager gives; with other sizes in the second call where they may vary and eager can."""
    if how == "dynamic":
        with suppress(Exception):
            tokens = inspect.signature(arguments).parameters["n"].default
            varied = partial(_varied, arguments, tokens)
            return varied, _calls(model, None, varied, how)
    try:
        return arguments, _calls(model, None, arguments, how)
    except Exception as error:
        raise Unfit(str(error)) from error


def _varied(arguments: Arguments, tokens: int, seed: int) -> tuple[Tensor, ...]:
    return arguments(seed, tokens + (2 if seed == SEEDS[1] else 0))


def _calls(make: Model, backend: Any, arguments: Arguments, how: How) -> list[Call]:
    model, calls = make(0), []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*convolution states .* are copied")
        function = model if backend is None else _compiled(make, model, backend, arguments, how)
        for seed in SEEDS:
            given = arguments(seed)
            results = tuple(function(*given))
            calls.append(Call.of(model, given, results).copied())
    return calls


def _compiled(make: Model, model: torch.nn.Module, backend: Any, arguments: Arguments, how: How) -> Callable[..., Any]:
    if how != "recorded":
        torch._dynamo.reset()
        return torch.compile(model, backend=backend, dynamic=True if how == "dynamic" else None, fullgraph=True)
    example = arguments(SEEDS[0])
    graph, inputs = recorded(make(0), example)
    for node, value in zip(graph.graph.find_nodes(op="placeholder"), inputs(example, model), strict=True):
        node.meta["grapharg"].example = value
    function = backend(graph, inputs(arguments(SEEDS[0]), model))
    return lambda *given: function(*inputs(given, model))


def _differences(
    model: Model,
    arguments: Arguments,
    how: How,
    wanted: Sequence[Call],
    exact: bool,
    found: Sequence[Call],
    packs: bool = False,
) -> list[str]:
    all_told: list[str] = []
    shadows: list[dict[str, Shadow]] = []
    for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
        where = f"call {place}"
        forms = of_forms(one, other, packs, how != "recorded")
        all_told += [f"{where}, {form}" for form in forms]
        if any(": shape" in form or ": dtype" in form for form in forms):
            return all_told
        ours, theirs = one.all(), other.all()
        off = [name for name in theirs if not same(ours[name], theirs[name])]
        if exact:
            all_told += [f"{where}, {n}: {bits}" for n in off if (bits := of_roundings(ours[n], theirs[n]))]
        off = [name for name in off if not is_near(ours[name], theirs[name])]
        if off and not shadows:
            shadows = _shadows(model, arguments, wanted)
        all_told += [f"{where}, {n}: {d}" for n in off if (d := of_numbers(ours[n], theirs[n], shadows[place][n]))]
    return all_told


def _all(calls: Sequence[Call]) -> Iterator[Tensor]:
    return (t for call in calls for t in call.all().values())


def _shadows(make: Model, arguments: Arguments, wanted: Sequence[Call]) -> list[dict[str, Shadow]]:
    """The twins of all that a caller sees, call by call."""
    model, kept = make(0), []
    mode = Shadows(coarsest(_all(wanted)))
    with torch.no_grad():
        for seed in SEEDS:
            given = arguments(seed)
            with mode:
                results = model(*given)
            kept.append({name: mode.of(t) for name, t in Call.of(model, given, results).all().items()})
    return kept


# Where a fake kernel tells other strides than the kernel has, nobody can keep these.
_LIES = "strides are not as told"


def _alone(model: Model, arguments: Arguments, how: How, differences: Callable[..., list[str]]) -> list[str]:
    """How AOTAutograd alone differs from eager."""
    lies: list[str] = []

    def as_it_is(graph: fx.GraphModule, _: Any) -> Any:
        return make_boxed_func(_Watched(graph, lies).run)

    backend = aot_autograd(
        fw_compiler=as_it_is, bw_compiler=as_it_is, inference_compiler=as_it_is, keep_inference_input_mutations=True
    )
    try:
        found = _calls(model, backend, arguments, how)
    except Exception as error:
        return [f"raises {type(error).__name__}: {error}"]
    return [*differences(found), *lies]


class _Watched(fx.Interpreter):
    """Runs a graph, and tells where its fake values have other strides than the values."""

    def __init__(self, graph: fx.GraphModule, lies: list[str]) -> None:
        super().__init__(graph)
        self._lies = lies

    def run_node(self, n: fx.Node) -> Any:
        value, fake = super().run_node(n), n.meta.get("val")
        if not isinstance(value, Tensor) or not isinstance(fake, Tensor) or fake._has_symbolic_sizes_strides:
            return value
        if used_strides(value) != used_strides(fake):
            self._lies.append(_LIES)
        return value
