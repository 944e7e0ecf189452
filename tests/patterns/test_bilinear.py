"""How a rotation is read: at any size, never across rows, and with all that it rounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from spellings import ROTATIONS

from helpers import Compiled, compiled, repeats
from npu_fuse.patterns.match import Match

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
D = 8
ALL = [(style, width, name) for (style, width), rotations in ROTATIONS.items() for name in rotations]
Rotation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return ROTATIONS["half", "full"]["llama"](x, cos, sin)


def turned(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def inputs(*shape: int, width: int = D, dtype: torch.dtype = FP32) -> tuple[torch.Tensor, ...]:
    """An x [..., tokens, n] and tables [tokens, width]."""
    return torch.randn(shape).to(dtype), *(torch.randn(shape[-2], width).to(dtype) for _ in range(2))


def whole(found: Compiled) -> list[Match]:
    """The rotations that the graph returns."""
    outputs = found.before.graph.output_node().args[0]
    return [match for match in found.findings().of("rope") if match.node in outputs]


def check(found: Compiled) -> Match:
    (match,) = whole(found)
    assert repeats(match, found.values()), match.params
    return match


# Sizes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("style", "width", "name"), ALL)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_every_spelling_at_the_sizes_of_a_model(style: str, width: str, name: str, dtype: torch.dtype) -> None:
    columns = 128 if width == "full" else 64
    found = compiled(ROTATIONS[style, width][name], *inputs(1, 32, 512, 128, width=columns, dtype=dtype))
    match = check(found)
    assert (match.params.style, match.params.head_dim, match.params.table_dim) == (style, 128, columns)
    assert match.inputs["x"].op == "placeholder"
    assert found.report.seconds_by_pass["recognise"] < 1


@pytest.mark.parametrize(("style", "width", "name"), ALL)
def test_every_spelling_with_symbols_for_batch_and_tokens(style: str, width: str, name: str) -> None:
    x, cos, sin = inputs(2, 3, 5, D, width=D if width == "full" else D // 2)
    for tensor in (x, cos, sin):
        torch._dynamo.mark_static(tensor, tensor.dim() - 1)
    torch._dynamo.mark_static(x, 1)
    check(compiled(ROTATIONS[style, width][name], x, cos, sin, dynamic=True))


@pytest.mark.parametrize("shape", [(5, 8, 8, 8), (8, 8, 8), (1, 1, 1, 8), (2, 8), (2, 2, 2, 2, 8)])
@pytest.mark.parametrize("name", ["llama", "view, unbind, cat"])
def test_axes_of_one_size_are_told_apart(shape: tuple[int, ...], name: str) -> None:
    check(compiled(ROTATIONS["half", "full"][name], *inputs(*shape)))


@pytest.mark.parametrize("table", [(D,), (1, D), (3, 1, D), (3, 5, D), (2, 3, 5, D), (2, 1, 1, D), (1, 1, 5, D)])
def test_tables_broadcast(table: tuple[int, ...]) -> None:
    check(compiled(half, torch.randn(2, 3, 5, D), torch.randn(table), torch.randn(table)))


def test_tables_may_broadcast_differently() -> None:
    check(compiled(half, torch.randn(2, 3, 5, D), torch.randn(5, D), torch.randn(2, 1, 1, D)))


# Rows -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 11, 13])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_what_rotates_only_some_rows_is_no_rotation(count: int, axis: int) -> None:
    """Whichever small number stands in for an axis, the first `count` along it must not pass for all."""

    def first(x: torch.Tensor) -> torch.Tensor:
        return x.narrow(axis, 0, count)

    def rest(x: torch.Tensor) -> torch.Tensor:
        return x.narrow(axis, count, x.shape[axis] - count)

    x, cos, sin = inputs(29, 29, 29, D)
    spellings: list[Rotation] = [
        lambda x, cos, sin: torch.cat((half(first(x), cos, sin), rest(x)), axis),
        lambda x, cos, sin: torch.cat((first(x), half(rest(x), cos, sin)), axis),
        lambda x, cos, sin: x * cos + turned(torch.cat((rest(x), first(x)), axis)) * sin,
        lambda x, cos, sin: x * cos + turned(x.roll(count, axis)) * sin,
    ]
    if axis == 2:
        cos, sin = cos[:1], sin[:1]
    assert not whole(compiled(lambda *args: [spelling(*args) for spelling in spellings], x, cos, sin))


@pytest.mark.parametrize("count", [5, 7, 29])
def test_nor_with_symbolic_axes(count: int) -> None:
    def function(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
        swapped = torch.cat((x[:, count:], x[:, :count]), 1)
        return [x * cos + turned(swapped) * sin, torch.cat((half(x[:, :count], cos, sin), x[:, count:]), 1)]

    x, cos, sin = inputs(2, 31, 3, D)
    for tensor in (x, cos, sin):
        torch._dynamo.mark_static(tensor, tensor.dim() - 1)
    assert not whole(compiled(function, x, cos, sin, dynamic=True))


MIXED: dict[str, Rotation] = {
    "batches swapped": lambda x, cos, sin: x * cos + turned(x.flip(0)) * sin,
    "batch and heads": lambda x, cos, sin: x * cos + turned(x.transpose(0, 1)) * sin,
    "heads and tokens": lambda x, cos, sin: x * cos + turned(x.transpose(1, 2)) * sin,
    "tokens and elements": lambda x, cos, sin: x * cos + turned(x.transpose(2, 3)) * sin,
    "by a view": lambda x, cos, sin: x * cos + turned(x.transpose(0, 1).reshape(x.shape)) * sin,
    "two heads": lambda x, cos, sin: x * cos + torch.cat((-x.roll(1, 1)[..., D // 2 :], x[..., : D // 2]), -1) * sin,
    "two tokens": lambda x, cos, sin: x * cos + turned(x.flatten(2).roll(D, -1).view(x.shape)) * sin,
}


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("size", [3, D])
def test_what_reads_another_row_is_no_rotation(name: str, size: int) -> None:
    x, cos, sin = inputs(size, size, size, D)
    if name == "tokens and elements":
        x, cos, sin = inputs(2, 3, D, D)
    assert not whole(compiled(MIXED[name], x, cos, sin))


# Elements -------------------------------------------------------------------------------------------------------------

WRONG: dict[str, Rotation] = {
    "x added": lambda x, cos, sin: half(x, cos, sin) + x,
    "one product twice": lambda x, cos, sin: half(x, cos, sin) + x * cos,
    "another product": lambda x, cos, sin: half(x, cos, sin) + x.flip(-1) * sin,
    "negated": lambda x, cos, sin: -half(x, cos, sin),
    "a quarter added": lambda x, cos, sin: half(x, cos, sin) + 0.25,
    "a quarter subtracted": lambda x, cos, sin: half(x, cos, sin) - 0.25,
    "subtracted from a quarter": lambda x, cos, sin: 0.25 - half(-x, cos, sin),
    "next to nothing added to x": lambda x, cos, sin: (x + 1e-20) * cos + turned(x) * sin,
    "doubled": lambda x, cos, sin: torch.add(x * cos, turned(x) * sin, alpha=2),
    "one table": lambda x, cos, sin: half(x, cos, cos),
    "squared table": lambda x, cos, sin: x * cos * cos + turned(x) * sin,
    "quarters": lambda x, cos, sin: x * cos + torch.cat((turned(x[..., :4]), turned(x[..., 4:])), -1) * sin,
    "reversed": lambda x, cos, sin: x * cos + torch.cat((-x.flip(-1)[..., :4], x.flip(-1)[..., 4:]), -1) * sin,
    "pairs for halves": lambda x, cos, sin: x * cos + turned(x.unflatten(-1, (2, -1)).mT.flatten(-2)) * sin,
    "nothing passed": lambda x, cos, sin: torch.cat((half(x[..., :4], cos[..., :4], sin[..., :4]), x[..., :4]), -1),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_formula_is_no_rotation(name: str) -> None:
    assert not whole(compiled(WRONG[name], *inputs(2, 3, 5, D)))


def test_what_is_added_to_passed_elements_is_seen() -> None:
    def function(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
        rotated = half(x[..., :4], cos, sin)
        return [
            torch.cat((rotated, x[..., 4:] + x[..., :4] * sin), -1),
            torch.cat((rotated, x[..., 4:] * cos), -1),
            torch.cat((rotated, -x[..., 4:]), -1),
            torch.cat((rotated, x[..., 4:].flip(-1)), -1),
        ]

    assert not whole(compiled(function, *inputs(2, 3, 5, D, width=4)))


def test_an_odd_number_of_rotated_elements_is_no_rotation() -> None:
    def function(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        a, b, c, rest = x[..., :1], x[..., 1:2], x[..., 2:3], x[..., 3:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, c * cos + b * sin, rest), -1)

    assert not whole(compiled(function, *inputs(2, 3, 5, D, width=1)))


# Roundings ------------------------------------------------------------------------------------------------------------


def partial(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.cat((half(x[..., :4], cos, sin), x[..., 4:]), -1)


PARTIAL: dict[str, Rotation] = {
    "as it is": partial,
    "cast back": lambda x, cos, sin: partial(x, cos, sin).to(BF16),
    "rotated part cast back": lambda x, cos, sin: torch.cat(
        (half(x[..., :4].float(), cos, sin).to(x.dtype), x[..., 4:]), -1
    ),
    "both parts cast": lambda x, cos, sin: torch.cat((half(x[..., :4], cos, sin).half(), x[..., 4:].half()), -1),
    "upcast": lambda x, cos, sin: partial(x.double(), cos, sin),
}


@pytest.mark.parametrize("name", PARTIAL)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_part_of_the_axis_is_rotated_and_the_rest_passes(name: str, dtype: torch.dtype) -> None:
    x, cos, sin = inputs(2, 3, 5, D, width=4)
    match = check(compiled(PARTIAL[name], x.to(dtype), cos, sin))
    assert (match.params.rope_dim, match.params.head_dim) == (4, D)


ROUNDED: dict[str, Rotation] = {
    "a product": lambda x, cos, sin: (x * cos).to(BF16).float() + turned(x) * sin,
    "x for one product": lambda x, cos, sin: x.to(BF16).float() * cos + turned(x) * sin,
    "the turned x": lambda x, cos, sin: x * cos + turned(x).to(BF16) * sin,
    "one of two products": lambda x, cos, sin: x.to(BF16) * cos.to(BF16) + turned(x) * sin,
    "one half": lambda x, cos, sin: torch.cat(
        [half(x, cos, sin).chunk(2, -1)[0].to(BF16), half(x, cos, sin)[..., 4:]], -1
    ),
    "a sum, wider than its products": lambda x, cos, sin: (x * cos).double() + (turned(x) * sin).double(),
    "one table for one half": lambda x, cos, sin: torch.cat(
        (
            x[..., :4] * cos[..., :4] - x[..., 4:] * sin[..., :4],
            x[..., 4:] * cos[..., :4].to(BF16).float() + x[..., :4] * sin[..., :4],
        ),
        -1,
    ),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_inner_roundings_are_repeated_and_refused(name: str) -> None:
    found = compiled(ROUNDED[name], *inputs(2, 3, 5, D))
    assert all(repeats(match, found.values()) for match in whole(found))
    assert not found.report.ops
    reasons = [site.reason for site in found.report.sites if site.kind == "rope" and site.status == "refused"]
    assert len(reasons) == len(found.findings().of("rope"))
    assert all("rounds to" in reason or "computes in" in reason for reason in reasons)


def test_a_second_rounding_of_the_result_is_not_swallowed() -> None:
    found = compiled(lambda x, cos, sin: half(x.double(), cos, sin).float().bfloat16(), *inputs(2, 3, 5, D))
    (match,) = found.findings().of("rope")
    assert match.params.dtype == FP32
    assert repeats(match, found.values())


dtypes = st.sampled_from([None, None, None, BF16, FP16, FP32, FP64])
STEPS = ("x", "turned", "cos", "sin", "first", "second", "both", "result", "again")


@settings(max_examples=60, deadline=None)
@given(
    casts=st.fixed_dictionaries(dict.fromkeys(STEPS, dtypes)),
    x_dtype=st.sampled_from([BF16, FP16, FP32]),
    table_dtype=st.sampled_from([BF16, FP32]),
    rotated=st.sampled_from([4, D]),
)
def test_what_is_recognised_is_repeated_wherever_it_is_cast(
    casts: dict[str, torch.dtype | None], x_dtype: torch.dtype, table_dtype: torch.dtype, rotated: int
) -> None:
    def cast(step: str, value: torch.Tensor) -> torch.Tensor:
        return value if casts[step] is None else value.to(casts[step])

    def function(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        wide, cos, sin = cast("x", x), cast("cos", cos), cast("sin", sin)
        part = wide[..., :rotated]
        y = cast("both", cast("first", part * cos) + cast("second", cast("turned", turned(part)) * sin))
        y = torch.cat((y, x[..., rotated:]), -1) if rotated < D else y
        return cast("again", cast("result", y))

    x, cos, sin = inputs(2, 3, 5, D, width=rotated)
    found = compiled(function, x.to(x_dtype), cos.to(table_dtype), sin.to(table_dtype))
    for match in found.findings().of("rope"):
        assert repeats(match, found.values()), match.params
