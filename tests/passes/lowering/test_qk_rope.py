"""Rotations of q and of the one k that its heads share, or with looked-up tables, become one op."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from spellings import ROTATIONS

from helpers import Compiled, compiled, refusal

Tensor = torch.Tensor
MQA, MROPE = "sgl_kernel_npu::fused_rope_qk_mqa", "npu::npu_mrope"
B, S, H, D = 2, 5, 4, 16
halves = ROTATIONS["half", "half"]["halves"]
neighbours = ROTATIONS["interleave", "half"]["stride, stack"]


def tables(dtype: torch.dtype = torch.float32, width: int = D) -> tuple[Tensor, Tensor]:
    angles = torch.arange(S)[:, None] / 50 ** (torch.arange(width // 2) / width * 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def check(function: Callable[..., tuple[Tensor, Tensor]], *inputs: Tensor, dynamic: bool = False, **settings: object):
    """The results have eager's types and strides, and in float32 its numbers; the tokens may be symbols."""
    for tensor in inputs if dynamic else ():
        torch._dynamo.mark_dynamic(tensor, max(tensor.dim() - 2, 0))
    wanted = function(*inputs)
    found = compiled(function, *inputs, **settings)
    for value, expected in zip(found.output, wanted, strict=True):
        assert value.dtype == expected.dtype
        if value.dtype == torch.float32:
            torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
        assert value.stride() == expected.stride()
    return found, wanted


def site(found: Compiled):
    (found_site,) = [site for site in found.report.sites if site.kind == "qk_rope"]
    return found_site


# One head of k -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rotate", [halves, neighbours])
def test_one_op_rounds_where_the_model_does(rotate: Callable, dtype: torch.dtype, dynamic: bool) -> None:
    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q, cos, sin), rotate(k, cos, sin)

    q, k = torch.randn(B, H, S, D, dtype=dtype), torch.randn(B, 1, S, D, dtype=dtype)
    found, wanted = check(function, q, k, *tables(dtype), dynamic=dynamic, numerics="exact")
    assert found.report.ops == {MQA: 1}
    assert all(torch.equal(value, expected) for value, expected in zip(found.output, wanted, strict=True))
    assert not site(found).roundings
    assert {s.op for s in found.report.sites} == {MQA}


@pytest.mark.parametrize("wide", ["tables", "all", "x"])
def test_a_rotation_in_float32_is_one_too(wide: str) -> None:
    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(
            halves(x.float() if wide != "tables" else x, cos.float() if wide == "all" else cos, sin).to(x.dtype)
            for x in (q, k)
        )

    q, k = torch.randn(B, H, S, D).bfloat16(), torch.randn(B, 1, S, D).bfloat16()
    narrow = torch.bfloat16 if wide in ("all", "x") else torch.float32
    found, wanted = check(function, q, k, *tables(narrow), numerics="exact")
    assert found.report.ops == {MQA: 1}
    assert all(torch.equal(value, expected) for value, expected in zip(found.output, wanted, strict=True))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_part_of_each_head(dynamic: bool) -> None:
    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(torch.cat((halves(x[..., :8], cos, sin), x[..., 8:]), -1) for x in (q, k))

    found, _ = check(function, torch.randn(B, H, S, D), torch.randn(B, 1, S, D), *tables(width=8), dynamic=dynamic)
    assert found.report.ops == {MQA: 1}
    assert "aten.cat.default" in found.targets()  # of cos and sin alone: the op copies what passes
    assert found.targets().count("aten.cat.default") == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_latent_attention(dynamic: bool) -> None:
    """q's heads have a part in front that is not rotated; k comes from a projection of its own."""

    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q = q.view(*q.shape[:-1], H, 24).transpose(1, 2)
        nope, rotary = q.split([8, D], -1)
        k = k[..., 8:].unsqueeze(1)
        return torch.cat((nope, neighbours(rotary, cos, sin)), -1), neighbours(k, cos, sin)

    found, _ = check(function, torch.randn(B, S, H * 24), torch.randn(B, S, 8 + D), *tables(), dynamic=dynamic)
    assert found.report.ops == {MQA: 1}
    assert all(s.status == "lowered" for s in found.report.sites if s.kind in ("rope", "qk_rope"))


@pytest.mark.parametrize(
    ("q", "k", "table"),
    [((S, H, D), (S, 1, D), (S, 1)), ((B, S, H, D), (B, S, 1, D), (S, 1)), ((S, B, H, D), (S, B, 1, D), (S, 1, 1))],
)
def test_tokens_in_any_axes(q: tuple[int, ...], k: tuple[int, ...], table: tuple[int, ...]) -> None:
    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(halves(x, *(t.view(*table, D // 2) for t in (cos, sin))) for x in (q, k))

    found, _ = check(function, torch.randn(q), torch.randn(k), *tables())
    assert found.report.ops == {MQA: 1}


def test_a_table_for_each_sequence() -> None:
    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(halves(x, cos.unsqueeze(1), sin.unsqueeze(1)) for x in (q, k))

    of_sequences = [torch.randn(B, S, D // 2) for _ in range(2)]
    found, _ = check(function, torch.randn(B, H, S, D), torch.randn(B, 1, S, D), *of_sequences)
    assert found.report.ops == {MQA: 1}


def test_strides_are_read_as_they_are() -> None:
    """Transposed views of projections are taken without a copy, and given back in the same layout."""

    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q = q.view(B, S, H, D).transpose(1, 2)
        rotated = torch.cat((-q[..., D // 2 :], q[..., : D // 2]), -1)
        k = k.view(B, S, 1, D).transpose(1, 2)
        turned = torch.cat((-k[..., D // 2 :], k[..., : D // 2]), -1)
        cos, sin = (torch.cat((t, t), -1) for t in (cos, sin))
        return q * cos + rotated * sin, k * cos + turned * sin

    found, _ = check(function, torch.randn(B, S, H * D), torch.randn(B, S, D), *tables())
    assert found.report.ops == {MQA: 1}
    assert found.targets().count("aten.clone.default") == 2  # of cos and sin, for both sequences


def test_layers_share_their_rows() -> None:
    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = halves(q, cos, sin), halves(k, cos, sin)
        return halves(q.tanh(), cos, sin), halves(k.tanh(), cos, sin)

    found, _ = check(function, torch.randn(B, H, S, D), torch.randn(B, 1, S, D), *tables())
    assert found.report.ops == {MQA: 2}
    assert found.targets().count("aten.expand.default") == 2  # of cos and of sin, once


def both(rotate: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable:
    return lambda q, k, cos, sin: (rotate(q, cos, sin), rotate(k, cos, sin))


def backward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), -1)


def deinterleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return halves(torch.cat((x[..., ::2], x[..., 1::2]), -1), cos, sin)


WIDE = torch.randn(S, D), torch.randn(S, D)
REFUSED: dict[str, tuple[Callable, tuple[Tensor, ...], str]] = {
    "six heads": (
        both(halves),
        (torch.randn(B, 6, S, D), torch.randn(B, 1, S, D), *tables()),
        "the number of q heads is 6, no power of two",
    ),
    "24 columns": (
        both(halves),
        (torch.randn(B, H, S, 24), torch.randn(B, 1, S, 24), *tables(width=24)),
        "half of rotary_dim is 12, no power of two",
    ),
    "tables with a column for each element": (
        both(ROTATIONS["half", "full"]["llama"]),
        (torch.randn(B, H, S, D), torch.randn(B, 1, S, D), *WIDE),
        "those of a pair are not known to be equal",
    ),
    "backward": (
        both(backward),
        (torch.randn(B, H, S, D), torch.randn(B, 1, S, D), *tables()),
        "it turns by the negative angle",
    ),
    "taken apart": (
        both(deinterleaved),
        (torch.randn(B, H, S, D), torch.randn(B, 1, S, D), *tables()),
        "it takes pairs of neighbours apart",
    ),
    "a wider result": (
        both(lambda x, cos, sin: halves(x.float(), cos, sin)),
        (torch.randn(B, H, S, D).bfloat16(), torch.randn(B, 1, S, D).bfloat16(), *tables()),
        "its result is torch.float32 for an x of torch.bfloat16",
    ),
    "in float64": (
        both(lambda x, cos, sin: halves(x.double(), cos, sin).to(x.dtype)),
        (torch.randn(B, H, S, D), torch.randn(B, 1, S, D), *tables(torch.float64)),
        "float64",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_pairs_that_the_op_has_not_are_turned_apart(name: str) -> None:
    function, inputs, reason = REFUSED[name]
    found, _ = check(function, *inputs)
    assert MQA not in found.report.ops
    assert reason in site(found).reason


def test_k_that_depends_on_q_is_turned_on_its_own() -> None:
    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q = halves(q, cos, sin)
        return q, halves(k + q.mean(), cos, sin)

    found, _ = check(function, torch.randn(B, H, S, D), torch.randn(B, 1, S, D), *tables())
    assert found.report.ops == {"npu::npu_rotary_mul": 2}
    assert "depends on its result" in site(found).reason


# Tables that are looked up -------------------------------------------------------------------------------------------


def by_position(rotate: Callable[[Tensor, Tensor, Tensor], Tensor], rope_dim: int, *, select: bool = False) -> Callable:
    def function(q: Tensor, k: Tensor, cache: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        rows = cache.index_select(0, positions) if select else cache[positions]
        cos, sin = (table.unsqueeze(1) for table in rows.chunk(2, -1))
        outputs = []
        for x in (q, k):
            heads = x.view(x.shape[0], -1, 64)
            turned = rotate(heads[..., :rope_dim], cos, sin)
            turned = turned if rope_dim == 64 else torch.cat((turned, heads[..., rope_dim:]), -1)
            outputs.append(turned.flatten(1))
        return tuple(outputs)

    return function


def looked_up(dtype: torch.dtype = torch.float32, rope_dim: int = 64, heads: tuple[int, int] = (6, 3)):
    q, k = (torch.randn(7, n * 64, dtype=dtype) for n in heads)
    return q, k, torch.randn(30, rope_dim, dtype=dtype), torch.randint(30, (7,))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("select", [False, True])
@pytest.mark.parametrize("rope_dim", [64, 32])
@pytest.mark.parametrize("rotate", [halves, neighbours])
def test_one_op_looks_up_and_turns(rotate: Callable, rope_dim: int, select: bool, dynamic: bool) -> None:
    q, k, cache, positions = looked_up(rope_dim=rope_dim)
    for tensor in (q, k, positions) if dynamic else ():
        torch._dynamo.mark_dynamic(tensor, 0)
    found, _ = check(by_position(rotate, rope_dim, select=select), q, k, cache, positions)
    assert found.report.ops == {MROPE: 1}
    assert not {"aten.index.Tensor", "aten.index_select.default", "aten.cat.default"} & {*found.targets()}
    assert found.targets().count("aten.remainder.Scalar") == (not select)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_looked_up_in_sixteen_bits(dtype: torch.dtype) -> None:
    inputs = looked_up(dtype)
    found, wanted = check(by_position(halves, 64), *inputs)
    assert found.report.ops == {MROPE: 1}
    assert "rounds once" in site(found).roundings[0]
    truth = by_position(halves, 64)(*(t.double() if t.is_floating_point() else t for t in inputs))
    for value, eager, exact in zip(found.output, wanted, truth, strict=True):
        assert (value.double() - exact).pow(2).mean() <= 1.1 * (eager.double() - exact).pow(2).mean()


def test_negative_positions_count_from_the_end() -> None:
    q, k, cache, _ = looked_up()
    found, _ = check(by_position(halves, 64), q, k, cache, torch.tensor([0, -1, -30, 29, 5, -7, 3]))
    assert found.report.ops == {MROPE: 1}


def test_positions_in_32_bits_are_widened() -> None:
    q, k, cache, positions = looked_up()
    found, _ = check(by_position(halves, 64, select=True), q, k, cache, positions.int())
    assert found.report.ops == {MROPE: 1}


def test_one_head_of_k_is_preferably_given_rows() -> None:
    inputs = looked_up(heads=(8, 1))
    found, _ = check(by_position(halves, 64), *inputs, numerics="exact")
    assert found.report.ops == {MQA: 1}
    assert "aten.cat.default" not in found.targets()  # the rows of the cache are cos | sin already


def repeated(style: str, times: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The rotation by tables whose columns stand `times` times, one after the other."""
    rotate = ROTATIONS[style, "full"]["llama" if style == "half" else "stride, stack"]
    return lambda x, cos, sin: rotate(x, torch.cat([cos] * times, -1), torch.cat([sin] * times, -1))


LOOKUPS_REFUSED: dict[str, tuple[Callable, tuple[Tensor, ...], str]] = {
    "40 columns": (
        by_position(halves, 40),
        looked_up(rope_dim=40),
        "npu_mrope: rotary_dim 40 is no multiple of 16",
    ),
    "a wider cache": (
        by_position(lambda x, cos, sin: halves(x, cos, sin).to(x.dtype), 64),
        (*looked_up(torch.bfloat16)[:2], torch.randn(30, 64), torch.randint(30, (7,))),
        "npu_mrope: cos_sin_cache is float32 but query is bfloat16",
    ),
    "a column for each of two neighbours": (
        by_position(repeated("interleave", 2), 64),
        looked_up(),
        "npu_mrope: cos and sin have a column for each element",
    ),
}


@pytest.mark.parametrize("name", LOOKUPS_REFUSED)
def test_lookups_that_no_op_has(name: str) -> None:
    function, inputs, reason = LOOKUPS_REFUSED[name]
    found, _ = check(function, *inputs)
    assert not {MROPE, MQA} & found.report.ops.keys()
    assert site(found).reason.startswith("fused_rope_qk_mqa: k has 3 heads; the op is for one that all heads of q")
    assert reason in site(found).reason


def test_columns_that_neighbours_do_not_share_are_refused_for_one_head_of_k_too() -> None:
    found, _ = check(by_position(repeated("interleave", 2), 64), *looked_up(heads=(8, 1)))
    assert MQA not in found.report.ops
    assert site(found).reason.startswith("cos and sin have a column for each element")


@pytest.mark.parametrize("heads", [(6, 3), (8, 1)])
@pytest.mark.parametrize(("times", "rope_dim"), [(2, 64), (4, 64), (2, 32), (4, 32)])
def test_rows_are_as_wide_as_what_they_turn(times: int, rope_dim: int, heads: tuple[int, int]) -> None:
    """Columns that stand four times turn twice as much as the cache is wide."""
    q, k, _, positions = looked_up(heads=heads)
    cache = torch.randn(30, rope_dim * 2 // times)
    found, _ = check(by_position(repeated("half", times), rope_dim), q, k, cache, positions)
    assert (MROPE in found.report.ops) == (times == 2 and heads != (8, 1))
    assert (MQA in found.report.ops) == (heads == (8, 1))


@pytest.fixture(scope="module")
def sites() -> dict[str, Compiled]:
    """A site of each op, in float32 and in bfloat16."""

    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return halves(q, cos, sin), halves(k, cos, sin)

    q, k = torch.randn(B, H, S, D).bfloat16(), torch.randn(B, 1, S, D).bfloat16()
    found = {
        MROPE: check(by_position(halves, 64), *looked_up())[0],
        MQA: check(function, q, k, *tables(torch.bfloat16))[0],
    }
    assert all(site(of).op == op for op, of in found.items())
    return found


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"q.backward": True}, "it turns by the negative angle"),
        ({"q.style": "deinterleave"}, "it takes pairs of neighbours apart"),
        ({"q.dtype": torch.float16}, "its result is torch.float16 for an x of torch.float32"),
        ({"q.steps": frozenset({torch.float64})}, "the model computes in torch.float64"),
        *[
            (changes, "npu_mrope: the rotated elements of q and k are not the first of heads of one length")
            for changes in ({"q.rope_start": 8}, {"k.rope_start": 8}, {"k.head_dim": 128})
        ],
        ({"num_heads": None}, "npu_mrope: the number of heads is not static"),
        ({"num_kv_heads": None}, "npu_mrope: the number of heads is not static"),
    ],
)
def test_what_else_two_rotations_may_be(sites: dict[str, Compiled], changes: dict, reason: str) -> None:
    given = {f"params.{path}": value for path, value in changes.items()}
    assert reason in refusal(sites[MROPE], "qk_rope", given)


@pytest.mark.parametrize(
    ("op", "changes", "reason"),
    [
        (MQA, {"q.steps": frozenset({torch.float32})}, "the op computes in torch.bfloat16; the model rounds on the"),
        (MROPE, {"lookup.dtype": torch.float16}, "the model rounds cos and sin to torch.float16; the op takes them as"),
        (MROPE, {"q.compute_dtype": torch.float16}, "rounds once, at its end; the model rounds at each step"),
    ],
)
def test_what_is_not_exact(sites: dict[str, Compiled], op: str, changes: dict, reason: str) -> None:
    given = {f"params.{path}": value for path, value in changes.items()}
    assert reason in refusal(sites[op], "qk_rope", given, numerics="exact")
