"""An op with more arguments than its contract covers: what the contract doesn't name has to keep its default.

torch_npu's attention ops take up to 46 arguments, many of them for quantised tensors alone. A contract of such an op
says which ones it reads; the whole schema is bound to them here, and the rest of it is judged.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from ..target import Target
from .contract import Refuse
from .reasons import raise_first

__all__ = ["PartlyCovered"]

_C = TypeVar("_C")
_R = TypeVar("_R")


@dataclass(frozen=True)
class PartlyCovered(Generic[_C]):
    """The schema of an op, of which a contract covers a part.

    Args:
        name: the op's qualified name, for errors.
        schema: its schema, as `OpContract.schema`.
        call: makes one value of the covered arguments. Its parameters say which these are.
    """

    name: str
    schema: str
    call: Callable[..., _C]

    def kernel(self, function: Callable[[_C], _R]) -> Callable[..., _R]:
        """A reference or fake kernel of the whole schema, from a function of what `call` makes.

        The kernel raises ValueError where an argument that isn't covered differs from its default.
        """
        signature = self._signature

        def kernel(*args: object, **kwargs: object) -> _R:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            raise_first(self.name, self._uncovered(bound.arguments))
            return function(self._call_of(bound.arguments))

        return _posing_as(function, kernel, signature)

    def refuse(self, function: Callable[[Target, _C], Iterator[str]]) -> Refuse:
        """`OpContract.refuse` of the whole schema, from a generator of reasons about what `call` makes."""

        def refuse(target: Target, **arguments: object) -> str | None:
            for reason in self._uncovered(arguments):
                return reason
            return next(function(target, self._call_of(arguments)), None)

        target = inspect.Parameter("target", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        signature = self._signature
        return _posing_as(function, refuse, signature.replace(parameters=[target, *signature.parameters.values()]))

    @functools.cached_property
    def _arguments(self) -> list[torch.Argument]:
        return torch._C.parse_schema(self.schema).arguments

    @functools.cached_property
    def _covered(self) -> frozenset[str]:
        return frozenset(inspect.signature(self.call).parameters)

    @functools.cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.Signature(
            [
                inspect.Parameter(
                    argument.name,
                    inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD,
                    default=argument.default_value if argument.has_default_value() else inspect.Parameter.empty,
                )
                for argument in self._arguments
            ]
        )

    def _call_of(self, arguments: Mapping[str, object]) -> _C:
        return self.call(**{name: value for name, value in arguments.items() if name in self._covered})

    def _uncovered(self, arguments: Mapping[str, object]) -> Iterator[str]:
        for argument in self._arguments:
            value = arguments[argument.name]
            if argument.name in self._covered or value is None:
                continue
            if value != argument.default_value:
                given = "given" if isinstance(value, torch.Tensor) else repr(value)
                yield f"{argument.name} is {given} (npu_fuse supports its default alone, {argument.default_value!r})"


def _posing_as(
    function: Callable[..., object], whole: Callable[..., _R], signature: inspect.Signature
) -> Callable[..., _R]:
    """`whole` with the name and docstring of `function`, and with `signature`."""
    functools.update_wrapper(whole, function)
    whole.__signature__ = signature  # type: ignore[attr-defined]  # inspect looks there first
    return whole
