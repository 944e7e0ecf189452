"""Masks that nobody listed: whatever is proven of a random one, its value agrees with, in every shape that is tried."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masks import Snapshots, described
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from npu_fuse.patterns.mask import Mask, classify

Tensor = torch.Tensor
LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class Inputs:
    """What a mask is computed from.

    Args:
        query, key: positions [queries, 1] and [1, keys].
        length: one integer that is read at run time.
        kept: bools [batch, 1, 1, keys].
        segments: integers [batch, tokens], of no fewer tokens than there are keys and queries.
    """

    query: Tensor
    key: Tensor
    length: Tensor
    kept: Tensor
    segments: Tensor

    @property
    def surplus(self) -> int:
        return self.key.shape[1] - self.query.shape[0]

    def ones(self) -> Tensor:
        return torch.ones(self.query.shape[0], self.key.shape[1], dtype=torch.bool)

    def in_one_segment(self) -> Tensor:
        of_query, of_key = (self.segments[:, :n] for n in (self.query.shape[0], self.key.shape[1]))
        return (of_query[:, :, None] == of_key[:, None, :])[:, None]


Program = Callable[[Inputs], Tensor]


@dataclass(frozen=True)
class Op:
    """A function of parts, each a function of the inputs, with a name to show."""

    name: str
    of: Callable[..., Any]
    parts: tuple[Op, ...] = ()

    def __call__(self, inputs: Inputs) -> Tensor:
        return self.of(inputs, *(part(inputs) for part in self.parts))

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.parts))})" if self.parts else self.name


def affine(query: int, key: int, constant: int, length: int, surplus: int) -> Op:
    def of(x: Inputs) -> Tensor:
        return query * x.query + key * x.key + constant + (length * x.length if length else 0) + surplus * x.surplus

    return Op(f"{query} i + {key} j + {constant} + {length} n + {surplus} (K - Q)", of)


COMPARISONS = {name: getattr(operator, name) for name in ("le", "lt", "ge", "gt", "eq", "ne")}


@st.composite
def integers(draw: st.DrawFn, depth: int = 2) -> Op:
    """A number of query and key."""
    of_others = ("abs", "//", "%", "min", "max", "-") if depth else ()
    kind = draw(st.sampled_from(("difference", "difference", "affine", *of_others)))
    small = st.integers(-3, 3)
    if kind == "difference":
        return affine(1, -1, draw(small), draw(st.integers(0, 1)), draw(st.integers(0, 1)))
    if kind == "affine":
        return affine(draw(st.integers(-2, 2)), draw(st.integers(-2, 2)), draw(small), draw(st.integers(-1, 1)), 0)
    a = draw(integers(depth - 1))
    if kind == "abs":
        return Op("abs", lambda _, a: a.abs(), (a,))
    if kind in ("//", "%"):
        by = draw(st.integers(2, 4))
        of = operator.floordiv if kind == "//" else operator.mod
        return Op(f"{kind} {by}", lambda _, a: of(a, by), (a,))
    both = {"min": torch.minimum, "max": torch.maximum, "-": torch.sub}[kind]
    return Op(kind, lambda _, a, b: both(a, b), (a, draw(integers(depth - 1))))


@st.composite
def bools(draw: st.DrawFn, depth: int = 3) -> Op:
    """What a query sees, by one condition or by several."""
    of_others = ("and", "and", "and", "or", "not", "where", "halves") if depth else ()
    alone = ("compared", "compared", "causal", "window", "triangle", "chunks", "kept", "segments")
    kind = draw(st.sampled_from((*alone, *of_others)))
    small = st.integers(-3, 3)
    if kind == "compared":
        name, constant = draw(st.sampled_from(list(COMPARISONS))), draw(small)
        return Op(f"{name} {constant}", lambda _, a: COMPARISONS[name](a, constant), (draw(integers()),))
    if kind == "causal":
        return Op("causal", lambda x: x.key <= x.query)
    if kind == "window":
        window = draw(st.integers(1, 4))
        return Op(f"window {window}", lambda x: x.key > x.query - window)
    if kind == "triangle":
        name, diagonal = draw(st.sampled_from(("tril", "triu"))), draw(small)
        return Op(f"{name} {diagonal}", lambda x: getattr(torch, name)(x.ones(), diagonal))
    if kind == "chunks":
        size, offset = draw(st.integers(2, 4)), draw(st.integers(0, 1))
        return Op(f"chunks {size} {offset}", lambda x: (x.query + offset) // size == x.key // size)
    if kind == "kept":
        return Op("kept", lambda x: x.kept)
    if kind == "segments":
        return Op("segments", Inputs.in_one_segment)
    a = draw(bools(depth - 1))
    if kind == "not":
        return Op("not", lambda _, a: ~a, (a,))
    if kind == "halves":
        return Op("halves", lambda _, a: torch.cat((a[..., :1, :], a[..., 1:, :]), -2), (a,))
    b = draw(bools(depth - 1))
    if kind == "where":
        return Op("where", lambda _, a, b, c: torch.where(a, b, c), (a, b, draw(bools(depth - 1))))
    return Op(kind, lambda _, a, b: a & b if kind == "and" else a | b, (a, b))


@st.composite
def bands(draw: st.DrawFn) -> Op:
    """What masks of models are: one or two bounds of the difference of key and query, and perhaps data."""
    offset = affine(1, -1, 0, *draw(st.sampled_from(((0, 0), (0, 0), (1, 0), (0, 1)))))
    ahead, window = draw(st.integers(-1, 2)), draw(st.sampled_from((None, None, 1, 3)))
    upper = Op(f">= -{ahead}", lambda _, a: a >= -ahead, (offset,))
    lower = Op(f"< {window}", lambda x, a: a < window if window is not None else x.ones(), (offset,))
    of_data = {"nothing": Inputs.ones, "kept": lambda x: x.kept, "segments": Inputs.in_one_segment}
    data = draw(st.sampled_from(("nothing", "nothing", *of_data)))
    return Op("and", lambda _, a, b, c: a & b & c, (upper, lower, Op(data, of_data[data])))


@st.composite
def masks(draw: st.DrawFn) -> Op:
    """Of bools, of floats, and sums of such."""
    kind = draw(st.sampled_from(("bool", "bool", "float", "sum")))
    seen = draw(st.one_of(bands(), bools()))
    if kind == "bool":
        return seen
    hidden, other = draw(st.sampled_from((-math.inf, LOWEST))), draw(bools()) if kind == "sum" else seen

    def of(_: Inputs, a: Tensor, b: Tensor) -> Tensor:
        first, second = (torch.zeros(seen.shape).masked_fill(~seen, hidden) for seen in (a, b))
        return first + second if kind == "sum" else first

    return Op(f"{kind} {hidden}", of, (seen, other))


def arguments(batch: int, q_len: int, kv_len: int, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.zeros(q_len),
        torch.zeros(kv_len),
        torch.randint(-2, 6, (), generator=generator),
        torch.rand(batch, kv_len, generator=generator) < 0.7,
        torch.randint(3, (batch, max(q_len, kv_len)), generator=generator).sort().values,
    )


def traced(program: Op, example: tuple[Tensor, ...], square: bool, mode: str) -> fx.GraphModule:
    """The graph of attention's mask, and of nothing else."""

    def mask(queries: Tensor, keys: Tensor, length: Tensor, kept: Tensor, segments: Tensor) -> Tensor:
        q_len = keys.shape[0] if square else queries.shape[0]
        query, key = torch.arange(q_len)[:, None], torch.arange(keys.shape[0])[None]
        seen = program(Inputs(query, key, length, kept[:, None, None], segments))
        return seen.expand(*seen.shape[:-2], q_len, keys.shape[0])

    return make_fx(mask, tracing_mode=mode)(*example)


def agrees(found: Mask, values: dict[fx.Node, Any], mask: Tensor, shape: torch.Size) -> None:
    """Asserts that a mask's value is what was found of it."""
    table = (mask if mask.dtype is torch.bool else mask == 0).expand(shape)
    if found.visibility is None:
        assert found.reason
        return
    assert torch.equal(described(found, values, shape), table)
    if found.visibility.every_query_sees_a_key:
        assert table.any(-1).all()
    if mask.dtype is not torch.bool:
        assert found.lowest or not (mask == LOWEST).any()
    *_, q_len, kv_len = shape
    lower = torch.ones(q_len, kv_len, dtype=torch.bool).tril().expand(shape)
    if found.kind == "all_true":
        assert table.all()
    if found.kind == "causal":
        assert q_len == kv_len
    if found.kind in ("causal", "causal_static_cache"):
        assert torch.equal(table, lower)
    if found.kind == "decode_prefix":
        assert q_len == 1
    if found.kind != "per_batch_or_head":
        assert torch.equal(table, table[:1, :1].expand(shape))


def test_what_is_proven_of_a_mask_is_so():
    seen: Counter[str] = Counter()

    @settings(max_examples=150, deadline=None)
    @given(masks(), st.booleans(), st.integers(1, 6), st.integers(1, 8), st.integers(0, 9))
    def check(program: Op, square: bool, q_len: int, kv_len: int, seed: int) -> None:
        if square:
            q_len = kv_len
        calls = [arguments(2, q_len, kv_len, seed), arguments(2, q_len, kv_len, seed + 1)]
        module = traced(program, calls[0], square, "fake")
        found = classify(mask_of(module), q_len, kv_len)
        seen[found.kind] += found.visibility is not None
        holds(module, square, found, calls)

    check()
    assert sum(seen.values()) > 50
    assert len(+seen) >= 5


def test_what_is_proven_of_a_mask_is_so_in_all_sizes():
    seen: Counter[str] = Counter()

    @settings(max_examples=40, deadline=None)
    @given(masks(), st.booleans(), st.integers(0, 9))
    def check(program: Op, square: bool, seed: int) -> None:
        module = traced(program, arguments(3, 5, 7, seed), square, "symbolic")
        queries, keys, *_ = module.graph.find_nodes(op="placeholder")
        kv_len = keys.meta["val"].shape[0]
        found = classify(mask_of(module), kv_len if square else queries.meta["val"].shape[0], kv_len)
        seen[found.kind] += found.visibility is not None
        shapes = [(3, 5, 7), (2, 2, 9), (4, 8, 8), (5, 11, 13)]
        holds(module, square, found, [arguments(*shape, seed + i) for i, shape in enumerate(shapes)])

    check()
    assert sum(seen.values()) > 10
    assert len(+seen) >= 3


def mask_of(module: fx.GraphModule) -> fx.Node:
    (output,) = module.graph.find_nodes(op="output")
    return output.args[0]


def holds(module: fx.GraphModule, square: bool, found: Mask, calls: list[tuple[Tensor, ...]]) -> None:
    """Asserts that what was found is so in every call."""
    for inputs in calls:
        queries, keys, _, kept, _ = inputs
        interpreter = Snapshots(module)
        mask = interpreter.run(*inputs)
        kv_len = keys.shape[0]
        shape = (kept.shape[0], 2, kv_len if square else queries.shape[0], kv_len)
        agrees(found, interpreter.taken, mask, torch.Size(shape))
