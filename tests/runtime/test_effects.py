"""What ops write is known by schema or by registration, and told by an op that says so."""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import fx

import npu_fuse
from npu_fuse.runtime.effects import effect_of, register_known, told_by, writes
from npu_fuse.runtime.ops import CONTRACTS
from npu_fuse.runtime.ops.register import register
from npu_fuse.runtime.target import Target

_NUMBERS = itertools.count()


@pytest.fixture
def define() -> Iterator[Callable[..., torch._ops.OpOverload]]:
    """Defines an op of a new name that does what a function does, with a schema that may not say so."""
    library = torch.library.Library("npu_fuse_test_effects", "FRAGMENT")

    def define(arguments: str, run: Callable[..., object], overload: str = "") -> torch._ops.OpOverload:
        name = f"op{next(_NUMBERS)}"
        library.define(f"{name}{overload}{arguments}")
        library.impl(f"{name}{overload}", run, "CompositeExplicitAutograd")
        packet = getattr(torch.ops.npu_fuse_test_effects, name)
        return getattr(packet, packet.overloads()[0])

    yield define
    library._destroy()


def test_a_registered_op_survives_dead_code_elimination(define) -> None:
    op = define("(Tensor x, Tensor state) -> ()", lambda x, state: state.add_(x) and None)

    def graph() -> fx.Graph:
        graph = fx.Graph()
        graph.call_function(op, (graph.placeholder("x"), graph.placeholder("state")))
        graph.output(())
        graph.eliminate_dead_code()
        return graph

    assert not graph().find_nodes(op="call_function", target=op)
    npu_fuse.register_side_effects(op, mutates=["state"])
    assert graph().find_nodes(op="call_function", target=op)


def test_what_is_written_is_what_is_declared_and_what_is_registered(define) -> None:
    op = define("(Tensor x, Tensor(a!) cache, Tensor state) -> Tensor", lambda x, cache, state: x)
    assert writes(op) == ("cache",)
    npu_fuse.register_side_effects(op, mutates=["state"])
    assert writes(op) == ("cache", "state")
    assert effect_of(op.overloadpacket) is effect_of(op)


def test_the_truthful_op_does_what_the_op_does_and_says_so(define) -> None:
    def run(x: torch.Tensor, state: torch.Tensor | None, caches: list[torch.Tensor], scale: float) -> torch.Tensor:
        for number, cache in enumerate(caches):
            cache.add_(number + 1)
        return x * scale

    op = define('(Tensor x, Tensor? state, Tensor[] caches, float scale=2., str kind="a) -> b") -> Tensor', run)
    npu_fuse.register_side_effects(op, mutates=["caches", "state"])
    truthful = effect_of(op).truthful
    assert told_by(truthful) is effect_of(op)
    assert writes(truthful) == ("state", "caches")
    assert [a.default_value for a in truthful._schema.arguments] == [a.default_value for a in op._schema.arguments]
    x, caches = torch.randn(3), [torch.zeros(2), torch.zeros(4)]
    assert torch.equal(truthful(x, None, caches, 3.0), x * 3)
    assert torch.equal(caches[1], torch.full((4,), 2.0))


def test_results_that_are_arguments_are_left_out(define) -> None:
    op = define("(Tensor q, Tensor k) -> (Tensor, Tensor, Tensor)", lambda q, k: (q.add_(1), k.clone(), k.add_(1)))
    npu_fuse.register_side_effects(op, mutates=["q", "k"], returns={0: "q", 2: "k"})
    q, k = torch.zeros(2), torch.ones(2)
    assert torch.equal(effect_of(op).truthful(q, k), torch.ones(2))
    assert torch.equal(k, torch.full((2,), 2.0))


def test_an_op_that_says_all_needs_no_other(define) -> None:
    op = define("(Tensor x, Tensor(a!) state) -> Tensor", lambda x, state: x.clone())
    npu_fuse.register_side_effects(op, mutates=["state"])
    assert effect_of(op).truthful is None


def test_a_second_registration_is_the_same_or_an_error(define) -> None:
    op = define("(Tensor x, Tensor state) -> Tensor", lambda x, state: x.clone())
    npu_fuse.register_side_effects(op, mutates=["state"])
    npu_fuse.register_side_effects(op, mutates=["state"])
    with pytest.raises(ValueError, match="registered already, as writing state"):
        npu_fuse.register_side_effects(op, mutates=["x"])


def test_mistakes_are_named(define) -> None:
    op = define("(Tensor x, int n) -> Tensor", lambda x, n: x.clone())
    aliased = define("(Tensor(a!) x) -> Tensor(a!)", lambda x: x)
    lists = define("(Tensor[] xs) -> Tensor", lambda xs: xs[0])
    with pytest.raises(ValueError, match="no argument 'state'; it has x, n"):
        npu_fuse.register_side_effects(op, mutates=["state"])
    with pytest.raises(ValueError, match=r"'n' of .* is int, not a tensor"):
        npu_fuse.register_side_effects(op, mutates=["n"])
    with pytest.raises(ValueError, match="no result 1"):
        npu_fuse.register_side_effects(op, mutates=["x"], returns={1: "x"})
    with pytest.raises(ValueError, match=r"'xs' of .* is a list of tensors, which result 0 can't be"):
        npu_fuse.register_side_effects(lists, mutates=["xs"], returns={0: "xs"})
    with pytest.raises(ValueError, match=r"result 0 of .* is an argument"):
        npu_fuse.register_side_effects(aliased, mutates=["x"])
    with pytest.raises(ValueError, match="no op 'npu_fuse_test_effects::nothing'"):
        npu_fuse.register_side_effects("npu_fuse_test_effects::nothing")
    with pytest.raises(ValueError, match="several overloads"):
        npu_fuse.register_side_effects("aten::add")


def test_an_op_is_found_by_its_name_and_overload(define) -> None:
    op = define("(Tensor x) -> ()", lambda x: None, overload=".quiet")
    npu_fuse.register_side_effects(f"{op._schema.name}.quiet")
    assert effect_of(op).mutates == ()


def test_every_contract_that_writes_undeclared_is_known() -> None:
    register(Target())
    register_known()
    for contract in CONTRACTS.values():
        assert set(contract.mutates) == set(writes(contract.op)), contract.name


def test_an_op_of_a_known_name_with_other_arguments_is_another_op() -> None:
    with torch.library._scoped_library("_C_ascend", "FRAGMENT") as library:
        library.define("store_kv_block(Tensor a, Tensor b) -> ()")
        register_known()
        assert effect_of(torch.ops._C_ascend.store_kv_block) is None
