"""Surgery that leaves the graph whole: order, layout, effects, and no trace of what was given up."""

import operator

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from npu_fuse.passes.edit import Edit, Refused
from npu_fuse.passes.layout import inverse, physical_order
from npu_fuse.passes.rewriter import Rewriter
from npu_fuse.patterns import values
from npu_fuse.runtime.ops import CONTRACTS
from npu_fuse.runtime.ops.register import register
from npu_fuse.runtime.target import Target

aten = torch.ops.aten
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _registered() -> None:
    register(Target())


def graph_of(function: object, *inputs: torch.Tensor) -> fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, tracing_mode="fake")(*inputs)


def rewriter(module: fx.GraphModule) -> Rewriter:
    return Rewriter(module, Target(), {}, pack_weights=True)


def node(module: fx.GraphModule, target: object, index: int = 0) -> fx.Node:
    return [n for n in module.graph.nodes if n.target is target][index]


def test_users_that_stand_too_early_are_moved() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = x.sin()
        early = a.exp()
        b = y.cos()
        return early, b, a

    module = graph_of(model, torch.randn(3), torch.randn(3))
    sin, cos = node(module, aten.sin.default), node(module, aten.cos.default)
    edits = rewriter(module)
    with edits.edit(sin, [sin]) as edit:
        both = edit.call(aten.mul.Tensor, sin.args[0], cos)
        edit.replace(sin, edit.call(aten.sub.Tensor, both, both))
    module.graph.lint()
    module.recompile()
    x, y = torch.randn(3), torch.randn(3)
    early, b, a = module(x, y)
    assert torch.equal(a, torch.zeros(3))
    assert torch.equal(early, torch.ones(3))
    assert torch.equal(b, y.cos())


def test_a_constant_goes_with_the_edit_that_made_it() -> None:
    module = graph_of(lambda x: x.sin(), torch.randn(3))
    before = str(module.graph)
    sin = node(module, aten.sin.default)
    edits = rewriter(module)
    edit = Edit(edits, sin, [sin])
    edit.constant("_ones", CPU, torch.ones(3).to)
    edit.roll_back()
    assert str(module.graph) == before
    assert not hasattr(module, "_ones_cpu")
    with edits.edit(sin, [sin]) as edit:
        ones = edit.constant("_ones", CPU, torch.ones(3).to)
        assert edit.constant("_ones", CPU, torch.zeros(3).to) is ones
        edit.replace(sin, edit.call(aten.add.Tensor, sin.args[0], ones))
    edit = Edit(edits, ones, [ones])
    assert edit.constant("_ones", CPU, torch.zeros(3).to) is ones  # another's, and it stays
    edit.roll_back()
    module.recompile()
    x = torch.randn(3)
    assert torch.equal(module(x), x + 1)


def test_an_input_that_needs_the_result_is_refused_and_leaves_no_trace() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        a = x.sin()
        return a + a.cos()

    module = graph_of(model, torch.randn(3))
    before = str(module.graph)
    sin, cos = node(module, aten.sin.default), node(module, aten.cos.default)
    edits = rewriter(module)
    with pytest.raises(Refused, match="depends on its result"), edits.edit(sin, [sin]) as edit:
        edit.replace(sin, edit.call(aten.mul.Tensor, sin.args[0], cos))
    assert str(module.graph) == before


def test_a_result_of_another_shape_or_type_is_refused() -> None:
    module = graph_of(lambda x: x.sin(), torch.randn(3, 4))
    sin = node(module, aten.sin.default)
    before = str(module.graph)
    edits = rewriter(module)
    with pytest.raises(Refused, match=r"shape \(4, 3\), the model's has \(3, 4\)"), edits.edit(sin, [sin]) as edit:
        edit.replace(sin, edit.call(aten.permute.default, sin.args[0], [1, 0]))
    with pytest.raises(Refused, match=r"torch.float16, the model's is torch.float32"), edits.edit(sin, [sin]) as edit:
        edit.replace(sin, edit.cast(sin.args[0], torch.float16))
    assert str(module.graph) == before


def test_the_layout_of_the_model_is_restored() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).sin()

    x = torch.randn(2, 3, 4)
    module = graph_of(model, x)
    sin = node(module, aten.sin.default)
    edits = rewriter(module)
    with edits.edit(sin, [sin]) as edit:
        edit.replace(sin, edit.contiguous(edit.call(aten.cos.default, sin.args[0])))
    module.recompile()
    assert torch.equal(module(x), x.transpose(1, 2).cos())
    assert module(x).stride() == model(x).stride() == (12, 1, 4)


def test_a_layout_with_gaps_is_refused() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return aten.as_strided.default(x, [2, 2], [4, 1])

    module = graph_of(model, torch.randn(8))
    strided = node(module, aten.as_strided.default)
    edits = rewriter(module)
    with pytest.raises(Refused, match=r"strides \(4, 1\), which can't be kept"), edits.edit(strided, [strided]) as edit:
        edit.replace(strided, edit.view(edit.call(aten.slice.Tensor, strided.args[0], 0, 0, 4), [2, 2]))


def test_nothing_is_rewritten_across_a_write() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        a = x.sin()
        x.add_(1)
        return a.cos()

    module = graph_of(model, torch.randn(3))
    sin, cos = node(module, aten.sin.default), node(module, aten.cos.default)
    edits = rewriter(module)
    with pytest.raises(Refused, match="side effects"), edits.edit(cos, [sin, cos]) as edit:
        edit.replace(cos, edit.call(aten.exp.default, sin.args[0]))


def test_new_nodes_read_a_buffer_after_the_write_that_the_site_stands_behind() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x.sin()

    module = graph_of(model, torch.randn(3))
    sin = node(module, aten.sin.default)
    placeholder = next(iter(module.graph.nodes))
    edits = rewriter(module)
    with edits.edit(sin, [sin]) as edit:
        edit.replace(sin, edit.call(aten.cos.default, placeholder))
    module.recompile()
    x = torch.randn(3)
    assert torch.equal(module(x.clone()), (x + 1).cos())


def test_a_contract_is_asked_and_its_call_is_by_position() -> None:
    module = graph_of(lambda x, w: x.sin(), torch.randn(3, 8), torch.randn(8))
    sin = node(module, aten.sin.default)
    x, weight = list(module.graph.nodes)[:2]
    edits = rewriter(module)
    contract = CONTRACTS["npu::npu_rms_norm"]
    with pytest.raises(Refused), edits.edit(sin, [sin]) as edit:
        edit.op(contract, input=weight, gamma=x, epsilon=1e-6)
    with edits.edit(sin, [sin]) as edit:
        edit.replace(sin, edit.item(edit.op(contract, input=x, gamma=weight, epsilon=1e-5), 0))
    call = node(module, contract.op)
    assert call.args == (x, weight, 1e-5)
    assert call.meta["npu_fuse"] == "sin"
    assert [tuple(v.shape) for v in call.meta["val"]] == [(3, 8), (3, 1)]
    assert node(module, operator.getitem).args == (call, 0)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0], [2, 1, 0]])
def test_physical_order_undoes_a_permutation(order: list[int]) -> None:
    x = torch.randn(2, 3, 4).permute(order)
    assert x.permute(physical_order(x)).is_contiguous()
    assert x.permute(physical_order(x)).permute(inverse(physical_order(x))).stride() == x.stride()


def test_source_and_module_are_carried_over() -> None:
    from helpers import compiled

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([nn.Sequential(nn.RMSNorm(8))])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner[0](x)

    found = compiled(Model(), torch.randn(3, 8))
    (site,) = found.report.sites
    assert site.module == "inner.0.0"
    call = node(found.after, CONTRACTS["npu::npu_rms_norm"].op)
    assert "nn_module_stack" in call.meta
    assert "stack_trace" in call.meta
    assert site.source is not None


def test_gaps_that_the_caller_sees_are_refused_even_where_any_layout_will_do() -> None:
    module = graph_of(lambda x: aten.as_strided.default(x, [2, 2], [4, 1]), torch.randn(8))
    strided = node(module, aten.as_strided.default)
    edits = rewriter(module)
    with pytest.raises(Refused, match="can't be kept"), edits.edit(strided, [strided]) as edit:  # noqa: PT012
        kept = edit.view(edit.call(aten.slice.Tensor, strided.args[0], 0, 0, 4), [2, 2])
        edit.replace(strided, kept, any_layout=True)


def _opaque(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous()


@pytest.mark.parametrize("is_opaque", [False, True])
@pytest.mark.parametrize("readers", [2, 70])
def test_a_layout_is_followed_through_a_few_ops_of_torch(readers: int, is_opaque: bool) -> None:
    module = graph_of(lambda x: x.t().sin().cos(), torch.randn(3, 4))
    sin, cos = node(module, aten.sin.default), node(module, aten.cos.default)
    value = cos.meta["val"]
    with module.graph.inserting_after(cos):
        last = cos
        for _ in range(readers):
            last.append(following := module.graph.call_function(aten.neg.default, (last,)))
            following.meta["val"], last = value, following
        read = module.graph.call_function(_opaque if is_opaque else aten.clone.default, (last,))
        read.kwargs = {} if is_opaque else {"memory_format": torch.contiguous_format}
        last.append(read)
        read.meta["val"] = value.contiguous()
    module.graph.output_node().args = (read,)
    edits = rewriter(module)
    with edits.edit(sin, [sin]) as edit:
        edit.replace(sin, edit.contiguous(edit.call(aten.sin.default, sin.args[0])), any_layout=True)
    module.recompile()
    x = torch.randn(3, 4)
    torch.testing.assert_close(module(x), x.t().sin().cos())
    follows = readers == 2 and not is_opaque
    assert cos.meta["val"].stride() == ((3, 1) if follows else (1, 4))
    assert ("permute" in str(module.graph)) is not follows


def test_a_collective_whose_result_is_used_elsewhere_is_not_taken_out() -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = x.sin()
        return a.cos(), a

    module = graph_of(model, torch.randn(3))
    sin, cos = node(module, aten.sin.default), node(module, aten.cos.default)
    with pytest.raises(Refused, match="gives is used elsewhere too"), rewriter(module).edit(cos, [sin, cos]) as edit:
        edit.absorb([sin, cos])


def test_an_effect_that_reads_a_result_before_it_could_be_computed_is_no_mover() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        a = x.sin()
        y.copy_(a)
        return a + y.cos()

    module = graph_of(model, torch.randn(3), torch.randn(3))
    sin, cos = node(module, aten.sin.default), node(module, aten.cos.default)
    edits = rewriter(module)
    with pytest.raises(Refused, match=r"copy_.*side effects, uses its result"), edits.edit(sin, [sin]) as edit:
        edit.replace(sin, edit.call(aten.exp.default, cos))


def test_of_a_shape_one_size_may_be_unknown() -> None:
    module = graph_of(lambda x: x.sin(), torch.randn(3, 4))
    sin = node(module, aten.sin.default)
    edits = rewriter(module)
    edit = Edit(edits, sin, [sin])
    sizes = [ShapeEnv().create_unbacked_symint() for _ in range(2)]
    sin.meta["val"] = torch.empty(3, sizes[0], device="meta")
    assert edit.known_sizes(sin) == [3, -1]
    sin.meta["val"] = torch.empty(sizes, device="meta")
    with pytest.raises(Refused, match="more than one size can't be told beforehand"):
        edit.known_sizes(sin)


def test_a_permutation_of_a_permuted_tensor_is_one_or_none() -> None:
    module = graph_of(lambda x: x.permute(2, 0, 1).exp(), torch.randn(2, 3, 5))
    exp, permuted = node(module, aten.exp.default), node(module, aten.permute.default)
    with rewriter(module).edit(exp, [exp]) as edit:
        back = edit.permuted(permuted, (1, 2, 0))
        swapped = edit.permuted(permuted, (0, 2, 1))
        edit.replace(exp, edit.call(aten.exp.default, edit.permuted(swapped, (0, 2, 1))))
    assert back is permuted.args[0]
    assert swapped.args == (back, [2, 1, 0])
    module.graph.lint()
    module.recompile()
    x = torch.randn(2, 3, 5)
    assert torch.equal(module(x), x.permute(2, 0, 1).exp())


def test_views_of_what_was_replaced_share_the_memory_of_what_replaces_it() -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.sin()
        return y.view(6)[2:], x.view(6)

    module = graph_of(model, torch.randn(2, 3))
    sin, cut = node(module, aten.sin.default), node(module, aten.slice.Tensor)
    other = node(module, aten.view.default, 1)
    edits = rewriter(module)
    with edits.edit(sin, [sin]) as edit:
        new = edit.call(aten.cos.default, sin.args[0])
        edit.replace(sin, new)
    untouched = other.meta["val"]
    edits.settle_views()
    assert values.storages(cut) == values.storages(new)
    assert cut.meta["val"].storage_offset() == 2
    assert other.meta["val"] is untouched
