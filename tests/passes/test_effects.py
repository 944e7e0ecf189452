"""What may be dropped, computed once or moved, before AOTAutograd and after."""

import operator
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F  # noqa: N812  # its usual name

import npu_fuse
from helpers import compiled, graph_of_dynamo
from npu_fuse.passes.cleanup import cleanup
from npu_fuse.passes.effects import is_pure, regions
from npu_fuse.patterns.canonical import Canonicaliser
from npu_fuse.patterns.term import TermPool
from npu_fuse.runtime.weights import pack

aten = torch.ops.aten
Tensor = torch.Tensor


@pytest.fixture(scope="module", autouse=True)
def _ops() -> Iterator[None]:
    """`tell` and `tell_too` write `state` and don't say so; only the first is registered."""
    library = torch.library.Library("npu_fuse_test_passes", "FRAGMENT")
    for name in ("tell", "tell_too"):
        library.define(f"{name}(Tensor x, Tensor state) -> Tensor")
        library.impl(name, _tell, "CompositeExplicitAutograd")
        torch.library.register_fake(f"npu_fuse_test_passes::{name}", lambda x, state: torch.empty_like(x), lib=library)
    npu_fuse.register_side_effects("npu_fuse_test_passes::tell", mutates=["state"])
    yield
    library._destroy()


def _tell(x: Tensor, state: Tensor) -> Tensor:
    out = x + state.sum()
    state.mul_(2).add_(x.sum())
    return out


def call(function: object, *args: object, **kwargs: object) -> fx.Node:
    graph = fx.Graph()
    x = graph.placeholder("x")
    args = tuple(x if argument is Tensor else argument for argument in args)
    if isinstance(function, str):
        return graph.call_method(function, (x, *args), kwargs)
    return graph.call_function(function, args, {k: x if v is Tensor else v for k, v in kwargs.items()})


PURE = {
    "aten": call(aten.add.Tensor, Tensor, 1),
    "an op of Python": call(operator.add, Tensor, 1),
    "getitem": call(operator.getitem, Tensor, 0),
    "a size": call(torch.sym_max, 1, 2),
    "a function of torch": call(torch.add, Tensor, 1),
    "a function of nn.functional": call(F.relu, Tensor),
    "out=None": call(torch.add, Tensor, 1, out=None),
    "inplace=False": call(F.silu, Tensor, inplace=False),
    "a method": call("mul", 2),
    "a method that gives a view": call("view", 3),
    "a packed parameter": call(pack, Tensor),
    "a constant": fx.Graph().get_attr("constant"),
    "what an export asserts": call(aten._assert_tensor_metadata.default, Tensor),
}
IMPURE = {
    "aten in place": call(aten.add_.Tensor, Tensor, 1),
    "aten with out": call(aten.add.out, Tensor, 1, out=Tensor),
    "aten random": call(aten.rand_like.default, Tensor),
    "+=": call(operator.iadd, Tensor, 1),
    "|=": call(operator.ior, Tensor, 1),
    "setitem": call(operator.setitem, Tensor, 0, 1),
    "delitem": call(operator.delitem, Tensor, 0),
    "a function of torch in place": call(torch.relu_, Tensor),
    "out=": call(torch.add, Tensor, 1, out=Tensor),
    "inplace=True": call(F.relu, Tensor, inplace=True),
    "inplace by position": call(F.relu, Tensor, True),
    "a random function": call(F.dropout, Tensor, 0.5),
    "a method in place": call("mul_", 2),
    "a method that fills": call("zero_"),
    "a random method": call("normal_"),
    "an unknown method": call("as_they_like"),
    "an unknown function": call(_tell, Tensor, Tensor),
    "a mode": call(torch._C._set_grad_enabled, False),
}


@pytest.mark.parametrize("name", PURE)
def test_what_computes_only_is_pure(name: str) -> None:
    assert is_pure(PURE[name])


@pytest.mark.parametrize("name", IMPURE)
def test_what_writes_or_draws_is_not(name: str) -> None:
    assert not is_pure(IMPURE[name])


def test_registration_makes_an_op_impure() -> None:
    assert not is_pure(call(torch.ops.npu_fuse_test_passes.tell.default, Tensor, Tensor))
    assert not is_pure(call(torch.ops.npu_fuse_test_passes.tell, Tensor, Tensor))
    assert is_pure(call(torch.ops.npu_fuse_test_passes.tell_too.default, Tensor, Tensor))


def test_dead_code_of_a_dynamo_graph_goes_and_its_writes_stay() -> None:
    """pytorch/pytorch#104463"""

    class Model(nn.Module):
        def forward(self, qkv: Tensor, count: Tensor) -> Tensor:
            qkv[:, :2].mul_(0.25)
            qkv[:, 3] = 1
            count += 1
            torch.add(count, 1, out=count)
            torch.ops.npu_fuse_test_passes.tell(qkv, count)
            _ = qkv.exp().sin()
            return qkv * 2

    module = graph_of_dynamo(Model(), torch.randn(3, 4), torch.zeros(1))
    cleanup(module)
    called = " ".join(str(node.target) for node in module.graph.nodes)
    assert "exp" not in called
    qkv, count = torch.randn(3, 4), torch.zeros(1)
    wanted, wanted_count = qkv.clone(), count.clone()
    result = Model()(wanted, wanted_count)
    (found,) = module(qkv, count)
    assert torch.equal(found, result)
    assert torch.equal(qkv, wanted)
    assert torch.equal(count, wanted_count)


def _numbers(op: Callable[..., Tensor]) -> list[int]:
    """Of two equal calls and of a read before and after them."""

    def model(x: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        return state.sin(), op(x, state), op(x, state), state.sin()

    from torch.fx.experimental.proxy_tensor import make_fx

    module = make_fx(model, tracing_mode="fake")(torch.randn(3), torch.randn(3))
    canonicaliser = Canonicaliser(TermPool())
    for node in module.graph.nodes:
        if node.op != "output":
            canonicaliser.visit(node)
    return [canonicaliser.numbers[node] for node in module.graph.output_node().args[0]]


def test_equal_calls_are_one_value_unless_they_are_registered() -> None:
    assert len(set(_numbers(torch.ops.npu_fuse_test_passes.tell_too))) == 2
    assert len(set(_numbers(torch.ops.npu_fuse_test_passes.tell))) == 4


def test_of_two_calls_of_an_op_only_the_one_that_draws_numbers_is_a_border() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    attention = aten.scaled_dot_product_attention.default
    plain, drops = (graph.call_function(attention, (x, x, x, None, dropout)) for dropout in (0.0, 0.5))
    graph.output((plain, drops))
    numbered = regions(graph)
    assert (numbered[plain], numbered[drops]) == (0, 1)


def test_no_stretch_goes_across_a_registered_op() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    before = graph.call_function(aten.sin.default, (x,))
    tell = graph.call_function(torch.ops.npu_fuse_test_passes.tell.default, (x, x))
    after = graph.call_function(aten.sin.default, (x,))
    numbered = regions(graph)
    assert numbered[before] < numbered[tell] < numbered[after]


def test_a_method_in_place_parts_a_graph_too() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    before, write, after = (graph.call_method(name, (x,)) for name in ("sin", "zero_", "sin"))
    numbered = regions(graph)
    assert numbered[before] < numbered[write] < numbered[after]


class Model(nn.Module):
    """An op that writes and is not used, between two readers, and again."""

    def __init__(self, op: Callable[..., Tensor]) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        before = state * 2
        self.op(x, state)
        first = self.op(x, state)
        return before + first + self.op(x, state) + state * 2


def _after_compiling(op: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    state = torch.ones(3)
    return compiled(Model(op), torch.arange(3.0), state).output, state


def test_a_registered_op_is_kept_in_order_and_each_time() -> None:
    state = torch.ones(3)
    wanted = Model(_tell)(torch.arange(3.0), state)
    output, compiled_state = _after_compiling(torch.ops.npu_fuse_test_passes.tell)
    assert torch.equal(output, wanted)
    assert torch.equal(compiled_state, state)
    _, unregistered = _after_compiling(torch.ops.npu_fuse_test_passes.tell_too)
    assert not torch.equal(unregistered, state)  # the call that no one uses is gone: what registration is for


def test_what_an_export_asserts_of_types_is_no_border() -> None:
    class Norm(torch.nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            wide = x.float()
            return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight

    given = (torch.randn(2, 8).bfloat16(), torch.ones(8).bfloat16())
    program = torch.export.export(Norm(), given).module()
    found = compiled(program, *given)
    assert "aten._assert_tensor_metadata.default" in str(found.before.graph)
    assert found.targets() == ["npu.npu_rms_norm.default", "<built-in function getitem>"]
