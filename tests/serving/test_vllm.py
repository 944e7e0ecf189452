"""vLLM's own code: its loader of plug-ins, its modes 1 and 2, and how it makes the compiler that a platform names."""

import logging
from collections.abc import Iterator
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import ascend_stand_in
import pytest
import torch
from normed import Normed
from vllm import plugins
from vllm.compilation import wrapper
from vllm.config import CompilationConfig, CompilationMode
from vllm.utils.import_utils import resolve_obj_by_qualname

import npu_fuse
from npu_fuse.runtime.serving import vllm as plugin


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Loads the plug-ins as each process of vLLM does."""
    for name in ("NPU_FUSE", "NPU_FUSE_OPTIONS", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    for cached in (plugin._on, plugin._off, plugin._compiler):
        cached.cache_clear()

    def load(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(plugins, "plugins_loaded", False)
        plugins.load_general_plugins()

    yield load
    plugin._compiler.cache_clear()


def test_it_is_an_entry_point() -> None:
    (point,) = [point for point in entry_points(group="vllm.general_plugins") if point.name == "npu_fuse"]
    assert point.load() is plugin.plug_in


@pytest.mark.parametrize("variables", [{}, {"NPU_FUSE": "0"}, {"NPU_FUSE": "1", "VLLM_PLUGINS": "another"}])
def test_off_unless_asked(load: Any, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    platform = ascend_stand_in.put(monkeypatch)
    load(**variables)
    assert platform.get_compile_backend() == ascend_stand_in.OWN


def test_the_platforms_compiler(load: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    platform = ascend_stand_in.put(monkeypatch)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)  # to be seen here
    with caplog.at_level(logging.INFO, logger="vllm.npu_fuse"):
        for _ in range(2):
            load(NPU_FUSE="1", VLLM_PLUGINS="npu_fuse")
        compiler = resolve_obj_by_qualname(platform.get_compile_backend())()
    assert isinstance(compiler, ascend_stand_in.AscendCompiler)
    assert isinstance(compiler, ascend_stand_in.CompilerInterface)
    assert (compiler.name, ascend_stand_in.CompilerInterface.__module__) == (
        "npu_fuse",
        "vllm.compilation.compiler_interface",
    )
    assert [record.getMessage().split(",")[0] for record in caplog.records if record.name == "vllm.npu_fuse"] == [
        f"npu_fuse {npu_fuse.__version__} is on in vllm-ascend {plugin.package_version('vllm-ascend')}"
    ]


def config(mode: CompilationMode, backend: str) -> Any:
    """What of vLLM's settings its wrapper reads."""
    return SimpleNamespace(
        compilation_config=CompilationConfig(mode=mode, backend=backend),
        observability_config=SimpleNamespace(enable_layerwise_nvtx_tracing=False),
        compile_debug_dump_path=lambda: None,
    )


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "npu_fuse"]


def test_mode_1_is_torch_compile(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    model, inputs = Normed(), (torch.randn(4, 32), torch.randn(4, 32))
    with caplog.at_level(logging.INFO, logger="npu_fuse"), torch.no_grad():
        wanted = model(*inputs)
        wrapper.compile_model_with_stock_torch(model, config(CompilationMode.STOCK_TORCH_COMPILE, "npu_fuse"))
        torch.testing.assert_close(model(*inputs), wanted)
    (line,) = told(caplog)
    assert "1 npu::npu_add_rms_norm" in line


@pytest.mark.parametrize("backend", ["npu_fuse", "npu_fuse.runtime.backend.npu_fuse"])
def test_mode_2_traces_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, backend: str) -> None:
    """Its guards are dropped, and what is compiled serves each further call; by name, or as a function."""
    torch._dynamo.reset()
    monkeypatch.setattr(
        wrapper, "get_current_vllm_config", lambda: config(CompilationMode.DYNAMO_TRACE_ONCE, backend)
    )
    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "0")  # which is for mode 3

    class Compiled(Normed, wrapper.TorchCompileWithNoGuardsWrapper):
        def __init__(self) -> None:
            Normed.__init__(self)
            wrapper.TorchCompileWithNoGuardsWrapper.__init__(self)

        __call__ = wrapper.TorchCompileWithNoGuardsWrapper.__call__

        def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            return self.norm(x + residual)

    model = Compiled()
    with caplog.at_level(logging.INFO, logger="npu_fuse"), torch.no_grad():
        for _ in range(3):
            inputs = torch.randn(4, 32), torch.randn(4, 32)
            torch.testing.assert_close(model(*inputs), model.norm(sum(inputs)))
    model.cleanup()
    (line,) = told(caplog)
    assert "1 npu::npu_add_rms_norm" in line


def test_mode_3_takes_no_backend_of_that_name() -> None:
    with pytest.raises(ValueError, match="Invalid backend for piecewise compilation: npu_fuse"):
        CompilationConfig(mode=CompilationMode.VLLM_COMPILE, backend="npu_fuse")
