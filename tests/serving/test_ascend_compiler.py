"""The compiler that vllm-ascend is given: its own, with our passes before it."""

import logging
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import ascend_stand_in
import pytest
import torch
from ascend_stand_in import OWN, AscendCompiler, compile_by
from torch import fx, nn

from npu_fuse.runtime.serving import vllm as plugin

Tensor = torch.Tensor
OURS = "npu_fuse.runtime.serving.vllm.Compiler"
HEADS, DIM, HIDDEN = 4, 32, 128


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The platform of a process of vllm-ascend in which nothing was asked for yet."""
    monkeypatch.delenv("NPU_FUSE", raising=False)
    monkeypatch.delenv("NPU_FUSE_OPTIONS", raising=False)
    for cached in (plugin._on, plugin._off, plugin._compiler):
        cached.cache_clear()
    torch._dynamo.reset()
    yield ascend_stand_in.put(monkeypatch)
    plugin._compiler.cache_clear()


@pytest.fixture
def compiler(platform: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What vLLM makes of the name that the platform gives."""
    monkeypatch.setenv("NPU_FUSE", "1")
    monkeypatch.setenv("NPU_FUSE_OPTIONS", '{"strict": true}')
    plugin.plug_in()
    module, name = platform.get_compile_backend().rsplit(".", 1)
    return getattr(import_module(module), name)()


def said(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [r.getMessage() for r in caplog.records if (r.name, r.levelno) == ("vllm.npu_fuse", level)]


# What is named


@pytest.mark.parametrize("value", [None, "0", "perhaps"])
def test_off_unless_asked(platform: Any, monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is not None:
        monkeypatch.setenv("NPU_FUSE", value)
    plugin.plug_in()
    assert platform.get_compile_backend() == OWN


def test_on_once_however_often_it_is_called(
    platform: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NPU_FUSE", "1")
    monkeypatch.setenv("NPU_FUSE_OPTIONS", '{"disable": ["qkv"], "graphs": {}}')
    with caplog.at_level(logging.INFO, logger="vllm.npu_fuse"):
        for _ in range(2):
            plugin.plug_in()
            assert platform.get_compile_backend() == OURS
    assert platform.get_compile_backend.own() == OWN
    (line,) = said(caplog, logging.INFO)
    assert line.startswith("npu_fuse 0.1.0 is on in vllm-ascend ")
    assert line.endswith("for ascend910b (cpu), with disable=['qkv'], pack_weights=False")


def test_without_vllm_ascend_the_line_says_what_there_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NPU_FUSE", "1")
    with caplog.at_level(logging.INFO, logger="vllm.npu_fuse"):
        plugin.plug_in()
    assert said(caplog, logging.INFO) == [
        "npu_fuse is on in vLLM: modes 1 and 2 take the backend 'npu_fuse', other modes are vLLM's own"
    ]


class OfOneSize:
    """As compilers were before they got a range."""

    def compute_hash(self, vllm_config: Any) -> str:
        return ""

    def compile(self, graph: Any, example_inputs: Any, compiler_config: Any, runtime_shape: Any) -> None:
        raise AssertionError


@pytest.mark.parametrize("kind", [OfOneSize, None])
def test_a_compiler_of_another_form_stays_alone_with_one_notice(
    platform: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: type | None
) -> None:
    monkeypatch.setenv("NPU_FUSE", "1")
    monkeypatch.setattr(sys.modules["vllm_ascend.compilation"], "AscendCompiler", kind)
    with caplog.at_level(logging.INFO, logger="vllm.npu_fuse"):
        plugin.plug_in()
        assert [platform.get_compile_backend() for _ in range(2)] == [OWN, OWN]
    assert not said(caplog, logging.INFO)
    (line,) = said(caplog, logging.WARNING)
    assert line.startswith("npu_fuse is off in vllm-ascend ")
    assert f"{OWN} is no compiler of a known form" in line


def test_a_platform_that_names_none_is_left_alone(
    platform: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NPU_FUSE", "1")
    monkeypatch.delattr(sys.modules["vllm_ascend.platform"], "NPUPlatform")
    plugin.plug_in()
    (line,) = said(caplog, logging.WARNING)
    assert "names no compiler" in line


# What it compiles


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Layer(nn.Module):
    """As vLLM has it: one projection, and an attention that writes to its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.after = Norm(HIDDEN), Norm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HEADS * DIM, bias=False)
        self.q_norm, self.k_norm = Norm(DIM), Norm(DIM)
        self.out = nn.Linear(HEADS * DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (part.view(-1, HEADS, DIM) for part in self.qkv(self.norm(x)).chunk(3, -1))
        q, k = (self._rotated(norm(part), cos, sin) for norm, part in ((self.q_norm, q), (self.k_norm, k)))
        result = torch.empty_like(q)
        torch.ops.stand_in_vllm.attention(q, k, v, result, "model.layers.0")
        return self.after(x + self.out(result.flatten(1)))

    @staticmethod
    def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


@pytest.fixture
def attention() -> Iterator[None]:
    library = ascend_stand_in.attention()
    yield
    library._destroy()


def tables() -> tuple[Tensor, Tensor]:
    angles = torch.rand(6, DIM // 2).repeat(1, 2)
    return angles.cos(), angles.sin()


@pytest.mark.usefixtures("attention")
def test_a_layer_is_rewritten_before_it_is_compiled(compiler: Any, caplog: pytest.LogCaptureFixture) -> None:
    layer, x, given = Layer().requires_grad_(False), torch.randn(6, HIDDEN), tables()
    with torch.no_grad(), caplog.at_level(logging.INFO, logger="vllm.npu_fuse"):
        compiled = torch.compile(layer, backend=compile_by(compiler), fullgraph=True)
        torch.testing.assert_close(compiled(x, *given), layer(x, *given))
    assert isinstance(compiler, AscendCompiler)
    assert {
        "npu.npu_rms_norm.default",
        "sgl_kernel_npu.split_qkv_rmsnorm_rope.default",
        "npu.npu_add_rms_norm.default",
    } <= compiler.targets()
    assert not any("rsqrt" in target or "cat" in target for target in compiler.targets())
    assert compiler.keys == [None]
    (line,) = said(caplog, logging.INFO)
    assert line.startswith("npu_fuse: 1 npu::npu_rms_norm")


@pytest.mark.usefixtures("attention")
def test_attention_writes_in_place() -> None:
    """The same layer by torch.compile, as in vLLM's modes 1 and 2: no functional form of the write is left."""
    from npu_fuse import Backend

    torch._dynamo.reset()
    layer, x, given = Layer(), torch.randn(6, HIDDEN), tables()
    backend = Backend(strict=True, keep_graphs=True)
    with torch.no_grad():
        compiled = torch.compile(layer, backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(x, *given), layer(x, *given))
    ((_, after),) = backend.graphs
    targets = [str(node.target) for node in after.graph.nodes]
    assert targets.count("stand_in_vllm.attention.default") == 1
    assert not any("auto_functionalized" in target or "clone" in target for target in targets)
    assert backend.report.ops["sgl_kernel_npu::split_qkv_rmsnorm_rope"] == 1


def test_a_graph_that_returns_one_tensor(compiler: Any) -> None:
    """As the parts do that vLLM cuts its graph into."""
    norm, x = Norm(16).requires_grad_(False), torch.randn(3, 16)
    graph = fx.symbolic_trace(norm)
    assert isinstance(graph.graph.output_node().args[0], fx.Node)
    before = str(graph.graph)
    with torch.no_grad():
        function, handle = compiler.compile(graph, [x], {}, (1, 8))
        assert handle is None
        torch.testing.assert_close(function(x), norm(x))
    assert str(graph.graph) == before
    assert "npu.npu_rms_norm.default" in compiler.targets()


def test_what_fails_is_compiled_as_it_is(
    compiler: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NPU_FUSE_OPTIONS", "{}")
    original = AscendCompiler.compile

    def failing(self: Any, graph: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        if any("npu_rms_norm" in str(node.target) for node in graph.graph.nodes):
            raise NotImplementedError("an op that is not known here")
        return original(self, graph, *args, **kwargs)

    monkeypatch.setattr(AscendCompiler, "compile", failing)

    norm, x = Norm(16).requires_grad_(False), torch.randn(3, 16)
    with torch.no_grad():
        compiled = torch.compile(norm, backend=lambda graph, inputs: compiler.compile(graph, inputs, {}, None, "k")[0])
        assert torch.equal(compiled(x), norm(x))
    assert compiler.keys == ["k"]
    (line,) = said(caplog, logging.WARNING)
    assert line == "npu_fuse leaves a graph as it is: NotImplementedError: an op that is not known here"


def test_its_hash_is_that_of_all_that_it_depends_on(compiler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    base = AscendCompiler().compute_hash("a")
    first = compiler.compute_hash("a")
    assert len(first) == 10
    assert first == compiler.compute_hash("a") != base
    assert first != compiler.compute_hash("b")
    monkeypatch.setenv("NPU_FUSE_OPTIONS", '{"strict": true, "disable": ["qkv", "glu", "rope"]}')
    second = compiler.compute_hash("a")
    assert second != first
    monkeypatch.setenv("NPU_FUSE_OPTIONS", '{"strict": true, "disable": ["rope", "glu", "qkv"]}')
    assert compiler.compute_hash("a") == second
    monkeypatch.setattr(plugin, "what_compiles", lambda target: {"op schemas": "others"})
    assert compiler.compute_hash("a") != second
