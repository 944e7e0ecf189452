"""A random program: its tensors, its statements, and the script that it is.

A program is built step by step. Each step draws from a string of bytes of its own, of which zeros choose what is
simplest, and appends statements over a pool of named values. The statements run while the program is built, so that a
step knows the shapes, types and strides of all values so far. A step that finds nothing to work on, or whose statements
raise, is left out; so any step of a failing program may be taken away, and what is left is a program still.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import attentions
import spellings
import torch
from torch.nn import functional

Tensor = torch.Tensor
T = TypeVar("T")

# What statements may name, besides values.
NAMES: Mapping[str, Any] = {
    "torch": torch,
    "F": functional,
    "math": math,
    **{name: getattr(spellings, name) for name in ("WEIGHTED", "OFFSET", "BARE", "ROTATIONS")},
    **{name: getattr(attentions, name) for name in ("PLAIN", "CAUSAL", "GROUPED", "ONE_KV_HEAD", "BIASED")},
}
_HEADER = """\
import math

import torch
from attentions import BIASED, CAUSAL, GROUPED, ONE_KV_HEAD, PLAIN
from fuzz.compare import check
from fuzz.programs import made
from spellings import BARE, OFFSET, ROTATIONS, WEIGHTED
from torch.nn import functional as F
"""


class Tokens(int):
    """How many tokens there are: the size that may be another in a later call."""


class Choices:
    """What one step draws from: bytes, and zeros behind them."""

    def __init__(self, data: bytes) -> None:
        self._data = iter(data)

    def number(self, below: int) -> int:
        return next(self._data, 0) % below

    def of(self, options: Sequence[T]) -> T:
        """One of them; the first is the simplest."""
        return options[self.number(len(options))]

    def rarely(self, one_in: int) -> bool:
        return self.number(one_in) == one_in - 1


@dataclass(frozen=True)
class Made:
    """A tensor that is there before the program runs.

    Args:
        name: its name.
        role: who holds it.
        source: the expression that makes it, of the tensors before it and `seed`.
    """

    name: str
    role: str  # "argument", "parameter" or "buffer"
    source: str


def made(
    seed: int,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    values: str = "normal",
    layout: str = "contiguous",
) -> Tensor:
    """A tensor by its description.

    Args:
        seed: of its numbers.
        shape: its shape.
        dtype: its type.
        values: "normal", "around one", "small", "large", "wide", "bool", "below n", "distinct below n"; or "normal"
            with one special number, as in "normal, nan".
        layout: how it lies in memory.
    """
    generator = torch.Generator().manual_seed(seed)
    kind, _, special = values.partition(", ")
    if kind == "bool":
        numbers = torch.rand(shape, generator=generator) < 0.7
    elif kind.startswith("distinct below"):
        numbers = torch.randperm(int(kind.split()[-1]), generator=generator)[: math.prod(shape)].view(shape)
    elif kind.startswith("below"):
        numbers = torch.randint(int(kind.split()[-1]), shape, generator=generator)
    else:
        numbers = torch.randn(shape, generator=generator)
        scale = {"normal": 1.0, "around one": 0.2, "small": 1e-3, "large": 300.0, "wide": 8.0}[kind]
        numbers = numbers * scale + (1.0 if kind == "around one" else 0.0)
    if special and numbers.numel():
        place = int(torch.randint(numbers.numel(), (), generator=generator))
        tiny = torch.finfo(dtype).tiny
        number = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "-0": -0.0, "denormal": tiny / 4, "zeros": 0.0}
        if special == "zeros":  # a row of them
            numbers[tuple(0 for _ in shape[:-1])] = 0.0
        else:
            numbers.view(-1)[place] = number[special]
    return laid_out(numbers.to(dtype), layout)


LAYOUTS = ("contiguous", "transposed", "offset", "sliced", "padded", "expanded", "first axis last")


def laid_out(x: Tensor, layout: str) -> Tensor:
    """A tensor with the same numbers and another layout in memory, where it has the axes for it."""
    if layout == "transposed" and x.dim() >= 2:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "first axis last" and x.dim() >= 2:
        return x.movedim(0, -1).contiguous().movedim(-1, 0)
    if layout == "offset":
        return torch.cat([x.new_zeros(3), x.reshape(-1), x.new_zeros(2)])[3 : 3 + x.numel()].view(x.shape)
    if layout == "sliced" and x.dim():
        return torch.stack([x, x], -1).flatten(-2)[..., 1::2]
    if layout == "padded" and x.dim():
        return torch.cat([x, x], -1)[..., : x.shape[-1]]
    if layout == "expanded" and x.dim() >= 2:
        return x[:1].clone().expand(x.shape)
    if layout == "pool" and x.dim() == 3:  # of a convolution's states, with a spare slot behind them
        rows = torch.zeros(x.shape[0] + 1, x.shape[2], x.shape[1], dtype=x.dtype)
        return rows[: x.shape[0]].transpose(1, 2).copy_(x)
    return x


@dataclass(frozen=True)
class Line:
    """A statement, and the names that it gives values to."""

    source: str
    names: tuple[str, ...] = ()


@dataclass
class Program:
    """A program that is ready to run.

    Args:
        made: its tensors.
        lines: its statements.
        results: the names of what it returns.
        tokens: how many there are, where nothing else is said.
        settings: of the backend, as expressions.
        how: it is compiled.
    """

    made: list[Made]
    lines: list[Line]
    results: list[str]
    tokens: int
    settings: dict[str, str]
    how: str

    def source(self) -> str:
        """The class of the model and the function that gives the arguments of a call."""
        held = [made for made in self.made if made.role != "argument"]
        given = [made for made in self.made if made.role == "argument"]
        text = ["class Model(torch.nn.Module):", "    def __init__(self, seed: int) -> None:"]
        text.append("        super().__init__()")
        for one in held:
            if one.role == "parameter":
                text.append(f"        self.{one.name} = torch.nn.Parameter({one.source}, requires_grad=False)")
            else:
                text.append(f"        self.register_buffer({one.name!r}, {one.source})")
        text += ["", f"    def forward({', '.join(['self', *(one.name for one in given)])}):"]
        text += [f"        {line.source}" for line in self.lines]
        text.append(f"        return ({''.join(f'{name}, ' for name in self.results)})")
        text += ["", "", f"def arguments(seed: int, n: int = {self.tokens}):"]
        text += [f"    {one.name} = {one.source}" for one in given]
        text.append(f"    return ({''.join(f'{one.name}, ' for one in given)})")
        return "\n".join(text) + "\n"

    def call(self) -> str:
        return f"check(Model, arguments, dict({self._settings()}), how={self.how!r})\n"

    def _settings(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.settings.items())

    def script(self) -> str:
        """The program as a file that runs alone, with `tests` on the path."""
        return f"{_HEADER}\n\n{self.source()}\n\n{self.call()}"

    def loaded(self) -> dict[str, Any]:
        """The names that the source defines."""
        namespace = {**NAMES, "made": made}
        exec(compile(self.source(), "program.py", "exec"), namespace)
        namespace["settings"] = eval(f"dict({self._settings()})")
        return namespace


class Unfit(Exception):  # noqa: N818  # nothing is wrong
    """A step finds nothing to work on."""


@dataclass
class Builder:
    """A program as far as it is built.

    Args:
        dtype: of new tensors.
        batch, tokens, width: sizes of new hidden states.
    """

    dtype: torch.dtype
    batch: int
    tokens: Tokens
    width: int
    made: list[Made] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    pool: dict[str, Tensor] = field(default_factory=dict)
    # What a step gives, which later steps and the results prefer.
    mains: list[str] = field(default_factory=list)
    # The last q, k and v.
    heads: list[tuple[str, str, str]] = field(default_factory=list)
    _count: int = 0

    def __post_init__(self) -> None:
        self._self = SimpleNamespace()

    # Tensors --------------------------------------------------------------------------------------------------------

    def new(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
        values: str = "normal",
        layout: str = "contiguous",
        role: str = "argument",
    ) -> str:
        """A tensor that the caller or the model holds; gives what a statement calls it by."""
        seed = f"seed + {self._count}"
        dtype = self.dtype if dtype is None else dtype
        sizes = ("n" if isinstance(size, Tokens) and role == "argument" else str(int(size)) for size in shape)
        parts = [seed, f"({''.join(f'{size}, ' for size in sizes)})", str(dtype)]
        if values != "normal" or layout != "contiguous":
            parts.append(repr(values))
        if layout != "contiguous":
            parts.append(repr(layout))
        return self.take(f"made({', '.join(parts)})", made(self._count, shape, dtype, values, layout), role)

    def take(self, source: str, value: Tensor, role: str = "argument") -> str:
        """Likewise, of any expression and its value."""
        letter = {"argument": "x", "parameter": "w", "buffer": "c"}[role]
        name = f"{letter}{self._next()}"
        self.made.append(Made(name, role, source))
        if role != "argument":
            setattr(self._self, name, value)
            name = f"self.{name}"
        self.pool[name] = value
        return name

    def input(self, c: Choices, shape: tuple[int, ...], dtype: torch.dtype | None = None, values: str = "") -> str:
        """A new argument whose layout and numbers are drawn."""
        layout = c.of(("contiguous",) * 4 + LAYOUTS)
        if not values:
            special = ("nan", "inf", "-inf", "-0", "denormal", "zeros")
            kinds = ("normal",) * 12 + ("small", "large", "wide") + tuple(f"normal, {one}" for one in special)
            values = c.of(kinds)
        dtype = self.dtype if dtype is None else dtype
        if c.rarely(12):
            dtype = c.of((torch.float32, torch.bfloat16, torch.float16))
        return self.new(shape, dtype, values, layout)

    def weight(self, c: Choices, shape: tuple[int, ...], values: str = "around one") -> str:
        """A new tensor that mostly is a parameter of the model."""
        role = c.of(("parameter",) * 5 + ("argument", "buffer"))
        dtype = torch.float32 if c.rarely(8) else self.dtype
        layout = c.of(("contiguous",) * 8 + ("transposed", "offset", "sliced"))
        return self.new(shape, dtype, values, layout, role)

    def matrix(self, c: Choices, rows: int, columns: int, dtype: torch.dtype) -> str:
        """A weight of F.linear."""
        role = c.of(("parameter",) * 7 + ("argument",))
        layout = c.of(("contiguous",) * 10 + ("transposed", "offset"))
        return self.new((rows, columns), dtype, "normal", layout, role)

    def value(self, c: Choices, fits: Callable[[Tensor], bool], otherwise: Callable[[], str]) -> str:
        """A value that fits: mostly one of the last, else a new one."""
        found = self.candidates(fits)
        place = c.number(min(len(found), 6) + 1)
        return found[place] if place < len(found) else otherwise()

    def candidates(self, fits: Callable[[Tensor], bool]) -> list[str]:
        """The values that fit, the last first."""
        names = [name for name, value in self.pool.items() if fits(value)]
        names.reverse()
        return sorted(names, key=lambda name: name not in self.mains)

    def existing(self, c: Choices, fits: Callable[[Tensor], bool]) -> str:
        """A value that there is; in an empty program, a new one."""
        found = self.candidates(fits)
        if not found and self.pool:
            raise Unfit
        return c.of(found) if found else self.input(c, (self.batch, self.tokens, self.width))

    def state(self, c: Choices, shape: tuple[int, ...] | None = None) -> str:
        """Hidden states [batch, tokens, width]: new or a value that there is."""
        return self.value(
            c,
            lambda t: t.is_floating_point() and t.dim() in (2, 3) and t.shape[-1] > 3 and t.numel() > 0,
            lambda: self.input(c, (self.batch, self.tokens, self.width)),
        )

    def of(self, name: str) -> Tensor:
        return self.pool[name]

    def tokens_of(self, name: str, axis: int) -> int:
        """The size of an axis that counts tokens, mostly."""
        size = self.of(name).shape[axis]
        return self.tokens if size == self.tokens else size

    # Statements -----------------------------------------------------------------------------------------------------

    def let(self, expression: str) -> str:
        """Names what an expression gives."""
        return self.lets(expression, 1)[0]

    def lets(self, expression: str, count: int) -> tuple[str, ...]:
        """Names all that it gives."""
        names = tuple(f"v{self._next()}" for _ in range(count))
        self._run(Line(f"{', '.join(names)} = {expression}", names))
        return names

    def do(self, statement: str) -> None:
        self._run(Line(statement))

    def insert(self, place: int, statement: str) -> None:
        """A statement between others, whose effect isn't known while the program is built."""
        self.lines.insert(place, Line(statement))

    def main(self, *names: str) -> None:
        self.mains += [name for name in names if name not in self.mains]

    def _next(self) -> int:
        self._count += 1
        return self._count - 1

    def _run(self, line: Line) -> None:
        namespace = {**NAMES, "self": self._self, **{k: v for k, v in self.pool.items() if "." not in k}}
        with torch.no_grad():
            exec(compile(line.source, "step", "exec"), namespace)
        for name in line.names:
            if not isinstance(namespace[name], Tensor):
                raise Unfit
            self.pool[name] = namespace[name]
        self.lines.append(line)

    # Steps ----------------------------------------------------------------------------------------------------------

    def step(self, fragment: Callable[[Builder, Choices], None], c: Choices) -> bool:
        """Appends what a fragment gives, or nothing where it doesn't fit."""
        kept = list(self.made), list(self.lines), dict(self.pool), list(self.mains), list(self.heads)
        try:
            fragment(self, c)
        except (Unfit, RuntimeError, IndexError, ValueError, TypeError):
            self.made, self.lines, self.pool, self.mains, self.heads = kept
            return False
        return True
