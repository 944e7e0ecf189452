"""From a graph without writes to torch's dialect: inputs that are written, fused ops, and sizes that vary.

torch-mlir's importer says all of a call but three things. An input that is written is a `!torch.tensor` here, read once
and overwritten at the end. An op that writes gets copies of what it writes as such tensors, and they are read after it.
And a fused op may be a call, which keeps the names of its arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv
from torch_mlir import ir
from torch_mlir.dialects import torch as torch_dialect
from torch_mlir.extras import fx_importer

from .errors import MlirError
from .functional import Functional, Written, contract_of, written_by

__all__ = ["Importer"]

aten = torch.ops.aten


class Importer(fx_importer.FxImporter):  # type: ignore[misc]  # it has no annotations
    """Imports graphs as functions of one module.

    Args:
        as_calls: make fused ops calls of functions that are declared, with their other arguments as attributes.
    """

    def __init__(self, as_calls: bool = False) -> None:
        context = ir.Context()
        torch_dialect.register_dialect(context)
        super().__init__(context=context, graph_node_importer_cls=_NodeImporter, config_check=False)
        self.as_calls = as_calls
        self.overwritten: set[fx.Node] = set()
        self.declared: dict[str, str] = {}

    def add(self, graph: Functional, name: str, *, overwrites: bool) -> Any:
        """Imports a graph, which is changed by it.

        Args:
            graph: the graph.
            name: of the function.
            overwrites: write the new values of its inputs into them; else they are results behind the others.

        Returns:
            The function.

        Raises:
            MlirError: the importer knows no form of a node.
        """
        module = graph.module
        placeholders = module.graph.find_nodes(op="placeholder")
        if overwrites and graph.written:
            output = module.graph.output_node()
            (given,) = output.args
            assert isinstance(given, (tuple, list))
            first = len(given) - len(graph.written)
            self.overwritten = {placeholders[i] for i in graph.written}
            with module.graph.inserting_before(output):
                for place, value in zip(graph.written, given[first:], strict=True):
                    module.graph.call_function(aten.copy_.default, (placeholders[place], value))
            output.args = (given[:first],)
        # Linalg's types say that a size varies, and that is all that it has of it.
        constraints = _ranges(placeholders) if overwrites else {}
        self._cc._symbolic_guards = constraints
        try:
            function = self.import_graph_module(
                module, func_name=name, import_symbolic_shape_expressions=bool(constraints)
            )
        except (NotImplementedError, TypeError, AssertionError, ValueError, RuntimeError, KeyError) as error:
            raise MlirError(f"torch-mlir can't import the graph: {type(error).__name__}: {error}") from error
        if graph.written and not overwrites:
            with self._c:
                places = [ir.IntegerAttr.get(ir.IntegerType.get_signless(64), i) for i in graph.written]
                function.attributes["npu_fuse.new_values_of_inputs"] = ir.ArrayAttr.get(places)
        return function

    def _graph_to_function_meta(self, g: fx.Graph) -> tuple[Any, Any]:
        kind, location = super()._graph_to_function_meta(g)
        inputs = [
            self._cc.node_val_to_type(node, mutable=node in self.overwritten) for node in g.find_nodes(op="placeholder")
        ]
        return ir.FunctionType.get(inputs, kind.results, context=self._c), location


class _NodeImporter(fx_importer.GraphNodeImporter):  # type: ignore[misc]  # it has no annotations
    def bind_node_value(self, node: fx.Node, value: Any, result_index: int = 0) -> None:
        if node in self.fx_importer.overwritten:
            self._inputs = {**getattr(self, "_inputs", {}), node: value}
            value = self._emit("torch.copy.to_vtensor", [self._cc.node_val_to_type(node)], [value])
        if node.op == "get_attr" and (node, result_index) in self._v:
            return  # torch-mlir imports a constant again for each call that reads it
        super().bind_node_value(node, value, result_index)

    def _emit(self, name: str, results: list[Any], operands: list[Any], location: Any = None) -> Any:
        location = location or ir.Location.unknown(self._c)
        return ir.Operation.create(name, results=results, operands=operands, loc=location).result

    def _import_torch_op_overload(self, loc: Any, node: fx.Node, concrete_target: Any = None) -> None:
        target = concrete_target or node.target
        written = written_by(target)
        if target is aten.copy_.default:
            self._overwrite(loc, node)
        elif self.fx_importer.as_calls and contract_of(target if written is None else written.op) is not None:
            self._import_as_call(loc, node, written)
        elif written is not None:
            self._import_with_copies(loc, node, written)
        else:
            super()._import_torch_op_overload(loc, node, concrete_target)

    def _overwrite(self, loc: Any, node: fx.Node) -> None:
        place, value = node.args
        operands = [self._import_argument(loc, value), self._inputs[place]]
        ir.Operation.create("torch.overwrite.tensor.contents", results=[], operands=operands, loc=loc)

    def _import_with_copies(self, loc: Any, node: fx.Node, written: Written) -> None:
        """An op that writes: on copies of what it writes, which are read after it."""
        given, copies, operands = _by_name(node, written.op), {}, []
        for a in written.op._schema.arguments:
            value = self._argument(loc, given, a)
            if a.name in written.names:
                kind = self._cc.value_info_to_type(given[a.name].meta["val"], mutable=True)
                value = copies[a.name] = self._emit("torch.copy.to_tensor", [kind], [value], loc)
            operands.append(value)
        kinds = self._kinds(node)
        own = len(kinds) - len(written.names)
        name = fx_importer._get_mlir_op_name_for_schema(written.op._schema)
        call = fx_importer._emit_operation(name, result_types=kinds[:own], operands=operands, loc=loc)
        new = [
            self._emit("torch.copy.to_vtensor", [kind], [copies[of]], loc)
            for kind, of in zip(kinds[own:], written.names, strict=True)
        ]
        self._bind(node, [*call.results, *new])

    def _import_as_call(self, loc: Any, node: fx.Node, written: Written | None) -> None:
        """A fused op as a call: its tensors are operands by name, its numbers and words attributes."""
        op: Any = written.op if written is not None else node.target
        given = _by_name(node, op)
        operands: dict[str, Any] = {}
        attributes = {"npu_fuse.op": ir.StringAttr.get(op._schema.name, self._c)}
        for a in op._schema.arguments:
            value = given.get(a.name, a.default_value)
            if isinstance(value, (list, tuple)) and any(isinstance(item, fx.Node) for item in value):
                operands |= {f"{a.name}.{i}": self._import_argument(loc, item) for i, item in enumerate(value)}
            elif isinstance(value, fx.Node):
                operands[a.name] = self._argument(loc, given, a)
            elif value is not None:
                attributes[f"npu_fuse.argument.{a.name}"] = self._attribute(value)
        kinds = self._kinds(node)
        names = [""] * len(kinds)
        if written is not None:
            names[len(kinds) - len(written.names) :] = [f"new {name}" for name in written.names]
        callee = ir.FlatSymbolRefAttr.get(self._declared(op, operands, kinds, names, attributes), self._c)
        values = list(operands.values())
        call = ir.Operation.create("func.call", results=kinds, operands=values, attributes={"callee": callee}, loc=loc)
        self._bind(node, list(call.results))

    def _declared(
        self, op: Any, operands: Mapping[str, Any], kinds: list[Any], names: list[str], attributes: dict[str, Any]
    ) -> str:
        """The name of the function that stands for such calls of an op."""
        importer = self.fx_importer
        inputs = [value.type for value in operands.values()]
        like = str((op._schema.name, inputs, kinds, list(operands), attributes))
        if like not in importer.declared:
            name = f"{op._schema.name.replace('::', '.')}.{len(importer.declared)}"
            importer.declared[like] = name
            with ir.Location.unknown(self._c):
                function = fx_importer.func_dialect.FuncOp(
                    name,
                    ir.FunctionType.get(inputs, kinds),
                    ip=importer._m_ip,
                    visibility="private",
                )
                for key, value in attributes.items():
                    function.attributes[key] = value
                function.attributes["arg_attrs"] = _named(operands)
                if any(names):
                    function.attributes["res_attrs"] = _named(names)
            importer.symbol_table.insert(function)
        found: str = importer.declared[like]
        return found

    def _attribute(self, value: Any) -> Any:
        with ir.Location.unknown(self._c):
            if isinstance(value, bool):
                return ir.BoolAttr.get(value)
            if isinstance(value, int):
                return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)
            if isinstance(value, float):
                return ir.FloatAttr.get(ir.F64Type.get(), value)
            if isinstance(value, (list, tuple)):
                return ir.ArrayAttr.get([self._attribute(item) for item in value])
            return ir.StringAttr.get(str(value))

    def _argument(self, loc: Any, given: Mapping[str, Any], a: Any) -> Any:
        if a.name in given:
            return self._import_argument(loc, given[a.name], a.type)
        return self._import_default_value(loc, a.default_value, a.type)

    def _kinds(self, node: fx.Node) -> list[Any]:
        value = node.meta["val"]
        every = value if isinstance(value, (tuple, list)) else () if value is None else (value,)
        return [self._cc.value_info_to_type(item) for item in every]

    def _bind(self, node: fx.Node, results: list[Any]) -> None:
        if isinstance(node.meta["val"], (tuple, list)):
            self._multi_result_nodes.add(node)
        for place, value in enumerate(results):
            self.bind_node_value(node, value, place)

    def _create_bind_symbolic_shape_ops(self, loc: Any, node: fx.Node) -> None:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or node.target is aten.copy_.default:
            return
        sizes = [size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size) for size in value.shape]
        symbols = sorted(set().union(*(size.free_symbols for size in sizes)), key=str)
        if not symbols or not all(str(symbol) in self._cc.get_symbolic_guards() for symbol in symbols):
            return
        with self._c:
            try:
                sizes = [_affine(size, symbols) for size in sizes]
            except _NotAffineError:  # the type says that the size varies, and that is all
                return
            shape = ir.AffineMapAttr.get(ir.AffineMap.get(0, len(symbols), sizes))
        operands = [self.resolve_node_value(node), *(self.resolve_symbol_value(str(symbol)) for symbol in symbols)]
        ir.Operation.create(
            "torch.bind_symbolic_shape", attributes={"shape_expressions": shape}, operands=operands, loc=loc
        )


class _NotAffineError(Exception):
    pass


def _affine(size: Any, symbols: list[sympy.Symbol]) -> Any:
    """A size as MLIR's affine expression of the symbols."""
    if isinstance(size, sympy.Symbol):
        return ir.AffineSymbolExpr.get(symbols.index(size))
    if isinstance(size, sympy.Integer):
        return ir.AffineConstantExpr.get(int(size))
    of = {sympy.Add: ir.AffineAddExpr, sympy.Mul: ir.AffineMulExpr, FloorDiv: ir.AffineFloorDivExpr}.get(size.func)
    if of is None:
        raise _NotAffineError
    first, *rest = (_affine(part, symbols) for part in size.args)
    for part in rest:
        first = of.get(first, part)
    return first


def _ranges(placeholders: list[fx.Node]) -> dict[str, Any]:
    """Between which bounds the sizes lie that vary."""
    found: dict[str, Any] = {}
    largest = torch.iinfo(torch.int64).max
    for node in placeholders:
        for number in _numbers(node.meta.get("val")):
            environment = number.node.shape_env
            for symbol in number.node.expr.free_symbols:
                bounds = environment.var_to_range.get(symbol)
                if bounds is not None:
                    low = int(bounds.lower) if math.isfinite(float(bounds.lower)) else -largest
                    high = int(bounds.upper) if math.isfinite(float(bounds.upper)) else largest
                    found[str(symbol)] = fx_importer.RangeConstraint(low, high)
    return dict(sorted(found.items()))


def _numbers(value: Any) -> Iterator[torch.SymInt]:
    for number in value.shape if isinstance(value, torch.Tensor) else (value,):
        if isinstance(number, torch.SymInt):
            yield number


def _by_name(node: fx.Node, op: Any) -> dict[str, Any]:
    return {**dict(zip((a.name for a in op._schema.arguments), node.args, strict=False)), **node.kwargs}


def _named(names: Any) -> Any:
    """A list of dicts that name operands or results."""
    return ir.ArrayAttr.get(
        [ir.DictAttr.get({"npu_fuse.name": ir.StringAttr.get(name)} if name else {}) for name in names]
    )
