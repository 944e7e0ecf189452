"""The Dynamo entry: what it is called by, when it leaves a graph alone, and what it promises of the rest."""

import copy
import logging
import warnings

import pytest
import torch
from torch import nn

import npu_fuse
from npu_fuse.runtime import backend as backend_module


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


class Norm(nn.Module):
    def __init__(self, size: int = 8, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def test_is_found_by_its_name() -> None:
    assert "npu_fuse" in torch._dynamo.list_backends()
    norm, x = Norm(), torch.randn(3, 8)
    with torch.no_grad():
        assert torch.equal(torch.compile(norm, backend="npu_fuse")(x), norm(x))


def test_takes_options_by_name() -> None:
    norm, x = Norm(), torch.randn(3, 8)
    with torch.no_grad():
        compiled = torch.compile(norm, backend="npu_fuse", options={"disable": {"rms_norm"}})
        assert torch.equal(compiled(x), norm(x))
        with pytest.raises(Exception, match=r"unknown option 'disabel' \(did you mean 'disable'\?\); known: disable"):
            torch.compile(norm, backend="npu_fuse", options={"disabel": ()})(x)
        with pytest.raises(Exception, match="unknown mode 'max-autotune'"):
            torch.compile(norm, backend=npu_fuse.npu_fuse, mode="max-autotune")(x)


def test_another_argument_is_told() -> None:
    with pytest.raises(TypeError, match="npu_fuse: unknown argument fullgraph; known: mode, options"):
        npu_fuse.npu_fuse(None, [], fullgraph=True)


def test_a_backend_of_ones_own_takes_a_mode_and_is_not_copied() -> None:
    backend = npu_fuse.Backend(strict=True)
    assert copy.deepcopy({"backend": backend})["backend"] is backend
    norm, x = Norm(), torch.randn(3, 8)
    with torch.no_grad():
        assert torch.equal(torch.compile(norm, backend=backend, mode="reduce-overhead")(x), norm(x))
        with pytest.raises(Exception, match="unknown mode 'max-autotune'; known: 'default', 'reduce-overhead'"):
            torch.compile(norm, backend=backend, mode="max-autotune")(x)
    assert [replayed.runner.stats.captures for replayed in backend.runners] == [1]


def test_options_and_settings_are_either_or() -> None:
    with pytest.raises(ValueError, match="not both"):
        npu_fuse.Backend(npu_fuse.Options(), strict=True)


def test_keeps_a_report_a_graph() -> None:
    backend = npu_fuse.Backend(strict=True)
    with torch.no_grad():
        torch.compile(Norm(8), backend=backend)(torch.randn(3, 8))
        torch.compile(Norm(16), backend=backend)(torch.randn(3, 16))
    assert [report.ops["npu::npu_rms_norm"] for report in backend.reports] == [1, 1]
    assert backend.report.ops["npu::npu_rms_norm"] == 2
    assert backend.report.graphs == 2


def test_keeps_graphs_where_it_is_told_to() -> None:
    keeping, others = npu_fuse.Backend(strict=True, keep_graphs=True), npu_fuse.Backend(strict=True)
    norm, x = Norm(), torch.randn(3, 8)
    for backend in (keeping, others):
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(lambda x: norm(x) @ x.T, backend=backend)(x)
    assert not others.graphs
    ((before, after),) = keeping.graphs
    ops = [{str(node.target) for node in graph.graph.nodes} for graph in (before, after)]
    assert "aten.rsqrt.default" in ops[0] - ops[1]
    assert "npu.npu_rms_norm.default" in ops[1] - ops[0]
    assert "aten.matmul.default" in ops[0] & ops[1]  # what the model called, not how it is kept whole


def test_logs_one_line_a_compilation(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="npu_fuse"), torch.no_grad():
        torch.compile(Norm(), backend=npu_fuse.Backend(strict=True))(torch.randn(3, 8))
    lines = [record.getMessage() for record in caplog.records if record.name == "npu_fuse"]
    assert len(lines) == 1
    assert "1 npu::npu_rms_norm" in lines[0]


def test_a_graph_that_needs_gradients_runs_unfused_with_the_right_ones() -> None:
    norm = Norm()
    backend = npu_fuse.Backend(strict=True)
    compiled = torch.compile(norm, backend=backend)
    x, y = (torch.randn(3, 8).requires_grad_() for _ in range(2))
    y.data.copy_(x.data)
    compiled(x).square().sum().backward()
    found = norm.weight.grad.clone()
    norm.weight.grad = None
    norm(y).square().sum().backward()
    torch.testing.assert_close(found, norm.weight.grad)
    torch.testing.assert_close(x.grad, y.grad)
    assert "needs gradients" in backend.reports[0].remark
    assert not backend.reports[0].ops


def test_inference_mode_fuses() -> None:
    backend = npu_fuse.Backend(strict=True)
    norm, x = Norm(), torch.randn(3, 8)
    with torch.inference_mode():
        assert torch.equal(torch.compile(norm, backend=backend)(x), norm(x))
    assert backend.reports[0].ops["npu::npu_rms_norm"] == 1


def test_autocast_runs_as_eager_does() -> None:
    projection, x = nn.Linear(8, 8), torch.randn(3, 8)

    def model(value: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return projection(value)

    with torch.no_grad():
        found = torch.compile(model, backend=npu_fuse.Backend(strict=True))(x)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, model(x))
        torch._dynamo.reset()
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(torch.compile(projection, backend=npu_fuse.Backend(strict=True))(x), projection(x))


def test_an_internal_failure_warns_once_and_runs_unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug of ours")

    for name in ("optimise", "prepare"):
        torch._dynamo.reset()
        with monkeypatch.context() as patch:
            patch.setattr(backend_module, name, broken)
            backend = npu_fuse.Backend()
            projection, x = nn.Sequential(nn.Linear(8, 8), Norm()), torch.randn(3, 8)
            with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert torch.equal(torch.compile(projection, backend=backend)(x), projection(x))
            ours = [w for w in caught if "npu_fuse" in str(w.message)]
            assert len(ours) == 1
            assert "a bug of ours" in str(ours[0].message)
            assert "a bug of ours" in backend.reports[0].failure
            assert "internal failure" in backend.reports[0].summary()


def test_strict_raises_an_internal_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(backend_module, "optimise", broken)
    with torch.no_grad(), pytest.raises(Exception, match="a bug of ours"):
        torch.compile(Norm(), backend=npu_fuse.Backend(strict=True))(torch.randn(3, 8))


def test_models_of_other_geometry_never_see_each_other() -> None:
    for _ in range(2):
        for size, eps in ((8, 1e-6), (16, 1e-5), (32, 1e-3)):
            norm, x = Norm(size, eps), torch.randn(3, size)
            backend = npu_fuse.Backend(strict=True)
            with torch.no_grad():
                assert torch.equal(torch.compile(norm, backend=backend)(x), norm(x))
            (site,) = backend.reports[0].sites
            assert (site.status, site.params["hidden_size"], site.params["eps"]) == ("lowered", size, eps)


def test_the_callers_graph_is_untouched() -> None:
    seen = {}

    def spy(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        seen["before"] = [(node.op, node.target) for node in module.graph.nodes]
        compiled = npu_fuse.Backend(strict=True)(module, inputs)
        seen["after"] = [(node.op, node.target) for node in module.graph.nodes]
        return compiled

    with torch.no_grad():
        torch.compile(nn.Sequential(nn.Linear(8, 8), Norm()), backend=spy)(torch.randn(3, 8))
    assert seen["before"] == seen["after"]


def test_a_module_float_is_bound_under_a_guard_and_a_callers_float_is_not() -> None:
    norm = Norm()
    backend = npu_fuse.Backend(strict=True)

    def model(x: torch.Tensor, scale: float) -> torch.Tensor:
        return norm(x) * scale

    compiled = torch.compile(model, backend=backend, dynamic=True)
    x = torch.randn(3, 8)
    with torch.no_grad():
        for scale in (0.5, 0.25, 0.125):
            assert torch.equal(compiled(x, scale), model(x, scale))
        assert len(backend.reports) == 1
        assert backend.reports[0].ops["npu::npu_rms_norm"] == 1
        norm.eps = 0.5
        assert torch.equal(compiled(x, 0.5), model(x, 0.5))
    assert len(backend.reports) == 2
    assert backend.reports[1].sites[0].params["eps"] == 0.5


def test_dynamic_tokens_are_not_baked_in() -> None:
    norm = Norm()
    backend = npu_fuse.Backend(strict=True)
    compiled = torch.compile(norm, backend=backend, dynamic=True)
    with torch.no_grad():
        for tokens in (3, 5, 64, 7):
            x = torch.randn(tokens, 8)
            assert torch.equal(compiled(x), norm(x))
    assert len(backend.reports) == 1


def test_mark_dynamic_holds() -> None:
    projection = nn.Sequential(nn.Linear(8, 8), Norm())
    backend = npu_fuse.Backend(strict=True)
    compiled = torch.compile(projection, backend=backend)
    with torch.no_grad():
        for tokens in (3, 5, 9):
            x = torch.randn(tokens, 8)
            torch._dynamo.mark_dynamic(x, 0)
            torch.testing.assert_close(compiled(x), projection(x))
    assert len(backend.reports) == 1


def test_writes_of_the_model_are_kept() -> None:
    norm = Norm()

    def model(x: torch.Tensor, count: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        y = norm(x)
        cache[1:4].copy_(y)
        cache[:, :4].mul_(2)
        return y

    arguments = [torch.randn(3, 8), torch.zeros(()), torch.ones(5, 8)]
    expected = [a.clone() for a in arguments]
    with torch.no_grad():
        wanted = model(*expected)
        assert torch.equal(torch.compile(model, backend=npu_fuse.Backend(strict=True))(*arguments), wanted)
    for found, value in zip(arguments, expected, strict=True):
        assert torch.equal(found, value)
