"""Nodes of a graph as lines of text, and a graph as a Python file that runs alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ...patterns import values
from ...runtime.sizes import number_of
from ...runtime.weights import IN_MEMORY
from ..edit import MADE_BY
from ..preserve import restore

_SHORT = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def lines(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """Each node as `name: bf16[2, 16] = aten.mul.Tensor(x, 2)`."""
    return tuple(map(line, nodes))


def line(node: fx.Node) -> str:
    """One node as text."""
    args = [str(_shown(value)) for value in node.args]
    args += [f"{name}={_shown(value)}" for name, value in node.kwargs.items()]
    called = str(node.target)
    if node.op == "placeholder":
        return f"{node.name}: {kind_of(value_of(node))}"
    if node.op == "get_attr":
        return f"{node.name}: {kind_of(value_of(node))} = self.{called}"
    if node.op == "output":
        return f"return {', '.join(args)}"
    if not isinstance(node.target, str) and not hasattr(node.target, "_schema"):
        called = getattr(node.target, "__name__", called)
    return f"{node.name}: {kind_of(value_of(node))} = {called}({', '.join(args)})"


def value_of(node: fx.Node) -> Any:
    """The fake value of a node, of AOTAutograd's graph or of Dynamo's."""
    return node.meta.get("val", node.meta.get("example_value"))


def kind_of(value: Any) -> str:
    """The type of a value as it is written on a line: `bf16[2, s0, 64]`, `int`."""
    if isinstance(value, torch.Tensor):
        return f"{_SHORT.get(value.dtype, str(value.dtype).removeprefix('torch.'))}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(kind_of, value))})"
    return {torch.SymInt: "int", torch.SymFloat: "float", torch.SymBool: "bool"}.get(type(value), type(value).__name__)


class _Text(str):
    """Text that is shown without quotes, within lists too."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _shown(argument: Any) -> Any:
    def text(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return _Text(value.name)
        return _Text(str(value)) if isinstance(value, (torch.dtype, torch.device, torch._ops.OpOverload)) else value

    shown = fx.node.map_aggregate(argument, text)
    return repr(shown) if isinstance(shown, str) else shown


_DEVICE = re.compile(r"device\(type='\w+'(, index=\d+)?\)")
_INSTALLED = re.compile(r"^.*site-packages.")
_ASSIGNED = re.compile(r"\s+(\w+) = ")


def script(module: fx.GraphModule, title: str) -> str:
    """A graph as a Python file: each node under the module and the line that wrote it, and inputs to run it with.

    Sizes that are symbolic get the values that they had when the graph was compiled. Inputs are drawn at random.
    Tensors that the graph holds are read from a file beside it, as `write` puts it there.

    Args:
        module: a graph of AOTAutograd's or of Dynamo's, with fake values.
        title: the first line of the file.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    restore(graph)  # what is kept whole for recognition has no kernel of its own
    code = graph.python_code("self")
    source = _DEVICE.sub("device(type='cpu')", code.src)  # where its inputs are, and the references of all ops
    nodes = {node.name: node for node in graph.nodes}
    body: list[str] = []
    written = None
    for text in source.strip().split("\n"):
        assigned = _ASSIGNED.match(text)
        node = nodes.get(assigned[1]) if assigned else None
        if node is not None and node.op == "call_function":
            place = _INSTALLED.sub("", values.source_line(node) or "")
            origin = "  ".join(part for part in (values.module_path(node), place) if part)
            if origin and origin != written:
                body.append(f"        # {origin}")
                written = origin
        body.append(f"    {text}" if text else "")
    own, placeholders = graph.find_nodes(op="get_attr"), graph.find_nodes(op="placeholder")
    attributes = dict.fromkeys(f"        self.{node.target} = HELD[{str(node.target)!r}]" for node in own)
    load = "HELD = torch.load(pathlib.Path(__file__).with_suffix('.pt'), weights_only=True)"
    return "\n".join(
        [
            f'"""{title}"""',
            "",
            *(["import pathlib"] if own else []),
            *imports(code.src, code.globals),
            "",
            "from npu_fuse.runtime.effects import register_known",
            "from npu_fuse.runtime.ops.register import register",
            "from npu_fuse.runtime.target import Target",
            "",
            "register(Target.detect())",
            "register_known()",
            *([load] if own else []),
            "",
            "",
            "class Graph(torch.nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            *attributes,
            "",
            *body,
            "",
            "",
            "def inputs():",
            "    return [",
            *(f"        {_input(node)},  # {node.name}" for node in placeholders),
            "    ]",
            "",
            "",
            'if __name__ == "__main__":',
            "    torch.manual_seed(0)",
            "    with torch.no_grad():",
            "        print(Graph()(*inputs()))",
            "",
        ]
    )


def write(path: Path, module: fx.GraphModule, title: str) -> None:
    """Writes a graph as a file that runs alone, and what tensors it holds beside it, in a file that ends in `.pt`.

    Raises:
        OSError: a file can't be written.
    """
    path.write_text(script(module, title), encoding="utf-8")
    tensors = held(module)
    if tensors:
        torch.save(tensors, path.with_suffix(".pt"))


def held(module: fx.GraphModule) -> dict[str, torch.Tensor]:
    """The tensors that a graph holds, on the CPU, by the names that it has for them."""
    found = {}
    with unset_fake_temporarily():
        for node in module.graph.find_nodes(op="get_attr"):
            value: torch.Tensor = attrgetter(str(node.target))(module)
            if value.is_meta:  # it has no numbers: those of the op's contract, else zeros
                make = node.meta.get(MADE_BY, lambda device, like=value: torch.zeros_like(like, device=device))
                value = make(torch.device("cpu"))
            found[str(node.target)] = value.cpu()
    return found


def imports(source: str, names: dict[str, Any]) -> Iterator[str]:
    """What makes the names in fx's code mean what they mean."""
    yield "import torch"
    for name, value in sorted(names.items()):
        if name == "torch" or not re.search(rf"\b{name}\b", source):
            continue
        if isinstance(value, float):  # inf and nan
            yield f"{name} = float({str(value)!r})"
        elif type(value).__name__ == "module":
            yield f"import {value.__name__} as {name}"
        else:
            module = getattr(value, "__module__", None) or "builtins"
            if module != "builtins" and getattr(value, "__name__", None):
                alias = "" if value.__name__ == name else f" as {name}"
                yield f"from {module} import {value.__name__}{alias}"
            else:
                yield f"{name} = type(None)" if value is type(None) else f"{name} = {value!r}"


def _input(node: fx.Node) -> str:
    """An expression that makes an input; one whose memory the program moves is a parameter, as only those are moved."""
    made = _made(value_of(node))
    return f"torch.nn.Parameter({made})" if any(user.target in IN_MEMORY for user in node.users) else made


def _made(value: Any) -> str:
    """An expression that makes a value like this one."""
    if isinstance(value, torch.Tensor):
        shape, stride = tuple(map(number_of, value.shape)), tuple(map(number_of, value.stride()))
        empty = f"torch.empty_strided({shape}, {stride}, dtype={value.dtype})"
        if value.dtype.is_floating_point or value.dtype.is_complex:
            return f"{empty}.normal_()"
        return f"{empty}.random_(2)" if value.dtype == torch.bool else f"{empty}.zero_()"
    if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
        return str(number_of(value))
    return repr(value)

