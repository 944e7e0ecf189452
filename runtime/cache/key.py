"""What a compilation depends on, as text: equal texts mean that the passes would do the same again.

Two parts: what is compiled, which names an entry, and what compiles it, which is compared with what made the entry. So
an entry that is out of date is told from one that isn't there, and makes room for its successor.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, detect_fake_mode
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from ...patterns import values
from .. import ranks
from ..collectives import is_collective
from ..effects import registered
from ..ops import CONTRACTS
from ..options import Options
from ..target import Target, package_version
from ..weights import memory_of
from .encoding import NotKept, encode_function

# Settings that change nothing of what the passes do.
_UNREAD = frozenset({"strict", "expect", "verify", "graphs", "keep_graphs", "dump", "target", "cache"})
# Bytes of a constant that are looked at.
_CONSTANT_LIMIT = 1 << 22


def compiled(
    module: fx.GraphModule, parameters: Mapping[fx.Node, torch.Tensor], options: Options, target: Target
) -> str:
    """A digest of what is compiled: a graph, and what its passes are told.

    Args:
        module: AOTAutograd's graph, before anything is rewritten.
        parameters: its placeholders that are parameters of the model, with what they hold.
        options: of the backend.
        target: the machine it is compiled for.

    Raises:
        NotKept: a part of it has no text that is the same in the next process.
    """
    digest = hashlib.sha256()
    for lines in (_settings(options, target), _nodes(module), _symbols(module), _weights(parameters), _around(module)):
        for line in lines:
            digest.update(line.encode())
            digest.update(b"\n")
    return digest.hexdigest()


def compiler(target: Target) -> dict[str, str]:
    """What compiles, by name: versions of packages, our own sources, the schemas of all fused ops."""
    schemas = "\n".join(sorted(str(contract.op._schema) for contract in CONTRACTS.values()))
    packages = {name: target.packages.get(name, "none") for name in ("torch_npu", "sgl_kernel_npu")}
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": str(torch.__version__),
        **packages,
        "npu_fuse": package_version("npu_fuse"),
        "sources": _sources(),
        "op schemas": hashlib.sha256(schemas.encode()).hexdigest(),
    }


@functools.cache
def _sources() -> str:
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for room in ("patterns", "passes", "runtime"):
        for path in sorted((root / room).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _settings(options: Options, target: Target) -> Iterator[str]:
    if callable(options.encoder_only):
        raise NotKept("Options.encoder_only is a function, whose text is not known")
    for name in options.__dataclass_fields__:
        if name not in _UNREAD:
            given = getattr(options, name)
            yield f"{name} = {sorted(given) if isinstance(given, frozenset) else given!r}"
    yield f"keep_lines = {options.keep_lines}"
    yield f"target = {target.soc} {target.device} {sorted(target.packages.items())}"
    yield from registered()


def _around(module: fx.GraphModule) -> Iterator[str]:
    """What the passes read besides the graph."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is not None:
        outputs = [info.output_type.name for info in metadata.output_info]
        yield f"outputs {outputs}, {metadata.num_intermediate_bases} bases"
    yield f"default {torch.get_default_dtype()}"
    for group in sorted({name for node in module.graph.nodes if is_collective(node.target) for name in _groups(node)}):
        if ranks.hcom(group) != group:
            raise NotKept("it holds collectives of HCCL, which names its groups anew in each process")
        yield f"group {group} of {ranks.size(group)}, on one machine {ranks.share_a_host(group)}"


def _groups(collective: fx.Node) -> list[str]:
    """The groups that a collective is given by name."""
    given = (*collective.args, *collective.kwargs.values())
    return [name for name in given if isinstance(name, str) and ranks.size(name) is not None]


def _nodes(module: fx.GraphModule) -> Iterator[str]:
    memory: dict[int, int] = {}
    keys: dict[str, int] = {}
    for node in module.graph.nodes:
        target = encode_function(node.target) if node.op == "call_function" else str(node.target)
        yield f"{node.op} {node.name} = {target} {_text(node.args)} {_text(node.kwargs)}"
        if isinstance(node.target, OpOverload) and node.target.namespace not in ("aten", "prims"):
            yield f"  {node.target._schema}"
        if node.op == "get_attr":
            yield f"  {_content(getattr(module, str(node.target), None), node)}"
        if node.op == "placeholder":
            yield f"  {node.meta.get('desc')}"
        if node.op != "output":
            yield f"  {_value(node.meta.get('val'), memory)}"
        stack = [(keys.setdefault(key, len(keys)), name, of) for key, name, of in values.module_stack(node)]
        yield f"  {[(key, name, _class(of)) for key, name, of in stack]} {values.source_line(node)}"


def _class(of: Any) -> str:
    return f"{of.__module__}.{of.__qualname__}" if isinstance(of, type) else str(of)


def _text(value: Any) -> str:
    """An argument; a Node stands as its name."""
    if isinstance(value, (list, tuple)):
        return f"{'[' if isinstance(value, list) else '('}{', '.join(map(_text, value))})"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_text(of)}" for name, of in value.items())
    if isinstance(value, slice):
        return f"slice {_text((value.start, value.stop, value.step))}"
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    known = (bool, int, float, str, OpOverload, torch.dtype, torch.device, torch.layout, torch.memory_format)
    if value is None or isinstance(value, known):
        return f"{type(value).__name__} {value!r}"
    raise NotKept(f"{value!r} is an argument of a type that is not known: {type(value).__name__}")


def _value(value: Any, memory: dict[int, int]) -> str:
    """A fake value: type, sizes, strides, and which memory it lies in, by the order of first mention."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_value(item, memory) for item in value)}]"
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value}" if _is_number(value) else type(value).__name__
    storage = value.untyped_storage()._cdata
    place = memory.setdefault(storage, len(memory))
    layout = f"{tuple(value.shape)} {tuple(value.stride())} {value.storage_offset()}"
    return f"{value.dtype} {value.device} {layout} in {place} {value.requires_grad} {value.is_neg()} {value.is_conj()}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, torch.SymInt, torch.SymFloat, torch.SymBool))


def _content(constant: Any, node: fx.Node) -> str:
    """The bytes of a constant of the model's code: rules read them."""
    if not isinstance(constant, torch.Tensor) or isinstance(constant, FakeTensor):
        raise NotKept(f"the attribute {node.target} is no tensor")
    if constant.numel() * constant.element_size() > _CONSTANT_LIMIT or constant.layout is not torch.strided:
        raise NotKept(f"the constant {node.target} is too large, or not strided")
    with unset_fake_temporarily(), torch.no_grad():
        flat = constant.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.sha256(bytes(flat.tolist())).hexdigest()


def _symbols(module: fx.GraphModule) -> Iterator[str]:
    """What is known of symbolic sizes."""
    found = [n.meta["val"] for n in module.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    mode = detect_fake_mode(found)
    env = mode.shape_env if mode is not None else None
    if env is None:
        return
    for symbol, reach in sorted(env.var_to_range.items(), key=lambda item: str(item[0])):
        yield f"{symbol} in {reach}, was {env.backed_var_to_val.get(symbol)}"
    yield str(sorted((str(a), str(b)) for a, b in env.replacements.items()))
    yield str(sorted(str(guard.expr) for guard in env.guards))
    yield str(sorted(str(a.expr) for asserts in env.deferred_runtime_asserts.values() for a in asserts))
    yield str(sorted(map(str, env.divisible)))


def _weights(parameters: Mapping[fx.Node, torch.Tensor]) -> Iterator[str]:
    yield str([node.name for node in parameters])
    yield from memory_of(list(parameters.values()))
