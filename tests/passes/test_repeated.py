"""Projections that are computed twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from helpers import Compiled, compiled
from npu_fuse import register_side_effects

Tensor = torch.Tensor
WIDTH = 8

library = torch.library.Library("repeated_test", "DEF")
library.define("send(Tensor x) -> ()")
library.impl("send", lambda x: None, "CompositeExplicitAutograd")
register_side_effects("repeated_test::send")


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(3, WIDTH), torch.randn(12, WIDTH), torch.randn(12)


def linears(found: Compiled) -> int:
    return sum(target in ("aten.linear.default", "aten.mm.default") for target in found.targets())


def status(found: Compiled) -> list[tuple[str, str | None]]:
    return [(site.status, site.reason) for site in found.report.sites if site.kind == "repeated_projection"]


def both(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    q = functional.linear(x, w, b)[:, :8]
    k, v = functional.linear(x, w, b)[:, 8:].chunk(2, -1)
    return q.sin() + (k * v).sum(-1, keepdim=True)


def test_equal_projections_are_computed_once() -> None:
    found = compiled(both, *inputs())
    assert linears(found) == 1
    assert status(found) == [("lowered", None)]
    assert torch.equal(found.output, both(*inputs()))
    assert found.report.launches_after == found.report.launches_before - 1


def test_three_are_one_too() -> None:
    found = compiled(lambda x, w, b: sum((x @ w.T).relu() * i for i in range(3)), *inputs())
    assert status(found) == [("lowered", None)] * 2
    assert torch.equal(found.output, (inputs()[0] @ inputs()[1].T).relu() * 3)


def of_another_weight(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return functional.linear(x, w, b) + functional.linear(x, w.flip(0), b)


def of_another_bias(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return functional.linear(x, w, b).sin() + functional.linear(x, w).cos()


def of_another_x(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return functional.linear(x, w, b) + functional.linear(x + 1, w, b)


def behind_a_write_of_x(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    first = functional.linear(x, w, b)
    x.mul_(2)
    return first.sin() + functional.linear(x, w, b)


def behind_a_write_of_the_weight(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    first = functional.linear(x, w, b)
    w[3].zero_()
    return first.sin() + functional.linear(x, w, b)


@pytest.mark.parametrize(
    "function", [of_another_weight, of_another_bias, of_another_x, behind_a_write_of_x, behind_a_write_of_the_weight]
)
def test_what_is_not_equal_is_computed_twice(function: Callable[..., Tensor]) -> None:
    found = compiled(function, *inputs())
    assert linears(found) == 2
    assert status(found) == []
    assert torch.equal(found.output, function(*inputs()))


def test_two_results_have_memory_of_their_own() -> None:
    found = compiled(lambda x, w, b: (functional.linear(x, w, b), functional.linear(x, w, b).view(-1)), *inputs())
    assert status(found) == [("refused", "both are results of the graph, and each has memory of its own")]
    first, second = found.output
    first.zero_()
    assert torch.equal(second, functional.linear(*inputs()).view(-1))


def test_a_result_that_is_written_leaves_the_other_use_as_it_was() -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        first, second = functional.linear(x, w, b), functional.linear(x, w, b)
        first[:, 2:5].mul_(3)
        return first, second.sin()

    found = compiled(function, *inputs())
    assert status(found) == [("lowered", None)]
    assert all(torch.equal(x, y) for x, y in zip(found.output, function(*inputs()), strict=True))


def test_an_effect_between_keeps_both() -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        first = functional.linear(x, w, b)
        torch.ops.repeated_test.send(x)
        return first.sin() + functional.linear(x, w, b)

    found = compiled(function, *inputs())
    assert linears(found) == 2
    assert status(found) == [("refused", "an op with side effects stands between its nodes")]


def test_it_can_be_turned_off() -> None:
    found = compiled(both, *inputs(), disable={"repeated_projection"})
    assert linears(found) == 2
    assert status(found) == [("refused", "repeated_projection is turned off by Options.disable")]
