"""What runs a rewritten graph: torch, op by op, or what Inductor compiles of it.

Inductor gets the graph as it would run, with torch's own ops and ours, and traces it once more. It takes ops apart by
its own rules, makes kernels of what lies between fused ops and calls these as they are. Writes into inputs stay writes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal

from torch import fx
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from .weights import IN_MEMORY

Inner = Literal["eager", "inductor"]

Compiled = Callable[..., Any]


def executable(module: fx.GraphModule, inner: Inner, *, strict: bool = False, is_late: bool = False) -> Compiled:
    """What runs a graph.

    What Inductor can't compile runs op by op, with one warning.

    Args:
        module: an ATen graph with fake values in `meta["val"]`; it stays as it is.
        inner: who runs it.
        strict: raise instead of warning.
        is_late: whether Dynamo has made its guards already, so that the graph has to do with what they say.

    Raises:
        Exception: whatever Inductor raises, under `strict`.
    """
    if inner == "eager":
        return module.forward
    try:
        return _by_inductor(module, is_late)
    except Exception as error:  # of a compiler that calls another: whatever there is
        if strict:
            raise
        warnings.warn(
            f"npu_fuse: a graph runs op by op, as Inductor failed to compile it: {type(error).__name__}: {error}",
            stacklevel=2,
        )
        return module.forward


def _by_inductor(module: fx.GraphModule, is_late: bool) -> Compiled:
    from torch._inductor.compile_fx import compile_fx  # takes a second to import

    packing, rest = _apart(module)
    examples = [node.meta["val"] for node in rest.graph.find_nodes(op="placeholder")]
    fake_mode = detect_fake_mode(examples)
    shapes = fake_mode.shape_env if fake_mode is not None else None
    known = _guards(shapes)
    # AOTAutograd around us has notes of its own in the context that it traces in.
    with tracing(TracingContext(fake_mode)):
        compiled: Any = compile_fx(rest, examples)
    if is_late and _guards(shapes) > known:
        raise RuntimeError("it holds for some sizes only, and nothing would check them any more")
    return compiled if packing is None else lambda *inputs: compiled(*inputs, *packing(*inputs))


def _guards(shapes: ShapeEnv | None) -> int:
    return len(shapes.guards) if shapes is not None else 0


def _apart(module: fx.GraphModule) -> tuple[fx.GraphModule | None, fx.GraphModule]:
    """The calls that bring weights into one form, and a copy of the rest, whose last inputs are what they give.

    They look at memory, and a trace would see a copy where there is a view.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    calls = [
        node
        for node in module.graph.nodes
        if node.target in IN_MEMORY and all(given.op == "placeholder" for given in node.all_input_nodes)
    ]
    rest = fx.Graph()
    copies = {node: rest.node_copy(node) for node in placeholders}
    for call in calls:
        copies[call] = rest.placeholder(call.name)
        copies[call].meta.update(call.meta)
    rest.output(rest.graph_copy(module.graph, copies))
    if not calls:
        return None, fx.GraphModule(module, rest)
    packing = fx.Graph()
    copies = {node: packing.node_copy(node) for node in placeholders}
    packing.output([packing.node_copy(call, copies.__getitem__) for call in calls])
    return fx.GraphModule(module, packing), fx.GraphModule(module, rest)
