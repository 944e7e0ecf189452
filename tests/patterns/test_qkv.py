"""The prologue of attention, read off its norms, rotations and views: where q and k are cut, and what they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from spellings import EPS, ROTATIONS, WEIGHTED
from torch import nn

from helpers import compiled
from npu_fuse.patterns.match import Findings, Match
from npu_fuse.patterns.qkv import Qkv

WIDTH = 32
SHAPES = {"BSN": (2, 5, WIDTH), "TN": (7, WIDTH), "SBN": (5, 3, WIDTH)}
ROPES = {"half": ("half", "full", "llama"), "interleave": ("interleave", "half", "stride, stack")}


@dataclass(frozen=True)
class Spelling:
    """How one prologue is written.

    Args:
        columns: order of q, k and v in one projection; None for three projections.
        by: whether that order is of "all" heads of each, or holds for each kv "head" anew.
        gate: whether a gate lies behind each head of q.
        q_heads, kv_heads, head_dim: sizes.
        norms: which of q and k are normed.
        full: whether the norm is over all heads together.
        heads_first: whether heads are put before tokens "before" or "after" the norm; None for never.
        layout: "BSN" [batch, sequence, width], "TN" [tokens, width] or "SBN" [sequence, batch, width].
        rope: style of the rotation.
        bias: whether the projections have one.
    """

    columns: str | None = "qkv"
    by: str = "all"
    gate: bool = False
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    norms: str = "qk"
    full: bool = False
    heads_first: str | None = "after"
    layout: str = "BSN"
    rope: str = "half"
    bias: bool = False

    @property
    def heads(self) -> dict[str, int]:
        return {"q": self.q_heads, "k": self.kv_heads, "v": self.kv_heads}


class Prologue(nn.Module):
    """Writes q, k and v as a spelling says."""

    def __init__(self, spelling: Spelling) -> None:
        super().__init__()
        self.spelling = s = spelling
        sizes = {name: heads * s.head_dim * (1 + (s.gate and name == "q")) for name, heads in s.heads.items()}
        if s.columns is None:
            self.projections = nn.ModuleDict({name: nn.Linear(WIDTH, sizes[name], s.bias) for name in "qkv"})
        else:
            self.projection = nn.Linear(WIDTH, sum(sizes.values()), s.bias)
        self.sizes = sizes
        self.weights = nn.ParameterDict(
            {n: torch.rand(s.heads[n] * s.head_dim if s.full else s.head_dim) for n in "qk"}
        )

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
        s = self.spelling
        if s.columns is None:
            parts = {name: self.projections[name](x) for name in "qkv"}
        elif s.by == "all":
            split = self.projection(x).split([self.sizes[name] for name in s.columns], -1)
            parts = dict(zip(s.columns, split, strict=True))
        else:
            groups = self.projection(x).unflatten(-1, (s.kv_heads, -1))
            split = groups.split([self.sizes[name] // s.kv_heads for name in s.columns], -1)
            parts = {name: part.flatten(-2) for name, part in zip(s.columns, split, strict=True)}
        gates = []
        if s.gate:
            parts["q"], gate = parts["q"].unflatten(-1, (s.q_heads, -1)).chunk(2, -1)
            gates.append(gate.flatten(-2))
            parts["q"] = parts["q"].flatten(-2)
        rotated = [self.rotated("q", parts["q"], cos, sin), self.rotated("k", parts["k"], cos, sin)]
        return [*rotated, parts["v"], *gates]

    def rotated(self, name: str, part: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        s = self.spelling
        norm = (lambda t: WEIGHTED["llama"](t, self.weights[name])) if name in s.norms else (lambda t: t)
        part = norm(part) if s.full else part
        heads = part.unflatten(-1, (s.heads[name], s.head_dim))
        heads = heads.transpose(-2, -3) if s.heads_first == "before" else heads
        heads = heads if s.full else norm(heads)
        heads = heads.transpose(-2, -3) if s.heads_first == "after" else heads
        if s.layout == "SBN":
            cos, sin = (table[:, None, None] for table in (cos, sin))
        else:
            cos, sin = (table.unsqueeze(-2 if s.heads_first is None else -3) for table in (cos, sin))
        style, width, spelled = ROPES[s.rope]
        return ROTATIONS[style, width][spelled](heads, cos, sin)


def inputs(spelling: Spelling, *, dynamic: bool = False) -> tuple[torch.Tensor, ...]:
    x = torch.randn(SHAPES[spelling.layout])
    tokens = x.shape[0] if spelling.layout == "SBN" else x.shape[-2]
    width = spelling.head_dim // (1 if spelling.rope == "half" else 2)
    tables = [torch.randn(tokens, width) for _ in range(2)]
    if dynamic:
        for tensor in (x, *tables):
            for axis in range(tensor.dim() - 1):
                torch._dynamo.mark_dynamic(tensor, axis)
    return x, *tables


def find(spelling: Spelling, *, dynamic: bool = False) -> Findings:
    return compiled(Prologue(spelling), *inputs(spelling, dynamic=dynamic)).findings()


def starts(spelling: Spelling, name: str) -> tuple[int, ...]:
    """The first column of each head: every column is labelled, and looked for."""
    s = spelling
    gates = ["gate"] if s.gate else []
    labels = {
        n: [label for i in range(heads) for label in ([f"{n}{i}", *gates] if n == "q" else [f"{n}{i}"])]
        for n, heads in s.heads.items()
    }
    if s.columns is None:
        order = labels[name]
    elif s.by == "all":
        order = [label for n in s.columns for label in labels[n]]
    else:
        sizes = {n: len(labels[n]) // s.kv_heads for n in s.columns}
        groups = [labels[n][i * sizes[n] : (i + 1) * sizes[n]] for i in range(s.kv_heads) for n in s.columns]
        order = [label for group in groups for label in group]
    return tuple(order.index(f"{name}{i}") * s.head_dim for i in range(s.heads[name]))


def check(findings: Findings, spelling: Spelling) -> Match:
    """One prologue, of the heads that the spelling has, where the spelling has them."""
    (match,) = findings.of("qkv")
    p = match.params
    assert isinstance(p, Qkv)
    separate = spelling.columns is None
    for name, head in (("q", p.q), ("k", p.k)):
        assert head.layout.starts == starts(spelling, name)
        assert head.layout.head_dim == spelling.head_dim
        assert (head.norm is not None) == (name in spelling.norms)
        if head.norm is not None:
            assert head.norm.hidden_size == spelling.head_dim * (spelling.heads[name] if spelling.full else 1)
    public = p.public()
    assert public["style"] == ("separate" if separate else "fused")
    assert public["gate"] == spelling.gate
    if spelling.gate:
        assert p.gate.starts == tuple(start + spelling.head_dim for start in starts(spelling, "q"))
        assert match.inputs["gate"].meta["val"].is_contiguous()
    assert (public["num_heads"], public["num_kv_heads"]) == (spelling.q_heads, spelling.kv_heads)
    assert public["rope_style"] == spelling.rope
    assert public["eps"] == (pytest.approx(EPS) if "q" in spelling.norms else None)
    chains = findings.of("norm_rope_chain")
    assert [chain.params.per_head for chain in chains] == [not spelling.full] * len(spelling.norms)
    assert not [miss for miss in findings.near_misses() if miss.kind == "qkv"]
    return match


SPELLINGS: dict[str, Spelling] = {
    "qwen3 in one projection": Spelling(),
    "qwen3": Spelling(columns=None),
    "llama": Spelling(columns=None, norms=""),
    "llama in one projection": Spelling(norms=""),
    "olmo2": Spelling(columns=None, full=True),
    "with biases": Spelling(columns=None, bias=True),
    "with one bias": Spelling(bias=True),
    "as many k as q": Spelling(kv_heads=4),
    "as many k as q, apart": Spelling(columns=None, kv_heads=4),
    "one k": Spelling(kv_heads=1),
    "one q": Spelling(q_heads=1, kv_heads=1, columns=None),
    "only q normed": Spelling(norms="q"),
    "only k normed": Spelling(norms="k", columns=None),
    "k first": Spelling(columns="kqv"),
    "v first": Spelling(columns="vqk"),
    "v between": Spelling(columns="qvk"),
    "heads first, then normed": Spelling(heads_first="before"),
    "tokens first": Spelling(heads_first=None),
    "vLLM": Spelling(layout="TN", heads_first=None),
    "tokens in one, heads first": Spelling(layout="TN", columns=None),
    "Megatron": Spelling(layout="SBN", heads_first=None),
    "glm": Spelling(rope="interleave", columns=None, norms=""),
    "gpt_neox": Spelling(by="head", kv_heads=4, norms=""),
    "codegen": Spelling(by="head", columns="qvk", norms="", heads_first=None),
    "persimmon": Spelling(by="head", kv_heads=4),
    "internlm2": Spelling(by="head", q_heads=6, norms=""),
    "qwen3_next": Spelling(columns=None, gate=True),
    "qwen3_next in one projection": Spelling(gate=True),
    "gates without a norm": Spelling(columns=None, gate=True, norms=""),
}


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_prologue_is_read(name: str, dynamic: bool) -> None:
    check(find(SPELLINGS[name], dynamic=dynamic), SPELLINGS[name])


spelled = st.builds(
    Spelling,
    columns=st.sampled_from([None, *map("".join, ("qkv", "kqv", "kvq", "qvk", "vqk", "vkq"))]),
    by=st.sampled_from(["all", "head"]),
    gate=st.booleans(),
    q_heads=st.sampled_from([3, 6]),
    kv_heads=st.sampled_from([1, 3]),
    head_dim=st.sampled_from([4, 8]),
    norms=st.sampled_from(["", "q", "k", "qk"]),
    full=st.booleans(),
    heads_first=st.sampled_from([None, "before", "after"]),
    layout=st.sampled_from(["BSN", "TN"]),
    rope=st.sampled_from(sorted(ROPES)),
    bias=st.booleans(),
)


@settings(max_examples=30, deadline=None)
@given(spelling=spelled)
def test_any_prologue_is_read(spelling: Spelling) -> None:
    if spelling.full:  # one head is normed alike in both ways; and its columns are to lie side by side
        spelling = replace(spelling, kv_heads=3, by="all", gate=False)
    if spelling.columns not in (None, "qkv") or spelling.by == "head":  # gates are read where an op takes them
        spelling = replace(spelling, gate=False)
    columns = spelling.columns or "qkv"
    if spelling.q_heads == spelling.kv_heads and columns.index("k") < columns.index("q"):
        spelling = replace(spelling, columns="qkv")  # which of two that are alike is q is not to be seen
    check(find(spelling), spelling)


def test_two_layers_have_a_prologue_each() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Prologue(Spelling(columns=None, q_heads=4)) for _ in range(2))

        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                q, k, v = layer(x, cos, sin)
                x = x + q.transpose(1, 2).flatten(2) * k.mean() * v.mean()
            return x

    findings = compiled(Two(), *inputs(Spelling())).findings()
    assert len(findings.of("qkv")) == 2
    assert len(findings.of("norm_rope_chain")) == 4
    claimed = [set(match.claimed) for match in findings.of("qkv")]
    assert not claimed[0] & claimed[1]


# What is none, and why -----------------------------------------------------------------------------------------------


class Changed(Prologue):
    """A prologue with one thing changed."""

    def __init__(self, spelling: Spelling, change: Callable[[torch.Tensor, str], torch.Tensor]) -> None:
        super().__init__(spelling)
        self.change = change

    def rotated(self, name: str, part: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return super().rotated(name, self.change(part, name), cos, sin)


BETWEEN: dict[str, tuple[Callable[[torch.Tensor, str], torch.Tensor], str]] = {
    "q is scaled": (lambda part, name: part * 0.5 if name == "q" else part, "comes from aten.mul.Tensor"),
    "k is clamped": (lambda part, name: part.clamp(-8, 8) if name == "k" else part, "comes from aten.clamp.default"),
    "columns interleaved": (
        lambda part, name: part.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2),
        "its heads are no plain cut of the projection's columns",
    ),
}


@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.parametrize("norms", ["", "qk"])
def test_what_lies_between_projection_and_norm_is_named(name: str, norms: str) -> None:
    change, reason = BETWEEN[name]
    spelling = Spelling(norms=norms)
    findings = compiled(Changed(spelling, change), *inputs(spelling)).findings()
    assert not findings.of("qkv")
    assert len(findings.of("rope")) == 2
    assert any(reason in miss.reason for miss in findings.near_misses() if miss.kind == "qkv")


def test_a_layer_norm_is_no_rms_norm() -> None:
    def layer_norm(part: torch.Tensor, name: str) -> torch.Tensor:
        return nn.functional.layer_norm(part, part.shape[-1:])

    spelling = Spelling(norms="")
    findings = compiled(Changed(spelling, layer_norm), *inputs(spelling)).findings()
    assert not findings.of("qkv")
    assert not findings.of("norm_rope_chain")


def test_without_a_v_of_the_width_of_k_there_is_no_prologue() -> None:
    class WideV(Prologue):
        def __init__(self) -> None:
            super().__init__(Spelling(columns=None))
            self.projections["v"] = nn.Linear(WIDTH, 24, bias=False)

    findings = compiled(WideV(), *inputs(Spelling())).findings()
    assert not findings.of("qkv")
    (miss,) = [miss for miss in findings.near_misses() if miss.kind == "qkv"]
    assert miss.reason == "no third projection of the same x is 16 wide, as v must be"


class Gated(Prologue):
    """Gates behind the heads of q, as `read` has them."""

    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor], q_heads: int = 4) -> None:
        super().__init__(Spelling(columns=None, gate=True, q_heads=q_heads))
        self.read = read

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
        heads = self.projections["q"](x).unflatten(-1, (self.spelling.q_heads, -1))
        q = self.rotated("q", heads[..., : self.spelling.head_dim].flatten(-2), cos, sin)
        return [q, self.rotated("k", self.projections["k"](x), cos, sin), self.projections["v"](x), self.read(heads)]


NO_GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "half of the gate": lambda heads: heads[..., 12:].exp(),
    "gates of some heads": lambda heads: heads[:, :, :3, 8:].exp(),
    "gates in another order": lambda heads: heads.flip(-2)[..., 8:].exp(),
    "no gates": lambda heads: heads.sum(),
}


@pytest.mark.parametrize("name", NO_GATES)
def test_columns_behind_q_that_are_no_whole_gates_are_not_read_as_such(name: str) -> None:
    findings = compiled(Gated(NO_GATES[name]), *inputs(Spelling())).findings()
    (match,) = findings.of("qkv")
    assert match.params.gate is None
    assert match.params.q.layout.starts == (0, 16, 32, 48)


def test_a_gate_that_is_used_where_it_lies_is_read_there() -> None:
    findings = compiled(Gated(lambda heads: heads[..., 8:].sigmoid()), *inputs(Spelling())).findings()
    (match,) = findings.of("qkv")
    assert match.params.gate.starts == (8, 24, 40, 56)
    assert not match.inputs["gate"].meta["val"].is_contiguous()


def test_one_head_of_k_behind_one_of_q_is_no_gate() -> None:
    spelling = Spelling(q_heads=1, kv_heads=1, norms="")
    match = check(find(spelling), spelling)
    assert match.params.gate is None


def test_q_and_k_of_two_inputs_are_no_prologue() -> None:
    class Cross(Prologue):
        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
            q = self.projections["q"](x)
            k, v = (self.projections[name](x.cos()) for name in "kv")
            return [self.rotated("q", q, cos, sin), self.rotated("k", k, cos, sin), v]

    findings = compiled(Cross(Spelling(columns=None)), *inputs(Spelling())).findings()
    assert len(findings.of("norm_rope_chain")) == 2
    assert not findings.of("qkv")


def test_q_and_k_at_two_positions_are_no_prologue() -> None:
    class Shifted(Prologue):
        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
            q, k, v = self.projection(x).split([self.sizes[name] for name in "qkv"], -1)
            return [self.rotated("q", q, cos, sin), self.rotated("k", k, sin, cos), v]

    findings = compiled(Shifted(Spelling()), *inputs(Spelling())).findings()
    assert len(findings.of("norm_rope_chain")) == 2
    assert not findings.of("qkv")


def test_one_rotated_tensor_is_no_prologue() -> None:
    class Query(Prologue):
        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            return self.rotated("q", self.projection(x)[..., : self.sizes["q"]], cos, sin)

    findings = compiled(Query(Spelling()), *inputs(Spelling())).findings()
    assert len(findings.of("norm_rope_chain")) == 1
    assert not findings.of("qkv")


# Chains ---------------------------------------------------------------------------------------------------------------


def chain(between: Callable[[torch.Tensor], torch.Tensor], *, norm_first: bool) -> Findings:
    """A norm and a rotation with something between."""

    def function(x: torch.Tensor, w: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        def rotate(x: torch.Tensor) -> torch.Tensor:
            return ROTATIONS["half", "full"]["llama"](x, cos, sin)

        if norm_first:
            return rotate(between(WEIGHTED["llama"](x, w)))
        return WEIGHTED["llama"](between(rotate(x)), w)

    x, cos, sin = torch.randn(2, 4, 4, 8).bfloat16(), *(torch.randn(4, 8).bfloat16() for _ in range(2))
    return compiled(function, x, torch.randn(8).bfloat16(), cos, sin).findings()


MOVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nothing": lambda x: x,
    "transpose": lambda x: x.transpose(1, 2),
    "copy": lambda x: x.transpose(1, 2).contiguous(),
    "there and back": lambda x: x.flatten(2).view(2, 4, 4, 8),
    "wider": lambda x: x.float(),
    "slice": lambda x: x[:, :, :],
}


@pytest.mark.parametrize("name", MOVES)
def test_movement_and_casts_may_stand_between_norm_and_rotation(name: str) -> None:
    findings = chain(MOVES[name], norm_first=True)
    assert [match.params.per_head for match in findings.of("norm_rope_chain")] == [True]
    assert not findings.of("rope_then_norm")


@pytest.mark.parametrize("name", MOVES)
def test_the_other_order_is_a_kind_of_its_own(name: str) -> None:
    findings = chain(MOVES[name], norm_first=False)
    assert len(findings.of("rope_then_norm")) == 1
    assert not findings.of("norm_rope_chain")


@pytest.mark.parametrize("norm_first", [True, False])
def test_something_computed_between_ends_the_chain(norm_first: bool) -> None:
    findings = chain(lambda x: x.sin(), norm_first=norm_first)
    assert len(findings.of("rms_norm")) == len(findings.of("rope")) == 1
    assert not findings.of("norm_rope_chain")
    assert not findings.of("rope_then_norm")
