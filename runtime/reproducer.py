"""Folders that show what went wrong, and that need nothing of the model: a script, and the values that it reads."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import fx

from ..passes.preserve import restore
from ..passes.rewrites import Program, Rewrite
from ..passes.views.code import held, imports, write
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
            tensors |= {f"{name}.{attribute}": value for attribute, value in held(program).items()}
        numbers = {node.name: value for node, value in values.items() if not isinstance(value, torch.Tensor)}
        _save(folder / _VALUES, tensors)
        site = rewrite.site
        title = f"{site.kind} in {site.where} ({site.source or 'no source is known'}): {verdict}"
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
    yield "from pathlib import Path"
    yield "from safetensors.torch import load_file"
    yield from imports(code.src, code.globals)
    yield "from npu_fuse.runtime.effects import register_known"
    yield "from npu_fuse.runtime.ops.register import register"
    yield "from npu_fuse.runtime.target import Target"


def _class(name: str, program: fx.GraphModule) -> Iterator[str]:
    yield f"class {name}:"
    yield from (f"    {attribute} = VALUES['{name}.{attribute}']" for attribute in held(program))
    yield from (f"    {line}" if line else "" for line in program.graph.python_code("self").src.strip().split("\n"))


# The values -----------------------------------------------------------------------------------------------------------

def _layout(name: str, value: torch.Tensor) -> tuple[Any, ...]:
    dtype = str(value.dtype).removeprefix("torch.")
    return name, dtype, tuple(value.shape), value.stride(), isinstance(value, torch.nn.Parameter)


def _save(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes tensors, each with memory of its own; of a complex one its real and imaginary parts."""
    held = {name: tensor.detach().cpu().resolve_conj() for name, tensor in tensors.items()}
    parts = {name: torch.view_as_real(value) if value.is_complex() else value for name, value in held.items()}
    save_file({name: value.clone(memory_format=torch.contiguous_format) for name, value in parts.items()}, path)


# How the script reads them.
_READING = f"""\
register(Target.detect())
register_known()


def load():
    \"\"\"The tensors of the file, each laid out in memory as it was.\"\"\"
    tensors = {{}}
    for name, value in load_file(Path(__file__).parent / "{_VALUES}").items():
        dtype, shape, stride, is_parameter = LAYOUTS[name]
        if value.dtype != getattr(torch, dtype):
            value = torch.view_as_complex(value)
        for axis, size in enumerate(shape):
            if stride[axis] == 0 and size > 1:
                value = value.narrow(axis, 0, 1)
        value = torch.empty_strided(value.shape, stride, dtype=value.dtype).copy_(value).expand(shape)
        tensors[name] = torch.nn.Parameter(value, requires_grad=False) if is_parameter else value
    return tensors

""".split("\n")
