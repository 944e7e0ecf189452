"""A lone rotation becomes one op, in the type that the model computes it in."""

import pytest
import torch

from helpers import compiled, refusal

Tensor = torch.Tensor


def half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def tables(tokens: int, width: int, *, doubled: bool = True) -> tuple[Tensor, Tensor]:
    angles = torch.arange(tokens)[:, None] / 100 ** (torch.arange(width // 2) / width * 2)
    angles = torch.cat((angles, angles), -1) if doubled else angles
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_rotation(dtype) -> None:
    x = torch.randn(2, 5, 3, 16, dtype=dtype).transpose(1, 2)
    cos, sin = (t[None, None].to(dtype) for t in tables(5, 16))
    found = compiled(half, x, cos, sin)
    assert found.report.ops == {"npu::npu_rotary_mul": 1}
    assert found.report.launches_after == 1
    bound = 1e-6 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(found.output, half(x, cos, sin), atol=bound, rtol=bound)
    assert found.output.stride() == half(x, cos, sin).stride()


def test_interleaved_pairs() -> None:
    x = torch.randn(2, 3, 5, 16)
    cos, sin = (t[None, None] for t in tables(5, 16, doubled=False))
    found = compiled(interleaved, x, cos, sin)
    assert found.report.ops == {"npu::npu_rotary_mul": 1}
    assert found.report.count("rope", style="interleave") == 1
    torch.testing.assert_close(found.output, interleaved(x, cos, sin))


@pytest.mark.parametrize("again", [lambda y: y.view(y.shape), lambda y: y.reshape(y.shape), lambda y: y])
def test_a_rotation_that_is_given_twice_is_computed_once(again) -> None:
    def twice(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        y = interleaved(x, cos, sin)
        return y, again(y)

    x = torch.randn(2, 3, 5, 16)
    cos, sin = (t[None, None] for t in tables(5, 16, doubled=False))
    found = compiled(twice, x, cos, sin)
    assert found.report.ops == {"npu::npu_rotary_mul": 1}
    first, second = found.output
    assert first.untyped_storage()._cdata == second.untyped_storage()._cdata
    torch.testing.assert_close(first, interleaved(x, cos, sin))
    torch.testing.assert_close(second, first)


def test_partial_rotation_passes_the_rest() -> None:
    def partial(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch.cat((half(x[..., :8], cos, sin), x[..., 8:]), -1)

    x = torch.randn(2, 3, 5, 16)
    cos, sin = (t[None, None] for t in tables(5, 8))
    found = compiled(partial, x, cos, sin)
    assert found.report.ops == {"npu::npu_rotary_mul": 1}
    assert found.report.count("rope", rope_dim=8, head_dim=16) == 1
    torch.testing.assert_close(found.output, partial(x, cos, sin))


def test_wide_tables_are_never_rounded_to_the_type_of_x() -> None:
    def olmo(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return half(x, cos, sin).to(x.dtype)

    x = torch.randn(1, 3, 5, 64, dtype=torch.bfloat16)
    cos, sin = (t[None, None] for t in tables(5, 64))
    found = compiled(olmo, x, cos, sin)
    assert found.report.ops == {"npu::npu_rotary_mul": 1}
    assert torch.equal(found.output, olmo(x, cos, sin))


def test_tables_are_widened_once_for_all_layers() -> None:
    def layers(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return interleaved(x, cos, sin), interleaved(y, cos, sin)

    cos, sin = (t[None, None] for t in tables(5, 16, doubled=False))
    found = compiled(layers, torch.randn(2, 3, 5, 16), torch.randn(2, 3, 5, 16), cos, sin)
    assert found.report.ops == {"npu::npu_rotary_mul": 2}
    assert sum(target == "aten.stack.default" for target in found.targets()) == 2


def test_tables_that_each_layer_makes_anew_are_made_once() -> None:
    def layer(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # as GLM has it
        cos, sin = (table[..., :8].repeat_interleave(2, -1) for table in (cos, sin))
        return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin

    def layers(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return layer(x, cos, sin), layer(y, cos, sin)

    def layers_of_two_angles(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return layer(x, cos, sin), layer(y, cos.neg(), sin)

    inputs = (*(torch.randn(2, 3, 5, 16) for _ in range(2)), *(t[None, None] for t in tables(5, 16)))
    for function, others in ((layers, 0), (layers_of_two_angles, 1)):
        found = compiled(function, *inputs)
        assert found.report.ops == {"npu::npu_rotary_mul": 2}
        read = [node.args[1:3] for node in found.after.graph.nodes if "npu_rotary_mul" in str(node.target)]
        assert len({cos for cos, _ in read}) == 1 + others
        assert len({sin for _, sin in read}) == 1
        for result, wanted in zip(found.output, function(*inputs), strict=True):
            torch.testing.assert_close(result, wanted)


def test_an_axis_too_long_for_the_kernel_is_refused() -> None:
    x = torch.randn(1, 2, 3, 896)
    cos, sin = (t[None, None] for t in tables(3, 896))
    found = compiled(half, x, cos, sin)
    assert not found.report.ops
    assert "896" in next(site for site in found.report.sites if site.kind == "rope").reason
    assert torch.equal(found.output, half(x, cos, sin))


# Pairs that are taken apart -------------------------------------------------------------------------------------------


def deinterleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


APART = "npu::npu_interleave_rope"
TABLES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "batch, heads, tokens": ((2, 3, 5, 64), (1, 1, 5, 32)),
    "tables of each sequence": ((2, 3, 5, 64), (2, 1, 5, 32)),
    "one head": ((2, 1, 5, 64), (5, 32)),
    "one token": ((2, 3, 1, 64), (1, 1, 1, 32)),
    "batch, tokens, heads": ((2, 5, 3, 64), (1, 5, 1, 32)),
    "tokens, heads": ((5, 3, 64), (5, 1, 32)),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", TABLES)
def test_neighbours_are_taken_apart_by_the_op(name: str, dtype: torch.dtype, dynamic: bool) -> None:
    shape, table = TABLES[name]
    x, cos, sin = torch.randn(shape).to(dtype), *(torch.randn(table).to(dtype) for _ in range(2))
    axis = shape.index(5) - len(shape) if 5 in shape else -2
    if dynamic and 5 in shape:
        for tensor in (x, cos, sin):
            torch._dynamo.mark_dynamic(tensor, axis)
    found = compiled(deinterleaved, x, cos, sin)
    assert found.report.ops == {APART: 1}
    eager, truth = deinterleaved(x, cos, sin), deinterleaved(x.double(), cos.double(), sin.double())
    assert found.output.stride() == eager.stride()
    assert (found.output.double() - truth).pow(2).mean() <= 1.1 * (eager.double() - truth).pow(2).mean()
    (site,) = [site for site in found.report.sites if site.kind == "rope"]
    assert "rounds once" in site.roundings[0]


def test_a_part_behind_what_passes_is_taken_apart() -> None:
    def function(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = x.view(2, 5, 3, 80).transpose(1, 2)
        return torch.cat((heads[..., :16], deinterleaved(heads[..., 16:], cos, sin)), -1)

    x, (cos, sin) = torch.randn(2, 5, 240).bfloat16(), (t.bfloat16() for t in tables(5, 64, doubled=False))
    found = compiled(function, x, cos, sin)
    assert found.report.ops == {APART: 1}
    torch.testing.assert_close(found.output, function(x, cos, sin), atol=0.05, rtol=0.05)


def test_layers_share_the_tables_of_pairs_that_are_taken_apart() -> None:
    def layers(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return deinterleaved(x, cos, sin), deinterleaved(y, cos, sin)

    cos, sin = (t.bfloat16() for t in tables(5, 64, doubled=False))
    found = compiled(layers, torch.randn(2, 3, 5, 64).bfloat16(), torch.randn(2, 2, 5, 64).bfloat16(), cos, sin)
    assert found.report.ops == {APART: 2}
    assert found.targets().count("aten.cat.default") == 2


NARROW = tuple(t.bfloat16() for t in tables(5, 64, doubled=False))
OTHERWISE: dict[str, tuple[Tensor, ...]] = {
    "float32": (torch.randn(2, 3, 5, 64), *tables(5, 64, doubled=False)),
    "32 columns": (torch.randn(2, 3, 5, 32).bfloat16(), *(t[:, :16] for t in NARROW)),
    "wider tables": (torch.randn(2, 3, 5, 64).bfloat16(), *tables(5, 64, doubled=False)),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_the_op_has_not_is_taken_apart_before(name: str) -> None:
    inputs = OTHERWISE[name]

    def function(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return deinterleaved(x, cos, sin).to(x.dtype)

    found = compiled(function, *inputs)
    assert found.report.ops == {"npu::npu_rotary_mul": 1}
    bound = 1e-6 if inputs[0].dtype == torch.float32 else 0.05
    torch.testing.assert_close(found.output, function(*inputs), atol=bound, rtol=bound)


def test_both_ops_say_why_not() -> None:
    x, cos, sin = torch.randn(2, 1000, 5, 64).bfloat16(), *tables(5, 64, doubled=False)
    found = compiled(lambda x, cos, sin: deinterleaved(x, cos, sin).to(x.dtype), x, cos, sin)
    assert not found.report.ops
    (site,) = [site for site in found.report.sites if site.kind == "rope"]
    assert site.reason.startswith("npu_interleave_rope: cos is float32 (the kernel takes float16, bfloat16); npu_rota")
    assert "N is 1000" in site.reason


def apart(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return half(x.unflatten(-1, (-1, 2)).transpose(-1, -2).reshape(x.shape), cos, sin)


@pytest.mark.parametrize(
    ("shape", "of_table", "reason"),
    [
        ((2, 3, 5, 7, 64), (5, 7), "axis 1 of 5 counts heads; the op wants batch, heads, tokens, or tokens, heads"),
        ((2, 3, 5, 7, 64), (2, 3, 5, 7), "cos and sin differ along all axes of x; the op wants them alike for all"),
    ],
)
def test_heads_of_pairs_that_are_taken_apart(shape, of_table, reason) -> None:
    x, angles = torch.randn(shape), torch.rand(*of_table, 32)
    cos, sin = (torch.cat((half, half), -1) for half in (angles.cos(), angles.sin()))
    found = compiled(apart, x, cos, sin)
    assert reason in found.report.sites[0].reason
    assert torch.equal(found.output, apart(x, cos, sin))


def test_a_backward_rotation_is_refused() -> None:
    cos, sin = (t[None, None] for t in tables(5, 16))
    found = compiled(half, torch.randn(2, 3, 5, 16), cos, sin)
    assert "it turns by the negative angle" in refusal(found, "rope", {"params.backward": True})
    steps = {"params.steps": frozenset({torch.float64})}
    assert "the model computes in torch.float64" in refusal(found, "rope", steps)
