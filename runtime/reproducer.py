"""Folders that show what went wrong, and that need nothing of the model: a script, and the values that it reads."""

from __future__ import annotations

import ctypes
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ..passes.preserve import restore
from ..passes.rewrites import Program, Rewrite
from ..passes.views.code import imports, write
from ..passes.withheld import Part

if TYPE_CHECKING:
    from .options import Options

SCRIPT = "reproduce.py"
_VALUES = "inputs.safetensors"


class Reproducers:
    """Writes such folders.

    Args:
        parent: where; by default in a new folder among the temporary ones.
    """

    def __init__(self, parent: Any = None) -> None:
        self._parent = None if parent is None else Path(parent)

    def of_site(self, rewrite: Rewrite, original: Program, values: Mapping[fx.Node, Any], verdict: str) -> Path:
        """Both programs of a site, the values that they read, and a script that compares what they give.

        Args:
            rewrite: the site.
            original: what the model has there.
            values: of the nodes that the programs read.
            verdict: what was found.
        """
        folder = self._new(f"wrong_{rewrite.site.kind}")
        programs = {"Original": original.module, "Fused": rewrite.fused}
        tensors = {node.name: value for node, value in values.items() if isinstance(value, torch.Tensor)}
        for name, program in programs.items():
            for node in program.graph.find_nodes(op="get_attr"):
                tensors[f"{name}.{node.target}"] = getattr(program, str(node.target))
        numbers = {node.name: value for node, value in values.items() if not isinstance(value, torch.Tensor)}
        _save(folder / _VALUES, tensors)
        site = rewrite.site
        title = f"{site.kind} in {site.module or 'the model'} ({site.source or 'no source is known'}): {verdict}"
        calls = {"Original": original.inputs, "Fused": rewrite.inputs}
        lines = [
            f'"""{title}"""',
            "",
            *dict.fromkeys(line for program in programs.values() for line in _imports(program)),
            *_READING,
            f"LAYOUTS = {{name: layout for name, *layout in {[_layout(*item) for item in tensors.items()]!r}}}",
            f"VALUES = load() | {numbers!r}",
        ]
        for name, program in programs.items():
            lines += ["", "", *_class(name, program)]
        lines += ["", "", 'if __name__ == "__main__":', "    with torch.no_grad():"]
        for name, nodes in calls.items():
            given = ", ".join(f"VALUES[{node.name!r}]" for node in nodes)
            lines.append(f"        {name.lower()} = {name}().forward({given})")
        lines += [
            "    for place, (wanted, found) in enumerate(zip(original, fused)):",
            "        error = (wanted.double() - found.double()).abs().max().item()",
            "        largest = wanted.double().abs().max().item()",
            '        print(f"result {place}: max error {error:.3g}, of numbers up to {largest:.3g}")',
        ]
        return _write(folder, lines)

    def of_failure(self, module: fx.GraphModule, part: Part, traceback: str, options: Options) -> Path:
        """The graph in which a part raised, with inputs of its shapes, and a script that compiles it."""
        folder = self._new(f"failed_{part.name}" + (f"_{part.kind}" if part.kind else ""))
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        restore(graph)
        write(folder / "graph.py", fx.GraphModule(module, graph), "The graph.")
        (folder / "traceback.txt").write_text(traceback, encoding="utf-8")
        placeholders = module.graph.find_nodes(op="placeholder")
        is_dynamic = any(isinstance(node.meta.get("val"), torch.SymInt) for node in placeholders)
        lines = [
            f'"""Raises in {part}: {traceback.strip().splitlines()[-1]}"""',
            "",
            "import torch",
            "",
            "import npu_fuse",
            "from graph import Graph, inputs",
            "",
            'if __name__ == "__main__":',
            f"    backend = npu_fuse.Backend(strict=True{''.join(_settings(options))})",
            "    with torch.no_grad():",
            f"        torch.compile(Graph(), backend=backend, dynamic={is_dynamic or None})(*inputs())",
        ]
        return _write(folder, lines)

    def _new(self, name: str) -> Path:
        if self._parent is None:
            return Path(tempfile.mkdtemp(prefix=f"npu_fuse_{name}_"))
        self._parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{name}_", dir=self._parent))


def _write(folder: Path, lines: list[str]) -> Path:
    (folder / SCRIPT).write_text("\n".join([*lines, ""]), encoding="utf-8")
    return folder


_SHOWN = ("disable", "numerics", "pack_weights")


def _settings(options: Options) -> Iterator[str]:
    """The options that say what is rewritten, where they aren't the default ones."""
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name in _SHOWN and value != field.default:
            yield f", {field.name}={set(value) if field.name == 'disable' else value!r}"


# The programs ---------------------------------------------------------------------------------------------------------


def _imports(program: fx.GraphModule) -> Iterator[str]:
    code = program.graph.python_code("self")
    yield "import json"
    yield "from pathlib import Path"
    yield from imports(code.src, code.globals)
    yield "from npu_fuse.runtime.effects import register_known"
    yield "from npu_fuse.runtime.ops.register import register"
    yield "from npu_fuse.runtime.target import Target"


def _class(name: str, program: fx.GraphModule) -> Iterator[str]:
    held = dict.fromkeys(str(node.target) for node in program.graph.find_nodes(op="get_attr"))
    yield f"class {name}:"
    yield from (f"    {attribute} = VALUES['{name}.{attribute}']" for attribute in held)
    yield from (f"    {line}" if line else "" for line in program.graph.python_code("self").src.strip().split("\n"))


# The values -----------------------------------------------------------------------------------------------------------

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def _layout(name: str, value: torch.Tensor) -> tuple[Any, ...]:
    dtype = str(value.dtype).removeprefix("torch.")
    return name, dtype, tuple(value.shape), value.stride(), isinstance(value, torch.nn.Parameter)


def _save(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes tensors in the format of safetensors; of a complex one its real and imaginary parts."""
    header, parts, place = {}, [], 0
    for name, tensor in tensors.items():
        held = tensor.detach().cpu()
        held = (torch.view_as_real(held.resolve_conj()) if held.is_complex() else held).contiguous()
        size = held.numel() * held.element_size()
        shape, span = list(held.shape), [place, place + size]
        header[name] = {"dtype": _DTYPES[held.dtype], "shape": shape, "data_offsets": span}
        parts.append(ctypes.string_at(held.data_ptr(), size) if size else b"")
        place += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(parts)


# How the script reads them: it has no other package than torch and this one.
_READING = f"""\
register(Target.detect())
register_known()


def load():
    \"\"\"The tensors of the file, each laid out in memory as it was.\"\"\"
    data = (Path(__file__).parent / "{_VALUES}").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {{}}
    for name, entry in json.loads(data[8:start]).items():
        dtype, shape, stride, is_parameter = LAYOUTS[name]
        first, last = entry["data_offsets"]
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)[start + first : start + last].clone()
        value = raw.view(getattr(torch, dtype)).reshape(shape)
        for axis, size in enumerate(shape):
            if stride[axis] == 0 and size > 1:
                value = value.narrow(axis, 0, 1)
        value = torch.empty_strided(value.shape, stride, dtype=value.dtype).copy_(value).expand(shape)
        tensors[name] = torch.nn.Parameter(value, requires_grad=False) if is_parameter else value
    return tensors

""".split("\n")
