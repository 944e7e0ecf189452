"""RMSNorm in the spellings of public models: recognised once, repeated bit for bit; what only looks like it is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import spellings
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from spellings import EPS
from torch import fx, nn
from torch.nn import functional

from helpers import Compiled, compiled, repeats
from npu_fuse.patterns.match import Match
from npu_fuse.patterns.rms_norm import RmsNorm
from npu_fuse.patterns.values import strip_widening
from npu_fuse.runtime.ops.register import register
from npu_fuse.runtime.target import Target

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [(BF16, BF16), (BF16, FP32), (FP16, FP16), (FP16, FP32), (FP32, FP32), (FP32, BF16)]
SIZE = 12  # no power of two: a division by it rounds


def tensors(*dtypes: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """An x and a weight for each pair of dtypes."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, 5, SIZE), (SIZE,))
    return [3 * torch.randn(shapes[i % 2], generator=generator).to(dtype) for i, dtype in enumerate(dtypes)]


def call(function: Callable[..., torch.Tensor], *, weighted: bool = True, dynamic: bool = False) -> Compiled:
    """Compiles a spelling for all dtypes in one graph: a result for each pair of x and weight."""

    def spelled(*arguments: torch.Tensor) -> list[torch.Tensor]:
        pairs = zip(arguments[::2], arguments[1::2], strict=True)
        return [function(x, w) if weighted else function(x) for x, w in pairs]

    inputs = tensors(*(dtype for pair in DTYPES for dtype in pair))
    if dynamic:
        for tensor in inputs[::2]:
            torch._dynamo.mark_dynamic(tensor, 0)
            torch._dynamo.mark_dynamic(tensor, 1)
    return compiled(spelled, *inputs)


def matches_of_outputs(found: Compiled) -> list[Match]:
    """The norms that the graph returns, which must be all that there are."""
    outputs = found.before.graph.output_node().args[0]
    matches = {match.node: match for match in found.findings().of("rms_norm")}
    assert list(matches) == sorted(outputs)
    assert not found.findings().near_misses()
    return [matches[output] for output in outputs]


def check(found: Compiled, *, weight: bool = True, offset: float = 0.0) -> None:
    values = found.values()
    for match in matches_of_outputs(found):
        p = match.params
        assert isinstance(p, RmsNorm)
        assert p.eps == pytest.approx(EPS)
        assert (p.hidden_size, p.weight, p.offset) == (SIZE, weight, offset)
        assert match.inputs["x"].op == "placeholder"
        assert repeats(match, values), p
        close_to_the_maths(match, values)


def close_to_the_maths(match: Match, values: dict[fx.Node, torch.Tensor]) -> None:
    """What the parameters say, in float64, is what the graph gives but for rounding."""
    p = match.params
    x, weight, bias, gate = (values[n].double() if (n := match.inputs.get(name)) is not None else None
                             for name in ("x", "weight", "bias", "gate"))
    act = {"silu": functional.silu, "sigmoid": torch.sigmoid}.get(p.gate)
    if act is not None and gate_is_before(match):
        x = x * act(gate)
    grouped = x.unflatten(-1, (p.groups, -1))
    y = (grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + p.eps)).flatten(-2)
    y = y * (p.offset + weight) if p.weight else y
    y = y + bias if p.bias else y
    y = y * act(gate) if act is not None and not gate_is_before(match) else y
    coarsest = max(torch.finfo(dtype).eps for dtype in p.steps)
    torch.testing.assert_close(values[match.node].double(), y, rtol=8 * coarsest, atol=8 * coarsest)


def gate_is_before(match: Match) -> bool:
    return match.parts[0].inputs["x"] is not match.inputs["x"]


@pytest.mark.parametrize("spelling", spellings.WEIGHTED)
def test_a_weighted_norm_is_recognised_and_repeated(spelling: str) -> None:
    check(call(spellings.WEIGHTED[spelling]))


@pytest.mark.parametrize("spelling", spellings.OFFSET)
def test_one_plus_weight_is_recognised_and_repeated(spelling: str) -> None:
    check(call(spellings.OFFSET[spelling]), offset=1.0)


@pytest.mark.parametrize("spelling", spellings.BARE)
def test_a_norm_without_weight_is_recognised_and_repeated(spelling: str) -> None:
    check(call(spellings.BARE[spelling], weighted=False), weight=False)


@pytest.mark.parametrize("spelling", ["llama", "olmo", "F.rms_norm", "sum / size", "keepdim=False, unsqueeze"])
def test_batch_and_tokens_may_be_symbols(spelling: str) -> None:
    found = call(spellings.WEIGHTED[spelling], dynamic=True)
    assert any(isinstance(size, torch.SymInt) for node in found.before.graph.nodes for size in [node.meta.get("val")])
    check(found)


@pytest.mark.parametrize("elementwise_affine", [True, False])
def test_the_module_of_torch(elementwise_affine: bool) -> None:
    norm = nn.RMSNorm(SIZE, eps=EPS, elementwise_affine=elementwise_affine)
    found = compiled(norm, torch.randn(3, SIZE), dynamic=elementwise_affine)
    check(found, weight=elementwise_affine)


def test_the_module_of_torch_has_the_eps_of_its_dtype_when_none_is_given() -> None:
    (match,) = matches_of_outputs(compiled(nn.RMSNorm(SIZE).bfloat16(), torch.randn(3, SIZE, dtype=BF16)))
    assert match.params.eps == torch.finfo(FP32).eps


@pytest.mark.parametrize("move", [lambda x: x.transpose(1, 2), lambda x: x[..., ::2], lambda x: x[:, 1:, 2:-2]])
def test_x_may_lie_anyhow(move: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = move(torch.randn(2, SIZE, SIZE).bfloat16())
    found = compiled(spellings.WEIGHTED["llama"], x, torch.randn(x.shape[-1]).bfloat16())
    (match,) = matches_of_outputs(found)
    assert repeats(match, found.values())


def test_a_weight_may_serve_two_norms_and_a_norm_two_weights() -> None:
    def function(a: torch.Tensor, b: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        llama = spellings.WEIGHTED["llama"]
        return [llama(a, w), llama(b, w), llama(a, v)]

    a, w, b, v = tensors(BF16, BF16, BF16, BF16)
    found = compiled(function, a, b, w, v)
    matches = matches_of_outputs(found)
    assert len({match.node for match in matches}) == 3
    assert all(repeats(match, found.values()) for match in matches)


def test_x_and_weight_may_be_computed_twice_alike() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        mean = x.transpose(0, 1).float().pow(2).mean(-1, keepdim=True)
        return (x.transpose(0, 1) * torch.rsqrt(mean + EPS)).to(x.dtype) * w.view(1, SIZE)

    found = compiled(function, *tensors(BF16, BF16))
    (match,) = matches_of_outputs(found)
    assert repeats(match, found.values())


# Where a norm is written out but something is else, the norm that there is ends before it --------------------------


def _ends_before(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> None:
    found = compiled(function, *inputs)
    (match,) = found.findings().of("rms_norm")
    assert not match.params.weight
    assert match.node is not found.before.graph.output_node().args[0][0]
    assert repeats(match, found.values())


def test_a_factor_for_each_token_is_no_weight() -> None:
    x, _ = tensors(FP32, FP32)
    _ends_before(lambda x, w: spellings.BARE["llama4, nanochat"](x) * w, x, torch.randn(5, 1))


def test_a_factor_of_one_element_is_no_weight() -> None:
    x, _ = tensors(FP32, FP32)
    _ends_before(lambda x, w: spellings.BARE["llama4, nanochat"](x) * w, x, torch.randn(1))


def test_a_matrix_of_weights_is_no_weight() -> None:
    x, _ = tensors(FP32, FP32)
    _ends_before(lambda x, w: spellings.BARE["llama4, nanochat"](x) * w, x, torch.randn(5, SIZE))


def test_two_minus_weight_is_no_weight() -> None:
    x, w = tensors(FP32, FP32)
    _ends_before(lambda x, w: spellings.BARE["llama4, nanochat"](x) * (2 - w), x, w)


def test_a_second_rounding_of_the_result_is_not_swallowed() -> None:
    _ends_before(lambda x: spellings.BARE["x / sqrt"](x.double()).float().bfloat16(), tensors(FP32)[0])


# Roundings inside are a matter of the spelling, which repeats them ----------------------------------------------------

ROUNDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "x between": lambda x: _scaled(x.to(BF16), x.pow(2).mean(-1, keepdim=True)),
    "squares": lambda x: _scaled(x, x.pow(2).to(BF16).float().mean(-1, keepdim=True)),
    "mean": lambda x: _scaled(x, x.pow(2).mean(-1, keepdim=True).to(BF16)),
    "squares, averaged wide": lambda x: _scaled(x, x.to(BF16).pow(2).mean(-1, keepdim=True, dtype=FP32)),
    "scale, twice": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS).to(FP16).to(BF16),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_inner_roundings_are_repeated_and_known(name: str) -> None:
    found = compiled(ROUNDED[name], tensors(FP32)[0])
    check(found, weight=False)
    (match,) = matches_of_outputs(found)
    assert BF16 in match.params.steps
    statistics, scale = match.params.statistics_dtype, match.params.scale_dtype
    assert name == "x between" or {BF16, FP16}.intersection((statistics, scale))
    assert not found.report.ops
    assert "rounds to torch." in found.report.sites[0].reason


def test_a_norm_that_is_an_op_already_is_one() -> None:
    """As diffusers and SGLang call it on an NPU."""
    register(Target())
    x, w = tensors(BF16, BF16)
    for op, offset in ((torch.ops.npu.npu_rms_norm, 0.0), (torch.ops.npu.npu_gemma_rms_norm, 1.0)):
        found = compiled(lambda x, w, op=op: op(x, w, EPS)[0], x, w)
        check(found, offset=offset)
        (site,) = found.report.sites
        assert site.status == "lowered"
        assert not site.roundings
        assert found.report.ops == {f"npu::{op._qualified_op_name.removeprefix('npu::')}": 1}
        assert torch.equal(found.output, op(x, w, EPS)[0])


@pytest.fixture
def vllm_norm() -> Iterator[Callable[..., torch.Tensor]]:
    """vLLM's op, as vLLM 0.33 declares and computes it."""
    library = torch.library.Library("vllm_ir", "FRAGMENT")
    library.define("rms_norm(Tensor x, Tensor? weight, float epsilon, SymInt? variance_size=None) -> Tensor")

    def native(
        x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> torch.Tensor:
        wide = x.float()
        part = wide if variance_size is None else wide[..., :variance_size]
        wide = wide * torch.rsqrt(part.pow(2).mean(dim=-1, keepdim=True) + epsilon)
        return (wide if weight is None else wide.to(weight.dtype) * weight).to(x.dtype)

    for key in ("CPU", "Meta"):
        library.impl("rms_norm", native, key)
    yield torch.ops.vllm_ir.rms_norm
    library._destroy()


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_vllms_op_for_a_norm_is_one(vllm_norm: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    x, w = tensors(dtype, dtype)
    found = compiled(lambda x, w: vllm_norm(x, w, EPS), x, w)
    check(found)
    (site,) = found.report.sites
    assert site.status == "lowered"
    assert not site.roundings
    assert found.report.ops == {"npu::npu_rms_norm": 1}
    torch.testing.assert_close(found.output, vllm_norm(x, w, EPS))
    added = compiled(lambda x, y, w: vllm_norm(x + y, w, EPS), x, x.flip(0), w)
    assert added.report.ops == {"npu::npu_add_rms_norm": 1}
    torch.testing.assert_close(added.output, vllm_norm(x + x.flip(0), w, EPS))


def test_vllms_op_stays_where_it_rounds_or_averages_otherwise(vllm_norm: Callable[..., torch.Tensor]) -> None:
    x, w = tensors(BF16, FP32)
    for function in (lambda x, w: vllm_norm(x, w, EPS), lambda x, w: vllm_norm(x, w.bfloat16(), EPS, 8)):
        found = compiled(function, x, w)
        assert not found.report.sites
        assert "vllm_ir.rms_norm.default" in found.targets()
        assert torch.equal(found.output, function(x, w))


# Weights, biases, groups and gates ------------------------------------------------------------------------------------


def test_a_bias_is_a_part_of_the_norm() -> None:
    spellings_of_bias = [
        lambda x, w, b: spellings.WEIGHTED["fla"](x, w) + b,
        lambda x, w, b: b + spellings.WEIGHTED["llama"](x, w),
        lambda x, w, b: torch.addcmul(b, spellings.BARE["x / sqrt"](x), w),
    ]
    x, w, _, b = tensors(FP32, FP32, FP32, FP32)
    for function in spellings_of_bias:
        found = compiled(function, x, w, b)
        (match,) = matches_of_outputs(found)
        assert match.params.bias
        assert match.params.weight
        assert repeats(match, found.values())
        close_to_the_maths(match, found.values())


def test_a_residual_behind_the_norm_is_no_bias() -> None:
    x, w, y, _ = tensors(FP32, FP32, FP32, FP32)
    (match,) = compiled(lambda x, w, y: y + spellings.WEIGHTED["llama"](x, w), x, w, y).findings().of("rms_norm")
    assert not match.params.bias


WEIGHTS: dict[str, Callable[..., torch.Tensor]] = {
    "expand_as": lambda x, w, v: spellings.BARE["llama4, nanochat"](x) * w.expand_as(x),
    "product": lambda x, w, v: spellings.BARE["llama4, nanochat"](x) * (w * v),
    "scaled": lambda x, w, v: spellings.BARE["llama4, nanochat"](x) * (3 * w),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_weight_may_be_computed(name: str) -> None:
    x, w, _, v = tensors(FP32, FP32, FP32, FP32)
    found = compiled(WEIGHTS[name], x, w, v)
    check(found)


def test_a_mean_may_be_viewed_and_a_sum_divided_anyhow() -> None:
    def viewed(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1) + EPS).view(*x.shape[:-1], 1)

    def times_reciprocal(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) * (1 / SIZE) + EPS)

    def eps_in_the_sum(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x.pow(2).sum(-1, keepdim=True) + EPS * SIZE) / SIZE)

    for function in (viewed, times_reciprocal, eps_in_the_sum):
        check(compiled(function, tensors(FP32)[0]), weight=False)


def _grouped(x: torch.Tensor, w: torch.Tensor, groups: int) -> torch.Tensor:
    wide = x.float().view(*x.shape[:-1], groups, -1)
    return w * spellings.BARE["x / sqrt"](wide).view(x.shape).to(x.dtype)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_groups_are_normed_each_on_its_own(groups: int, dynamic: bool) -> None:
    x, w = tensors(BF16, BF16)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(x, 1)
    found = compiled(lambda x, w: _grouped(x, w, groups), x, w)
    (match,) = matches_of_outputs(found)
    assert (match.params.groups, match.params.hidden_size, match.params.weight) == (groups, SIZE, True)
    assert repeats(match, found.values())
    close_to_the_maths(match, found.values())


def test_groups_of_another_axis_are_none() -> None:
    x, _ = tensors(FP32, FP32)
    found = compiled(lambda x: spellings.BARE["x / sqrt"](x.view(2, 5, 3, 4)).transpose(-1, -2).reshape(x.shape), x)
    (match,) = found.findings().of("rms_norm")
    assert match.params.hidden_size == 4


def _silu_before(x: torch.Tensor, gate: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    wide = x.float() * functional.silu(gate.float())
    return w * spellings.BARE["x / sqrt"](wide).to(x.dtype)


def _silu_before_grouped(x: torch.Tensor, gate: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return _grouped(x.float() * functional.silu(gate.float()), w, 3).to(x.dtype)


def _silu_behind(x: torch.Tensor, gate: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (spellings.WEIGHTED["llama"](x, w) * functional.silu(gate.float())).to(x.dtype)


def _sigmoid_behind(x: torch.Tensor, gate: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    wide = spellings.BARE["x / sqrt"](x.float()) * w.float()
    return (torch.sigmoid(gate.float()) * wide).to(x.dtype)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("gated", [_silu_before, _silu_before_grouped, _silu_behind, _sigmoid_behind])
def test_a_gate_is_a_part_of_the_norm_and_no_unit_of_its_own(gated, dtype: torch.dtype) -> None:
    x, w, gate, _ = tensors(dtype, dtype, dtype, dtype)
    found = compiled(gated, x, gate, w)
    (match,) = matches_of_outputs(found)
    assert match.params.gate == ("sigmoid" if gated is _sigmoid_behind else "silu")
    assert (match.params.weight, match.params.groups) == (True, 3 if gated is _silu_before_grouped else 1)
    assert all(match.inputs[name].op == "placeholder" for name in ("x", "gate", "weight"))
    assert repeats(match, found.values())
    close_to_the_maths(match, found.values())
    assert not found.findings().of("glu")
    assert found.report.count("rms_norm", gated=True) == 1


def _scaled_first(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    scaled = (x.float() * (1.0 + w)).to(x.dtype).float()
    return (scaled * torch.rsqrt(scaled.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_vector_that_scales_x_for_the_norm_alone_is_a_part_of_it(dtype: torch.dtype) -> None:
    x, w = tensors(dtype, dtype)
    found = compiled(_scaled_first, x, w)
    (match,) = matches_of_outputs(found)
    assert match.params.scaled_before
    assert match.inputs["x"].op == "placeholder"
    assert repeats(match, found.values())
    assert found.report.ops == {"npu::npu_rms_norm": 1}
    torch.testing.assert_close(found.output, _scaled_first(x, w))


def test_a_scaled_x_that_is_used_elsewhere_is_x_itself() -> None:
    def model(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        scaled = x * w
        return [spellings.BARE["x / sqrt"](scaled), scaled]

    (match,) = compiled(model, *tensors(FP32, FP32)).findings().of("rms_norm")
    assert not match.params.scaled_before
    assert match.inputs["x"].name == "mul"


def test_a_norm_of_an_mlps_unit_has_no_gate() -> None:
    def model(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return spellings.WEIGHTED["llama"](functional.silu(functional.linear(x, a)) * functional.linear(x, b), w)

    x, w = tensors(FP32, FP32)
    findings = compiled(model, x, w, torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)).findings()
    assert len(findings.of("glu")) == 1
    assert [match.params.gate for match in findings.of("rms_norm")] == [None]


# What is no RMSNorm -------------------------------------------------------------------------------------------------


def _scaled(x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(mean + EPS)


def _layer_norm(x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return _scaled(centred, centred.pow(2).mean(-1, keepdim=True))


def test_a_norm_of_a_norm_is_two() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(12, 12), torch.nn.RMSNorm(12), torch.nn.RMSNorm(12))
    found = compiled(model, tensors(FP32)[0])
    assert [match.params.scaled_before for match in found.findings().of("rms_norm")] == [False, False]
    assert found.report.ops == {"npu::npu_rms_norm": 2}


NEAR: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "L2 norm": (
        lambda x: _scaled(x, (x * x).sum(-1, keepdim=True)),
        "eps is added to 12 times the mean of squares (an L2 norm); an RMSNorm adds it to the mean",
    ),
    "LayerNorm": (_layer_norm, "the mean is subtracted before the squares are taken: a LayerNorm, not an RMSNorm"),
    "other axis": (
        lambda x: _scaled(x, x.pow(2).mean(1, keepdim=True)),
        "the mean of squares is taken over axes (-2,); an RMSNorm takes it over (-1,)",
    ),
    "two axes": (
        lambda x: _scaled(x, x.pow(2).mean((1, 2), keepdim=True)),
        "the mean of squares is taken over axes (-2, -1); an RMSNorm takes it over (-1,)",
    ),
    "eps outside of the root": (
        lambda x: x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6),
        "eps 1e-06 is added to the root of the mean of squares; an RMSNorm adds it under the root",
    ),
    "another value scaled": (
        lambda x: _scaled(x.sin(), x.pow(2).mean(-1, keepdim=True)),
        "the value that is scaled is not the one whose squares are averaged",
    ),
}


@pytest.mark.parametrize("name", NEAR)
def test_a_near_miss_says_where_it_differs(name: str) -> None:
    function, reason = NEAR[name]
    findings = compiled(function, tensors(FP32)[0]).findings()
    assert not findings.of("rms_norm")
    assert [miss.kind for miss in findings.near_misses()] == ["rms_norm"]
    assert findings.near_misses()[0].reason.startswith(reason)


FAR: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean of magnitudes": lambda x: _scaled(x, x.abs().mean(-1, keepdim=True)),
    "mean of products": lambda x: _scaled(x, (x * x.cos()).mean(-1, keepdim=True)),
    "divided by the mean": lambda x: x / (x.pow(2).mean(-1, keepdim=True) + EPS),
    "fourth root": lambda x: x * (x.pow(2).mean(-1, keepdim=True) + EPS).pow(-0.25),
    "multiplied by the root": lambda x: x * torch.sqrt(x.pow(2).mean(-1, keepdim=True) + EPS),
    "eps behind the root": lambda x: x / (x.pow(2).mean(-1, keepdim=True).sqrt() + EPS),
    "less than the mean": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) - EPS),
    "two values averaged": lambda x: _scaled(x, x.pow(2).mean(-1, keepdim=True) + x.cos().mean(-1, keepdim=True)),
    "largest square": lambda x: _scaled(x, x.pow(2).amax(-1, keepdim=True)),
    "all of it": lambda x: _scaled(x, x.pow(2).mean()),
}


@pytest.mark.parametrize("name", FAR)
def test_other_maths_is_not_recognised(name: str) -> None:
    assert not compiled(FAR[name], tensors(FP32)[0]).findings().of("rms_norm")


def test_a_scale_along_the_wrong_axis_is_not_recognised() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        mean = x.pow(2).mean(-1)
        return [_scaled(x, mean), _scaled(x, mean.unsqueeze(0)), _scaled(x, mean.view(1, -1))]

    assert not compiled(function, torch.randn(SIZE, SIZE)).findings().of("rms_norm")


# Any spelling of the same maths --------------------------------------------------------------------------------------

CHOICES: dict[str, dict[str, Callable[..., torch.Tensor]]] = {
    "square": {"pow": lambda x: x.pow(2), "product": lambda x: x * x, "square": torch.square},
    "mean": {
        "mean": lambda s: s.mean(-1, keepdim=True),
        "sum / n": lambda s: s.sum(-1, keepdim=True) / SIZE,
        "unsqueezed": lambda s: s.mean(-1).unsqueeze(-1),
    },
    "eps": {"behind": lambda m: m + EPS, "before": lambda m: EPS + m, "minus": lambda m: m - -EPS},
    "scaled": {
        "rsqrt": lambda x, v: x * torch.rsqrt(v),
        "swapped": lambda x, v: torch.rsqrt(v) * x,
        "pow": lambda x, v: x * v**-0.5,
        "1 / sqrt": lambda x, v: x * (1 / torch.sqrt(v)),
        "reciprocal": lambda x, v: x * v.sqrt().reciprocal(),
        "x / sqrt": lambda x, v: x / v.sqrt(),
        "x / pow": lambda x, v: x / v**0.5,
    },
}
ORDERS: dict[str, Callable[..., torch.Tensor]] = {
    "normed * weight": lambda x, w, v, scaled, cast: cast(scaled(x, v)) * w,
    "weight * normed": lambda x, w, v, scaled, cast: w * cast(scaled(x, v)),
    "(x * weight) * scale": lambda x, w, v, scaled, cast: scaled(x * w, v),
    "x * (weight * scale)": lambda x, w, v, scaled, cast: x * scaled(w, v),
}
dtypes = st.sampled_from([BF16, FP16, FP32, torch.float64])
norms = st.fixed_dictionaries(
    {
        **{step: st.sampled_from(sorted(choices)) for step, choices in CHOICES.items()},
        "order": st.sampled_from(sorted(ORDERS)),
        "offset": st.sampled_from([0.0, 1.0, -0.5]),
        "statistics": st.sampled_from([FP32, torch.float64]),
        "scaled_wide": st.booleans(),
        "normed": dtypes,
        "result": dtypes,
    }
)


def spelled(norm: dict[str, object], cast: Callable[[str, torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A norm of the given choices; `cast` may round a value, known by the step that made it."""
    steps = {step: CHOICES[step][norm[step]] for step in CHOICES}

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        wide = x.to(norm["statistics"])
        square = cast("square", steps["square"](wide))
        variance = cast("variance", steps["eps"](cast("mean", steps["mean"](square))))
        factor = cast("factor", w + norm["offset"]) if norm["offset"] else w
        scaled_x = wide if norm["scaled_wide"] else x
        y = ORDERS[norm["order"]](scaled_x, factor, variance, steps["scaled"], lambda n: n.to(norm["normed"]))
        return y.to(norm["result"])

    return function


@settings(max_examples=60, deadline=None)
@given(norm=norms, x_dtype=st.sampled_from([BF16, FP16, FP32]), weight_dtype=st.sampled_from([BF16, FP32]))
def test_any_spelling_is_recognised_and_repeated(
    norm: dict[str, object], x_dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    found = compiled(spelled(norm, lambda _, value: value), *tensors(x_dtype, weight_dtype))
    (match,) = found.findings().of("rms_norm")
    assert match.node is strip_widening(found.before.graph.output_node().args[0][0])
    assert match.params.offset == norm["offset"]
    assert repeats(match, found.values()), match.params


@settings(max_examples=40, deadline=None)
@given(norm=norms, rounded=st.sets(st.sampled_from(["square", "mean", "variance", "factor"])), to=dtypes)
def test_what_is_recognised_is_repeated_whatever_is_rounded(
    norm: dict[str, object], rounded: set[str], to: torch.dtype
) -> None:
    function = spelled(norm, lambda step, value: value.to(to).to(value.dtype) if step in rounded else value)
    found = compiled(function, *tensors(FP32, FP32))
    for match in found.findings().of("rms_norm"):
        assert repeats(match, found.values()), match.params


PERTURBED: dict[tuple[str, str], Callable[..., torch.Tensor]] = {
    ("square", "cube"): lambda x: x.pow(3),
    ("square", "magnitude"): torch.abs,
    ("mean", "sum"): lambda s: s.sum(-1, keepdim=True),
    ("mean", "other axis"): lambda s: s.mean(0, keepdim=True),
    ("mean", "sum / 11"): lambda s: s.sum(-1, keepdim=True) / (SIZE - 1),
    ("eps", "subtracted"): lambda m: m - EPS,
    ("scaled", "root"): lambda x, v: x * v.sqrt(),
    ("scaled", "no root"): lambda x, v: x / v,
    ("scaled", "another value"): lambda x, v: torch.rsqrt(v) * x.sin(),
}


@settings(max_examples=40, deadline=None)
@given(norm=norms, perturbed=st.sampled_from(sorted(PERTURBED)))
def test_no_perturbed_spelling_is_recognised(norm: dict[str, object], perturbed: tuple[str, str]) -> None:
    step, _ = perturbed
    x, w = tensors(FP32, FP32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CHOICES, step, {norm[step]: PERTURBED[perturbed]})
        function = spelled({**norm, "order": "normed * weight"}, lambda _, value: value)
    assert not compiled(function, x, w).findings().of("rms_norm")
