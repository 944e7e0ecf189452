"""Random programs around the kinds, compiled and in eager mode: one shard of them. FUZZ_SHARD says which."""

from __future__ import annotations

import os
import random

import pytest
from fuzz.compare import MismatchError, Unfit, run_program, told
from fuzz.draws import Draw, Step, built, numbered, shrunk
from fuzz.fragments import KINDS

# Of a shard, and of one test: a test that takes five minutes is taken for one that hangs.
PROGRAMS, AT_ONCE = 150, 25
SHARD = int(os.environ.get("FUZZ_SHARD", "0"))


@pytest.mark.parametrize("first", range(SHARD * PROGRAMS, (SHARD + 1) * PROGRAMS, AT_ONCE))
def test_compiled_programs_do_as_in_eager(first: int) -> None:
    ran = 0
    for number in range(first, first + AT_ONCE):
        draw = numbered(number)
        try:
            run_program(built(draw))
        except Unfit:
            continue
        except MismatchError:
            small = shrunk(draw, lambda program: bool(told(program)))
            pytest.fail(f"program {number}, made small:\n\n{small.script()}\n{told(small)}", pytrace=False)
        ran += 1
    assert ran > AT_ONCE // 2


@pytest.mark.parametrize("kind", KINDS)
def test_programs_reach_each_kind(kind: str) -> None:
    """Else they might fuse nothing, and be right."""
    draw = random.Random(kind)
    for _ in range(30):
        try:
            outcome = run_program(built(Draw(bytes([draw.randrange(3)]), (Step(kind, draw.randbytes(40)),))))
        except Unfit:
            continue
        if outcome.report.count(kind):
            return
    pytest.fail(f"{kind} is lowered in none of 30 programs")
