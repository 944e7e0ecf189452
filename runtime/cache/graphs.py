"""A rewritten graph as JSON, and made anew beside the graph that it was rewritten from."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from ...patterns import values
from ..ops import CONTRACTS
from ..ops.contract import OpContract
from ..ops.host_attention import HOST_CONTRACTS
from .encoding import NotKept, Unreadable, decode, decode_function, encode, encode_function

# What a node's metadata say of where the model wrote it.
_ORIGIN = ("nn_module_stack", "stack_trace", "source_fn_stack", "npu_fuse")


def describe(module: fx.GraphModule, before: Collection[str]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """A rewritten graph, and the constants that the rewriting has made.

    Args:
        module: the graph.
        before: the names of the nodes of the graph that it was rewritten from.

    Raises:
        NotKept: something in it has no form in a file.
    """
    nodes, constants = [], {}
    for node in module.graph.nodes:
        target = encode_function(node.target) if node.op == "call_function" else str(node.target)
        if node.op == "get_attr" and node.name not in before:
            constants[target] = _constant(module, target)
        elif node.op not in ("get_attr", "placeholder", "call_function", "output"):
            raise NotKept(f"{node.name} is a {node.op}")
        origin = node.meta.get("npu_fuse")
        layout = None if node.op == "output" else layout_of(node.meta.get("val"))
        nodes.append([node.name, node.op, target, encode(tuple(node.args)), encode(dict(node.kwargs)), origin, layout])
    return nodes, constants


def _constant(module: fx.GraphModule, name: str) -> torch.Tensor:
    value = getattr(module, name, None)
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        raise NotKept(f"the attribute {name} is no tensor")
    with unset_fake_temporarily():
        return value.detach().cpu()


def layout_of(value: Any) -> Any:
    """What is to be known of a value without the value: of a tensor its type, device, sizes and strides."""
    if isinstance(value, torch.Tensor):
        sizes = [[str(size) for size in of] for of in (value.shape, value.stride())]
        return [str(value.dtype), str(value.device), *sizes, str(value.storage_offset())]
    if isinstance(value, (list, tuple)):
        return [layout_of(item) for item in value]
    return str(value)


def rebuild(module: fx.GraphModule, nodes: Iterable[Any], constants: dict[str, torch.Tensor]) -> None:
    """Makes a graph anew, in place of the one that it was rewritten from.

    Args:
        module: has the graph of which the other was rewritten; gets the new one.
        nodes: as `describe` gave them.
        constants: likewise.

    Raises:
        Unreadable: the nodes are not those of such a graph, or a value comes out otherwise.
    """
    known = {node.name: node for node in module.graph.nodes}
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}
    values_of = _Values(module)
    devices = dict[str, torch.device]()
    for name, op, target, args, kwargs, origin, layout in nodes:
        function = decode_function(target) if op == "call_function" else target
        node = made[name] = graph.create_node(op, function, decode(args, made), decode(kwargs, made), name=name)
        if node.name != name:
            raise Unreadable(f"two nodes are called {name}")
        of = known.get(name, known.get(origin))
        if of is not None:
            kept = of.meta if name in known else {key: of.meta[key] for key in _ORIGIN if key in of.meta}
            node.meta.update(kept)
        if origin is not None:
            node.meta["npu_fuse"] = origin
        if op == "output":
            continue
        if op == "get_attr" and name not in known:
            devices[target] = torch.device(layout[1])
            with unset_fake_temporarily():
                constant = constants[target].to(devices[target])
            module.register_buffer(target, constant, persistent=False)
            node.meta["val"] = values_of.of_constant(constant)
        elif op == "call_function":
            values_of.settle(node, known.get(name), layout)
        if layout_of(node.meta["val"]) != layout:
            raise Unreadable(f"{name} is {layout_of(node.meta['val'])} here, and was {layout}")
    if {n for n, node in known.items() if node.op == "placeholder"} - made.keys():
        raise Unreadable("an input is missing")
    module.graph = graph


class _Values:
    """The fake values of a graph that is made anew: those of the old nodes where they hold still."""

    def __init__(self, module: fx.GraphModule) -> None:
        found = [n.meta["val"] for n in module.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        self._mode: Any = detect_fake_mode(found)
        self._contracts: dict[Any, OpContract] = {of.op: of for of in (*CONTRACTS.values(), *HOST_CONTRACTS)}
        self._changed: set[fx.Node] = set()

    def of_constant(self, constant: torch.Tensor) -> Any:
        return self._mode.from_tensor(constant, static_shapes=True)

    def settle(self, node: fx.Node, old: fx.Node | None, layout: Any) -> None:
        """Gives a call its value: the old node's, if that has this layout and lies in no memory that is another now."""
        if old is not None and layout_of(old.meta.get("val")) == layout:
            lies = values.storages(old)
            read = frozenset().union(*(values.storages(source) for source in old.all_input_nodes))
            if not lies & read or not self._changed & set(node.all_input_nodes):
                return
        self._changed.add(node)
        # As when it was rewritten: the strides of a fused op are the contract's.
        contract = self._contracts.get(node.target) if old is None else None
        function: Any = node.target if contract is None or contract.mutates else contract.fake
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        guards = self._mode.shape_env
        with self._mode, guards.suppress_guards() if guards is not None else contextlib.nullcontext():
            node.meta["val"] = function(*args, **kwargs)

