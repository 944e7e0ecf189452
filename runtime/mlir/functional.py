"""Graphs without writes: what a graph writes becomes a value, of which the last is the new value of an input.

A graph of the backend writes caches in place, and ops do that whose schema doesn't say so. MLIR's tensors are values: a
write that is handed over as a call is lost. So the graph is traced once more, with torch's own functionalisation, which
knows views; an op that writes is called by an op of ours that gives the new values of what it writes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._higher_order_ops import auto_functionalize
from torch._ops import OpOverload
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from ..effects import effect_of, told_by, writes
from ..ops import CONTRACTS, OpContract
from ..ops.reasons import NO_VALUES
from ..sizes import known_same_shape
from ..weights import pack, transposed
from .errors import MlirError

__all__ = ["Functional", "Written", "computed", "contract_of", "functional", "is_empty", "traced", "written_by"]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Functional:
    """A graph without writes.

    Args:
        module: the graph; its outputs are those that the graph had, then the new values of the inputs that it wrote.
        written: the positions of these inputs.
        has_read: whether values were read while it was traced, so that it holds for these values only.
    """

    module: fx.GraphModule
    written: tuple[int, ...]
    has_read: bool = False


@dataclass(frozen=True, slots=True)
class Written:
    """What an op of ours stands for, which gives the results of an op and then the new values of what that writes.

    Args:
        op: the op.
        names: the arguments that it writes.
    """

    op: OpOverload
    names: tuple[str, ...]


_WRITTEN: dict[OpOverload, Written] = {}


def written_by(target: object) -> Written | None:
    """What an op of ours stands for; None of other ops."""
    return _WRITTEN.get(target) if isinstance(target, OpOverload) else None


def contract_of(target: object) -> OpContract | None:
    """The contract of an op, or None."""
    return CONTRACTS.get(target._schema.name) if isinstance(target, OpOverload) else None


def computed(contract: OpContract, given: Mapping[str, Any]) -> Any:
    """What the reference of a contract gives.

    Raises:
        MlirError: it reads values, and the tensors have none; or it is computed by several ranks.
    """
    if contract.group is not None and given[contract.group] is not None:
        raise MlirError(f"{contract.name} is computed by all ranks of a group, and a text is for one")
    try:
        return contract.reference(**given)
    except NO_VALUES as error:
        told = f"the reference of {contract.name} reads values of tensors, which a graph doesn't have"
        raise MlirError(told) from error


def functional(module: fx.GraphModule, decompositions: Mapping[Any, Any] | None = None) -> Functional:
    """A copy of a graph without its writes; the graph itself is untouched.

    Args:
        module: AOTAutograd's graph, with fake values in `meta["val"]`.
        decompositions: take ops apart, those of contracts by their references. None leaves all as they are, and a graph
            that writes nothing node for node.

    Raises:
        MlirError: a write can't be expressed, or a reference reads values, which a graph doesn't have.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    copy = fx.GraphModule(module, graph)
    held = _held_as_inputs(copy)
    inputs = [node.meta.get("val") for node in graph.find_nodes(op="placeholder")]
    if decompositions is None and not any(map(_is_no_function, graph.nodes)):
        found = Functional(copy, ())
    else:
        interpreter = _Interpreter(copy, by_references=decompositions is not None)
        found = traced(interpreter.run, inputs, decompositions or {})
    if any(place >= len(inputs) - len(held) for place in found.written):
        raise MlirError("the graph writes a tensor that it holds itself")
    _hold(found.module, held)
    return found


def _held_as_inputs(module: fx.GraphModule) -> list[torch.Tensor]:
    """Makes the tensors that a graph holds its last inputs; gives them."""
    graph = module.graph
    held: list[torch.Tensor] = []
    for node in graph.find_nodes(op="get_attr"):
        tensor = getattr(module, str(node.target))
        with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
            place = graph.placeholder(f"held_{len(held)}")
        place.meta.update(node.meta)
        node.replace_all_uses_with(place)
        graph.erase_node(node)
        held.append(tensor)
    module.recompile()
    return held


def _hold(module: fx.GraphModule, held: Sequence[torch.Tensor]) -> None:
    """Makes a graph hold tensors that are its last inputs; those without values, on the meta device, stay inputs."""
    placeholders = module.graph.find_nodes(op="placeholder")
    for node, tensor in zip(placeholders[len(placeholders) - len(held) :], held, strict=True):
        if not tensor.is_meta:
            module.register_buffer(node.name, tensor)
            with module.graph.inserting_before(next(n for n in module.graph.nodes if n.op != "placeholder")):
                own = module.graph.get_attr(node.name)
            own.meta.update(node.meta)
            node.replace_all_uses_with(own)
            module.graph.erase_node(node)
    module.recompile()


def traced(function: Callable[..., Any], inputs: Sequence[Any], decompositions: Mapping[Any, Any]) -> Functional:
    """A function's ops as a graph without writes.

    Args:
        function: gives a tensor, a tuple of them or None; may write its inputs. What it reads of tensors that are no
            fake ones holds for their values only.
        inputs: tensors, and numbers that may be symbolic.
        decompositions: take ops apart.
    """
    reads = _Reads()
    fake = detect_fake_mode(inputs) or nullcontext()

    def run(*given: Any) -> tuple[Any, ...]:
        outputs = function(*given)
        outputs = outputs if isinstance(outputs, (tuple, list)) else () if outputs is None else (outputs,)
        return (*outputs, *(value for value in given if isinstance(value, torch.Tensor)))

    def values_only(*given: Any) -> Any:
        with reads:
            return dispatch_functionalize(run, FunctionalTensorMode())(*given)

    with fake, torch.no_grad(), traceback.preserve_node_meta():
        module = make_fx(values_only, decomposition_table=dict(decompositions))(*inputs)
    placeholders = module.graph.find_nodes(op="placeholder")
    tensors = [place for place, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
    output = module.graph.output_node()
    (given,) = output.args
    assert isinstance(given, (tuple, list))
    first = len(given) - len(tensors)
    new = [(i, node) for i, node in zip(tensors, given[first:], strict=True) if node is not placeholders[i]]
    output.args = ((*given[:first], *(node for _, node in new)),)
    _tidy(module.graph)
    module.recompile()
    return Functional(module, tuple(i for i, _ in new), reads.any)


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Lets a function read numbers of tensors that have some, which tracing forbids; they become part of the graph."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if not isinstance(func, OpOverload) or any(isinstance(arg, torch._subclasses.FakeTensor) for arg in args):
            return func(*args, **given)
        if func is aten._local_scalar_dense.default:
            self.any = True
            with disable_proxy_modes_tracing():
                return func(*args)
        if func is aten.index.Tensor and any(_is_mask(index) for index in args[1]):
            self.any = True
            with disable_proxy_modes_tracing():
                places = [list(index.nonzero().unbind(1)) if _is_mask(index) else [index] for index in args[1]]
            return func(args[0], [place for some in places for place in some])
        self.any |= torch.Tag.dynamic_output_shape in func.tags and func is not aten.index.Tensor
        return func(*args, **given)


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _tidy(graph: fx.Graph) -> None:
    """Takes out what says nothing: devices, copies of whole values, and tensors without elements that are joined."""
    for node in graph.nodes:
        if node.kwargs.get("device") is not None:
            node.update_kwarg("device", None)
    for node in graph.find_nodes(op="call_function", target=aten.copy.default):
        old, new = (part.meta["val"] for part in node.args[:2])
        if new.dtype == old.dtype and known_same_shape(new.shape, old.shape):
            node.replace_all_uses_with(node.args[1])
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        parts, *dim = node.args
        full = [part for part in parts if not is_empty(part.meta["val"])]
        if full and len(full) < len(parts):
            node.args = (full, *dim)
    graph.eliminate_dead_code()


def is_empty(value: Any) -> bool:
    """Whether a value is a tensor that is known to have no elements."""
    return isinstance(value, torch.Tensor) and any(isinstance(size, int) and size == 0 for size in value.shape)


def _is_no_function(node: fx.Node) -> bool:
    """Whether a node does more than a function does, or is code that MLIR can't call."""
    if node.op != "call_function" or node.target in (pack, transposed) or _is_range(node.target):
        return node.op == "call_function"
    return node.target is torch.ops.higher_order.auto_functionalized_v2 or bool(writes(node.target))


def _is_range(target: Any) -> bool:
    """Whether a call begins or ends a range of the profiler."""
    return isinstance(target, OpOverload) and target.namespace == "profiler"


class _Interpreter(fx.Interpreter):
    """Runs a graph with ops that write called by ops that give what they write."""

    def __init__(self, module: fx.GraphModule, by_references: bool) -> None:
        super().__init__(module)
        self.extra_traceback = False  # an error is told as it is
        self._by_references = by_references

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.higher_order.auto_functionalized_v2:
            return self._functionalised(*args, **kwargs)
        if target is pack:  # as values, not by moving parameters
            return torch.cat(list(args[0]))
        if target is transposed:
            (weight,) = args
            return (weight if weight.dim() == 2 else weight.select(1, 0)).t().contiguous()
        if _is_range(target):
            return None
        if not isinstance(target, OpOverload) or target.namespace in ("aten", "prims"):
            return super().call_function(target, args, kwargs)
        names = [argument.name for argument in target._schema.arguments]
        return self._call(target, {**dict(zip(names, args, strict=False)), **kwargs})

    def _functionalised(self, op: OpOverload, **given: Any) -> tuple[Any, ...]:
        """The results of an op, and the new values of the bases of what it writes, which keep theirs."""
        bases = [base.clone() for base in given.pop("_all_bases")]
        names, types = auto_functionalize.get_mutable_args(op)
        views = auto_functionalize.read_view_information_from_args(names, types, given, bases)
        for name in names:
            view = views[name]
            if isinstance(view, list):
                raise MlirError(f"{op} writes a list of tensors ({name!r}), which has no form in MLIR")
            given[name] = None if view is None else view.regenerate_view(bases)
        result = self._call(op, given)
        return (*(result if isinstance(result, tuple) else (result,)), *bases)

    def _call(self, target: OpOverload, given: dict[str, Any]) -> Any:
        effect = told_by(target)
        op = target if effect is None else effect.op
        contract = contract_of(op) if self._by_references else None
        given = {a.name: given.get(a.name, a.default_value) for a in op._schema.arguments}
        result = _called(op, given) if contract is None else computed(contract, given)
        if effect is None:
            return result
        results = result if isinstance(result, tuple) else (result,)
        left = tuple(value for i, value in enumerate(results) if i not in effect.returns)
        return None if not left else left[0] if len(left) == 1 else left


def _called(op: OpOverload, given: Mapping[str, Any]) -> Any:
    names = tuple(name for name in writes(op) if given[name] is not None)
    positional = [given[a.name] for a in op._schema.arguments if not a.kwarg_only]
    named = {a.name: given[a.name] for a in op._schema.arguments if a.kwarg_only}
    if not names:
        return op(*positional, **named)
    for name in names:
        if not isinstance(given[name], torch.Tensor):
            raise MlirError(f"{op} writes a list of tensors ({name!r}), which has no form in MLIR")
    results = _giving_writes(op, names)(*positional, **named)
    results = results if isinstance(results, tuple) else (results,)
    first = len(results) - len(names)
    for name, value in zip(names, results[first:], strict=True):
        given[name].copy_(value)
    kept = list(results[:first])
    effect = effect_of(op)
    for place, name in (effect.returns if effect is not None else {}).items():
        kept[place] = given[name]
    return None if not kept else kept[0] if len(kept) == 1 else tuple(kept)


@functools.cache
def _giving_writes(op: OpOverload, names: tuple[str, ...]) -> OpOverload:
    """Defines an op of ours that gives the results of an op, and the new values of what that writes."""
    schema = op._schema
    if any(result.alias_info is not None for result in schema.returns):
        raise MlirError(f"{op} gives back what it writes, which has no form in MLIR: {schema}")
    arguments, _, _ = str(schema).partition("(")[2].rpartition(") -> ")
    arguments = re.sub(r"\([a-z]\w*!?(?: -> [^)]*)?\)", "", arguments)  # the marks of what is written
    results = ", ".join([*(str(result.type) for result in schema.returns), *("Tensor" for _ in names)])
    name = "_".join((*schema.name.split("::"), *filter(None, (schema.overload_name,)), "giving", *names))
    order = [a.name for a in schema.arguments]

    def fake(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(order, args, strict=False)), **kwargs}
        found = op(*args, **kwargs)
        found = found if isinstance(found, tuple) else () if found is None else (found,)
        every = (*found, *(torch.empty_like(given[name]) for name in names))
        return every[0] if len(every) == 1 else every

    library = _library()
    library.define(f"{name}({arguments}) -> ({results})")  # type: ignore[no-untyped-call]  # torch's own
    torch.library.register_fake(f"npu_fuse::{name}", fake, lib=library)
    giving: OpOverload = getattr(torch.ops.npu_fuse, name).default
    _WRITTEN[giving] = Written(op, names)
    return giving


@functools.cache
def _library() -> torch.library.Library:
    return torch.library.Library("npu_fuse", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own
