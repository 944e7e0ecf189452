"""The cache: what the passes made of a graph is kept in a file, and taken from there by the next process.

The whole result is kept, not how it was found: the nodes of the rewritten graph, the constants that were made for it,
and the report. It is made anew beside the graph of the new process, whose inputs, parameters, symbolic sizes and guards
it takes. Weights are no part of it: they are packed at the first call, as after a first compilation.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ...passes.report import Report, Site
from ..declarations import Declarations
from ..options import Options
from ..target import Target
from .asked import Asked, ask_again
from .encoding import NotKept, Unreadable, decode, encode
from .files import pack, read, unpack, write
from .graphs import describe, rebuild
from .key import compiled, compiler

_log = logging.getLogger("npu_fuse")

# Of the report, what is not counted anew.
_KEPT = ("ops", "launches_before", "launches_after", "bytes_before", "bytes_after")


def cached(
    folder: Path,
    module: fx.GraphModule,
    parameters: Mapping[fx.Node, torch.Tensor],
    options: Options,
    target: Target,
    declarations: Declarations,
    passes: Callable[[Declarations], Report],
) -> Report:
    """Takes what the passes made of a graph in an earlier process, or runs them and keeps what they make.

    Args:
        folder: of the cache.
        module: AOTAutograd's graph, which is rewritten in place.
        parameters: its placeholders that are parameters of the model, with what they hold.
        options: of the backend.
        target: the machine it is compiled for.
        declarations: which layers are bidirectional.
        passes: rewrites the graph, by these declarations.

    Returns:
        The report, whose `cache` says which of both it was.
    """
    try:
        entry = Entry(folder, module, parameters, options, target)
    except NotKept as reason:
        report = passes(declarations)
        report.cache = f"not kept: {reason}"
        return report
    taken = entry.take(module, declarations)
    if taken is not None:
        return taken
    before, asked = {node.name for node in module.graph.nodes}, Asked(declarations)
    report = passes(asked)
    entry.keep(module, before, report, asked)
    return report


class Entry:
    """One graph, to be taken from the cache or to be put there.

    Args:
        folder: of the cache.
        module: AOTAutograd's graph, before anything is rewritten. It is read only here, and when it is taken.
        parameters: its placeholders that are parameters of the model, with what they hold.
        options: of the backend.
        target: the machine it is compiled for.

    Raises:
        NotKept: it can't be told from others.
    """

    def __init__(
        self,
        folder: Path,
        module: fx.GraphModule,
        parameters: Mapping[fx.Node, torch.Tensor],
        options: Options,
        target: Target,
    ) -> None:
        self._start = time.perf_counter()
        self._folder = folder
        self._name = compiled(module, parameters, options, target)
        self._compiler = compiler(target)

    def take(self, module: fx.GraphModule, declarations: Declarations) -> Report | None:
        """Gives a graph the fusions that an earlier compilation made; it stays as it is where there are none.

        An entry that can't be used is told of in one line of the log.

        Returns:
            The report of that compilation, or None.
        """
        try:
            data = read(self._folder, self._name)
            if data is None:
                return None
            report = self._taken(unpack(data), module, declarations)
        except Exception as error:  # whatever is in a file: the passes can always do it again
            reason = str(error) if isinstance(error, Unreadable) else f"{type(error).__name__}: {error}"
            _log.warning("entry %s of the compile cache is ignored: %s", self._name[:16], reason)
            return None
        report.seconds_by_pass = {"cache": time.perf_counter() - self._start}
        report.cache = "taken"
        return report

    def _taken(self, content: dict[str, Any], module: fx.GraphModule, declarations: Declarations) -> Report:
        made_by = content["compiler"]
        if made_by != self._compiler:
            changed = [name for name, version in self._compiler.items() if made_by.get(name) != version]
            told = (f"{name} {_short(made_by.get(name))}, here {_short(self._compiler[name])}" for name in changed)
            raise Unreadable(f"it is out of date: made by {'; '.join(told)}")
        nodes = {node.name: node for node in module.graph.nodes}
        text = json.loads(content["text"])
        ask_again(text["asked"], nodes, declarations)
        rebuild(module, text["nodes"], content["constants"])
        module.graph.lint()
        module.recompile()
        sites = [Site(**decode(site, {})) for site in text["sites"]]
        return Report(sites=sites, **{name: decode(text["report"][name], {}) for name in _KEPT})

    def keep(self, module: fx.GraphModule, before: Collection[str], report: Report, asked: Asked) -> None:
        """Keeps a compilation, and notes on its report whether that went well.

        Args:
            module: the rewritten graph.
            before: the names of the nodes of the graph that it was rewritten from.
            report: of the passes.
            asked: what they asked of the modules.
        """
        try:
            nodes, constants = describe(module, before)
            text = {
                "nodes": nodes,
                "asked": asked.notes,
                "report": {name: encode(getattr(report, name)) for name in _KEPT},
                "sites": [encode(asdict(site)) for site in report.sites],
            }
            data = pack({"compiler": self._compiler, "text": json.dumps(text), "constants": constants})
            write(self._folder, self._name, data)
        except (NotKept, OSError) as error:
            report.cache = f"not kept: {error}"
        else:
            report.cache = "kept"


def _short(version: Any) -> str:
    """Digests by their first figures."""
    return str(version)[:16]
