"""Of several ops the first that is legal is taken; what a refused one has begun leaves no trace."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from npu_fuse.passes.edit import Edit, Refused
from npu_fuse.passes.lowering.candidates import first_legal
from npu_fuse.passes.rewriter import Rewriter
from npu_fuse.runtime.ops import CONTRACTS, OpContract
from npu_fuse.runtime.ops.register import register
from npu_fuse.runtime.target import Target

aten = torch.ops.aten
NORM, SWIGLU, ROTARY = "npu::npu_rms_norm", "npu::npu_swiglu", "npu::npu_rotary_mul"


@pytest.fixture
def module() -> fx.GraphModule:
    register(Target())
    return make_fx(lambda x: x.sin().cos(), tracing_mode="fake")(torch.randn(4, 8))


def sine(module: fx.GraphModule) -> fx.Node:
    return next(node for node in module.graph.nodes if node.target is aten.sin.default)


def refusing(reason: str, edit: Edit, node: fx.Node) -> Callable[[OpContract], None]:
    """Begins everything that an edit can do, and is refused."""

    def build(contract: OpContract) -> None:
        edit.note(f"rounded by {contract.name}")
        tangent = edit.share("tangent", lambda: edit.call(aten.tan.default, node.args[0]))
        edit.replace(node, edit.call(aten.exp.default, tangent))
        raise Refused(reason)

    return build


def allowing(edit: Edit, node: fx.Node) -> Callable[[OpContract], None]:
    def build(contract: OpContract) -> None:
        edit.note("rounded once")
        tangent = edit.share("tangent", lambda: edit.call(aten.tan.default, node.args[0]))
        edit.replace(node, tangent)

    return build


def never(contract: OpContract) -> None:
    raise AssertionError("must not be tried")


def test_the_first_that_is_legal_is_taken_and_the_others_leave_no_trace(module: fx.GraphModule) -> None:
    node = sine(module)
    rewriter = Rewriter(module, Target(), {}, pack_weights=True)
    with rewriter.edit(node, [node]) as edit:
        kept = edit.call(aten.tanh.default, node.args[0])
        candidates = {NORM: refusing("no", edit, node), SWIGLU: allowing(edit, node), ROTARY: never}
        assert first_legal(candidates, edit) is CONTRACTS[SWIGLU]
        assert edit.notes == ["rounded once"]
    assert not kept._erased
    targets = [n.target for n in module.graph.nodes if n.op == "call_function"]
    assert sorted(map(str, targets)) == ["aten.cos.default", "aten.tan.default", "aten.tanh.default"]
    module.graph.lint()
    module.recompile()
    x = torch.randn(4, 8)
    assert torch.equal(module(x), x.tan().cos())


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        (("too wide", "too long"), "npu_rms_norm: too wide; npu_swiglu: too long"),
        (("too wide", "too wide"), "too wide"),
        (("too wide", "too long", "too wide"), "npu_rms_norm and npu_rotary_mul: too wide; npu_swiglu: too long"),
    ],
)
def test_where_none_is_legal_all_reasons_are_given_alike_ones_once(
    module: fx.GraphModule, reasons: tuple[str, ...], said: str
) -> None:
    node, before = sine(module), str(module.graph)
    rewriter = Rewriter(module, Target(), {}, pack_weights=True)
    names = (NORM, SWIGLU, ROTARY)
    with pytest.raises(Refused) as refusal, rewriter.edit(node, [node]) as edit:  # noqa: PT012  # the edit ends with it
        candidates = {name: refusing(why, edit, node) for name, why in zip(names, reasons, strict=False)}
        first_legal(candidates, edit)
    assert str(refusal.value) == said
    assert str(module.graph) == before
    assert not rewriter.shared


def test_rounding_otherwise_is_a_reason_to_try_the_next(module: fx.GraphModule) -> None:
    node = sine(module)
    rewriter = Rewriter(module, Target(), {}, pack_weights=True, numerics="exact")

    def exact(contract: OpContract) -> None:
        edit.replace(node, edit.call(aten.tan.default, node.args[0]))

    with rewriter.edit(node, [node]) as edit:
        with pytest.raises(Refused, match="numerics is 'exact', and rounded once"):
            first_legal({NORM: allowing(edit, node)}, edit)
        assert first_legal({NORM: allowing(edit, node), SWIGLU: exact}, edit) is CONTRACTS[SWIGLU]


def test_sizes_that_were_read_of_what_is_undone_go_with_it() -> None:
    module = make_fx(lambda x: x.sin(), tracing_mode="symbolic")(torch.randn(4, 8))
    node = sine(module)
    rewriter = Rewriter(module, Target(), {}, pack_weights=True)
    before = str(module.graph)
    for _ in range(2):  # what is forgotten is read anew
        with pytest.raises(Refused), rewriter.edit(node, [node]) as edit:  # noqa: PT012  # the edit ends with it
            twice = edit.call(aten.cat.default, [node.args[0], node.args[0]])
            edit.replace(node, edit.view(edit.call(aten.tan.default, twice), edit.sizes(twice)))
            raise Refused("no such op")
        module.graph.lint()
        assert str(module.graph) == before
