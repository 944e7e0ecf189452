"""Causal convolutions: each spelling is found, with what is read and kept, and repeated bit for bit; others are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from helpers import Compiled, compiled, repeats, same
from npu_fuse.patterns.match import Match

Tensor = torch.Tensor
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
B, C, T, W = 2, 6, 9, 4


def one(found: Compiled) -> Match:
    """The one convolution of a graph, whose formulas give the graph's bits."""
    (match,) = found.findings().of("causal_conv1d")
    values = found.values()
    assert repeats(match, values), match.params
    update = match.params.update
    if update is not None:
        given = {name: values[match.inputs[name]] for name in update.spelling.inputs}
        assert same(update.spelling(**given), values[match.inputs["new_state"]])
    assert not [miss for miss in found.findings().near_misses() if miss.kind == "causal_conv1d"]
    return match


def none(found: Compiled) -> list[str]:
    """Why there is no convolution."""
    assert not found.findings().of("causal_conv1d")
    return [miss.reason for miss in found.findings().near_misses() if miss.kind == "causal_conv1d"]


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = FP32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


class Conv(torch.nn.Module):
    """A spelling with its weights [channels, width], which are the model's."""

    def __init__(
        self,
        spelling: Callable[..., Any],
        bias: bool = True,
        dtype: torch.dtype = FP32,
        channels: int = C,
        width: int = W,
    ) -> None:
        super().__init__()
        weight, offset = drawn((channels, width), (channels,), dtype=dtype)
        self.spelling = spelling
        self.weight = torch.nn.Parameter(weight)
        self.bias = torch.nn.Parameter(offset) if bias else None

    def forward(self, *inputs: Tensor) -> Any:
        return self.spelling(*inputs, self.weight, self.bias)


# No state -----------------------------------------------------------------------------------------------------------


def conv(x: Tensor, w: Tensor, b: Tensor | None, padding: int = 0) -> Tensor:
    return functional.conv1d(x, w.unsqueeze(1), b, padding=padding, groups=w.shape[0])


def padded_and_cut(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return conv(x, w, b, padding=w.shape[1] - 1)[..., : x.shape[-1]]


def cut_from_behind(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return conv(x, w, b, padding=w.shape[1] - 1)[:, :, : -(w.shape[1] - 1)]


def padded_before(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return conv(functional.pad(x, (w.shape[1] - 1, 0)), w, b)


def zeros_before(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return conv(torch.cat([x.new_zeros(*x.shape[:2], w.shape[1] - 1), x], -1), w, b)


def unfolded(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    y = (functional.pad(x, (w.shape[1] - 1, 0)).unfold(-1, w.shape[1], 1) * w[:, None]).sum(-1)
    return y if b is None else y + b[:, None]


def tap_by_tap(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    wide = functional.pad(x, (w.shape[1] - 1, 0))
    y = w[:, :1] * wide[..., : x.shape[-1]]
    for tap in range(1, w.shape[1]):
        y = y + wide[..., tap : tap + x.shape[-1]] * w[:, tap].unsqueeze(-1)
    return y if b is None else y + b.unsqueeze(-1)


def bias_behind(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    y = padded_and_cut(x, w, None)
    return y if b is None else b.view(1, -1, 1) + y


PREFILLS = {
    f.__name__: f
    for f in (
        padded_and_cut,
        cut_from_behind,
        padded_before,
        zeros_before,
        unfolded,
        tap_by_tap,
        bias_behind,
    )
}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "F.silu": functional.silu,
    "x * sigmoid(x)": lambda y: y * torch.sigmoid(y),
    "wide": lambda y: functional.silu(y.float()).to(y.dtype),
}


@pytest.mark.parametrize("name", PREFILLS)
@pytest.mark.parametrize(("bias", "dtype", "dynamic"), [(True, BF16, None), (False, FP32, None), (True, FP32, True)])
def test_prefill_without_a_state(name: str, bias: bool, dtype: torch.dtype, dynamic: bool | None) -> None:
    x = drawn((B, C, T), dtype=dtype)[0]
    torch._dynamo.mark_static(x, 1)
    match = one(compiled(Conv(PREFILLS[name], bias, dtype), x, dynamic=dynamic))
    p = match.params
    assert (p.mode, p.width, p.channels, p.bias, p.activation, p.lead) == ("prefill", W, C, bias, None, 0)
    assert (p.state, p.update, p.dtype, p.roles) == (None, None, dtype, ("batch", "channel", "time"))
    assert {name: node.op for name, node in match.inputs.items()} == dict.fromkeys(
        ("x", "weight", "bias") if bias else ("x", "weight"), "placeholder"
    )


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_an_activation_is_part_of_it(name: str, dtype: torch.dtype) -> None:
    spelling = lambda *given: ACTIVATIONS[name](padded_and_cut(*given))  # noqa: E731
    match = one(compiled(Conv(spelling, dtype=dtype), *drawn((B, C, T), dtype=dtype)))
    assert (match.params.activation, match.params.dtype) == ("silu", dtype)


def test_an_activation_may_come_before_the_cut() -> None:
    match = one(compiled(Conv(lambda x, w, b: functional.silu(conv(x, w, b, W - 1))[..., :T]), *drawn((B, C, T))))
    assert match.params.activation == "silu"


@pytest.mark.parametrize("activation", [functional.gelu, torch.tanh, functional.relu])
def test_another_activation_stands_behind_it(activation: Callable[[Tensor], Tensor]) -> None:
    found = compiled(Conv(lambda *given: activation(padded_and_cut(*given))), *drawn((B, C, T)))
    match = one(found)
    assert match.params.activation is None
    assert match.node.target is torch.ops.aten.slice.Tensor


def test_an_activation_is_taken_once() -> None:
    match = one(compiled(Conv(lambda *g: functional.silu(functional.silu(padded_and_cut(*g)))), *drawn((B, C, T))))
    assert match.params.activation == "silu"
    assert match.node.target is torch.ops.aten.silu.default


def test_tokens_may_come_first() -> None:
    """x [batch, tokens, channels], as projections give it: the transposes around stay what they are."""
    found = compiled(Conv(lambda x, w, b: padded_and_cut(x.transpose(1, 2), w, b).transpose(1, 2)), *drawn((B, T, C)))
    match = one(found)
    assert match.params.x_roles == ("batch", "time", "channel")
    assert match.inputs["x"].op == "placeholder"
    assert match.params.roles == ("batch", "channel", "time")


def test_one_sequence_may_have_no_axis() -> None:
    match = one(compiled(Conv(lambda x, w, b: padded_and_cut(x[None], w, b)[0]), *drawn((C, T))))
    assert match.params.x_roles == ("channel", "time")


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
def test_any_width(width: int) -> None:
    match = one(compiled(Conv(padded_and_cut, width=width), *drawn((B, C, T))))
    assert match.params.width == width


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("name", PREFILLS)
def test_sequences_shorter_than_the_filter(name: str, tokens: int) -> None:
    assert one(compiled(Conv(PREFILLS[name]), *drawn((B, C, tokens)))).params.mode == "prefill"


# With a state -------------------------------------------------------------------------------------------------------


def hf(x: Tensor, state: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """transformers: the state has `width` columns."""
    new = torch.cat([state, x], -1).to(w.dtype)
    state.copy_(new[:, :, -state.shape[-1] :])
    return functional.silu(conv(new, w, b)[:, :, -x.shape[-1] :])


def hf_chunk(x: Tensor, state: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """transformers: several tokens behind a state, which is convolved too."""
    new = torch.cat([state, x], -1)
    state.copy_(new[..., -state.shape[-1] :])
    y = functional.silu(conv(new, w, b, w.shape[1] - 1)[:, :, : new.shape[-1]])
    return y[:, :, -x.shape[-1] :]


def last_columns(x: Tensor, state: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    full = torch.cat([state, x], -1)
    state.copy_(full[..., full.shape[-1] - state.shape[-1] :])
    return functional.silu(conv(full[..., state.shape[-1] - (w.shape[1] - 1) :], w, b))


def in_two_writes(x: Tensor, state: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    full = torch.cat([state, x], -1)
    kept = state.shape[-1] - x.shape[-1]
    old = state[..., x.shape[-1] :].clone()
    state[..., :kept] = old
    state[..., kept:] = x
    return functional.silu(conv(full, w, b)[..., -x.shape[-1] :])


CHUNKS = {f.__name__: f for f in (hf, hf_chunk, last_columns, in_two_writes)}


@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize(
    ("state_len", "tokens", "dtype"), [(3, 1, BF16), (4, 1, FP32), (4, 3, BF16), (6, 2, FP32), (6, 1, BF16)]
)
def test_tokens_behind_a_state(name: str, state_len: int, tokens: int, dtype: torch.dtype) -> None:
    match = one(compiled(Conv(CHUNKS[name], dtype=dtype), *drawn((B, C, tokens), (B, C, state_len), dtype=dtype)))
    p = match.params
    assert (p.mode, p.activation, p.lead) == ("update" if tokens == 1 else "prefill", "silu", 0)
    assert (p.state.length, p.state.start, p.update.length) == (state_len, state_len - 3, state_len)
    assert p.state.roles == p.update.roles == ("batch", "channel", "time")
    assert match.inputs["state"] is match.inputs["buffer"]
    assert match.inputs["state"].op == "placeholder"


@pytest.mark.parametrize("name", ["hf", "hf_chunk", "last_columns"])
def test_any_number_of_tokens_behind_a_state(name: str) -> None:
    """In one program: whether the new state holds columns of the old one depends on a symbol."""
    x, state = drawn((B, C, 5), (B, C, W))
    for tensor in (x, state):
        torch._dynamo.mark_static(tensor, 1)
    torch._dynamo.mark_static(state, 2)
    match = one(compiled(Conv(CHUNKS[name]), x, state, dynamic=True))
    assert (match.params.mode, match.params.state.start, match.params.update.length) == ("prefill", 1, W)


def kept_of_prefill(x: Tensor, state: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    missing = state.shape[-1] - x.shape[-1]
    state.copy_(functional.pad(x, (missing, 0))[..., -state.shape[-1] :] if missing > 0 else x[..., -W:])
    return padded_and_cut(x, w, b)


@pytest.mark.parametrize("tokens", [1, 3, 4, 9])
def test_the_end_of_a_prefill_is_kept(tokens: int) -> None:
    match = one(compiled(Conv(kept_of_prefill), *drawn((B, C, tokens), (B, C, W))))
    assert (match.params.mode, match.params.state, match.params.update.length) == ("prefill", None, W)
    assert match.inputs["buffer"].op == "placeholder"


def test_a_state_may_be_returned() -> None:
    """recurrent_gemma: the state is replaced, and written into nothing."""

    def step(x: Tensor, state: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        window = torch.cat((state, x), -1)
        return (window * w).sum(-1) + b, window[:, :, 1:]

    match = one(compiled(Conv(step), *drawn((B, C, 1), (B, C, W - 1))))
    assert (match.params.mode, match.params.bias, match.params.update.length) == ("update", True, W - 1)
    assert "buffer" not in match.inputs


def test_the_results_before_x_may_be_wanted_too() -> None:
    """zaya: a second convolution reads them."""

    def step(x: Tensor, state: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return conv(torch.cat([state, x], -1), w, b)

    match = one(compiled(Conv(step), *drawn((B, C, 1), (B, C, W))))
    assert (match.params.lead, match.params.mode) == (1, "prefill")


def test_flags_say_whose_state_counts() -> None:
    def step(x: Tensor, state: Tensor, flags: Tensor, w: Tensor, b: Tensor) -> Tensor:
        full = torch.cat([torch.where(flags[:, None, None], state, 0), x.transpose(1, 2)], -1)
        state.copy_(full[..., -(W - 1) :])
        return conv(full, w, b).transpose(1, 2)

    for tokens in (1, 2, 5):
        x, state = drawn((B, tokens, C), (B, C, W - 1))
        match = one(compiled(Conv(step), x, state, torch.tensor([True, False])))
        assert [match.inputs[name].op for name in ("has_initial", "state", "buffer")] == ["placeholder"] * 3
        assert match.params.x_roles == ("batch", "time", "channel")


# Windows ------------------------------------------------------------------------------------------------------------


def weighed(window: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    y = torch.sum(window * w, dim=-1)
    return functional.silu(y if b is None else y + b)


def shifted(x: Tensor, state: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    window = torch.cat([state[..., 1:], x.unsqueeze(-1)], -1)
    state.copy_(window)
    return weighed(window, w, b)


def rolled(x: Tensor, state: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    state.copy_(torch.roll(state, -1, -1))
    state[:, :, -1] = x
    return weighed(state, w, b)


def rolled_and_kept(x: Tensor, state: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    new = state.roll(shifts=-1, dims=-1)
    new[:, :, -1:] = x[..., None]
    state.copy_(new)
    return weighed(new.float(), w.float(), None if b is None else b.float()).to(x.dtype)


def multiplied(x: Tensor, state: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    window = torch.cat([state[..., 1:], x.unsqueeze(-1)], -1)
    state.copy_(window)
    y = torch.einsum("bcw,cw->bc", window, w)
    return functional.silu(y if b is None else y + b)


def matmul(x: Tensor, state: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    window = torch.cat([state[..., 1:], x.unsqueeze(-1)], -1)
    state.copy_(window)
    y = torch.matmul(window.unsqueeze(-2), w.unsqueeze(-1)).squeeze(-1).squeeze(-1)
    return functional.silu(y if b is None else y + b)


def column_by_column(x: Tensor, state: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    y = state[..., 1] * w[:, 0] + state[..., 2] * w[:, 1] + state[..., 3] * w[:, 2] + x * w[:, 3]
    state.copy_(torch.cat([state[..., 1:], x[..., None]], -1))
    return functional.silu(y if b is None else y + b)


WINDOWS = {f.__name__: f for f in (shifted, rolled, rolled_and_kept, multiplied, matmul, column_by_column)}


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize(("bias", "dtype"), [(True, BF16), (False, FP32)])
def test_a_window_of_state_and_one_token(name: str, bias: bool, dtype: torch.dtype) -> None:
    match = one(compiled(Conv(WINDOWS[name], bias, dtype), *drawn((B, C), (B, C, W), dtype=dtype)))
    p = match.params
    assert (p.mode, p.width, p.bias, p.activation) == ("update", W, bias, "silu")
    assert (p.state.length, p.state.start, p.update.length) == (W, 1, W)
    assert match.inputs["state"] is match.inputs["buffer"]
    assert match.inputs["x"].op == match.inputs["weight"].op == "placeholder"


def index_put(x: Tensor, pool: Tensor, slots: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    window = torch.cat([pool[slots], x.unsqueeze(-1)], -1)
    pool[slots] = window[..., 1:]
    return weighed(window, w, b)


def index_copy(x: Tensor, pool: Tensor, slots: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    window = torch.cat([pool.index_select(0, slots), x.unsqueeze(-1)], -1)
    pool.index_copy_(0, slots, window[..., 1:])
    return weighed(window, w, b)


def tokens_first(x: Tensor, pool: Tensor, slots: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """A pool of [slots, width - 1, channels], as the kernel has it."""
    window = torch.cat([pool[slots], x.unsqueeze(1)], 1)
    pool[slots] = window[:, 1:]
    return functional.silu(conv(window.transpose(1, 2), w, b).squeeze(-1))


@pytest.mark.parametrize("spelling", [index_put, index_copy, tokens_first])
@pytest.mark.parametrize("bias", [True, False])
def test_slots_of_a_pool(spelling: Callable[..., Tensor], bias: bool) -> None:
    x, pool = drawn((B, C), (5, C, W - 1))
    roles = ("batch", "channel", "time")
    if spelling is tokens_first:
        pool, roles = pool.transpose(1, 2).contiguous(), ("batch", "time", "channel")
    match = one(compiled(Conv(spelling, bias), x, pool, torch.tensor([3, 1])))
    assert match.params.mode == "update"
    assert match.params.state.roles == match.params.update.roles == roles
    assert match.inputs["state"] is match.inputs["buffer"]
    assert match.inputs["indices"] is match.inputs["written_indices"]
    assert [match.inputs[name].op for name in ("x", "state", "indices")] == ["placeholder"] * 3


def test_a_state_that_is_computed_is_one_all_the_same() -> None:
    """A pool read by one-hot rows, where a row of a pad is zeros."""

    def step(x: Tensor, pool: Tensor, slots: Tensor, w: Tensor, b: Tensor) -> Tensor:
        hot = (slots[:, None] == torch.arange(pool.shape[0])).to(x.dtype)
        return weighed(torch.cat([torch.einsum("bn,ncw->bcw", hot, pool), x.unsqueeze(-1)], -1), w, b)

    match = one(compiled(Conv(step), *drawn((B, C), (5, C, W - 1)), torch.tensor([3, -1])))
    assert match.params.mode == "update"
    assert match.inputs["state"].op == "call_function"


# What is none -------------------------------------------------------------------------------------------------------

OTHERS: dict[str, tuple[Callable[..., Any], str]] = {
    "the same on both sides": (
        lambda x, w, b: conv(functional.pad(x, (1, 2)), w, b),
        "reads 2 columns ahead of the first of x: it is not causal",
    ),
    "padding on both sides": (
        lambda x, w, b: functional.conv1d(x, w[:, None, :3], b, padding=1, groups=C),
        "reads 1 columns ahead of the first of x: it is not causal",
    ),
    "the wrong end": (
        lambda x, w, b: conv(x, w, b, W - 1)[..., W - 1 :],
        f"it gives {T + W - 1} columns, 0 of them before x, whose columns are {T}",
    ),
    "one column too many": (
        lambda x, w, b: conv(x, w, b, W - 1)[..., : T + 1],
        f"it gives {T + W - 1} columns",
    ),
    "one column too few": (lambda x, w, b: conv(x, w, b, W - 1)[..., : T - 1], f"it gives {T + W - 1} columns"),
    "padded by one too few": (
        lambda x, w, b: conv(functional.pad(x, (W - 2, 0)), w, b),
        "reads 1 columns ahead of the first of x: it is not causal",
    ),
    "padded by ones": (lambda x, w, b: conv(functional.pad(x, (W - 1, 0), value=1.0), w, b), "columns ahead"),
    "a stride": (
        lambda x, w, b: functional.conv1d(x, w[:, None], b, stride=2, padding=W - 1, groups=C)[..., :T],
        "its stride is 2; it must be 1",
    ),
    "dilated": (
        lambda x, w, b: functional.conv1d(x, w[:, None], b, padding=2 * (W - 1), dilation=2, groups=C)[..., :T],
        "its dilation is 2; it must be 1",
    ),
    "channels in groups": (
        lambda x, w, b: functional.conv1d(x, w.unflatten(-1, (2, 2)), b, padding=1, groups=C // 2)[..., :T],
        f"it has {C // 2} groups for {C} channels; each channel needs its own",
    ),
    "two filters a channel": (
        lambda x, w, b: functional.conv1d(x, torch.cat([w, w])[:, None], None, padding=W - 1, groups=C)[..., :T],
        f"it has {2 * C} filters for {C} channels; each channel needs one",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_convolution_is_a_near_miss(name: str) -> None:
    spelling, reason = OTHERS[name]
    (said,) = none(compiled(Conv(spelling), *drawn((B, C, T))))
    assert reason in said


UNLIKE: dict[str, Callable[..., Any]] = {
    "not in groups": lambda x, w, b: functional.conv1d(x, w[:, None].expand(-1, C, -1), b, padding=W - 1)[..., :T],
    "two axes": lambda x, w, b: functional.conv2d(x[:, :, None], w[:, None, None], b, padding=(0, W - 1), groups=C),
    "transposed": lambda x, w, b: functional.conv_transpose1d(x, w[:, None], b, groups=C)[..., :T],
    "a dot product with one tensor": lambda x, w, b: (x[..., :W] * w).sum(-1) + b,
    "a mean of windows": lambda x, w, b: functional.pad(x, (W - 1, 0)).unfold(-1, W, 1).mean(-1),
    "windows two steps apart": lambda x, w, b: (functional.pad(x, (W - 1, 0)).unfold(-1, W, 2) * w[:, None]).sum(-1),
    "taps of two filters": lambda x, w, b: (
        w[:, :1] * functional.pad(x, (1, 0))[..., :T] + x * (w * 2)[:, 1:2] + x * w[:, 2:3]
    ),
    "a tap twice": lambda x, w, b: w[:, :1] * functional.pad(x, (1, 0))[..., :T] + x * w[:, :1],
}


@pytest.mark.parametrize("name", UNLIKE)
def test_what_is_unlike_is_not_spoken_of(name: str) -> None:
    assert none(compiled(Conv(UNLIKE[name]), *drawn((B, C, T)))) == []


def test_taps_in_another_order_are_another_filter() -> None:
    def backwards(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        wide = functional.pad(x, (1, 0))
        return w[:, 1:2] * wide[..., :T] + x * w[:, :1]

    assert none(compiled(Conv(backwards, width=2), *drawn((B, C, T)))) == []


def test_filters_that_are_turned_round_are_read_behind_that() -> None:
    match = one(compiled(Conv(lambda x, w, b: padded_and_cut(x, w.flip(-1), b)), *drawn((B, C, T))))
    assert match.inputs["weight"].target is torch.ops.aten.flip.default


def test_a_bias_of_another_shape_is_none_of_it() -> None:
    x, each = drawn((B, C, T), (B, C, 1))
    found = compiled(Conv(lambda x, each, w, b: padded_and_cut(x, w, None) + each), x, each)
    match = one(found)
    assert not match.params.bias
    assert match.node.target is torch.ops.aten.slice.Tensor


KEPT_OTHERWISE: dict[str, Callable[..., Tensor]] = {
    "the first columns": lambda full, x: full[..., :W],
    "not the last": lambda full, x: full[..., -W - 1 : -1],
    "zeros for the old state": lambda full, x: functional.pad(x, (W - 1, 0)),
    "doubled": lambda full, x: full[..., -W:] * 2,
    "rolled": lambda full, x: full[..., -W:].roll(1, -1),
    "zeros behind": lambda full, x: functional.pad(x, (0, W - 1)),
}


@pytest.mark.parametrize("name", KEPT_OTHERWISE)
def test_what_is_kept_otherwise_is_no_update(name: str) -> None:
    def step(x: Tensor, state: Tensor, w: Tensor, b: Tensor) -> Tensor:
        full = torch.cat([state, x], -1)
        state.copy_(KEPT_OTHERWISE[name](full, x))
        return conv(full, w, b)[..., -1:]

    match = one(compiled(Conv(step), *drawn((B, C, 1), (B, C, W))))
    assert match.params.mode == "update"
    assert match.params.update is None


def test_the_state_of_another_convolution_is_no_update() -> None:
    def step(x: Tensor, state: Tensor, other: Tensor, w: Tensor, b: Tensor) -> Tensor:
        state.copy_(torch.cat([other, x], -1)[..., -W:])
        return conv(torch.cat([state * 2, x], -1), w, b)[..., -1:]

    match = one(compiled(Conv(step), *drawn((B, C, 1), (B, C, W), (B, C, W))))
    assert match.params.update is None


def test_a_state_shorter_than_the_filter_needs_is_a_near_miss() -> None:
    def step(x: Tensor, state: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return conv(torch.cat([state, x], -1), w, b, 1)[..., :-1]

    (reason,) = none(compiled(Conv(step), *drawn((B, C, 3), (B, C, W - 2))))
    assert f"2 columns stand before x; a filter of {W} reads 3" in reason


def test_slots_that_are_written_may_be_others_than_those_read() -> None:
    def step(x: Tensor, pool: Tensor, slots: Tensor, into: Tensor, w: Tensor, b: Tensor) -> Tensor:
        window = torch.cat([pool[slots], x.unsqueeze(-1)], -1)
        pool[into] = window[..., 1:]
        return weighed(window, w, b)

    match = one(compiled(Conv(step), *drawn((B, C), (5, C, W - 1)), torch.tensor([3, 1]), torch.tensor([0, 2])))
    assert match.inputs["indices"] is not match.inputs["written_indices"]


def test_two_convolutions_of_one_graph_each_keep_their_own() -> None:
    def step(x: Tensor, first: Tensor, second: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return hf(hf(x, first, w, b), second, w, b)

    found = compiled(Conv(step), *drawn((B, C, 1), (B, C, W), (B, C, W)))
    matches = found.findings().of("causal_conv1d")
    assert len({match.inputs["buffer"] for match in matches}) == 2
    assert all(match.inputs["buffer"] is match.inputs["state"] for match in matches)


# Numbers ------------------------------------------------------------------------------------------------------------


def token_by_token(
    x: Tensor, state: Tensor | None, w: Tensor, b: Tensor | None, silu: bool
) -> tuple[Tensor, list[list[Tensor]]]:
    """In float64 and one token at a time: the results [batch, channels, tokens], and the columns that were seen."""
    x, w = x.double(), w.double()
    seen: list[list[Tensor]] = []
    results = []
    for sequence in range(x.shape[0]):
        columns = [] if state is None else list(state[sequence].double().unbind(-1))
        row = []
        for token in x[sequence].unbind(-1):
            columns.append(token)
            y = torch.zeros_like(token) if b is None else b.double().clone()
            for tap in range(w.shape[1]):
                back = w.shape[1] - 1 - tap
                if back < len(columns):
                    y = y + w[:, tap] * columns[-1 - back]
            row.append(y * torch.sigmoid(y) if silu else y)
        results.append(torch.stack(row, -1))
        seen.append(columns)
    return torch.stack(results), seen


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_what_is_recognised_is_what_it_says(data: st.DataObject) -> None:
    """By what the match says alone (state, taps, bias, activation, columns kept), token by token in float64."""
    name = data.draw(st.sampled_from([*PREFILLS, *CHUNKS, *WINDOWS]))
    bias, silu = data.draw(st.booleans()), data.draw(st.booleans())
    batch, channels = data.draw(st.integers(2, 3)), data.draw(st.integers(2, 5))
    tokens, state_len = data.draw(st.integers(1, 7)), data.draw(st.integers(3, 6))
    if name in PREFILLS:
        spelling: Callable[..., Tensor] = PREFILLS[name]
        if silu:
            spelling = lambda *given: functional.silu(PREFILLS[name](*given))  # noqa: E731
        inputs = drawn((batch, channels, tokens))
    elif name in CHUNKS:
        if name == "in_two_writes":
            tokens = min(tokens, state_len - 1)
        spelling, silu = CHUNKS[name], True
        inputs = drawn((batch, channels, tokens), (batch, channels, state_len))
    else:
        spelling, silu, tokens = WINDOWS[name], True, 1
        inputs = drawn((batch, channels), (batch, channels, W))
    model = Conv(spelling, bias, channels=channels)
    before = [tensor.clone() for tensor in inputs]
    found = compiled(model, *inputs)
    match = one(found)
    p = match.params
    assert (p.bias, p.activation) == (bias, "silu" if silu else None)
    state = None
    if p.state is not None:
        state = before[1][..., p.state.start : p.state.start + p.width - 1]
    x = before[0].view(batch, channels, -1)
    wanted, seen = token_by_token(x, state, model.weight, model.bias, silu)
    torch.testing.assert_close(found.output.double().view_as(wanted), wanted, rtol=1e-5, atol=1e-5)
    if p.update is not None:
        whole = torch.cat([before[1], x], -1)
        assert same(inputs[1], whole[..., -p.update.length :])
        assert all(torch.equal(columns[-1], whole[i, :, -1].double()) for i, columns in enumerate(seen))
