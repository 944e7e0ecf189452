"""What stands in for vllm-ascend: a platform that names a compiler, and that compiler, in their form there."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd

if find_spec("vllm") is not None:
    from vllm.compilation.compiler_interface import CompilerInterface
else:
    CompilerInterface = object

OWN = "vllm_ascend.compilation.AscendCompiler"


class AscendCompiler(CompilerInterface):
    """Copies what it is given, has AOTAutograd take it apart, and keeps what it came to."""

    name = "AscendCompiler"

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.keys: list[str | None] = []

    def compute_hash(self, vllm_config: Any) -> str:
        return f"hash of {vllm_config}"

    def compile(
        self,
        graph: fx.GraphModule,
        example_inputs: list[Any],
        compiler_config: dict[str, Any],
        compile_range: Any,
        key: str | None = None,
    ) -> tuple[Callable[..., Any] | None, Any | None]:
        self.keys.append(key)

        def keep(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
            self.graphs.append(graph)
            return graph.forward

        given = copy.deepcopy(graph)
        result = given.graph.output_node().args[0]
        if isinstance(result, fx.Node):
            given.graph.output_node().args = ((result,),)
            given.recompile()
        function = aot_autograd(fw_compiler=keep)(given, example_inputs)
        return (lambda *args: function(*args)[0]) if isinstance(result, fx.Node) else function, (key, "a path")

    def targets(self) -> set[str]:
        """The ops of all that it compiled."""
        return {str(node.target) for graph in self.graphs for node in graph.graph.nodes if node.op == "call_function"}


class NPUPlatform:
    @classmethod
    def get_compile_backend(cls) -> str:
        return OWN


def modules() -> dict[str, ModuleType]:
    """vllm_ascend's modules by name, to be put into sys.modules; each time with a platform of its own."""
    platform = type("NPUPlatform", (NPUPlatform,), {})
    contents = {
        "vllm_ascend": {},
        "vllm_ascend.platform": {"NPUPlatform": platform},
        "vllm_ascend.compilation": {"AscendCompiler": AscendCompiler},
    }
    made = {}
    for name, content in contents.items():
        module = made[name] = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=name == "vllm_ascend")
        module.__path__ = []
        vars(module).update(content)
    return made


def compile_by(compiler: Any, **settings: Any) -> Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]:
    """A backend of torch.compile that calls a compiler as vLLM does."""

    def backend(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        function, handle = compiler.compile(graph, inputs, {}, (1, 8192), key="artifact", **settings)
        assert handle is None or compiler.name == "AscendCompiler"
        return function

    return backend


def attention() -> torch.library.Library:
    """vLLM's attention, which writes its result where it is told to, and finds its cache by the layer's name."""
    library = torch.library.Library("stand_in_vllm", "FRAGMENT")
    library.define("attention(Tensor query, Tensor key, Tensor value, Tensor(a!) output, str layer_name) -> ()")

    def attend(query: Any, key: Any, value: Any, output: Any, layer_name: str) -> None:
        heads = [x.transpose(0, 1) for x in (query, key, value)]
        output.copy_(torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(0, 1))

    library.impl("attention", attend, "CPU")
    library.impl("attention", lambda *arguments: None, "Meta")
    return library


def put(monkeypatch: Any) -> Any:
    """Puts the stand-in in place, and gives its platform."""
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return sys.modules["vllm_ascend.platform"].NPUPlatform
