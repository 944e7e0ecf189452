"""Ops that write undeclared are called by ops that say so before AOTAutograd, and come back as they were."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import fx

import npu_fuse
from helpers import Compiled, compiled, graph_of_dynamo
from npu_fuse.passes.truthful import tell_writes

Tensor = torch.Tensor


@pytest.fixture(scope="module", autouse=True)
def _ops(undeclared_aliases: None) -> Iterator[None]:
    library = torch.library.Library("npu_fuse_test_truthful", "FRAGMENT")

    def define(schema: str, run: Callable[..., object], fake: Callable[..., object]) -> None:
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"npu_fuse_test_truthful::{name}", fake, lib=library)

    define("conv(Tensor x, Tensor states, Tensor? bias=None) -> Tensor", _conv, lambda x, *_: torch.empty_like(x))
    define("rotate(Tensor q, Tensor k, Tensor cos) -> (Tensor, Tensor)", _rotate, lambda q, k, cos: (q * 1, k * 1))
    define("store(Tensor x, Tensor cache) -> Tensor", _store, lambda x, cache: cache * 1)
    define("cached(Tensor x, Tensor cache) -> (Tensor, Tensor, Tensor)", _cached, lambda x, c: (x * 1, c * 1, x * 1))
    define("count(Tensor x) -> ()", _count, lambda x: None)
    register = npu_fuse.register_side_effects
    register("npu_fuse_test_truthful::conv", mutates=["states"])
    register("npu_fuse_test_truthful::rotate", mutates=["q", "k"], returns={0: "q", 1: "k"})
    register("npu_fuse_test_truthful::store", mutates=["cache"], returns={0: "cache"})
    register("npu_fuse_test_truthful::cached", mutates=["cache"], returns={1: "cache"})
    register("npu_fuse_test_truthful::count")
    yield
    library._destroy()


def _conv(x: Tensor, states: Tensor, bias: Tensor | None = None) -> Tensor:
    out = x + states.sum(0) + (0 if bias is None else bias)
    states[:-1] = states[1:].clone()
    states[-1] = x
    return out


def _rotate(q: Tensor, k: Tensor, cos: Tensor) -> tuple[Tensor, Tensor]:
    return q.mul_(cos), k.mul_(cos)


def _store(x: Tensor, cache: Tensor) -> Tensor:
    return cache.add_(x)


def _cached(x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x * 2, cache.add_(x), x * 3


COUNTS: list[float] = []


def _count(x: Tensor) -> None:
    COUNTS.append(float(x.sum()))


OPS = torch.ops.npu_fuse_test_truthful
X, STATES = torch.randn(4), torch.randn(3, 4)


def check(model: Callable[..., object], *inputs: Tensor) -> Compiled:
    own, expected = ([value.clone() for value in inputs] for _ in range(2))
    found = compiled(model, *own)
    outputs, wanted = found.output, model(*expected)
    outputs, wanted = (value if isinstance(value, tuple) else (value,) for value in (outputs, wanted))
    for value, want in zip((*outputs, *own), (*wanted, *expected), strict=True):
        torch.testing.assert_close(value, want)
    assert not any("npu_fuse" in target and "test" not in target for target in found.targets())
    assert not any("auto_functionalized" in target for target in found.targets())
    return found


def test_a_state_is_written_where_it_is() -> None:
    def model(x: Tensor, states: Tensor) -> Tensor:
        return OPS.conv(x, states) + states.sum(0)

    found = check(model, X, STATES)
    assert found.targets()[0] == "npu_fuse_test_truthful.conv.default"
    assert "copy_" not in str(found.after.graph)


@pytest.mark.parametrize("bias", [True, False])
def test_a_state_whose_results_no_one_uses_is_written_once_a_call(bias: bool) -> None:
    """pytorch/pytorch#169141"""

    def model(x: Tensor, states: Tensor) -> Tensor:
        OPS.conv(x, states, bias=x if bias else None)
        OPS.conv(x, states=states)
        return x * 2

    found = check(model, X, STATES)
    assert found.targets().count("npu_fuse_test_truthful.conv.default") == 2


def test_a_view_of_a_pool_that_was_written_before() -> None:
    def model(x: Tensor, pool: Tensor) -> Tensor:
        states = pool[1]
        states.mul_(2)
        out = OPS.conv(x, states)
        states.add_(1)
        return out + pool.sum((0, 1))

    check(model, X, torch.randn(2, 3, 4))


def test_the_old_state_is_kept_for_who_reads_it() -> None:
    def model(x: Tensor, states: Tensor) -> Tensor:
        old = states.clone()
        return OPS.conv(x, states) + (old - states).sum(0)

    check(model, X, STATES)


def test_results_that_are_arguments_go_on_being_them() -> None:
    def model(x: Tensor, cos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k = x * 2, x * 3
        rotated, other = OPS.rotate(q, k, cos)
        rotated.add_(1)
        return q + 0, rotated + other, k - 1

    found = check(model, X, torch.rand(4))
    assert found.targets().count("npu_fuse_test_truthful.rotate.default") == 1
    assert "clone" not in str(found.after.graph)


def test_a_single_result_that_is_an_argument() -> None:
    def model(x: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        stored = OPS.store(x, cache)
        stored.mul_(2)
        return cache + 1, stored - 1

    check(model, X, STATES)


def test_results_beside_those_that_are_arguments() -> None:
    def model(x: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        first, stored, last = OPS.cached(x, cache)
        return last, first, stored + 0

    check(model, X, STATES)


def test_an_effect_that_no_argument_shows_is_kept_where_it_is() -> None:
    def model(x: Tensor) -> Tensor:
        OPS.count(x)
        OPS.count(x)
        y = x * 2
        OPS.count(y)
        return y

    x = torch.arange(3.0)
    COUNTS.clear()
    found = compiled(model, x)
    assert COUNTS == [3, 3, 6]
    assert [target for target in found.targets() if "count" in target] == ["npu_fuse_test_truthful.count.default"] * 3


def test_the_models_graph_is_told_by_name_and_place() -> None:
    def model(x: Tensor, states: Tensor) -> Tensor:
        return OPS.cached(cache=states, x=x)[0]

    module = graph_of_dynamo(model, X, STATES)
    tell_writes(module.graph)
    module.graph.lint()
    targets = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
    assert "npu_fuse.npu_fuse_test_truthful_cached.default" in targets


def test_results_that_are_handed_on_whole_leave_the_op() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    call = graph.call_function(OPS.rotate.default, (x, x, x))
    graph.output(call)
    tell_writes(graph)
    assert call.target is OPS.rotate.default


def test_without_the_backend_nothing_is_told() -> None:
    module = graph_of_dynamo(lambda x, states: OPS.conv(x, states), X, STATES)
    assert "npu_fuse_test_truthful.conv" in str(module.graph)


def _written_twice(drop: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def model(x: Tensor) -> Tensor:
        y = drop(x)
        y += y
        return x.sin()

    return model


@pytest.mark.parametrize(
    "drop",
    [
        torch.nn.Dropout(0.5).eval(),
        lambda x: torch.dropout(x, 0.5, False),
        lambda x: torch.dropout(input=x, p=0.5, train=False),
        lambda x: torch.nn.functional.dropout(x, 0.0),
    ],
)
def test_dropout_that_drops_nothing_is_its_input(drop: Callable[[Tensor], Tensor]) -> None:
    check(_written_twice(drop), torch.arange(4.0))


def test_dropout_that_drops_is_not() -> None:
    x = torch.ones(1000)
    found = compiled(_written_twice(lambda x: torch.nn.functional.dropout(x, 0.5)), x)
    assert torch.equal(found.output, torch.ones(1000).sin())
    assert torch.equal(x, torch.ones(1000))
