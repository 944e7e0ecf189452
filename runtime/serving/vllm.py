"""vLLM: npu_fuse compiles, or rewrites what vllm-ascend compiles.

vLLM's modes 1 and 2 take any backend by its name, and need nothing of what is here:

    vllm serve … --compilation-config '{"mode": 1, "backend": "npu_fuse"}'

vllm-ascend turns these modes off. Its own mode, 3, compiles by the compiler that its platform names. So an entry point
in the group `vllm.general_plugins` has the platform name `Compiler`: the platform's own, with our passes before it.

    NPU_FUSE=1 vllm serve …
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor

from ..backend import Backend
from ..cache.key import compiler as what_compiles
from ..ops.register import register
from ..options import Options
from ..target import Target, package_version
from .environment import enabled, options, told

__all__ = ["plug_in"]

_PLATFORM = "vllm_ascend.platform:NPUPlatform"

# vLLM shows what loggers below its own say, and no others.
_log = logging.getLogger("vllm.npu_fuse")

_Function = Callable[..., Any]


def plug_in() -> None:
    """Where `NPU_FUSE` is 1, lets the platform of vllm-ascend name our compiler. It may be called repeatedly."""
    if not enabled():
        return
    if find_spec("vllm_ascend") is None:
        _log.info("npu_fuse is on in vLLM: modes 1 and 2 take the backend 'npu_fuse', other modes are vLLM's own")
        return
    try:
        platform = pkgutil.resolve_name(_PLATFORM)
        named = platform.get_compile_backend
    except (ImportError, AttributeError) as error:
        _off(f"{_PLATFORM} names no compiler: {error}")
        return
    if not isinstance(named, _Named):
        platform.get_compile_backend = _Named(named)


class _Named:
    """The platform's answer, by what name its compiler is imported: ours, if it can stand before the platform's own."""

    def __init__(self, own: Callable[[], str]) -> None:
        self.own = own

    def __call__(self) -> str:
        own = self.own()
        reason = _why_not(own)
        if reason is not None:
            _off(reason)
            return own
        _on()
        return f"{__name__}.Compiler"


def _why_not(own: str) -> str | None:
    """Why ours can't stand before the compiler of this name, or None."""
    try:
        base = pkgutil.resolve_name(own)
        inspect.signature(base.compile).bind(None, None, None, compiler_config=None, compile_range=None, key=None)
        inspect.signature(base.compute_hash).bind(None, None)
        parameters = list(inspect.signature(base.compile).parameters)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        return f"{own} is no compiler of a known form: {error}"
    return None if parameters[1:3] == ["graph", "example_inputs"] else f"{own}.compile takes {parameters}"


@functools.cache
def _off(reason: str) -> None:
    _log.warning("npu_fuse is off in vllm-ascend %s: %s", package_version("vllm-ascend"), reason)


@functools.cache
def _on() -> None:
    target = _target()
    versions = f"npu_fuse {package_version('npu_fuse')} is on in vllm-ascend {package_version('vllm-ascend')}"
    _log.info("%s, for %s (%s), with %s", versions, target.soc, target.device, told(_options()))


def _options() -> Options:
    """Those asked for, but for what is the framework's business: weights are packed, and graphs captured, by vLLM."""
    return replace(options(), pack_weights=False, graphs=None)


def _target() -> Target:
    return _options().target or Target.detect()


def __getattr__(name: str) -> Any:
    """`Compiler`, which vLLM imports by its name, is made when it is asked for: its base is vllm-ascend's."""
    if name != "Compiler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    named = pkgutil.resolve_name(_PLATFORM).get_compile_backend
    return _compiler(pkgutil.resolve_name(named.own() if isinstance(named, _Named) else named()))


@functools.cache
def _compiler(base: Any) -> type:
    class Compiler(base):  # type: ignore[misc]  # a class that is known when it runs
        """The platform's compiler, with our passes before it."""

        name = "npu_fuse"  # under which vLLM keeps what it made

        def compute_hash(self, vllm_config: Any) -> str:
            """The base's, and all that our passes depend on."""
            target = _target()
            register(target)
            known = (super().compute_hash(vllm_config), what_compiles(target), told(_options()))
            return hashlib.sha256(repr(known).encode()).hexdigest()[:10]

        def compile(self, graph: fx.GraphModule, example_inputs: list[Any], *args: Any, **kwargs: Any) -> Any:
            """Rewrites a graph, and has the base compile it; on a failure, has it compile the graph as it is.

            Returns:
                What runs it, and no handle: vLLM can't load what runs between its graph and the rewritten one.
            """
            plain = super().compile
            try:
                through = _Before(functools.partial(_without_key, plain, args, kwargs))
                return through.compiled(graph, example_inputs), None
            except Exception as error:
                if _options().strict:
                    raise
                _log.warning("npu_fuse leaves a graph as it is: %s: %s", type(error).__name__, error)
                return plain(graph, example_inputs, *args, **kwargs)

    return Compiler


def _without_key(
    compile: _Function, args: Sequence[Any], kwargs: dict[str, Any], graph: fx.GraphModule, inputs: Sequence[Any]
) -> _Function:
    """What a compiler makes of another graph than it was asked for, whose key would be wrong."""
    bound = inspect.signature(compile).bind(graph, list(inputs), *args, **kwargs)
    bound.arguments["key"] = None
    function: _Function | None
    function, _ = compile(*bound.args, **bound.kwargs)
    if function is None:
        raise RuntimeError("vllm-ascend's compiler made nothing of the rewritten graph")
    return function


class _Before(Backend):
    """Our passes, before another compiler."""

    def __init__(self, compile: Callable[[fx.GraphModule, Sequence[Any]], _Function]) -> None:
        super().__init__(_options())
        self._compile = compile

    def _executable(self, graph: fx.GraphModule, inputs: Sequence[Any], *, is_late: bool = False) -> _Function:
        return self._compile(graph, inputs)

    def compiled(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> _Function:
        """What runs a graph of vLLM's, which may return a single tensor."""
        inputs = _in_one_mode(inputs)
        result = graph.graph.output_node().args[0]
        if isinstance(result, (tuple, list)):
            function = self(graph, inputs)
        else:
            function = _first_of(self(_returning_tuple(graph), inputs))
        _log.info("npu_fuse: %s", self.report.summary())
        return function


def _in_one_mode(inputs: Sequence[Any]) -> list[Any]:
    """Inputs of which none is fake in another mode than the one that Dynamo compiles in."""
    mode = detect_fake_mode()

    def moved(value: Any) -> Any:
        if mode is None or not isinstance(value, FakeTensor) or value.fake_mode is mode:
            return value
        return mode.from_tensor(value)

    return list(map(moved, inputs))


def _returning_tuple(graph: fx.GraphModule) -> fx.GraphModule:
    copy = fx.Graph()
    copy.output((copy.graph_copy(graph.graph, {}),))
    return fx.GraphModule(graph, copy)


def _first_of(function: _Function) -> _Function:
    @functools.wraps(function)
    def first(*args: torch.Tensor) -> Any:
        return function(*args)[0]

    return first
