"""A kind of one's own from a pattern alone: found in each spelling, exact, checked, and lowered by its own contract."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers import compiled
from npu_fuse import Backend
from npu_fuse.passes.pipeline import Flow
from npu_fuse.patterns import RULES, Rule, recognise

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import custom_pattern

RULE = custom_pattern.FLOW.rules[-1]


@pytest.mark.parametrize(
    "spelling",
    [
        lambda x: 30.0 * torch.tanh(x / 30.0),
        lambda x: torch.tanh(x.float() * (1 / 30)).mul(30).to(x.dtype),
        lambda x: (x / 30).tanh() / (1 / 30),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_spelling_is_found_and_gives_the_models_bits(spelling, dtype: torch.dtype) -> None:
    found = compiled(spelling, torch.linspace(-90, 90, 64).to(dtype))
    (match,) = recognise(found.before.graph, [RULE]).of("soft_cap")
    assert match.params.numbers["cap"] == pytest.approx(30)
    values = {name: found.values()[node] for name, node in match.inputs.items()}
    assert torch.equal(match.params.spelling(**values), found.values()[match.node])


def test_what_the_check_says_is_a_near_miss_and_nothing_said_is_none() -> None:
    findings = recognise(compiled(lambda x: 30 * torch.tanh(x / 20), torch.ones(3)).before.graph, [RULE])
    (miss,) = findings.near_misses()
    assert miss.reason == "x is scaled by 0.05 and its tanh by 30; a cap is the inverse"
    assert not recognise(compiled(torch.tanh, torch.ones(3)).before.graph, [RULE]).near_misses()


def test_one_backend_knows_it_and_no_other() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return 30.0 * torch.tanh(x / 30.0)

    backend = Backend(flow=custom_pattern.FLOW, strict=True)
    with torch.no_grad():
        torch.compile(model, backend=backend)(torch.ones(4))
    assert backend.report.ops == {"my_npu::soft_cap": 1}
    assert not compiled(model, torch.ones(4)).report.sites
    assert Flow().rules == RULES


def test_a_kind_or_an_op_that_is_there_is_not_taken_twice() -> None:
    with pytest.raises(ValueError, match="soft_cap is there already"):
        custom_pattern.FLOW.with_kind(RULE, custom_pattern.lower)
    named_alike = replace(custom_pattern.SOFT_CAP, name="npu::npu_swiglu")
    with pytest.raises(ValueError, match="npu::npu_swiglu is there already"):
        Flow().with_kind(Rule("cap", RULE.match), custom_pattern.lower, named_alike)
