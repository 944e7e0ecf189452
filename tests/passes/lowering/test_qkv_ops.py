"""Which op a prologue of attention becomes: norms over all heads, gates and looked-up tables have their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional

from helpers import Compiled, compiled, refusal
from npu_fuse.runtime.target import Target

Tensor = torch.Tensor
PLAIN = "sgl_kernel_npu::split_qkv_rmsnorm_rope"
WHOLE = "sgl_kernel_npu::split_qkv_tp_rmsnorm_rope"
GATED = "sgl_kernel_npu::split_qkvgate_gemma_rmsnorm_rope"
LOOKED_UP = "sgl_kernel_npu::split_qkv_rmsnorm_rope_pos_cache_half_npu"

BATCH, TOKENS, WIDTH, MOST = 2, 5, 32, 40
HEADS, KV_HEADS, D = 4, 2, 16


def angles(positions: Tensor, rope_dim: int) -> Tensor:
    return positions[..., None] / 50 ** (torch.arange(rope_dim // 2) / rope_dim * 2)


def rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def llama_norm(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    return w * rms(x.float(), eps).to(x.dtype)


def olmo_norm(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    return (w * rms(x.float(), eps)).to(x.dtype)


def gemma_norm(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    return (rms(x.float(), eps) * (1.0 + w.float())).to(x.dtype)


def wide_norm(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    return w.float() * rms(x.float(), eps)


def half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


class Attention(nn.Module):
    """The projections and norms; subclasses write the rest."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, fused: bool = False, gate: bool = False) -> None:
        super().__init__()
        widths = [HEADS * D * (2 if gate else 1), KV_HEADS * D, KV_HEADS * D]
        self.widths, self.fused = widths, fused
        projections = [nn.Linear(WIDTH, sum(widths))] if fused else [nn.Linear(WIDTH, n) for n in widths]
        self.projections = nn.ModuleList(projections)
        self.q_norm, self.k_norm = (nn.Parameter(torch.rand(self.normed(i)) + 0.5) for i in range(2))
        self.to(dtype)

    def normed(self, index: int) -> int:
        return D

    def project(self, x: Tensor) -> list[Tensor]:
        projected = [projection(x) for projection in self.projections]
        return list(projected[0].split(self.widths, -1)) if self.fused else projected

    @staticmethod
    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, D))


def hidden(dtype: torch.dtype = torch.float32, *leading: int) -> Tensor:
    return torch.randn(*(leading or (BATCH, TOKENS)), WIDTH, dtype=dtype)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def check(model: nn.Module, *inputs: Tensor, further: float = 1.25, **settings: object) -> Compiled:
    """The numbers are eager's, and no further from float64's than they, but for chance."""
    with torch.no_grad():
        eager = model(*inputs)
    found = compiled(model, *inputs, **settings)
    dtype = next(model.parameters()).dtype
    model.double()
    with torch.no_grad():
        truth = model(*(t.double() if t.is_floating_point() else t for t in inputs))
    model.to(dtype)
    bound = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 0.1}[dtype]
    for value, expected, true in zip(found.output, eager, truth, strict=True):
        torch.testing.assert_close(value, expected, atol=bound, rtol=bound)
        assert value.stride() == expected.stride()
        if dtype != torch.float32:
            error, eager_error = ((t.double() - true).pow(2).mean().sqrt() for t in (value, expected))
            assert error <= further * eager_error
    return found


def qkv_site(found: Compiled):
    (site,) = [site for site in found.report.sites if site.kind == "qkv"]
    return site


def assert_refused(model: nn.Module, *inputs: Tensor, **settings: object) -> str:
    found = check(model, *inputs, **settings)
    assert not any("split_qkv" in op for op in found.report.ops), str(found.report)
    return qkv_site(found).reason


# A norm over all heads together --------------------------------------------------------------------------------------


class Olmo2(Attention):
    """Norms before the heads are cut, tables of repeated angles; rotated in float32 where those are."""

    rotate = staticmethod(half)
    norm = staticmethod(olmo_norm)
    rope_dim = D
    table_dtype = torch.float32

    def normed(self, index: int) -> int:
        return (HEADS, KV_HEADS)[index] * D

    def tables(self, x: Tensor) -> tuple[Tensor, Tensor]:
        of_pairs = angles(torch.arange(x.shape[1]), self.rope_dim)
        both = torch.cat((of_pairs, of_pairs), -1)
        dtype = torch.float64 if x.dtype == torch.float64 else self.table_dtype
        return both.cos().to(dtype), both.sin().to(dtype)

    def forward(self, x: Tensor) -> list[Tensor]:
        q, k, v = self.project(x)
        cos, sin = self.tables(x)
        outputs = []
        for value, weight in ((q, self.q_norm), (k, self.k_norm)):
            value = self.heads(self.norm(value, weight)).transpose(1, 2)
            turned = self.rotate(value[..., : self.rope_dim], cos, sin).to(x.dtype)
            outputs.append(torch.cat((turned, value[..., self.rope_dim :]), -1) if self.rope_dim < D else turned)
        return [*outputs, v]


class Partial(Olmo2):
    rope_dim = 8


class Offset(Olmo2):
    norm = staticmethod(gemma_norm)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [Olmo2, Partial, Offset])
def test_a_norm_over_all_heads(kind: type[Olmo2], fused: bool, dynamic: bool | None) -> None:
    found = check(kind(fused=fused), hidden(), dynamic=dynamic)
    assert found.report.ops == {WHOLE: 1}
    assert all(site.status == "lowered" and site.op == WHOLE for site in found.report.sites)
    assert found.report.count("norm_rope_chain", per_head=False) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_rounds_where_olmo_does(dtype: torch.dtype) -> None:
    found = check(Olmo2(dtype), hidden(dtype), numerics="exact")
    assert found.report.ops == {WHOLE: 1}
    assert not qkv_site(found).roundings


class NarrowTables(Olmo2):
    table_dtype = torch.bfloat16


class UnroundedNorm(Olmo2):
    norm = staticmethod(wide_norm)


@pytest.mark.parametrize(
    ("kind", "note"),
    [
        (NarrowTables, "rounds once, at its end; the model rounds at each step"),
        (UnroundedNorm, "the op rounds normed values to torch.bfloat16 before it rotates them, the model does not"),
    ],
)
def test_where_it_rounds_otherwise_is_said(kind: type[Olmo2], note: str) -> None:
    found = check(kind(torch.bfloat16), hidden(torch.bfloat16), further=1.6)  # one more rounding is 1.4 times the error
    assert found.report.ops == {WHOLE: 1}
    assert note in qkv_site(found).roundings[-1]
    assert "numerics is 'exact'" in assert_refused(kind(torch.bfloat16), hidden(torch.bfloat16), numerics="exact")


class GivenTables(Olmo2):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        self.tables = lambda x: (cos, sin)
        return super().forward(x)


class Neighbours(Olmo2):
    rotate = staticmethod(neighbours)

    def tables(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(table[:, : D // 2] for table in super().tables(x))


class OnlyQ(Olmo2):
    def forward(self, x: Tensor) -> list[Tensor]:
        norms = iter((olmo_norm, lambda value, weight: value))
        self.norm = lambda value, weight: next(norms)(value, weight)
        return super().forward(x)


class TwoEps(Olmo2):
    def forward(self, x: Tensor) -> list[Tensor]:
        eps = iter((1e-6, 1e-3))
        self.norm = lambda value, weight: olmo_norm(value, weight, next(eps))
        return super().forward(x)


REFUSED: dict[str, tuple[type[Olmo2], str]] = {
    "neighbours": (Neighbours, "it rotates pairs of neighbours; the op rotates halves"),
    "only q": (OnlyQ, "only q is normed"),
    "two eps": (TwoEps, "different eps: 1e-06 and 0.001"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_norms_over_all_heads_that_the_op_has_not(name: str) -> None:
    kind, reason = REFUSED[name]
    assert reason in assert_refused(kind(), hidden())


def test_tables_whose_halves_may_differ_are_refused() -> None:
    cos, sin = torch.randn(TOKENS, D), torch.randn(TOKENS, D)
    reason = assert_refused(GivenTables(), hidden(), cos, sin)
    assert reason == "cos and sin have a column for each element, and those of a pair are not known to be equal"


# Gates ---------------------------------------------------------------------------------------------------------------


class Qwen3Next(Attention):
    """A gate behind each head of q; 1 is added to the weights; the first columns are rotated."""

    rope_dim = 8
    norm = staticmethod(gemma_norm)

    def __init__(self, dtype: torch.dtype = torch.float32, *, fused: bool = False) -> None:
        super().__init__(dtype, fused=fused, gate=True)

    def read(self, gate: Tensor) -> Tensor:
        return gate.reshape(*gate.shape[:-2], -1).sigmoid()

    def forward(self, x: Tensor) -> list[Tensor]:
        q, k, v = self.project(x)
        q, gate = q.unflatten(-1, (HEADS, 2 * D)).chunk(2, -1)
        of_pairs = angles(torch.arange(x.shape[1]), self.rope_dim)
        tables = [table.to(x.dtype) for table in (of_pairs.cos(), of_pairs.sin())]
        cos, sin = (torch.cat((table, table), -1) for table in tables)
        outputs = []
        for value, weight in ((q, self.q_norm), (self.heads(k), self.k_norm)):
            value = self.norm(value, weight).transpose(1, 2)
            outputs.append(torch.cat((half(value[..., : self.rope_dim], cos, sin), value[..., self.rope_dim :]), -1))
        return [*outputs, v, self.read(gate)]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("fused", [False, True])
def test_gates(fused: bool, dynamic: bool | None) -> None:
    found = check(Qwen3Next(fused=fused), hidden(), dynamic=dynamic)
    assert found.report.ops == {GATED: 1}
    assert found.report.count("qkv", gate=True, style="fused" if fused else "separate") == 1
    assert all(site.status == "lowered" and site.op == GATED for site in found.report.sites)
    assert sum("linear" in target for target in found.targets()) == 1
    assert "aten.split.Tensor" not in found.targets()  # the gate comes from the op, it is not cut from the projection


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gates_in_sixteen_bits(dtype: torch.dtype) -> None:
    found = check(Qwen3Next(dtype), hidden(dtype))
    assert found.report.ops == {GATED: 1}
    assert "rounds once" in qkv_site(found).roundings[-1]


class ReadTwice(Qwen3Next):
    def read(self, gate: Tensor) -> Tensor:
        return (gate.reshape(*gate.shape[:-2], -1).sigmoid() * gate.sum()).contiguous()


class ReadWhole(Qwen3Next):
    """The projection of q and gate is read as a whole as well."""

    def forward(self, x: Tensor) -> list[Tensor]:
        outputs = super().forward(x)
        return [*outputs, self.projections[0](x).exp()]


def test_a_projection_that_is_read_as_a_whole_too_stays() -> None:
    found = check(ReadWhole(), hidden())
    assert found.report.ops == {GATED: 1}


def test_a_gate_that_is_used_where_it_lies_is_refused() -> None:
    assert "can't be kept" in assert_refused(ReadTwice(), hidden())


class WholeHeads(Qwen3Next):
    rope_dim = D


class PlainNorm(Qwen3Next):
    norm = staticmethod(llama_norm)


class NoNorm(Qwen3Next):
    norm = staticmethod(lambda x, w: x)


GATES_REFUSED: dict[str, tuple[type[Qwen3Next], str]] = {
    "whole heads": (WholeHeads, "rope_dim 16 is not in 1 to head_dim 16 - 1"),
    "nothing added": (PlainNorm, "0 is added to the weights of its norms; the op adds 1"),
    "no norm": (NoNorm, "q and k are not normed; the op for heads with gates norms them"),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", GATES_REFUSED)
def test_gates_that_the_op_has_not(name: str, fused: bool) -> None:
    kind, reason = GATES_REFUSED[name]
    assert reason in assert_refused(kind(fused=fused), hidden())


# Tables that are looked up -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lookup:
    """How rows are looked up, and what for."""

    gather: Callable[[Tensor, Tensor], Tensor] = lambda cache, positions: cache.index_select(0, positions)
    norm: Callable[[Tensor, Tensor], Tensor] | None = llama_norm
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = halves
    rope_dim: int = D
    wide_rotation: bool = False


class VLlm(Attention):
    """A cache of cos | sin, of which each token looks up a row."""

    def __init__(
        self,
        lookup: Lookup,
        dtype: torch.dtype = torch.bfloat16,
        cache_dtype: torch.dtype | None = None,
        **options: bool,
    ) -> None:
        super().__init__(dtype, **options)
        self.lookup = lookup
        table = angles(torch.arange(MOST), lookup.rope_dim)
        cache = torch.cat((table.cos(), table.sin()), -1)
        self.register_buffer("cache", cache.to(cache_dtype or dtype))

    def forward(self, x: Tensor, positions: Tensor) -> list[Tensor]:
        lookup = self.lookup
        q, k, v = self.project(x)
        cos, sin = lookup.gather(self.cache, positions).chunk(2, -1)
        outputs = []
        for value, weight in ((q, self.q_norm), (k, self.k_norm)):
            value = self.heads(value)
            value = value if lookup.norm is None else lookup.norm(value, weight)
            part, rest = value[..., : lookup.rope_dim], value[..., lookup.rope_dim :]
            part = part.float() if lookup.wide_rotation and x.dtype != torch.float64 else part
            turned = lookup.rotate(part, *(table.unsqueeze(-2).to(part.dtype) for table in (cos, sin))).to(x.dtype)
            outputs.append(torch.cat((turned, rest.to(x.dtype)), -1) if rest.shape[-1] else turned)
        return [*outputs, v]


def by_index(cache: Tensor, positions: Tensor) -> Tensor:
    return cache[positions]


LOOKUPS: dict[str, Lookup] = {
    "index_select": Lookup(),
    "index": Lookup(gather=by_index),
    "embedding": Lookup(gather=lambda cache, positions: functional.embedding(positions, cache)),
    "no norm": Lookup(norm=None),
    "gemma": Lookup(norm=gemma_norm),
    "partial": Lookup(rope_dim=8),
    "repeated": Lookup(rotate=lambda x, cos, sin: half(x, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))),
    "rotated in float32": Lookup(norm=olmo_norm, wide_rotation=True),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", LOOKUPS)
def test_looked_up_tables(name: str, fused: bool, dynamic: bool | None) -> None:
    model = VLlm(LOOKUPS[name], fused=fused)
    found = check(model, hidden(torch.bfloat16, 7), torch.randint(MOST, (7,)), dynamic=dynamic)
    assert found.report.ops == {LOOKED_UP: 1}
    assert found.report.count("qkv", looked_up=True) == 1
    assert all(site.status == "lowered" and site.op == LOOKED_UP for site in found.report.sites)
    assert not {"aten.index.Tensor", "aten.index_select.default", "aten.embedding.default"} & {*found.targets()}
    assert found.targets().count("aten.remainder.Scalar") == (LOOKUPS[name].gather is by_index)


@pytest.mark.parametrize("shape", [(BATCH, TOKENS), (1, TOKENS), (TOKENS,)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_of_each_sequence_or_of_all(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    model = VLlm(Lookup(gather=by_index))
    found = check(model, hidden(torch.bfloat16), torch.randint(MOST, shape).to(dtype))
    assert found.report.ops == {LOOKED_UP: 1}


def test_negative_positions_count_from_the_end_where_the_model_lets_them() -> None:
    model, x = VLlm(Lookup(gather=by_index)), hidden(torch.bfloat16, 4)
    found = check(model, x, torch.tensor([0, -1, -MOST, MOST - 1]))
    assert found.report.ops == {LOOKED_UP: 1}
    with torch.no_grad():
        for positions in ([3, 2, 1, 0], [-3, -7, 5, -2]):
            for value, expected in zip(
                found.function(x, torch.tensor(positions)), model(x, torch.tensor(positions)), strict=True
            ):
                torch.testing.assert_close(value, expected, atol=0.1, rtol=0.1)


def test_it_rounds_where_such_a_model_does() -> None:
    model = VLlm(LOOKUPS["rotated in float32"])
    found = check(model, hidden(torch.bfloat16, 7), torch.randint(MOST, (7,)), numerics="exact")
    assert found.report.ops == {LOOKED_UP: 1}


@pytest.mark.parametrize(("norm", "rounds"), [(olmo_norm, True), (wide_norm, False)])
def test_normed_values_are_rounded_as_the_model_does(norm: Callable[[Tensor, Tensor], Tensor], rounds: bool) -> None:
    model = VLlm(Lookup(norm=norm, wide_rotation=True))
    found = check(model, hidden(torch.bfloat16, 7), torch.randint(MOST, (7,)), numerics="exact")
    (node,) = [node for node in found.after.graph.nodes if "pos_cache" in str(node.target)]
    assert node.kwargs["cast_norm_to_bf16"] is rounds


def test_a_cache_that_is_rounded_after_the_lookup_is_read_as_it_is() -> None:
    model = VLlm(Lookup(), cache_dtype=torch.float32)
    inputs = hidden(torch.bfloat16, 7), torch.randint(MOST, (7,))
    found = compiled(model, *inputs)
    assert found.report.ops == {LOOKED_UP: 1}
    assert "the model rounds cos and sin to torch.bfloat16" in qkv_site(found).roundings[0]
    with torch.no_grad():
        for value, expected in zip(found.output, model(*inputs), strict=True):
            torch.testing.assert_close(value, expected, atol=0.1, rtol=0.1)


def test_layers_share_what_they_look_up() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(VLlm(Lookup(gather=by_index)) for _ in range(2))

        def forward(self, x: Tensor, positions: Tensor) -> list[Tensor]:
            first = self.layers[0](x, positions)
            return [*first, *self.layers[1](x + first[0].flatten(-2)[..., :WIDTH], positions)]

    model = Two()
    model.layers[1].cache = model.layers[0].cache
    inputs = hidden(torch.bfloat16, 7), torch.randint(MOST, (7,))
    found = compiled(model, *inputs)
    assert found.report.ops == {LOOKED_UP: 2}
    assert found.targets().count("aten.remainder.Scalar") == 1


class Random(VLlm):
    """Draws a number before its projection: an effect, whose order is kept."""

    def project(self, x: Tensor) -> list[Tensor]:
        noise = torch.rand(1, dtype=x.dtype)
        q, k, v = super().project(x)
        return [q, k, v + noise]


class LookedUpBefore(Random):
    def forward(self, x: Tensor, positions: Tensor) -> list[Tensor]:
        return super().forward(x, self.cache[positions])


@pytest.mark.parametrize(
    ("model", "op"),
    [
        (Random(Lookup(gather=by_index), fused=True), LOOKED_UP),
        (LookedUpBefore(Lookup(gather=lambda cache, rows: rows), fused=True), PLAIN),
    ],
    ids=["after the effect", "before it"],
)
def test_what_was_looked_up_before_an_effect_is_not_looked_up_again(model: Random, op: str) -> None:
    found = compiled(model, hidden(torch.bfloat16, 7), torch.randint(MOST, (7,)))
    assert found.report.ops == {op: 1}


# The order of preference ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["index", "no norm", "partial"])
def test_other_types_take_the_op_that_is_given_rows(name: str, dtype: torch.dtype) -> None:
    found = check(VLlm(LOOKUPS[name], dtype), hidden(dtype, 7), torch.randint(MOST, (7,)))
    assert found.report.ops == {PLAIN: 1}


def test_neighbours_take_the_op_that_is_given_rows() -> None:
    model = VLlm(Lookup(rotate=neighbours))
    found = check(model, hidden(torch.bfloat16, 7), torch.randint(MOST, (7,)))
    assert found.report.ops == {PLAIN: 1}


def test_what_is_refused_by_all_has_all_reasons() -> None:
    old = Target("ascend910b", "npu", {"sgl_kernel_npu": "2026.3.1.post1"})
    inputs = hidden(torch.float16, 7), torch.randint(MOST, (7,))
    reason = assert_refused(VLlm(Lookup(), torch.float16), *inputs, target=old)
    assert reason == (
        "split_qkv_rmsnorm_rope_pos_cache_half_npu: input_tensor is float16, and the kernel rounds its results to "
        "bfloat16; split_qkv_rmsnorm_rope: sgl_kernel_npu 2026.3.1.post1 has no is_neox_style, 2026.05.01.post3 "
        "brought it"
    )


def test_one_reason_for_all_is_given_once() -> None:
    model = VLlm(Lookup())
    inputs = hidden(torch.bfloat16, 7), torch.randint(MOST, (7,))
    reason = assert_refused(model, *inputs, target=Target("ascend910b", "npu", {"torch_npu": "2.13.0"}))
    assert reason == "sgl_kernel_npu, which has the kernel, can't be imported"


def test_an_old_package_has_the_op_that_looks_up_and_not_the_other() -> None:
    old = Target("ascend910b", "npu", {"sgl_kernel_npu": "2026.3.1.post1"})
    found = check(VLlm(Lookup()), hidden(torch.bfloat16, 7), torch.randint(MOST, (7,)), target=old)
    assert found.report.ops == {LOOKED_UP: 1}


# Projections spelled otherwise ----------------------------------------------------------------------------------------


class Spelled(nn.Module):
    """q, k and v of one weight or three, as `projected` writes them; rotated, no norm."""

    def __init__(self, projected: Callable[..., tuple[Tensor, ...]], *widths: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(width, WIDTH) / 8 for width in widths)
        self.projected = projected

    def forward(self, x: Tensor) -> list[Tensor]:
        q, k, v = self.projected(x, *self.weights)
        table = angles(torch.arange(x.shape[-2]), D).to(x.dtype)
        cos, sin = table.cos()[:, None], table.sin()[:, None]
        return [halves(q, cos, sin), halves(k, cos, sin), v]


def by_heads(*parts: Tensor) -> tuple[Tensor, ...]:
    return tuple(part.unflatten(-1, (-1, D)) for part in parts[:2]) + parts[2:]


def tower(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """As towers of vision models have it: [3, heads, dim]."""
    q, k, v = functional.linear(x, weight).reshape(*x.shape[:-1], 3, HEADS, D).permute(2, 0, 1, 3, 4).unbind(0)
    return q, k, v


def falcon(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return by_heads(*(x @ weight.T).split([HEADS * D, KV_HEADS * D, KV_HEADS * D], -1))


def three_products(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return by_heads(x @ q.T, torch.matmul(x, k.t()), x @ v.transpose(0, 1))


GROUPED = (HEADS * D, KV_HEADS * D, KV_HEADS * D)
PROJECTIONS: dict[str, Spelled] = {
    "tower": Spelled(tower, 3 * HEADS * D),
    "x @ w.T": Spelled(falcon, sum(GROUPED)),
    "x @ w.T, three times": Spelled(three_products, *GROUPED),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", PROJECTIONS)
def test_projections_spelled_otherwise(name: str, dynamic: bool | None) -> None:
    found = check(PROJECTIONS[name], hidden(), dynamic=dynamic)
    assert found.report.ops == {PLAIN: 1}
    assert sum(any(word in target for word in ("linear", "mm", "matmul")) for target in found.targets()) == 1


def neox(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return functional.linear(x, weight).unflatten(-1, (HEADS, 3 * D)).chunk(3, -1)


def internlm2(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    groups = functional.linear(x, weight).unflatten(-1, (KV_HEADS, HEADS // KV_HEADS + 2, D))
    return groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]


@pytest.mark.parametrize(
    ("model", "starts"),
    [(Spelled(neox, 3 * HEADS * D), "0, 48, 96, 144"), (Spelled(internlm2, sum(GROUPED)), "0, 16, 64, 80")],
    ids=["gpt_neox", "internlm2"],
)
def test_heads_with_others_between_are_counted_and_refused(model: Spelled, starts: str) -> None:
    found = check(model, hidden())
    assert not any("split_qkv" in op for op in found.report.ops)
    assert found.report.count("qkv", style="fused") == 1
    assert f"heads of q start at columns {starts}, …, with others between" in qkv_site(found).reason


# What else a pattern may tell -----------------------------------------------------------------------------------------


BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


class PerHead(Olmo2):
    """A norm of each head; tables of their own for each sequence."""

    def normed(self, index: int) -> int:
        return D

    def norm(self, x: Tensor, w: Tensor) -> Tensor:
        return llama_norm(self.heads(x), w).flatten(-2)

    def tables(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(torch.stack([table, table + 0.5])[:, None] for table in super().tables(x))


@pytest.fixture(scope="module")
def sites() -> dict[str, Compiled]:
    """A site of each op whose columns lie in one projection; "separate" is one in three."""
    torch.manual_seed(0)
    found = {
        PLAIN: compiled(PerHead(BF16, fused=True), hidden(BF16)),
        GATED: compiled(Qwen3Next(BF16, fused=True), hidden(BF16)),
        LOOKED_UP: compiled(VLlm(Lookup(), fused=True), hidden(BF16, 7), torch.randint(MOST, (7,))),
    }
    assert all(qkv_site(of).op == op for op, of in found.items())
    return found | {"separate": compiled(PerHead(BF16), hidden(BF16))}


OTHERWISE: list[tuple[str, dict[str, object], str]] = [
    (PLAIN, {"rope.backward": True}, "it turns by the negative angle"),
    (PLAIN, {"rope.style": "deinterleave"}, "it takes pairs of neighbours apart"),
    (PLAIN, {"rope.rope_start": 2}, "its first 2 elements pass and the next are rotated"),
    (PLAIN, {"rope.dtype": FP32}, "q and k are torch.float32 after the rotation, the projection is torch.bfloat16"),
    (PLAIN, {"rope.steps": frozenset({FP64})}, "the model computes in torch.float64"),
    (PLAIN, {"q.norm": None}, "only k is normed"),
    (PLAIN, {"k.norm": None}, "only q is normed"),
    (PLAIN, {"q.norm.groups": 2}, "its norm has a bias, a gate, groups or a scale before it"),
    (PLAIN, {"k.norm.bias": True}, "its norm has a bias, a gate, groups or a scale before it"),
    (PLAIN, {"ranks": ("0", 2)}, "the norm of q is over 16 of its 64 columns on a rank"),
    (GATED, {"ranks": ("0", 2)}, "it has gates, and its norm is over several ranks"),
    (PLAIN, {"k.norm.hidden_size": 8}, "the norm of k is over 8 elements; ops norm per head of 16"),
    (PLAIN, {"k.norm.eps": 0.5}, "the norms of q and k have different eps: 1e-06 and 0.5"),
    (PLAIN, {"k.norm.offset": 1.0}, "the norms of q and k are of different kinds"),
    (PLAIN, {"k.norm.weight": False}, "the norms of q and k are of different kinds"),
    ("separate", {"q.layout.starts": (16, 32, 48, 64)}, "q is 64 of the 64 columns of its projection"),
    (GATED, {"rope.style": "interleave"}, "it rotates pairs of neighbours; the op rotates halves"),
    (PLAIN, {"rope.style": "interleave", "shares_columns": False}, "cos and sin have a column for each element"),
    (PLAIN, {"k.layout.roles": (1, "head", 0, "dim")}, "sin is broadcast otherwise against q than against k"),
    (
        PLAIN,
        {"q.layout.roles": (1, "head", 0, "dim"), "k.layout.roles": (1, "head", 0, "dim")},
        "the axes of cos and sin are ordered otherwise than those of x",
    ),
    (PLAIN, {"q.layout.roles": (0, 1, "head", "dim")}, "sin differs from head to head"),
]


@pytest.mark.parametrize(("op", "changes", "reason"), OTHERWISE)
def test_what_else_a_prologue_may_be(sites: dict[str, Compiled], op: str, changes: dict, reason: str) -> None:
    assert reason in refusal(sites[op], "qkv", {f"params.{path}": value for path, value in changes.items()})


def test_what_is_no_projection_any_more_is_not_packed(sites: dict[str, Compiled]) -> None:
    found = sites["separate"]
    x = next(n for n in found.before.graph.find_nodes(op="placeholder") if n.meta["val"].dim() == 3)
    assert refusal(found, "qkv", {"inputs.k": x}) == "its projections have been taken by another fusion"


@pytest.mark.parametrize(
    ("op", "changes", "reason"),
    [
        *[
            (op, {"q.norm.statistics_dtype": BF16}, "the model takes its statistics in torch.bfloat16, the op in")
            for op in (PLAIN, GATED, LOOKED_UP)
        ],
        (PLAIN, {}, "the model rounds normed values to torch.bfloat16 before it rotates them, the op does not"),
        (GATED, {}, "the model rounds normed values to torch.bfloat16 before it rotates them, the op does not"),
        (LOOKED_UP, {}, "the op computes in float32 and rounds once, at its end; the model rounds at each step"),
    ],
)
def test_what_is_not_exact(sites: dict[str, Compiled], op: str, changes: dict, reason: str) -> None:
    given = {f"params.{path}": value for path, value in changes.items()}
    assert reason in refusal(sites[op], "qkv", given, numerics="exact")
