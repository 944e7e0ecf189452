"""The plug-in, by SGLang's own loader and in SGLang's own code."""

import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from normed import Normed
from sglang_on_cpu import common, hook_registry, npu_graph_runner, plugins

from npu_fuse import Backend
from npu_fuse.runtime.ops.split_qkv import split_qkv_rmsnorm_rope_reference
from npu_fuse.runtime.serving import sglang as plugin

Load = Callable[..., None]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Load]:
    """Loads the plug-ins as a process of SGLang does, with variables set; afterwards all is as it was."""
    for name in ("NPU_FUSE", "NPU_FUSE_OPTIONS", "SGLANG_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    original = common.get_compiler_backend
    plugin._backend.cache_clear()

    def load(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with caplog.at_level(logging.INFO, logger="npu_fuse"):
            plugins.load_plugins()

    yield load
    hook_registry._propagate_patch(common.get_compiler_backend, original, plugin)
    hook_registry.HookRegistry.reset()


def said(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if (record.name, record.levelno) == ("npu_fuse", level)]


@pytest.mark.parametrize("variables", [{}, {"NPU_FUSE": "0"}, {"NPU_FUSE": "1", "SGLANG_PLUGINS": "another"}])
def test_off_unless_asked(load: Load, variables: dict[str, str]) -> None:
    original = common.get_compiler_backend
    load(**variables)
    assert common.get_compiler_backend is original


@pytest.mark.parametrize("variables", [{}, {"SGLANG_PLUGINS": "another, npu_fuse"}])
def test_a_model_that_sglang_compiles_for_an_npu_is_fused(
    load: Load, caplog: pytest.LogCaptureFixture, variables: dict[str, str]
) -> None:
    load(NPU_FUSE="1", NPU_FUSE_OPTIONS='{"strict": true}', **variables)
    model, inputs = Normed().requires_grad_(False), (torch.randn(4, 32), torch.randn(4, 32))
    with caplog.at_level(logging.INFO, logger="npu_fuse"):
        for tokens in (4, 2):  # each size that is captured asks for the backend
            with npu_graph_runner.patch_model_npu(model, True, tokens, None) as forward:
                output = forward(*(x[:tokens] for x in inputs))
    torch.testing.assert_close(output, model(*(x[:2] for x in inputs)))
    backend = npu_graph_runner.get_compiler_backend("npugraph_ex")
    assert isinstance(backend, Backend)
    assert [report.ops for report in backend.reports] == [{"npu::npu_add_rms_norm": 1}] * 2
    (line,) = [line for line in said(caplog, logging.INFO) if " is on " in line]
    assert line == "npu_fuse 0.1.0 is on in SGLang 0.5.23, for ascend910b (cpu), with strict=True"


def test_what_sglang_compiles_otherwise_is_its_own(load: Load) -> None:
    load(NPU_FUSE="1")
    assert common.get_compiler_backend() == "inductor"
    assert common.get_compiler_backend(mode="max-autotune") == "inductor"


def test_capture_is_left_to_sglang(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    load(NPU_FUSE="1", NPU_FUSE_OPTIONS='{"graphs": {}}')
    assert common.get_compiler_backend("npugraph_ex").options.graphs is None
    assert "SGLang captures and replays" in caplog.text


def test_settings_that_cannot_be_read_leave_it_off(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    load(NPU_FUSE="1", NPU_FUSE_OPTIONS='{"disabled": ["qkv"]}')
    assert common.get_compiler_backend("npugraph_ex") == "inductor"
    (warning,) = said(caplog, logging.WARNING)
    assert "did you mean 'disable'?" in warning


@pytest.mark.parametrize(
    ("version", "seam", "reason"),
    [
        ("0.5.22", None, "its hooks are known from 0.5.23 to before 0.6"),
        ("0.6.0", None, "its hooks are known from 0.5.23 to before 0.6"),
        ("0.5.24", "get_compile_backend", "can't be hooked: module 'sglang.srt.utils.common' has no attribute"),
        ("0.5.24", "get_device", "sglang.srt.utils.common.get_device_name takes no mode"),
    ],
)
def test_another_release_gets_one_notice(
    load: Load,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str,
    seam: str | None,
    reason: str,
) -> None:
    monkeypatch.setattr(plugin, "package_version", lambda package: version)
    if seam == "get_device":
        monkeypatch.setattr(common, "get_device_name", lambda: "npu", raising=False)
        seam = "get_device_name"
    if seam is not None:
        monkeypatch.setattr(plugin, "_SEAM", f"sglang.srt.utils.common.{seam}")
    load(NPU_FUSE="1")
    assert common.get_compiler_backend("npugraph_ex") == "inductor"
    (warning,) = said(caplog, logging.WARNING)
    assert warning.startswith(f"npu_fuse is off in SGLang {version}: ")
    assert reason in warning


def test_what_fails_later_leaves_sglang_its_own_backend(
    load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(target: object) -> None:
        raise RuntimeError("npu::npu_rms_norm is registered with another schema")

    monkeypatch.setattr(plugin, "register", broken)
    load(NPU_FUSE="1")
    assert common.get_compiler_backend("npugraph_ex") == "inductor"
    assert said(caplog, logging.WARNING) == [
        "npu_fuse is off, SGLang compiles by itself: RuntimeError: npu::npu_rms_norm is registered with another schema"
    ]


def module_of(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of sgl_kernel_npu with one function, imported."""
    name = "sgl_kernel_npu.norm.split_qkv_rmsnorm_rope"
    module = ModuleType(name)
    module.split_qkv_rmsnorm_rope = function
    for parent in ("sgl_kernel_npu", "sgl_kernel_npu.norm"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys.modules["sgl_kernel_npu"], "norm", sys.modules["sgl_kernel_npu.norm"], raising=False)
    monkeypatch.setattr(sys.modules["sgl_kernel_npu.norm"], "split_qkv_rmsnorm_rope", module, raising=False)
    return module


def rows() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(3, 256), torch.randn(3, 1, 1, 32), torch.randn(3, 1, 1, 32)


def test_a_kernel_that_a_model_calls_by_hand_is_one_op(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return split_qkv_rmsnorm_rope_reference(*args, **kwargs)

    kernel.__signature__ = plugin.inspect.signature(split_qkv_rmsnorm_rope_reference)
    module = module_of(kernel, monkeypatch)
    load(NPU_FUSE="1", NPU_FUSE_OPTIONS='{"strict": true}')
    backend = common.get_compiler_backend("npugraph_ex")

    def model(qkv: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> Any:
        return module.split_qkv_rmsnorm_rope(qkv, sin, cos, 128, 64, 32)

    torch._dynamo.reset()
    found = torch.compile(model, backend=backend, fullgraph=True)(*rows())
    assert backend.report.ops == {"sgl_kernel_npu::split_qkv_rmsnorm_rope": 1}
    for x, y in zip(found, model(*rows()), strict=True):
        torch.testing.assert_close(x, y)


def test_a_kernel_with_other_parameters_is_left_as_it_is(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(input: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor, q_weight: torch.Tensor) -> torch.Tensor:
        return input

    module = module_of(kernel, monkeypatch)
    load(NPU_FUSE="1")
    common.get_compiler_backend("npugraph_ex")
    assert module.split_qkv_rmsnorm_rope is kernel
