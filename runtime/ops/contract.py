"""What is known of one fused op: its schema, what it computes, the shapes it gives, and where it may be used."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ..target import Soc, Target

__all__ = ["Kernel", "Lacking", "OpContract", "Refuse"]

# One that only mutates its arguments returns nothing.
Kernel = Callable[..., torch.Tensor | tuple[torch.Tensor, ...] | None]
Refuse = Callable[..., str | None]


class Lacking(str):
    """A reason that holds for every call: the machine has no such kernel, or not the package with it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpContract:
    """One fused op.

    Args:
        name: the op's qualified name, "npu::npu_rms_norm".
        schema: its schema as torch writes it, without the namespace; argument names are the op's own.
        reference: the same maths and roundings in plain torch ops, called with the schema's arguments; fresh contiguous
            results. Raises ValueError for a call that is undefined on the device.
        fake: shapes, dtypes and strides of the results; sizes may be symbolic.
        refuse: why a call is not the kernel's business, else None. Called as `refuse(target, **arguments)`, by the
            schema's names with defaults filled in; tensors may be fake, with symbolic sizes. Installs no guards.
        socs: where the kernel exists.
        source: the package, version and label of what is written here.
        mutates: names of the arguments that the kernel writes, also where the schema does not say so.
        device_kernel: what runs on the NPU, for an op that no package registers.
        group: the argument that names the ranks that take part; a call that is given one is a collective.
    """

    name: str
    schema: str
    reference: Kernel
    fake: Kernel
    refuse: Refuse
    socs: frozenset[Soc]
    source: str
    mutates: tuple[str, ...] = ()
    device_kernel: Kernel | None = None
    group: str | None = None

    @property
    def namespace(self) -> str:
        """The part of `name` before the colons."""
        return self.name.partition("::")[0]

    @property
    def op(self) -> torch._ops.OpOverload:
        """The registered overload, for a graph to call.

        Raises:
            RuntimeError: the op is not registered yet.
        """
        return _overload(self.name)

    @property
    def parsed_schema(self) -> torch.FunctionSchema:
        """`schema` with its namespace, parsed."""
        return _parse(f"{self.namespace}::{self.schema}")

    def bind(self, /, *args: object, **kwargs: object) -> dict[str, object]:
        """All arguments of a call by name, in the schema's order, defaults filled in.

        Raises:
            TypeError: an argument is missing, unknown, given twice, or no tensor where the schema wants one.
        """
        parameters = {parameter.name: parameter for parameter in self.parsed_schema.arguments}
        if len(args) > len(parameters):
            raise TypeError(f"{self.name} takes {len(parameters)} arguments, got {len(args)}: {self.schema}")
        by_place = dict(zip(list(parameters)[: len(args)], args, strict=True))
        if twice := by_place.keys() & kwargs.keys():
            raise TypeError(f"{self.name}: {_names(twice)} given twice: {self.schema}")
        if unknown := kwargs.keys() - parameters.keys():
            raise TypeError(f"{self.name} has no argument {_names(unknown)}: {self.schema}")
        given = by_place | kwargs
        bound = {}
        for name, parameter in parameters.items():
            if name not in given and not parameter.has_default_value():
                raise TypeError(f"{self.name}: argument {name!r} is missing: {self.schema}")
            value = given.get(name, parameter.default_value)
            if str(parameter.type) == "Tensor" and not isinstance(value, torch.Tensor):
                raise TypeError(f"{self.name}: argument {name!r} is no tensor but {value!r}: {self.schema}")
            bound[name] = value
        return bound

    def refusal(self, target: Target, /, *args: object, **kwargs: object) -> str | None:
        """Why this call may not become the op on `target`, as a sentence; None when it may.

        Args:
            target: the machine.
            args: the op's arguments, as a call would have them; tensors may be fake, with symbolic sizes.
            kwargs: likewise.

        Raises:
            TypeError: the arguments don't fit the schema.
        """
        bound = self.bind(*args, **kwargs)
        if target.soc not in self.socs:
            others = ", ".join(sorted(self.socs))
            return Lacking(f"{self.name} has no kernel on {target.soc} (it has one on {others})")
        if target.soc == "ascend310p":
            for name, value in bound.items():
                if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
                    return f"{name} is bfloat16, which ascend310p does not compute; use float16"
        return self.refuse(target, **bound)


def _names(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))


@functools.cache
def _overload(name: str) -> torch._ops.OpOverload:
    namespace, _, unqualified = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), unqualified, None)
    if packet is None:
        raise RuntimeError(f"{name} is not registered; call npu_fuse.runtime.ops.register.register first")
    overload: torch._ops.OpOverload = packet.default
    return overload


@functools.cache
def _parse(schema: str) -> torch.FunctionSchema:
    return torch._C.parse_schema(schema)
