"""The modules of the model that wrote a node: not only their paths, but the instances, while Dynamo calls the backend.

Dynamo names on each node the modules whose `forward` it stood in, and by which identity; and it guards on each of them,
by a source that says how to reach it from the frame that it compiles. One compiled graph serves every instance that
passes the guards, so whoever lets a graph depend on an attribute of an instance has to guard on it.
"""

from __future__ import annotations

import enum
import re
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import fx, nn
from torch._dynamo import symbolic_convert
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, LocalSource, NNModuleSource
from torch._guards import Guard, Source, TracingContext
from torch.utils._pytree import tree_leaves

from ..patterns import values

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Owner:
    """A module that wrote a node.

    Args:
        path: as in `model.named_modules()`; "" for the module that is compiled.
        type: its class.
        module: the instance; None where it isn't known.
        source: how Dynamo reaches it.
    """

    path: str
    type: type
    module: nn.Module | None = None
    source: Source | None = None

    def read(self, name: str, *, guard: bool) -> Any:
        """An attribute of the instance; None where there is none.

        Args:
            name: of the attribute.
            guard: whether the graph is to be compiled anew for an instance in which it is another.
        """
        value = getattr(self.module, name, _ABSENT)
        if guard and self.source is not None:
            install_guard(self.source.make_guard(partial(GuardBuilder.HASATTR, attr=name)))
            if value is not _ABSENT:
                # A string or a member of an enumeration may be an equal one; anything else is told by what it is.
                equal = isinstance(value, (str, enum.Enum))
                match = GuardBuilder.EQUALS_MATCH if equal else GuardBuilder.ID_MATCH
                install_guard(AttrSource(self.source, name).make_guard(match))
        return None if value is _ABSENT else value


class Owners:
    """The owners of the nodes of the graph that Dynamo compiles; outside of a compilation no instance is known."""

    def __init__(self) -> None:
        self._guarded: _Guarded | None = None
        self._compiled: Owner | None = None
        self._known: dict[tuple[str, str, bool], Owner] = {}
        self._modules: dict[str, nn.Module] = {}
        context, translator = TracingContext.try_get(), getattr(symbolic_convert.tls, "current_tx", None)
        if context is not None and translator is not None:
            self._guarded = _Guarded(context, translator.output)
            self._compiled = _compiled(translator.output.root_tx)
            given = tree_leaves(translator.output.root_tx.f_locals)
            roots = [value for value in given if isinstance(value, nn.Module)]
            self._modules = {str(id(module)): module for root in roots for module in root.modules()}

    def of(self, node: fx.Node, *, sources: bool = False) -> list[Owner]:
        """The modules in whose `forward` a node was written, the innermost first, the compiled one last.

        Args:
            node: of the graph.
            sources: whether the graph is to depend on them: only those that Dynamo guards on are known then, with their
                sources. To look them up takes longer.
        """
        owners = [self._owner(*entry, sources) for entry in reversed(values.module_stack(node))]
        compiled = self._compiled
        return owners if compiled is None or "" in {owner.path for owner in owners} else [*owners, compiled]


    def _owner(self, key: str, name: str, kind: type, sources: bool) -> Owner:
        """The module of one entry of a stack. Many nodes have it on theirs."""
        known = self._known.get((key, name, sources))
        if known is None:
            identity = key.partition("@")[0]  # behind the @ stands which call of the module it is
            module, source = (None if sources else self._modules.get(identity)), None
            if module is None:
                guarded = self._guarded.get(name) if self._guarded is not None else None
                if guarded is not None and str(id(guarded[0])) == identity:
                    module, source = guarded
            known = self._known[key, name, sources] = Owner(values.plain_path(name), kind, module, source)
        return known


def _compiled(frame: Any) -> Owner | None:
    """The module whose method a frame is: it stands on no node."""
    code = frame.f_code
    first = code.co_varnames[0] if code.co_argcount else ""
    module = frame.f_locals.get(first)
    if isinstance(module, nn.Module) and hasattr(type(module), code.co_name):
        return Owner("", type(module), module, LocalSource(first))
    return None


class _Guarded:
    """The modules that Dynamo has guards on, by their names as in `nn_module_stack`.

    Each is looked up when it is first asked for, as a model has many and few are. Dynamo's graph isn't kept alive.

    Args:
        context: of the compilation.
        output: Dynamo's OutputGraph.
    """

    def __init__(self, context: TracingContext, output: Any) -> None:
        self._guards = context.guards_context.dynamo_guards
        self._output = weakref.ref(output)
        self._known: dict[str, tuple[nn.Module, Source] | None] = {}

    @cached_property
    def _of_modules(self) -> dict[str, Source]:
        """Of guards of modules: of the others there are many."""
        return _named(guard for guard in self._guards if isinstance(guard.originating_source, NNModuleSource))

    @cached_property
    def _all(self) -> dict[str, Source]:
        return _named(self._guards)

    def get(self, name: str) -> tuple[nn.Module, Source] | None:
        if name not in self._known:
            self._known[name] = self._found(name)
        return self._known[name]

    def _found(self, name: str) -> tuple[nn.Module, Source] | None:
        output = self._output()
        source = self._of_modules.get(name) or self._all.get(name)
        if output is None or source is None:
            return None
        value = output.resolve_source_value(source)
        return (value, source) if isinstance(value, nn.Module) else None


def _named(guards: Iterable[Guard]) -> dict[str, Source]:
    """The sources of guards, by names as in `nn_module_stack`."""
    # Guards on the state of torch have no name; nor have modules of an exported program.
    sources = {guard.name: guard.originating_source for guard in guards}
    named = {name: source for name, source in sources.items() if name and "._parameters[" not in name}
    return {_MODULES.sub(r".\2", name): source for name, source in named.items()}


_MODULES = re.compile(r"""\._modules\[(['"])([^'"\]]+)\1\]""")  # which `nn_module_stack` writes as an attribute
