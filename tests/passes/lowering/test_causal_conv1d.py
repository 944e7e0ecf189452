"""Causal convolutions become one op on the model's own state; where they may not, the reason says why."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from helpers import Compiled, compiled, refusal, same
from npu_fuse import Target
from npu_fuse.runtime.conv_state import in_pool_memory

Tensor = torch.Tensor
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OP = "npu_fuse::causal_conv1d_columns"
B, C, W = 2, 32, 4


class Mixer(nn.Module):
    """A convolution between two projections, as models have it: tokens come first outside of it."""

    def __init__(
        self, conv: Callable[..., Tensor], dtype: torch.dtype = BF16, bias: bool = True, channels: int = C
    ) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.conv = conv
        self.before = nn.Linear(C, channels, dtype=dtype)
        self.conv1d = nn.Conv1d(channels, channels, W, groups=channels, bias=bias, dtype=dtype)
        self.after = nn.Linear(channels, C, dtype=dtype)

    def forward(self, x: Tensor, *states: Tensor) -> Tensor:
        columns = self.before(x).transpose(1, 2)
        y = self.conv(columns, *states, self.conv1d.weight.squeeze(1), self.conv1d.bias)
        return self.after(y.transpose(1, 2))


def run(x: Tensor, w: Tensor, b: Tensor | None, padding: int = 0) -> Tensor:
    return functional.conv1d(x, w.unsqueeze(1), b, padding=padding, groups=w.shape[0])


def prefill(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return functional.silu(run(x, w, b, W - 1)[..., : x.shape[-1]])


def prefill_kept(x: Tensor, state: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    state.copy_(functional.pad(x, (max(state.shape[-1] - x.shape[-1], 0), 0))[..., -state.shape[-1] :])
    return prefill(x, w, b)


def decode(x: Tensor, state: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    seen = torch.cat([state, x], -1)
    state.copy_(seen[..., -state.shape[-1] :])
    return functional.silu(run(seen, w, b)[..., -x.shape[-1] :])


def without_activation(x: Tensor, state: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    seen = torch.cat([state, x], -1)
    state.copy_(seen[..., -state.shape[-1] :])
    return run(seen, w, b)[..., -x.shape[-1] :]


def chunk(x: Tensor, state: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    seen = torch.cat([state, x], -1)
    state.copy_(seen[..., -state.shape[-1] :])
    return functional.silu(run(seen, w, b, W - 1)[..., : seen.shape[-1]])[..., -x.shape[-1] :]


def drawn(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pooled(columns: int = W, dtype: torch.dtype = BF16, batch: int = B, channels: int = C) -> Tensor:
    return in_pool_memory(drawn(batch, channels, columns, dtype=dtype, seed=1))


def again(states: tuple[Tensor, ...]) -> list[Tensor]:
    """Copies in memory of the same kind."""
    return [torch.empty_strided(s.shape, s.stride(), dtype=s.dtype).copy_(s) for s in states]


def check(
    model: nn.Module,
    x: Tensor,
    *states: Tensor,
    dynamic: bool | None = None,
    exact_states: bool = True,
    **settings: object,
) -> Compiled:
    """Compiles a call; its numbers and its states are those of eager, and of float64.

    Behind another convolution states are not exact: it rounds otherwise.
    """
    wide, others = [s.double() for s in states], again(states)
    with torch.no_grad():
        wanted = model(x, *others)
    found = compiled(model, x, *states, dynamic=dynamic, **settings)
    with torch.no_grad():
        exact = model.double()(x.double(), *wide)
    torch.testing.assert_close(found.output.double(), exact, rtol=3e-2, atol=3e-2)
    assert found.output.stride() == wanted.stride()
    for ours, theirs, far in zip(states, others, wide, strict=True):
        assert same(ours, theirs) if exact_states else torch.allclose(ours.double(), far, rtol=3e-2, atol=3e-2)
    return found


def reason(found: Compiled) -> str:
    (site,) = [site for site in found.report.sites if site.kind == "causal_conv1d"]
    assert site.status == "refused"
    assert OP not in found.report.ops
    return site.reason


def in_place(found: Compiled) -> list[str]:
    return [site.status for site in found.report.sites if site.kind == "in_place"]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("columns", [W - 1, W])
def test_a_step_is_one_launch_that_writes_the_state(columns: int, dtype: torch.dtype, bias: bool) -> None:
    found = check(Mixer(decode, dtype, bias), drawn(B, 1, C, dtype=dtype), pooled(columns, dtype))
    assert found.report.ops[OP] == 1
    assert found.report.launches_after == 3  # two projections
    assert in_place(found) == ["lowered"]
    written = ("copy", "cat", "clone")
    assert not [target for target in found.targets() if any(name in target for name in written)]


@pytest.mark.parametrize(
    ("spelling", "tokens", "columns"),
    [
        (prefill_kept, 9, W),
        (prefill_kept, 2, W),
        (prefill_kept, 3, W - 1),
        (decode, 3, W),
        (chunk, 2, W),
        (chunk, 7, W + 2),
        (without_activation, 1, W),
        (without_activation, 5, W - 1),
    ],
)
def test_several_tokens_and_what_is_kept_of_them(spelling: Callable[..., Tensor], tokens: int, columns: int) -> None:
    found = check(Mixer(spelling), drawn(B, tokens, C), pooled(columns))
    assert found.report.ops[OP] == 1
    assert in_place(found) == ["lowered"]


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_prompt_without_a_state(dynamic: bool | None) -> None:
    x = drawn(B, 9, C)
    torch._dynamo.mark_static(x, 2)
    found = check(Mixer(prefill), x, dynamic=dynamic)
    assert found.report.ops[OP] == 1


def test_any_number_of_tokens_in_one_program() -> None:
    model, state = Mixer(chunk), pooled()
    x = drawn(B, 5, C)
    torch._dynamo.mark_dynamic(x, 1)
    found = check(model, x, state)
    assert found.report.ops[OP] == 1
    model.to(BF16)
    for tokens in (2, 3, 8):
        x, ours, theirs = drawn(B, tokens, C, seed=tokens), *again((state, state))
        with torch.no_grad():
            torch.testing.assert_close(found.function(x, ours), model(x, theirs), rtol=3e-2, atol=3e-2)
        assert same(ours, theirs)


def test_twenty_steps_leave_the_states_of_eager() -> None:
    model, ours, theirs = Mixer(decode), pooled(), pooled()
    torch._dynamo.reset()
    step = torch.compile(model, backend="npu_fuse", fullgraph=True)
    with torch.no_grad():
        for token in range(20):
            x = drawn(B, 1, C, seed=token)
            torch.testing.assert_close(step(x, ours), model(x, theirs), rtol=3e-2, atol=3e-2)
            assert same(ours, theirs)


def test_slots_of_a_pool_are_read_and_written_by_the_model() -> None:
    """Two sequences may have one slot, so that the op gets rows of its own."""

    class Pooled(Mixer):
        def forward(self, x: Tensor, pool: Tensor, slots: Tensor) -> Tensor:
            token = self.before(x)
            seen = torch.cat([pool[slots], token.unsqueeze(-1)], -1)
            pool[slots] = seen[..., 1:]
            return self.after(functional.silu((seen * self.conv1d.weight.squeeze(1)).sum(-1) + self.conv1d.bias))

    for slots in ([3, 1], [2, 2], [-1, 0]):
        model, pool = Pooled(decode), drawn(5, C, W - 1, seed=1)
        ours, theirs, x = pool.clone(), pool.clone(), drawn(B, C)
        found = compiled(model, x, ours, torch.tensor(slots))
        with torch.no_grad():
            torch.testing.assert_close(found.output, model(x, theirs, torch.tensor(slots)), rtol=3e-2, atol=3e-2)
        assert found.report.ops[OP] == 1
        if slots != [2, 2]:  # which of two writes into one row stays is not said
            assert same(ours, theirs)


def test_flags_say_whose_state_counts() -> None:
    def step(x: Tensor, state: Tensor, flags: Tensor, w: Tensor, b: Tensor) -> Tensor:
        seen = torch.cat([torch.where(flags[:, None, None], state, 0), x], -1)
        state.copy_(seen[..., -W:])
        return functional.silu(run(seen, w, b)[..., -x.shape[-1] :])

    for tokens in (1, 3, 6):
        ours, theirs, flags = pooled(), pooled(), torch.tensor([True, False])
        model, x = Mixer(step), drawn(B, tokens, C)
        found = compiled(model, x, ours, flags)
        with torch.no_grad():
            torch.testing.assert_close(found.output, model(x, theirs, flags), rtol=3e-2, atol=3e-2)
        assert found.report.ops[OP] == 1
        assert same(ours, theirs)


def test_a_state_that_is_multiplied_by_flags_is_read_as_that() -> None:
    """As a product, which is NaN where a state that doesn't count is infinite, and so stays a product."""

    def step(x: Tensor, state: Tensor, flags: Tensor, w: Tensor, b: Tensor) -> Tensor:
        seen = torch.cat([state * flags[:, None, None], x], -1)
        state.copy_(seen[..., -W:])
        return functional.silu(run(seen, w, b)[..., -x.shape[-1] :])

    for tokens in (1, 3, 6):
        ours, theirs, flags = pooled(), pooled(), torch.tensor([True, False])
        model, x = Mixer(step), drawn(B, tokens, C)
        found = compiled(model, x, ours, flags)
        with torch.no_grad():
            torch.testing.assert_close(found.output, model(x, theirs, flags), rtol=3e-2, atol=3e-2)
        assert found.report.ops[OP] == 1
        assert "aten.mul.Tensor" in found.targets()
        assert same(ours, theirs)


@pytest.mark.parametrize("columns", [W - 1, W])
def test_the_states_of_all_layers_may_be_one_tensor(columns: int) -> None:
    """Each layer's is a part of it, with tokens before channels: what is read and written is the same, turned."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Mixer(decode), Mixer(decode)])

        def forward(self, x: Tensor, states: Tensor) -> Tensor:
            for number, layer in enumerate(self.layers):
                x = layer(x, states[number].transpose(1, 2))
            return x

    found = check(Layers(), drawn(B, 1, C), drawn(3, B, columns, C, seed=1), exact_states=False)
    assert found.report.ops[OP] == 2
    assert found.report.launches_after == 6  # two projections a layer
    assert in_place(found) == ["lowered", "lowered"]


class OneByOne(Mixer):
    """Prompts of lengths that the host knows, behind one another in x: a convolution each."""

    def __init__(self, flags_are: str) -> None:
        super().__init__(decode)
        self.flags_are = flags_are

    def forward(self, x: Tensor, pool: Tensor, flags: Tensor) -> Tensor:
        rows, results = self.before(x).split([3, 1, 5]), []
        for sequence, part in enumerate(rows):
            slot, flag = sequence + 1, flags[sequence]
            if self.flags_are == "scalars":
                seen = torch.cat([torch.where(flag, pool[slot], 0), part.t()], -1)
                pool[slot].copy_(seen[:, -(W - 1) :])
                seen = seen[None]
            else:
                old = pool[slot : slot + 1]
                seen = torch.cat([old * flag if self.flags_are == "factors" else old, part.t()[None]], -1)
                old.copy_(seen[..., -(W - 1) :])
            results.append(functional.silu(run(seen, self.conv1d.weight.squeeze(1), self.conv1d.bias))[0])
        return self.after(torch.cat(results, -1).t())


@pytest.mark.parametrize("flags_are", ["scalars", "factors", "unused"])
def test_sequences_behind_one_another_are_an_op_each(flags_are: str) -> None:
    model, x, flags = OneByOne(flags_are), drawn(9, C), torch.tensor([True, False, True])
    ours, theirs = again((pool := pooled(W - 1, batch=5), pool))
    found = compiled(model, x, ours, flags)
    with torch.no_grad():
        torch.testing.assert_close(found.output, model(x, theirs, flags), rtol=3e-2, atol=3e-2)
    assert same(ours, theirs)
    assert same(ours[[0, 4]], pool[[0, 4]])
    assert found.report.ops[OP] == 3
    assert found.report.launches_after <= found.report.launches_before


def test_prompts_behind_slots_of_a_pool() -> None:
    """As sgl_kernel_npu's own functions of torch have it: flags as factors, and the end of the columns put back."""

    class Pooled(Mixer):
        def forward(self, x: Tensor, pool: Tensor, slots: Tensor, flags: Tensor) -> Tensor:
            old = pool[slots] * flags[:, None, None].to(x.dtype)
            seen = torch.cat([old, self.before(x).transpose(1, 2)], -1)
            pool[slots] = seen[..., -(W - 1) :]
            y = functional.silu(run(seen, self.conv1d.weight.squeeze(1), self.conv1d.bias))
            return self.after(y.transpose(1, 2))

    slots, flags = torch.tensor([3, 1]), torch.tensor([True, False])
    for tokens in (1, 2, 5):
        model, x, pool = Pooled(decode), drawn(B, tokens, C), drawn(5, C, W - 1, seed=1)
        ours, theirs = pool.clone(), pool.clone()
        found = compiled(model, x, ours, slots, flags)
        with torch.no_grad():
            torch.testing.assert_close(found.output, model(x, theirs, slots, flags), rtol=3e-2, atol=3e-2)
        assert same(ours, theirs)
        assert found.report.ops[OP] == 1


def test_an_old_state_that_is_read_later_is_not_overwritten() -> None:
    class Late(Mixer):
        def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            old = state.clone()
            return super().forward(x, state), old * 2

    model, ours, theirs = Late(decode), pooled(), pooled()
    x = drawn(B, 1, C)
    found = compiled(model, x, ours)
    with torch.no_grad():
        wanted, old = model(x, theirs)
    torch.testing.assert_close(found.output[0], wanted, rtol=3e-2, atol=3e-2)
    assert same(found.output[1], old)
    assert same(ours, theirs)


REFUSED: dict[str, tuple[Callable[[], Compiled], str]] = {
    "columns side by side": (
        lambda: check(Mixer(decode), drawn(B, 1, C), drawn(B, C, W)),
        "npu_fuse.runtime.conv_state.adopt(cache) moves those of a transformers cache once",
    ),
    "float32": (lambda: check(Mixer(decode, FP32), drawn(B, 1, C, dtype=FP32), pooled(dtype=FP32)), "x is float32"),
    "24 channels": (
        lambda: check(Mixer(decode, channels=24), drawn(B, 1, C), pooled(channels=24)),
        "24 channels, not known to be a multiple of 16",
    ),
    "weights that may not be moved": (
        lambda: check(Mixer(decode), drawn(B, 1, C), pooled(), pack_weights=False),
        "Options.pack_weights is off",
    ),
    "exact rounding": (
        lambda: check(Mixer(decode), drawn(B, 1, C), pooled(), numerics="exact"),
        "the op rounds once; the model rounds the sum to torch.bfloat16 before its silu",
    ),
    "turned off": (
        lambda: check(Mixer(decode), drawn(B, 1, C), pooled(), disable=["causal_conv1d"]),
        "turned off",
    ),
    "columns before x": (
        lambda: check(Mixer(lambda x, s, w, b: run(torch.cat([s, x], -1), w, b)[..., -2:]), drawn(B, 1, C), pooled()),
        "results for 1 columns before x too",
    ),
    "another processor": (
        lambda: check(Mixer(decode), drawn(B, 1, C), pooled(), target=Target("ascend310p")),
        "has no kernel on ascend310p",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_stays_as_it_was(name: str) -> None:
    call, expected = REFUSED[name]
    assert expected in reason(call())


def test_weights_that_are_computed_are_refused() -> None:
    found = check(Mixer(lambda x, s, w, b: decode(x, s, w * 2, b)), drawn(B, 1, C), pooled())
    assert "a weight of the convolution is computed or passed in" in reason(found)


def test_weights_that_change_are_seen() -> None:
    model, ours, theirs = Mixer(decode), pooled(), pooled()
    x = drawn(B, 1, C)
    found = compiled(model, x, ours.clone(memory_format=torch.preserve_format))
    with torch.no_grad():
        model.conv1d.weight.mul_(2)
        torch.testing.assert_close(found.function(x, ours), model(x, theirs), rtol=3e-2, atol=3e-2)
    assert same(ours, theirs)


@pytest.fixture(scope="module")
def step() -> Compiled:
    return check(Mixer(decode), drawn(B, 1, C), pooled())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"lead": 1}, "it gives results for 1 columns before x too"),
        ({"steps": frozenset({torch.float64})}, "the model computes in torch.float64"),
        ({"dtype": FP32, "steps": frozenset()}, "its result is torch.float32 for an x of torch.bfloat16"),
        ({"weight_roles": ("time", "channel")}, "the axes of its weight are time, channel"),
        (
            dict.fromkeys(("state.roles", "update.roles"), ("batch", "channel", "channel")),
            "the axes of its state are batch, channel, channel",
        ),
        ({"state.start": 0}, "it reads the columns from 0 on of a state of 4; the op reads the last"),
        ({"x_roles": ("batch", "batch", "channel")}, "are batch, batch, channel: too many"),
        ({"roles": ("batch", "time", "time")}, "the axes of its result are batch, time, time: too many"),
    ],
)
def test_what_else_a_step_may_be(step: Compiled, changes: dict, expected: str) -> None:
    given = {f"params.{path}": value for path, value in changes.items()}
    assert expected in refusal(step, "causal_conv1d", given)


class Alone(nn.Module):
    """A convolution without projections, of an x whose columns lie side by side."""

    def __init__(self, conv: Callable[..., tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.conv, self.weight = conv, nn.Parameter(drawn(C, W))

    def forward(self, x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        y, *kept = self.conv(x, *states, self.weight, None)
        return y.contiguous(), *kept


def plain(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, ...]:
    return (run(x, w, b, W - 1)[..., : x.shape[-1]],)


def kept(x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, ...]:
    return *plain(x, w, b), x[..., -(W - 1) :].clone()


def written(x: Tensor, state: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, ...]:
    return (without_activation(x, state, w, b),)


@pytest.mark.parametrize(("conv", "launches"), [(plain, "2 launches, the model's are 1"), (kept, "3 launches")])
def test_more_launches_than_the_model_has_are_refused(conv: Callable[..., tuple[Tensor, ...]], launches: str) -> None:
    found = compiled(Alone(conv), drawn(B, C, 9))
    assert reason(found).startswith(f"the op and the copies around it are {launches}")


def test_so_they_are_where_a_state_is_written() -> None:
    found = compiled(Alone(written), drawn(B, C, 9), pooled())
    assert found.report.ops[OP] == 1
    (match,) = found.findings().of("causal_conv1d")
    joined = {"claimed": tuple(node for node in match.claimed if "cat" not in str(node.target))}
    assert refusal(found, "causal_conv1d", joined) == (
        "the op and the copies around it are 3 launches, the model's are 2"
    )


class ReadElsewhere(nn.Module):
    """Uses the filter in another way too, or gives it back."""

    def __init__(self, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.use = use
        self.weight = nn.Parameter(drawn(C, 1, W))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return prefill(x, self.weight.squeeze(1), None), self.use(self.weight)


@pytest.mark.parametrize("use", [lambda w: w.view(-1) * 2, lambda w: w[:, 0] + 1])
def test_a_filter_that_is_read_elsewhere_too_stays_where_it_is(use: Callable[[Tensor], Tensor]) -> None:
    """Moved, it has no such view, and what is computed of it has other strides."""
    model, x = ReadElsewhere(use), drawn(B, 5, C).transpose(1, 2)
    with torch.no_grad():
        wanted = model(x)
    found = compiled(model, x)
    assert "its weight is read elsewhere too, by aten." in reason(found)
    for value, expected in zip(found.output, wanted, strict=True):
        assert same(value, expected)
        assert value.stride() == expected.stride()
