"""A graph in which nothing fuses comes out node for node as it went in, but for writes, which are put back in place."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

import npu_fuse
from helpers import compiled


def form(graph: fx.Graph) -> list[tuple[str, str, str]]:
    """Every node with its target and arguments."""
    return [(node.op, str(node.target), str((node.args, node.kwargs))) for node in graph.nodes]


def through_aot_alone(function: object, *inputs: torch.Tensor) -> fx.Graph:
    graphs = []

    def compiler(module: fx.GraphModule, _: object) -> object:
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=compiler, inference_compiler=compiler, keep_inference_input_mutations=True)
    with torch.no_grad():
        torch.compile(function, backend=backend)(*inputs)
    return graphs[0]


def layer_norm(x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-6)


def writes(x: torch.Tensor) -> torch.Tensor:
    x[:, :4].mul_(2)
    return torch.softmax(x, -1).sum(0) + x.chunk(2, -1)[0].mean()


def random(x: torch.Tensor) -> torch.Tensor:
    first = torch.rand_like(x)
    return x + torch.rand_like(x) - 2 * first


@pytest.mark.parametrize("function", [layer_norm, writes, random])
def test_without_ops_that_are_preserved_it_is_the_graph_of_aot_autograd(function: object) -> None:
    x = torch.randn(3, 8)
    wanted = form(through_aot_alone(function, x.clone()))
    assert form(compiled(function, x.clone(), disable={"in_place"}).after.graph) == wanted


def test_with_them_it_is_the_graph_that_was_recognised_with_the_models_ops() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    found = compiled(model, torch.randn(3, 8))
    restored = [(op, target.replace("npu_fuse.", "aten."), rest) for op, target, rest in form(found.before.graph)]
    assert form(found.after.graph) == restored


def test_random_numbers_are_drawn_as_in_eager() -> None:
    x = torch.randn(3, 8)
    found = compiled(random, x)
    torch.manual_seed(0)
    wanted = random(x)
    torch.manual_seed(0)
    assert torch.equal(found.function(x), wanted)


def test_turned_off_fusions_leave_the_graph_and_are_reported() -> None:
    norm = nn.RMSNorm(8)
    off = compiled(norm, torch.randn(3, 8), disable={"rms_norm"})
    assert form(off.after.graph) == form(off.before.graph)
    (site,) = off.report.sites
    assert (site.kind, site.status) == ("rms_norm", "refused")
    assert site.reason == "rms_norm is turned off by Options.disable"
    assert off.report.count("rms_norm") == 1


def test_seconds_are_counted_by_pass() -> None:
    report = compiled(nn.RMSNorm(8), torch.randn(3, 8)).report
    passes = {"repeated_projection", "recognise", "encoder_only", "fuse", "in_place", "cleanup"}
    assert set(report.seconds_by_pass) == passes
    assert report.seconds == pytest.approx(sum(report.seconds_by_pass.values()))


def test_explain_speaks_of_all_graphs_of_a_call() -> None:
    norm = nn.RMSNorm(8)

    def model(x: torch.Tensor) -> torch.Tensor:
        y = norm(x)
        torch._dynamo.graph_break()
        return norm(y)

    report = npu_fuse.explain(model, torch.randn(3, 8))
    assert report.graphs == 2
    assert report.count("rms_norm") == 2
    assert report.ops["npu::npu_rms_norm"] == 2


def test_explain_can_be_asked_again_and_again() -> None:
    norm = nn.RMSNorm(8)
    assert all(npu_fuse.explain(norm, torch.randn(3, 8)).ops["npu::npu_rms_norm"] == 1 for _ in range(20))


def test_explain_says_when_there_is_nothing_to_compile() -> None:
    with pytest.raises(RuntimeError, match="compiled no graph"):
        npu_fuse.explain(lambda: 3)
