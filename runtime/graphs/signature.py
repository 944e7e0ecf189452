"""Arguments by their names, whichever way they are passed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn


class Signature:
    """The parameters of a callable.

    Args:
        function: a function, or a module, compiled or not.
        named: names that are used for parameters elsewhere; those of `*args` are `arg0`, `arg1`, ….

    Raises:
        ValueError: a name is none of the callable's parameters.
    """

    def __init__(self, function: Callable[..., Any], named: Collection[str]) -> None:
        self.wrapped = plain(function)
        self.signature = inspect.signature(self.wrapped)
        kinds = {name: parameter.kind for name, parameter in self.signature.parameters.items()}
        self._open = inspect.Parameter.VAR_KEYWORD in kinds.values()
        self._varying = inspect.Parameter.VAR_POSITIONAL in kinds.values()
        self._positional = tuple(
            name for name, kind in kinds.items() if kind in (inspect.Parameter.POSITIONAL_ONLY, _EITHER)
        )
        self._by_name = {name for name, kind in kinds.items() if kind in (_EITHER, inspect.Parameter.KEYWORD_ONLY)}
        self._known = self._by_name | set(self._positional)
        self._optional = {name for name, parameter in self.signature.parameters.items() if parameter.default is None}
        self._by_position = tuple(name for name, kind in kinds.items() if kind is inspect.Parameter.POSITIONAL_ONLY)
        if not self._open and not self._varying:
            for name in named:
                if name not in self._known:
                    raise ValueError(
                        f"GraphRunner.inputs: {name!r} is no parameter; known: {', '.join(sorted(self._known))}"
                    )

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by name; a None that is the default anyway is left out.

        Raises:
            TypeError: there are too many, one is given twice, or a name is unknown.
        """
        names = self._positional
        if len(args) > len(names):
            if not self._varying:
                raise TypeError(
                    f"GraphRunner: {len(args)} arguments for the {len(names)} parameters {', '.join(names)}"
                )
            names = (*names, *(f"arg{i}" for i in range(len(args) - len(names))))
        bound = dict(zip(names, args, strict=False))
        for name, value in kwargs.items():
            if name in bound or not (name in self._by_name or self._open):
                raise TypeError(f"GraphRunner: {name!r} is given {'twice' if name in bound else 'but no parameter'}")
            bound[name] = value
        if len(args) <= len(self._positional):  # else what comes after would move up
            for name in self._optional:
                if name in bound and bound[name] is None:
                    del bound[name]
        return bound

    def call(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Calls the function with arguments by name."""
        by_keyword = dict(arguments)
        varying = [name for name in arguments if self._varying and name not in self._known and name.startswith("arg")]
        # What comes before the arguments of `*args` has to be given by position too.
        before = self._positional if varying else self._by_position
        by_position = [by_keyword.pop(name) for name in (*before, *varying) if name in by_keyword]
        return function(*by_position, **by_keyword)


_EITHER = inspect.Parameter.POSITIONAL_OR_KEYWORD


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """What is behind `torch.compile` and modules, with a signature of its own."""
    if isinstance(function, nn.Module):
        inner = getattr(function, "_orig_mod", function)
        return plain(inner.forward)
    return getattr(function, "_torchdynamo_orig_callable", function)
