"""All that a user may set."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from ..passes.kinds import check_kind, hint
from .declarations import EncoderOnly
from .graphs.replayed import graph_settings
from .inner import Inner
from .target import Target

Numerics = Literal["fused", "exact"]


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of one backend.

    Args:
        disable: kinds of fusion that are left alone, such as `{"qkv"}`. Their sites are recognised and reported still.
            "in_place" leaves writes into buffers as the copies that AOTAutograd makes of them; "encoder_only" leaves
            layers causal that declare themselves bidirectional; "repeated_projection" computes what a model projects
            twice, twice.
        numerics: "fused" lets an op round elsewhere than the model does, as the report notes it; "exact" refuses such a
            fusion, so that what is fused gives the bits of the model, but for the order in which a kernel sums.
        pack_weights: let separate projections of one input (q, k, v; gate, up) share one storage and one matmul.
        expect: how many sites of a kind become ops in each graph, such as `{"qkv": 28}`, on their own or as parts of
            larger ones. Where there are fewer, a warning says which fell short and why; `strict` raises it. A graph is
            held to it where anything is recognised in it, or nearly, or it multiplies matrices.
        verify: on which calls each rewritten site is run beside what the model had there, on the inputs of the call:
            "first", "always", or every so many calls. A site that is further off than its rounding allows is put back
            with a warning that names a folder to reproduce it with. What such a call gives is what the model gives.
        strict: raise on an internal failure, instead of leaving out what failed with a warning; and where fewer sites
            become ops than `expect` says.
        encoder_only: layers whose attention is bidirectional, though they are given a causal mask: patterns of their
            paths as in `model.named_modules()` ("layers.*.self_attn"; `*` stands for anything, dots too), or a function
            of a module's path and class. All attention within such a module loses the causal part of its mask, which
            changes what the model computes. Layers whose own `attn_type` is ENCODER_ONLY need not be named.
        graphs: capture each graph and replay it; a dict of `buckets` for the one size that varies, and of `outputs`,
            `max_graphs`, `warm_ups`, `check_padding`, `debug_poison`, as `GraphRunner` has them. By default, no graphs.
        keep_graphs: keep each graph in `Backend.graphs`, and each site's lines in the report, to be looked at.
        dump: a folder to write each graph to: after each pass as a Python file that runs alone, and its report as text,
            JSON and a page, with a file for each site. By default what the environment variable NPU_FUSE_DUMP says.
        profile_ranges: run each fused op within a range of torch's profiler that bears the name of its site.
        cache: keep what is made of each graph for the next process: True in a folder beside torch's own caches, a path
            in that folder. By default what the environment variable NPU_FUSE_CACHE says: "1", a path, or nothing.
        inner: what runs the rewritten graph: "eager" runs op by op, "inductor" compiles what lies between fused ops.
        target: the machine to compile for, or the name of its SoC; by default the one this process runs on.

    Raises:
        ValueError: `disable` or `expect` names a kind that doesn't exist, `numerics`, `verify` or `inner` is another
            word, `encoder_only` is neither paths nor a function, `dump` is a file, a value is of another type, or
            `profile_ranges` is to be within what Inductor compiles.
    """

    disable: frozenset[str] = frozenset()
    numerics: Numerics = "fused"
    pack_weights: bool = True
    expect: Mapping[str, int] = field(default_factory=dict)
    verify: Literal["first", "always"] | int | None = None
    strict: bool = False
    encoder_only: EncoderOnly = ()
    graphs: Mapping[str, Any] | None = None
    keep_graphs: bool = False
    dump: str | os.PathLike[str] | None = field(default_factory=lambda: os.environ.get("NPU_FUSE_DUMP") or None)
    profile_ranges: bool = False
    cache: bool | str | os.PathLike[str] = field(default_factory=lambda: _switch(os.environ.get("NPU_FUSE_CACHE", "")))
    inner: Inner = "eager"
    target: Target | None = None

    def __post_init__(self) -> None:
        if isinstance(self.disable, str):
            raise ValueError(f"Options.disable: give a set of kinds, such as {{{self.disable!r}}}, not a string")
        object.__setattr__(self, "disable", frozenset(self.disable))
        for kind in sorted(self.disable):
            check_kind("Options.disable", kind)
        if self.numerics not in get_args(Numerics):
            raise ValueError(f"Options.numerics: {self.numerics!r} is unknown; known: {', '.join(get_args(Numerics))}")
        if self.inner not in get_args(Inner):
            raise ValueError(f"Options.inner: {self.inner!r} is unknown; known: {', '.join(get_args(Inner))}")
        if self.profile_ranges and self.inner != "eager":
            raise ValueError("Options.profile_ranges: Inductor makes one kernel of several ops; use inner='eager'")
        for kind, count in self.expect.items():
            check_kind("Options.expect", kind)
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise ValueError(f"Options.expect: {kind!r} is to be a number of sites, not {count!r}")
        _check_verify(self.verify)
        for name in ("pack_weights", "strict", "keep_graphs", "profile_ranges"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"Options.{name}: give True or False, not {getattr(self, name)!r}")
        if self.dump is not None and os.path.exists(self.dump) and not os.path.isdir(self.dump):
            raise ValueError(f"Options.dump: {os.fspath(self.dump)!r} is a file, not a folder")
        if isinstance(self.target, str):
            object.__setattr__(self, "target", Target(self.target))
        elif self.target is not None and not isinstance(self.target, Target):
            raise ValueError(f"Options.target: give a Target or the name of an SoC, not {self.target!r}")
        object.__setattr__(self, "encoder_only", _encoder_only(self.encoder_only))
        if self.graphs is not None:
            object.__setattr__(self, "graphs", graph_settings(self.graphs))

    @property
    def keep_lines(self) -> bool:
        """Whether sites keep their lines, for who looks at them."""
        return self.keep_graphs or self.dump is not None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Options:
        """Options from `torch.compile(options={…})`.

        Raises:
            ValueError: a key is unknown.
        """
        known = [field.name for field in fields(cls)]
        for key in settings:
            if key not in known:
                raise ValueError(f"Options: unknown option {key!r}{hint(key, known)}; known: {', '.join(known)}")
        return cls(**settings)


def _check_verify(given: object) -> None:
    if given in (None, "first", "always"):
        return
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise ValueError(f"Options.verify: give 'first', 'always' or a number of calls, not {given!r}")


def _encoder_only(given: object) -> EncoderOnly:
    if callable(given):
        return given
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ValueError(
            f"Options.encoder_only: give patterns of module paths, such as ('layers.*.self_attn',), or a function of"
            f" path and class; not {given!r}"
        )
    patterns = tuple(given)
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise ValueError(f"Options.encoder_only: {pattern!r} is no pattern of module paths")
    return patterns


def _switch(said: str) -> bool | str:
    """What an environment variable says that is a switch or a path."""
    known: dict[str, bool | str] = {"": False, "0": False, "1": True}
    return known.get(said, said)
