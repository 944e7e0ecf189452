"""Stand-ins for packages that a framework imports and a CPU can't have: enough to import the framework's own files.

Whatever is asked of a stand-in is there: its classes may be inherited and asked for instances, its functions decorate
without effect. Nothing of it computes, so a test that reaches one finds no tensor.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


class _Kind(type):
    """The type of a class of a stand-in: an enumeration, say, has all members."""

    def __getattr__(cls, name: str) -> Any:
        if _is_special(name):
            raise AttributeError(name)
        return _Value()


class _Value:
    """A function or a constant of a stand-in."""

    def __getattr__(self, name: str) -> Any:
        if _is_special(name):
            raise AttributeError(name)
        return _Value()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        decorated = args[0] if len(args) == 1 and not kwargs else None
        return decorated if callable(decorated) else self

    def __getitem__(self, _: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return other

    __ror__ = __or__


class _Package(ModuleType):
    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if _is_special(name):
            raise AttributeError(name)
        return _Kind(name, (), {}) if name[:1].isupper() else _Value()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = frozenset(packages)

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        known = name.partition(".")[0] in self.packages
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Package(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in_for(*packages: str) -> None:
    """Lets packages be imported that are not installed; those that are come first."""
    sys.meta_path.append(_Finder(packages))
