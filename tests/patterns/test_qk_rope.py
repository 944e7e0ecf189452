"""q and k turned by the same tables: where all heads of q share one of k, or the tables are looked up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from spellings import ROTATIONS

from helpers import compiled
from npu_fuse.patterns.match import Findings, Match
from npu_fuse.patterns.qk_rope import QkRope

Tensor = torch.Tensor
B, S, H, D = 2, 5, 4, 8
half = ROTATIONS["half", "half"]["halves"]
STYLES = {
    "half": half,
    "half, full tables": ROTATIONS["half", "full"]["llama"],
    "interleave": ROTATIONS["interleave", "half"]["stride, stack"],
}


def find(function: Callable[..., object], *inputs: Tensor) -> Findings:
    return compiled(function, *inputs).findings()


def tables(width: int = D // 2, *shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(*shape, S, width), torch.randn(*shape, S, width)


def pair(findings: Findings) -> Match:
    (match,) = findings.of("qk_rope")
    assert isinstance(match.params, QkRope)
    assert {match.inputs["rotated_q"], match.inputs["rotated_k"]} == {part.node for part in match.parts}
    return match


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("q_first", [True, False])
def test_one_head_of_k_for_all_of_q(name: str, q_first: bool, dynamic: bool) -> None:
    rotate = STYLES[name]

    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        return [rotate(x, cos, sin) for x in ((q, k) if q_first else (k, q))]

    inputs = (torch.randn(B, H, S, D), torch.randn(B, 1, S, D), *tables(D if "full" in name else D // 2))
    for tensor in inputs if dynamic else ():
        torch._dynamo.mark_dynamic(tensor, tensor.dim() - 2)
    match = pair(find(function, *inputs))
    assert match.params.public() == {
        "num_heads": H,
        "num_kv_heads": 1,
        "head_dim": D,
        "rope_dim": D,
        "rope_style": name.partition(",")[0],
        "looked_up": False,
        "dtype": torch.float32,
    }
    assert match.params.head_axis == 1
    assert tuple(match.inputs["k"].meta["val"].shape)[1] == 1


@pytest.mark.parametrize(
    ("q", "k", "cos", "axis"),
    [
        ((B, S, H, D), (B, S, 1, D), (S, 1, D // 2), 2),
        ((S, H, D), (S, 1, D), (S, 1, D // 2), 1),
        ((S, B, H, D), (S, B, 1, D), (S, 1, 1, D // 2), 2),
        ((H, S, D), (1, S, D), (S, D // 2), 0),
    ],
)
def test_heads_may_be_any_axis(q: tuple[int, ...], k: tuple[int, ...], cos: tuple[int, ...], axis: int) -> None:
    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return half(q, cos, sin), half(k, cos, sin)

    match = pair(find(function, *map(torch.randn, (q, k, cos, cos))))
    assert match.params.head_axis == axis
    assert (match.params.num_heads, match.params.num_kv_heads) == (H, 1)


def test_what_passes_may_differ() -> None:
    """As in latent attention: q's heads have a part that is not rotated in front, k's one head is rotated whole."""

    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat((q[..., :3], half(q[..., 3:], cos, sin)), -1), half(k, cos, sin)

    match = pair(find(function, torch.randn(B, H, S, 3 + D), torch.randn(B, 1, S, D), *tables()))
    assert (match.params.q.rope_start, match.params.q.head_dim) == (3, 3 + D)
    assert (match.params.k.rope_start, match.params.k.head_dim) == (0, D)
    assert len(match.inputs["rotated_q"].meta["val"].shape) == 4
    assert match.inputs["rotated_q"].meta["val"].shape[-1] == 3 + D


@pytest.mark.parametrize("heads", [(H, 2), (H, H), (H, 1)])
def test_looked_up_tables_make_a_pair_of_any_heads(heads: tuple[int, int]) -> None:
    def function(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (table.unsqueeze(1) for table in cache[positions].chunk(2, -1))
        return half(q, cos, sin), half(k, cos, sin)

    q, k = (torch.randn(S, n, D) for n in heads)
    match = pair(find(function, q, k, torch.randn(9, D), torch.randint(9, (S,))))
    assert match.params.public()["looked_up"]
    assert match.params.head_axis == 1
    assert (match.params.num_heads, match.params.num_kv_heads) == heads
    assert {"cache", "positions", "rows"} <= match.inputs.keys()


def test_each_layer_has_a_pair() -> None:
    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        total = q
        for _ in range(3):
            total = half(total.tanh(), cos, sin) + half(k + total.mean(), cos, sin)
        return total

    findings = find(function, torch.randn(B, H, S, D), torch.randn(B, 1, S, D), *tables())
    matches = findings.of("qk_rope")
    assert len(matches) == 3
    assert len({part for match in matches for part in match.parts}) == 6


def test_a_cast_of_both_is_a_pair_once() -> None:
    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return half(q.float(), cos, sin).bfloat16(), half(k.float(), cos, sin).bfloat16()

    q, k = torch.randn(B, H, S, D).bfloat16(), torch.randn(B, 1, S, D).bfloat16()
    match = pair(find(function, q, k, *tables()))
    assert match.params.q.dtype == torch.bfloat16
    assert match.inputs["rotated_q"].meta["val"].dtype == torch.bfloat16


NO_PAIRS: dict[str, tuple[Callable[..., object], tuple[Tensor, ...]]] = {
    "heads of k, tables given": (
        lambda q, k, cos, sin: (half(q, cos, sin), half(k, cos, sin)),
        (torch.randn(B, H, S, D), torch.randn(B, 2, S, D), *tables()),
    ),
    "one head of each, tables given": (
        lambda q, k, cos, sin: (half(q, cos, sin), half(k, cos, sin)),
        (torch.randn(B, 1, S, D), torch.randn(B, 1, S, D), *tables()),
    ),
    "tables the other way round": (
        lambda q, k, cos, sin: (half(q, cos, sin), half(k, sin, cos)),
        (torch.randn(B, H, S, D), torch.randn(B, 1, S, D), *tables()),
    ),
    "two styles": (
        lambda q, k, cos, sin: (half(q, cos, sin), STYLES["interleave"](k, cos, sin)),
        (torch.randn(B, H, S, D), torch.randn(B, 1, S, D), *tables()),
    ),
    "other widths": (
        lambda q, k, cos, sin: (half(q, cos, sin), half(k[..., :4], cos[..., :2], sin[..., :2])),
        (torch.randn(B, H, S, D), torch.randn(B, 1, S, D), *tables()),
    ),
    "a table for each head of q": (
        lambda q, k, cos, sin: (half(q, cos, sin), half(k, cos, sin)),
        (torch.randn(B, H, S, D), torch.randn(B, 1, S, D), *tables(D // 2, H)),
    ),
    "batches that differ": (
        lambda q, k, cos, sin: (half(q, cos, sin), half(k, cos, sin)),
        (torch.randn(B, H, S, D), torch.randn(1, 1, S, D), *tables()),
    ),
    "no axis for heads": (
        lambda q, k, cos, sin: (half(q, cos, sin), half(k, cos, sin)),
        (torch.randn(S, D), torch.randn(S, D), *tables()),
    ),
    "one rotation": (lambda q, cos, sin: half(q, cos, sin), (torch.randn(B, H, S, D), *tables())),
}


@pytest.mark.parametrize("name", NO_PAIRS)
def test_anything_else_is_no_pair(name: str) -> None:
    function, inputs = NO_PAIRS[name]
    assert not find(function, *inputs).of("qk_rope")
