"""What is refused: arguments that can't be served, and captures that replays would not repeat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from .capture import CaptureBackend, Captured
from .errors import CaptureError
from .reach import reachable
from .record import Place, Trace, place, storage_key
from .spec import Shapes


def check_arguments(shapes: Shapes, arguments: Mapping[str, Any], device: torch.device) -> None:
    """Refuses arguments that can't be copied to static memory, or whose spec says that they mustn't.

    Raises:
        ValueError: names the argument.
    """
    for name, value in arguments.items():
        spec = shapes.of(name)
        if isinstance(value, torch.Tensor):
            if not spec.convert and spec.dtype not in (None, value.dtype):
                raise ValueError(f"GraphRunner: {name!r} is {value.dtype}, and its InputSpec wants {spec.dtype}")
            if value.device != device and (spec.static or not spec.convert):
                raise ValueError(f"GraphRunner: {name!r} is on {value.device}, and its graphs on {device}")
            if is_traceable_wrapper_subclass(value):
                raise ValueError(f"GraphRunner: {name!r} is a {type(value).__name__}, whose memory is not its own")
            if value.layout is not torch.strided:
                raise ValueError(f"GraphRunner: {name!r} has the layout {value.layout}; only strided memory is copied")
        elif isinstance(value, (list, tuple, dict)) and any(isinstance(x, torch.Tensor) for x in tree_leaves(value)):
            raise ValueError(f"GraphRunner: {name!r} is a {type(value).__name__} of tensors: pass each by its own name")
        elif isinstance(value, (list, tuple)) and spec.axes and spec.host is None:
            raise ValueError(f"GraphRunner: {name!r} is a list: InputSpec.host says which argument of an op takes it")


def refuse_gradients(arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise ValueError(f"GraphRunner: {name!r} requires gradients, and replays have none: detach it, or call "
                             "under torch.no_grad()")  # fmt: skip


def refuse_escapes(roots: Sequence[Any], captured: Captured) -> None:
    """Refuses a function that keeps a tensor which it computes: no replay would keep the next.

    Raises:
        CaptureError: names where the tensor is kept.
    """
    alive = {key for key, storage in captured.trace.made.items() if not storage.expired()}  # type: ignore[no-untyped-call]
    for root in roots:
        for path, tensor in reachable([root], alive):
            raise CaptureError(
                f"the function keeps a tensor {list(tensor.shape)} that it computed, as {type(root).__name__}{path}; a "
                "replay would not set it again: return it, or copy_ it into a tensor that is there before the call"
            )


def refuse_changes(
    roots: Sequence[Any], arguments: Mapping[str, Any], places: Mapping[str, Place], trace: Trace, result: Any
) -> None:
    """Refuses a function that does more to a tensor than to write to it, or that hides tensors in what it returns.

    Args:
        roots: the callable, and what else tensors are looked for in.
        arguments: those of the run, by name.
        places: where the tensors among them were before.
        trace: what was seen of the run.
        result: what it returned.

    Raises:
        CaptureError: names the op, the argument or the object.
    """
    for reshaped, error in trace.reshaped:
        if any(tensor is reshaped for _, tensor in reachable([*roots, *arguments.values()], {storage_key(reshaped)})):
            raise error
    for name, was in places.items():
        if place(arguments[name]) != was:
            raise CaptureError(f"the function gives its argument {name!r} other memory or another shape; a replay "
                               "would not: copy_ to it instead")  # fmt: skip
    made = {key for key, storage in trace.made.items() if not storage.expired()}  # type: ignore[no-untyped-call]
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.Tensor):
            continue
        for path, tensor in reachable([leaf], made):
            raise CaptureError(
                f"the function returns a {type(leaf).__name__}, whose {path} is a tensor {list(tensor.shape)} that it "
                "computed, and each replay would return the same object: return tensors in tuples, lists and dicts, or "
                "in a class that torch.utils._pytree knows"
            )


def own_outputs(roots: Sequence[Any], backend: CaptureBackend, captured: Captured, inputs: set[int]) -> set[int]:
    """The storages of outputs that are the graph's own: no input's, and no parameter's or cache's.

    Raises:
        CaptureError: nothing that was seen made one of them, and the backend captures nothing else.
    """
    keys = {storage_key(leaf) for leaf in tree_leaves(captured.result) if isinstance(leaf, torch.Tensor)} - inputs
    unknown = keys - captured.trace.made.keys()
    unknown -= {storage_key(tensor) for _, tensor in reachable(roots, unknown)} if unknown else set()
    if unknown and not backend.sees_all:
        raise CaptureError(
            "an output lies in memory that no op of the run made, and that can't be reached from the function: kernels "
            f"ran past torch's dispatcher, and the {backend.name} backend can't see them"
        )
    return unknown | (keys & captured.trace.made.keys())
