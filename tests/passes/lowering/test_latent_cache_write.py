"""What latent attention keeps of a token is normed, rotated and written in one launch; where it isn't, the reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

from helpers import Compiled, compiled, refusal, repeats
from npu_fuse import Target

Tensor = torch.Tensor
LATENT, ROPE, HIDDEN, TOKENS, BLOCKS, SIZE = 512, 64, 128, 5, 6, 16
SLOTS = torch.tensor([3, 17, 40, 95, 60])
OP, SCATTER = "npu::npu_kv_rmsnorm_rope_cache_v2", "npu::npu_scatter_pa_kv_cache"


def halves(k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = k.chunk(2, -1)
    return k * cos + torch.cat((-second, first), -1) * sin


def apart(k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """DeepSeek's: pairs of neighbours are taken apart, then it is a rotation of halves."""
    return halves(k.unflatten(-1, (-1, 2)).transpose(-1, -2).reshape(k.shape), cos, sin)


def neighbours(k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of neighbours stay where they are."""
    first, second = k[..., ::2], k[..., 1::2]
    cos, sin = cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)


class Layer(nn.Module):
    """The keys of a layer of latent attention, on caches [blocks, block_size, 1, …]."""

    def __init__(self, rope: Callable[..., Tensor] = apart, latent: int = LATENT, rope_dim: int = ROPE) -> None:
        super().__init__()
        self.rope, self.widths = rope, (latent, rope_dim)
        self.kv_a_proj_with_mqa = nn.Linear(HIDDEN, latent + rope_dim, bias=False)
        self.kv_a_layernorm = deepseek.DeepseekV3RMSNorm(latent)
        nn.init.uniform_(self.kv_a_layernorm.weight, 0.5, 1.5)

    def keys(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        latent, k = self.kv_a_proj_with_mqa(x).split(self.widths, -1)
        return self.kv_a_layernorm(latent).unsqueeze(1), self.rope(k.unsqueeze(1), cos, sin)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, ckv: Tensor, kpe: Tensor, slots: Tensor) -> None:
        latent, k = self.keys(x, cos.unsqueeze(1), sin.unsqueeze(1))
        ckv.view(-1, 1, ckv.shape[-1])[slots] = latent
        kpe.view(-1, 1, kpe.shape[-1])[slots] = k


def inputs(
    dtype: torch.dtype = torch.bfloat16, size: int = SIZE, latent: int = LATENT, rope_dim: int = ROPE
) -> tuple[Tensor, ...]:
    """x, cos, sin, ckv_cache, k_cache, slots."""
    angles = torch.rand(TOKENS, rope_dim // 2) * 6
    tables = (torch.cat([half, half], -1).to(dtype) for half in (angles.cos(), angles.sin()))
    caches = (torch.randn(96 // size, size, 1, width).to(dtype) for width in (latent, rope_dim))
    return torch.randn(TOKENS, HIDDEN).to(dtype), *tables, *caches, SLOTS.clone()


def check(layer: nn.Module, *given: Tensor, dynamic: bool | None = None, **settings: Any) -> Compiled:
    """Compiles the call, and compares what it gives and what the caches hold with eager."""
    own, expected = (tuple(value.clone() for value in given) for _ in range(2))
    for value in own:  # tokens and blocks are what may be dynamic
        for axis in range(1, value.dim()):
            torch._dynamo.mark_static(value, axis)
    found = compiled(layer, *own, dynamic=dynamic, **settings)
    with torch.no_grad():
        wanted = layer(*expected)
    if wanted is not None:
        torch.testing.assert_close(found.output, wanted, rtol=3e-2, atol=3e-2)
    for value, want in zip(own, expected, strict=True):
        torch.testing.assert_close(value, want, rtol=2e-2, atol=2e-2)
    return found


def is_fused(found: Compiled) -> bool:
    left = ("aten.copy_.default", "aten.clone.default", "auto_functionalized_v2")
    return found.report.ops == {OP: 1} and not any(name in found.targets() for name in left)


def reason_of(found: Compiled) -> str:
    (reason,) = (site.reason for site in found.report.sites if site.kind == "latent_cache_write")
    return reason


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [None, True])
def test_it_is_one_launch(dtype: torch.dtype, dynamic: bool | None) -> None:
    layer = Layer().to(dtype)
    found = check(layer, *inputs(dtype), dynamic=dynamic)
    assert is_fused(found)
    # the projection, the slots counted from the start, and the op
    assert found.report.launches_after == 3
    assert all(site.status == "lowered" and site.op == OP for site in found.report.sites)
    (match,) = found.findings().of("latent_cache_write")
    assert repeats(match, found.values())
    (call,) = found.after.graph.find_nodes(
        op="call_function", target=torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2.default
    )
    assert call.kwargs["cache_mode"] == "PA_BNSD"
    assert call.kwargs["epsilon"] == layer.kv_a_layernorm.variance_epsilon
    assert call.kwargs["is_output_kv"] is False


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_caches_hold_the_float64_maths_rounded_once(dtype: torch.dtype) -> None:
    layer = Layer().to(dtype)
    x, cos, sin, ckv, kpe, slots = inputs(dtype)
    before = ckv.clone()
    assert is_fused(compiled(layer, x, cos, sin, ckv, kpe, slots))
    kv = layer.kv_a_proj_with_mqa(x).double()
    latent, k = kv[:, :LATENT], kv[:, LATENT:]
    normed = latent * (latent.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * layer.kv_a_layernorm.weight.double()
    turned = apart(k, cos.double(), sin.double())
    tolerance = {torch.float16: 2**-11, torch.bfloat16: 2**-8}[dtype]
    for cache, wanted in ((ckv, normed), (kpe, turned)):
        torch.testing.assert_close(cache.flatten(0, 2)[slots].double(), wanted, rtol=tolerance * 1.01, atol=1e-5)
    others = [slot for slot in range(96) if slot not in slots]
    assert torch.equal(ckv.flatten(0, 2)[others], before.flatten(0, 2)[others])


def test_k_may_be_written_first_and_slots_be_blocks() -> None:
    class Other(Layer):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor, ckv: Tensor, kpe: Tensor, slots: Tensor) -> None:
            latent, k = self.keys(x, cos.unsqueeze(1), sin.unsqueeze(1))
            kpe[slots // SIZE, slots % SIZE] = k
            ckv[slots // SIZE, slots % SIZE] = latent

    assert is_fused(check(Other().bfloat16(), *inputs()))
    *given, _ = inputs()
    assert is_fused(check(Other().bfloat16(), *given, torch.tensor([-1, 17, -96, 79, -40])))


def test_caches_without_heads_and_int32_slots() -> None:
    class Flat(Layer):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor, ckv: Tensor, kpe: Tensor, slots: Tensor) -> None:
            latent, k = self.keys(x, cos.unsqueeze(1), sin.unsqueeze(1))
            ckv.flatten(0, 1)[slots] = latent.squeeze(1)
            kpe.flatten(0, 1)[slots] = k.squeeze(1)

    x, cos, sin, ckv, kpe, slots = inputs()
    assert is_fused(check(Flat().bfloat16(), x, cos, sin, ckv.squeeze(2), kpe.squeeze(2), slots.int()))


def test_what_is_written_may_be_read_as_well() -> None:
    class Read(Layer):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor, ckv: Tensor, kpe: Tensor, slots: Tensor) -> Tensor:
            latent, k = self.keys(x, cos.unsqueeze(1), sin.unsqueeze(1))
            ckv.view(-1, 1, LATENT)[slots] = latent
            kpe.view(-1, 1, ROPE)[slots] = k
            return torch.cat([latent, k], -1) + kpe.view(-1, ROPE)[slots].sum()

    found = check(Read().bfloat16(), *inputs())
    assert found.report.ops == {OP: 1}
    (call,) = found.after.graph.find_nodes(
        op="call_function", target=torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2.default
    )
    assert call.kwargs["is_output_kv"] is True
    assert "npu.npu_rms_norm.default" not in found.targets()


class Attention(nn.Module):
    """Latent attention with absorbed projections, over paged caches, as serving frameworks spell it for decoding.

    Norms and rotations are transformers' own for DeepSeek V3.
    """

    heads, nope, value = 4, 32, 32

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, self.heads * (self.nope + ROPE), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(HIDDEN, LATENT + ROPE, bias=False)
        self.kv_a_layernorm = deepseek.DeepseekV3RMSNorm(LATENT)
        self.w_uk = nn.Parameter(torch.randn(self.heads, self.nope, LATENT) * LATENT**-0.5)
        self.w_uv = nn.Parameter(torch.randn(self.heads, LATENT, self.value) * LATENT**-0.5)
        self.o_proj = nn.Linear(self.heads * self.value, HIDDEN, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, ckv: Tensor, kpe: Tensor, slots: Tensor, table: Tensor
    ) -> Tensor:
        tokens = x.shape[0]
        q_nope, q_pe = self.q_proj(x).view(tokens, self.heads, -1).split([self.nope, ROPE], -1)
        latent, k_pe = self.kv_a_proj_with_mqa(x).split([LATENT, ROPE], -1)
        q_pe, k_pe = deepseek.apply_rotary_pos_emb_interleave(
            q_pe.unsqueeze(2), k_pe.view(tokens, 1, 1, ROPE), cos.unsqueeze(1), sin.unsqueeze(1)
        )
        ckv[slots // SIZE, slots % SIZE] = self.kv_a_layernorm(latent).unsqueeze(1)
        kpe[slots // SIZE, slots % SIZE] = k_pe.view(tokens, 1, ROPE)
        keys, rotated = (cache[table].flatten(1, 3) for cache in (ckv, kpe))
        q_latent = torch.bmm(q_nope.transpose(0, 1), self.w_uk).transpose(0, 1)
        scores = q_latent @ keys.mT + q_pe.squeeze(2) @ rotated.mT
        weights = (scores * (self.nope + ROPE) ** -0.5).softmax(-1, dtype=torch.float32).to(x.dtype)
        out = torch.bmm((weights @ keys).transpose(0, 1), self.w_uv).transpose(0, 1)
        return self.o_proj(out.reshape(tokens, -1))


def test_a_layer_of_deepseek_v3_on_paged_caches() -> None:
    table = torch.tensor([[0, 1], [1, 0], [2, 3], [5, 4], [3, 2]])
    found = check(Attention().bfloat16(), *inputs(), table)
    assert found.report.ops[OP] == 1
    assert SCATTER not in found.report.ops
    (site,) = (site for site in found.report.sites if site.kind == "latent_cache_write")
    assert site.params["style"] == "deinterleave"
    assert len(site.roundings) == 2


# Limits --------------------------------------------------------------------------------------------------------------


def is_left_in_parts(found: Compiled) -> bool:
    """Whether at least both writes are one launch."""
    return OP not in found.report.ops and found.report.ops[SCATTER] == 1


def test_other_rotations() -> None:
    found = check(Layer(neighbours).bfloat16(), *inputs())
    assert is_left_in_parts(found)
    assert "leaves pairs of neighbours where they are" in reason_of(found)
    found = check(Layer(halves).bfloat16(), *inputs())
    assert is_left_in_parts(found)
    assert "takes halves" in reason_of(found)
    found = check(Layer(lambda k, cos, sin: apart(k, cos, -sin)).bfloat16(), *inputs())
    assert OP not in found.report.ops or is_fused(found)


def test_other_sizes() -> None:
    found = check(Layer(latent=256).bfloat16(), *inputs(latent=256))
    assert is_left_in_parts(found)
    assert "is not [B, 1, S, 576]" in reason_of(found)
    found = check(Layer(latent=544, rope_dim=32).bfloat16(), *inputs(latent=544, rope_dim=32))
    assert is_left_in_parts(found)
    assert "gamma [544] is not [512]" in reason_of(found)
    found = check(Layer().bfloat16(), *inputs(size=8))
    assert is_left_in_parts(found)
    assert "blocks of 8, not known to be a multiple of 16" in reason_of(found)


def test_other_types_and_socs() -> None:
    found = check(Layer(), *inputs(torch.float32))
    assert "kv is float32" in reason_of(found)
    found = check(Layer().bfloat16(), *inputs(), target=Target(soc="ascend310p"))
    assert "no kernel on ascend310p" in reason_of(found)
    found = check(Layer().bfloat16(), *inputs(), numerics="exact")
    assert "Options.numerics is 'exact'" in reason_of(found)


def test_tables_in_float32() -> None:
    class Wide(Layer):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor, ckv: Tensor, kpe: Tensor, slots: Tensor) -> None:
            latent, k = self.kv_a_proj_with_mqa(x).split(self.widths, -1)
            k = apart(k.unsqueeze(1).float(), cos.unsqueeze(1), sin.unsqueeze(1)).to(x.dtype)
            ckv.view(-1, 1, LATENT)[slots] = self.kv_a_layernorm(latent).unsqueeze(1)
            kpe.view(-1, 1, ROPE)[slots] = k

    x, cos, sin, *rest = inputs()
    found = check(Wide().bfloat16(), x, cos.float(), sin.float(), *rest)
    assert is_left_in_parts(found)
    assert "cos is float32" in reason_of(found)


def test_parts_of_two_tensors_or_in_the_other_order_are_none() -> None:
    class Two(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(HIDDEN, LATENT + ROPE, bias=False)

        def forward(self, x: Tensor, cos: Tensor, sin: Tensor, ckv: Tensor, kpe: Tensor, slots: Tensor) -> None:
            latent, k = self.kv_a_proj_with_mqa(x)[:, :LATENT], self.other(x)[:, LATENT:]
            ckv.view(-1, 1, LATENT)[slots] = self.kv_a_layernorm(latent).unsqueeze(1)
            kpe.view(-1, 1, ROPE)[slots] = apart(k.unsqueeze(1), cos.unsqueeze(1), sin.unsqueeze(1))

    class Swapped(Layer):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor, ckv: Tensor, kpe: Tensor, slots: Tensor) -> None:
            k, latent = self.kv_a_proj_with_mqa(x).split([ROPE, LATENT], -1)
            ckv.view(-1, 1, LATENT)[slots] = self.kv_a_layernorm(latent).unsqueeze(1)
            kpe.view(-1, 1, ROPE)[slots] = apart(k.unsqueeze(1), cos.unsqueeze(1), sin.unsqueeze(1))

    for layer in (Two(), Swapped()):
        found = check(layer.bfloat16(), *inputs())
        assert not found.findings().of("latent_cache_write")
        assert is_left_in_parts(found)


def test_one_cache_for_both_is_one_write() -> None:
    class Joint(Layer):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor) -> None:
            latent, k = self.keys(x, cos.unsqueeze(1), sin.unsqueeze(1))
            cache.view(-1, 1, LATENT + ROPE)[slots] = torch.cat([latent, k], -1)

    x, cos, sin, ckv, kpe, slots = inputs()
    found = check(Joint().bfloat16(), x, cos, sin, torch.cat([ckv, kpe], -1), slots)
    assert not found.findings().of("kv_cache_write")
    assert found.targets().count("aten.index_put_.default") == 1


def test_a_norm_with_an_offset() -> None:
    class Gemma(Layer):
        def keys(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
            latent, k = self.kv_a_proj_with_mqa(x).split(self.widths, -1)
            weight = 1 + self.kv_a_layernorm.weight.float()
            normed = functional.rms_norm(latent.float(), (LATENT,), eps=1e-6) * weight
            return normed.to(x.dtype).unsqueeze(1), self.rope(k.unsqueeze(1), cos, sin)

    found = check(Gemma().bfloat16(), *inputs())
    assert is_left_in_parts(found)
    assert "offset" in reason_of(found)


@pytest.fixture(scope="module")
def fused() -> Compiled:
    return check(Layer().half(), *inputs(torch.float16))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"write.layout": "batch"}, "its caches have a batch"),
        *[
            ({f"norm.{name}": value}, "its norm has a bias, a gate, groups, an offset or a scale before it")
            for name, value in (("bias", True), ("groups", 2), ("offset", 1.0))
        ],
        ({"norm.steps": frozenset({torch.float64})}, "the model computes in torch.float64"),
        ({"rope.steps": frozenset({torch.float64})}, "the model computes in torch.float64"),
        ({"rope.backward": True}, "it turns by the negative angle"),
        ({"rope.style": "half"}, "its rotation takes halves"),
        ({"rope.style": "interleave"}, "its rotation leaves pairs of neighbours where they are"),
        ({"rope.head_dim": 128}, "64 of 128 elements of k are rotated"),
    ],
)
def test_what_else_a_site_may_be(fused: Compiled, changes: dict, reason: str) -> None:
    given = {f"params.{path}": value for path, value in changes.items()}
    assert reason in refusal(fused, "latent_cache_write", given)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"norm.statistics_dtype": torch.float16}, "takes its statistics in torch.float16"),
        ({}, "the model rounds the normed latent to torch.float16 before the weight"),
        ({"norm.normed_dtype": torch.float32}, "the op rounds the rotated k once"),
    ],
)
def test_what_is_not_exact(fused: Compiled, changes: dict, reason: str) -> None:
    given = {f"params.{path}": value for path, value in changes.items()}
    assert reason in refusal(fused, "latent_cache_write", given, numerics="exact")
