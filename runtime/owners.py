"""The modules of the model that wrote a node: not only their paths, but the instances, while Dynamo calls the backend.

Dynamo names on each node the modules whose `forward` it stood in, and by which identity; and it guards on each of them,
by a source that says how to reach it from the frame that it compiles. One compiled graph serves every instance that
passes the guards, so whoever lets a graph depend on an attribute of an instance has to guard on it.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch._dynamo import symbolic_convert
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, LocalSource
from torch._guards import Source, TracingContext

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
            install_guard(self.source.make_guard(functools.partial(GuardBuilder.HASATTR, attr=name)))
            if value is not _ABSENT:
                # A string or a member of an enumeration may be an equal one; anything else is told by what it is.
                equal = isinstance(value, (str, enum.Enum))
                match = GuardBuilder.EQUALS_MATCH if equal else GuardBuilder.ID_MATCH
                install_guard(AttrSource(self.source, name).make_guard(match))
        return None if value is _ABSENT else value


class Owners:
    """The owners of a graph's nodes.

    Args:
        graph: of Dynamo, or AOTAutograd's of one; outside of a compilation by Dynamo no instance is known.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._known: Mapping[str, tuple[nn.Module, Source]] = {}
        self._compiled: Owner | None = None
        context, translator = TracingContext.try_get(), getattr(symbolic_convert.tls, "current_tx", None)
        if context is not None and translator is not None:
            names = {name for node in graph.nodes for _, name, _ in values.module_stack(node)}
            self._known = dict(_guarded(context, translator.output, names))
            self._compiled = _compiled(translator.output.root_tx)

    def of(self, node: fx.Node) -> list[Owner]:
        """The modules in whose `forward` a node was written, the innermost first, the compiled one last."""
        owners = []
        for key, name, kind in reversed(values.module_stack(node)):
            module, source = self._known.get(name, (None, None))
            if str(id(module)) != key.partition("@")[0]:  # behind the @ stands which call of the module it is
                module, source = None, None
            owners.append(Owner(values.plain_path(name), kind, module, source))
        compiled = self._compiled
        return owners if compiled is None or "" in {owner.path for owner in owners} else [*owners, compiled]


def _compiled(frame: Any) -> Owner | None:
    """The module whose method a frame is: it stands on no node."""
    code = frame.f_code
    first = code.co_varnames[0] if code.co_argcount else ""
    module = frame.f_locals.get(first)
    if isinstance(module, nn.Module) and hasattr(type(module), code.co_name):
        return Owner("", type(module), module, LocalSource(first))
    return None


def _guarded(context: TracingContext, output: Any, names: set[str]) -> Iterator[tuple[str, tuple[nn.Module, Source]]]:
    """The modules of some names that Dynamo has guards on.

    Args:
        context: of the compilation.
        output: Dynamo's OutputGraph.
        names: as in `nn_module_stack`.
    """
    guards = context.guards_context.dynamo_guards
    # Guards on the state of torch have no name; nor have modules of an exported program.
    sources = {_MODULES.sub(r".\2", guard.name): guard.originating_source for guard in guards if guard.name}
    for name in names & sources.keys():
        value = output.resolve_source_value(sources[name])
        if isinstance(value, nn.Module):
            yield name, (value, sources[name])


_MODULES = re.compile(r"""\._modules\[(['"])([^'"\]]+)\1\]""")  # which `nn_module_stack` writes as an attribute
