"""Random programs by their numbers, and how one that fails is made small."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from .disturbances import DISTURBANCES
from .fragments import KINDS
from .programs import Builder, Choices, Program, Tokens

_FRAGMENTS = {**KINDS, **DISTURBANCES}
# Half of all steps are kinds.
_NAMES = [*KINDS, *DISTURBANCES] + list(DISTURBANCES) * (len(KINDS) // len(DISTURBANCES) - 1)
_SETTINGS = {
    "numerics": ("'exact'",),
    "pack_weights": ("False",),
    "target": ("'host'", "'ascend910_93'", "'ascend950'", "'ascend310p'"),
    "verify": ("'first'",),
}


@dataclass(frozen=True)
class Step:
    """Which fragment comes next, and what it draws from."""

    name: str
    data: bytes


@dataclass(frozen=True)
class Draw:
    """All that a program is built from.

    Args:
        head: what is drawn for all of it: types, sizes, results, settings.
        steps: its fragments.
    """

    head: bytes
    steps: tuple[Step, ...]


def numbered(number: int) -> Draw:
    """The draw of this number."""
    draw = random.Random(number)
    steps = (Step(draw.choice(_NAMES), draw.randbytes(40)) for _ in range(draw.randint(1, 5)))
    return Draw(draw.randbytes(32), tuple(steps))


def built(draw: Draw) -> Program:
    """The program of a draw."""
    c = Choices(draw.head)
    b = Builder(
        dtype=c.of((torch.float32, torch.bfloat16, torch.float16) * 3 + (torch.float64,)),
        batch=c.of((2, 2, 1, 3, 2, 1) * 2 + (0,)),
        tokens=Tokens(c.of((3, 5, 1, 4))),
        width=c.of((32, 16, 64, 12, 7)),
    )
    settings = {name: c.of(values) for name, values in _SETTINGS.items() if c.rarely(5)}
    if c.rarely(8):
        settings["disable"] = "{" + repr(c.of(("in_place", *KINDS))) + "}"
    how = c.of(("recorded",) * 88 + ("Dynamo",) * 7 + ("dynamic",))
    for step in draw.steps:
        b.step(_FRAGMENTS[step.name], Choices(step.data))
    names = [name for name in b.mains if c.number(4) != 3] or b.mains or list(b.pool)[-1:]
    results = names + [c.of(list(b.pool)) for _ in range(c.of((0, 0, 1, 2))) if b.pool]
    return Program(b.made, b.lines, results, b.tokens, settings, how)


def shrunk(draw: Draw, fails: Callable[[Program], bool], seconds: float = 40.0) -> Program:
    """The smallest program that is found to fail, by leaving out parts of one that does.

    Args:
        draw: of the program that fails.
        fails: whether another one does.
        seconds: after which the smallest so far is given.
    """
    end = time.monotonic() + seconds
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for other in _smaller_draws(draw):
            if time.monotonic() > end:
                break
            if fails(built(other)):
                draw, is_smaller = other, True
                break
    program, is_smaller = built(draw), True
    while is_smaller:
        is_smaller = False
        for one in _smaller_programs(program):
            if time.monotonic() > end:
                break
            if fails(one):
                program, is_smaller = one, True
                break
    return program


def _smaller_draws(draw: Draw) -> Iterator[Draw]:
    for i in range(len(draw.steps)):
        yield replace(draw, steps=draw.steps[:i] + draw.steps[i + 1 :])
    for data in _smaller_bytes(draw.head):
        yield replace(draw, head=data)
    for i, step in enumerate(draw.steps):
        for data in _smaller_bytes(step.data):
            yield replace(draw, steps=(*draw.steps[:i], Step(step.name, data), *draw.steps[i + 1 :]))


def _smaller_bytes(data: bytes) -> Iterator[bytes]:
    """With zeros in place of some, which choose what is simplest."""
    size = len(data)
    while size:
        for start in range(0, len(data), size):
            if any(data[start : start + size]):
                yield data[:start] + bytes(len(data[start : start + size])) + data[start + size :]
        size //= 2


def _smaller_programs(program: Program) -> Iterator[Program]:
    for i in reversed(range(len(program.lines))):
        yield replace(program, lines=program.lines[:i] + program.lines[i + 1 :])
    for i in range(len(program.results)):
        yield replace(program, results=program.results[:i] + program.results[i + 1 :])
    for i in range(len(program.made)):
        yield replace(program, made=program.made[:i] + program.made[i + 1 :])
    for name in program.settings:
        yield replace(program, settings={key: value for key, value in program.settings.items() if key != name})
