"""Models that call the op of an NPU by hand: their copies go, what they compute stays, and no call is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import npu_fuse
from helpers import Compiled, compiled, same
from npu_fuse import Target
from npu_fuse.runtime.conv_state import in_pool_memory
from npu_fuse.runtime.effects import register_known
from npu_fuse.runtime.ops.register import register

Tensor = torch.Tensor
BF16 = torch.bfloat16
OP = "npu::causal_conv1d"
D, W, SLOTS = 32, 4, 6
PREFILL, UPDATE = 0, 1

# What else than the call may be launched: the projections around it, and the sum of what they give.
PLAIN = {"aten.linear.default", "npu.causal_conv1d.default"}
VIEWS = {
    "aten.transpose.int",
    "aten.as_strided.default",
    "aten.select.int",
    "aten.permute.default",
    "aten.slice.Tensor",
}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    """As a package of kernels has done it before a model calls them."""
    register(Target())
    register_known()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def by_hand(*arguments: object, **named: object) -> Tensor:
    return torch.ops.npu.causal_conv1d(*arguments, **named)


class Layer(nn.Module):
    """A projection, and a convolution as its `forward` spells it."""

    def __init__(self, bias: bool = True, activation: int = 1) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.before = nn.Linear(D, D, dtype=BF16)
        self.conv1d = nn.Conv1d(D, D, W, groups=D, bias=bias, dtype=BF16)
        self.activation = activation

    def weight(self) -> Tensor:
        return self.conv1d.weight.squeeze(1).transpose(0, 1).contiguous()

    def run(self, x: Tensor, states: Tensor, mode: int, **others: Tensor | None) -> Tensor:
        bias, mode_of = self.conv1d.bias, {"activation_mode": self.activation, "run_mode": mode}
        return by_hand(x, self.weight(), states, bias, **others, **mode_of)


class Decode(Layer):
    """One token a request, on slots of the pool."""

    def forward(self, x: Tensor, pool: Tensor, starts: Tensor, slots: Tensor) -> Tensor:
        return self.run(self.before(x), pool, UPDATE, query_start_loc=starts, cache_indices=slots)


class Extend(Layer):
    """Prompts behind one another: on a copy of the columns in use, which is written back as a whole."""

    def forward(self, x: Tensor, pool: Tensor, starts: Tensor, slots: Tensor, flags: Tensor) -> Tensor:
        states = pool[:, -(W - 1) :].contiguous()
        given = {"query_start_loc": starts, "cache_indices": slots, "has_initial_state": flags}
        y = self.run(self.before(x), states, PREFILL, **given)
        pool[:, -(W - 1) :] = states
        return y


class ExtendLayer(Extend):
    """Likewise, where the pool is that of one layer out of all."""

    def forward(self, x: Tensor, pools: Tensor, starts: Tensor, slots: Tensor, flags: Tensor) -> Tensor:
        return super().forward(x, pools[1], starts, slots, flags)


class Verify(Layer):
    """Draft tokens, of which the last call had some accepted."""

    def forward(self, x: Tensor, pool: Tensor, starts: Tensor, slots: Tensor, accepted: Tensor) -> Tensor:
        given = {"query_start_loc": starts, "cache_indices": slots, "num_accepted_tokens": accepted}
        return self.run(self.before(x), pool, UPDATE, **given)


class Turned(Layer):
    """States of [slots, channels, columns] that are turned for the call, and turned back."""

    def forward(self, x: Tensor, pool: Tensor, slots: Tensor) -> Tensor:
        states = pool.transpose(1, 2).clone()
        columns = self.before(x).transpose(1, 2)
        y = self.run(columns.transpose(1, 2).clone(), states, UPDATE, cache_indices=slots)
        pool.copy_(states.transpose(1, 2))
        return y


STARTS, FLAGS = torch.tensor([0, 3, 3, 4, 9]), torch.tensor([True, False, False, True])
ALL: dict[str, tuple[type[Layer], tuple[Tensor, ...]]] = {
    "decode": (Decode, (drawn(3, D), drawn(SLOTS, 3, D), torch.arange(4), torch.tensor([4, 0, 2]))),
    "decode with pads": (Decode, (drawn(3, D), drawn(SLOTS, 3, D), torch.arange(4), torch.tensor([4, -1, 2]))),
    "extend": (Extend, (drawn(9, D), drawn(SLOTS, 3, D), STARTS, torch.tensor([1, 3, 5, 0]), FLAGS)),
    "extend in a layer": (ExtendLayer, (drawn(9, D), drawn(2, SLOTS, 3, D), STARTS, torch.tensor([1, 3, 5, 0]), FLAGS)),
    "verify": (
        Verify,
        (drawn(6, D), drawn(SLOTS, 5, D), torch.tensor([0, 3, 6]), torch.tensor([5, 2]), torch.tensor([1, 3])),
    ),
    "turned": (Turned, (drawn(2, 1, D), in_pool_memory(drawn(SLOTS, D, 3)), torch.tensor([3, 1]))),
}


def again(inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Copies in memory of the same kind."""
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t) for t in inputs]


def check(model: nn.Module, inputs: tuple[Tensor, ...], **settings: object) -> Compiled:
    """Compiles a call: it gives eager's result and leaves eager's pools, to the bit."""
    ours, theirs = again(inputs), again(inputs)
    with torch.no_grad():
        wanted = model(*theirs)
    found = compiled(model, *ours, **settings)
    given, wanted = ((value,) if isinstance(value, Tensor) else value for value in (found.output, wanted))
    assert all(same(a, b) for a, b in zip((*given, *ours), (*wanted, *theirs), strict=True))
    return found


def site(found: Compiled) -> npu_fuse.Site:
    (of,) = [site for site in found.report.sites if site.kind == "causal_conv1d"]
    return of


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("bias", "activation"), [(True, 1), (False, 0)])
def test_only_the_call_is_left(name: str, bias: bool, activation: int) -> None:
    kind, inputs = ALL[name]
    found = check(kind(bias, activation), inputs)
    assert (site(found).status, site(found).op) == ("lowered", OP)
    assert found.report.ops[OP] == 1
    launched = {target for target in found.targets() if not target.startswith("<function transposed")}
    assert launched - VIEWS == PLAIN
    params = site(found).params
    assert (params["width"], params["bias"], params["channels"]) == (W, bias, D)
    assert params["activation"] == ("silu" if activation else None)
    assert params["mode"] == ("prefill" if "extend" in name else "update")
    assert params["state_len"] == (5 if name == "verify" else 3)


def test_the_result_is_that_of_the_convolution() -> None:
    """By float64 and torch's own convolution."""
    model, (x, pool, slots) = Turned(), ALL["turned"][1]
    (own,) = again((pool,))
    found = compiled(model, x, own, slots)
    with torch.no_grad():
        columns = model.before(x).double().transpose(1, 2)
        seen = torch.cat([pool[slots].double(), columns], -1)
        conv = model.conv1d
        wanted = functional.silu(functional.conv1d(seen, conv.weight.double(), conv.bias.double(), groups=D))
    torch.testing.assert_close(found.output.double(), wanted.transpose(1, 2), rtol=1e-2, atol=1e-3)
    expected = pool.clone()
    expected[slots] = seen[..., 1:].to(BF16)
    assert same(own, expected)


def test_weights_that_change_are_seen() -> None:
    kind, inputs = ALL["decode"]
    model = kind()
    found = compiled(model, *again(inputs))

    def steps() -> Iterator[None]:
        yield model.conv1d.weight.mul_(2)
        yield model.conv1d.weight.copy_(drawn(D, 1, W, seed=7))
        yield model.load_state_dict({k: v * 3 for k, v in model.state_dict().items()}, assign=True)

    with torch.no_grad():
        for _ in steps():
            ours, theirs = again(inputs), again(inputs)
            assert same(found.function(*ours), model(*theirs))
            assert same(ours[1], theirs[1])
    assert len(model.state_dict()["conv1d.weight"].shape) == 3


def test_a_weight_that_is_given_as_the_op_takes_it_stays() -> None:
    class Given(Layer):
        def forward(self, x: Tensor, pool: Tensor, weight: Tensor) -> Tensor:
            return by_hand(x, weight, pool, run_mode=UPDATE)

    found = check(Given(), (drawn(2, 1, D), drawn(SLOTS, 3, D), drawn(W, D)))
    assert site(found).status == "lowered"
    assert found.targets() == ["npu.causal_conv1d.default"]
    assert site(found).params["bias"] is False


def test_an_op_that_says_what_it_writes_is_one_too() -> None:
    class Ours(Turned):
        def run(self, x: Tensor, states: Tensor, mode: int, **others: Tensor | None) -> Tensor:
            return torch.ops.npu_fuse.causal_conv1d(x, self.weight(), states, run_mode=mode, **others)

    found = check(Ours(), ALL["turned"][1])
    assert found.report.ops["npu_fuse::causal_conv1d"] == 1
    assert "aten.clone.default" not in found.targets()


REFUSED: dict[str, tuple[type[Layer], tuple[Tensor, ...], dict[str, object], str]] = {
    "more rows than are read": (
        Extend,
        (drawn(9, D), drawn(SLOTS, 5, D), *ALL["extend"][1][2:]),
        {},
        "its states (6, 3, 32) have strides (160, 32, 1), so that each call copies them",
    ),
    "another processor": (*ALL["decode"], {"target": Target("ascend950")}, "has no kernel on ascend950"),
    "turned off": (*ALL["turned"], {"disable": ["causal_conv1d"]}, "turned off"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_stays_as_it_was(name: str) -> None:
    kind, inputs, settings, reason = REFUSED[name]
    found = check(kind(), inputs, **settings)
    assert site(found).status == "refused"
    assert reason in site(found).reason
    assert found.targets().count("npu.causal_conv1d.default") == 1
    assert "aten.clone.default" in found.targets()


def test_columns_side_by_side_are_refused() -> None:
    class Copied(Turned):
        def forward(self, x: Tensor, pool: Tensor, slots: Tensor) -> Tensor:
            states = pool.transpose(1, 2).contiguous()
            y = self.run(self.before(x), states, UPDATE, cache_indices=slots)
            pool.copy_(states.transpose(1, 2))
            return y

    x, pool, slots = ALL["turned"][1]
    found = check(Copied(), (x, pool.contiguous(), slots))
    assert "npu_fuse.runtime.conv_state.in_pool_memory" in site(found).reason
    assert site(check(Copied(), (x, pool, slots))).status == "lowered"


def test_weights_that_may_not_be_moved_leave_the_states_in_place() -> None:
    found = check(Turned(), ALL["turned"][1], pack_weights=False)
    assert site(found).status == "lowered"
    assert found.targets().count("aten.clone.default") == 1


# Order --------------------------------------------------------------------------------------------------------------


class Tracked(Layer):
    """Rows of x go to a tracked slot before the call; the state of another is copied behind it."""

    def forward(self, x: Tensor, pool: Tensor, slots: Tensor, tracked: Tensor, rows: Tensor) -> Tensor:
        x = self.before(x)
        pool[tracked] = x.flatten(0, 1)[rows]
        y = self.run(x, pool, UPDATE, cache_indices=slots)
        pool[tracked + 1] = pool[slots[:1]]
        return y


class RolledBack(Layer):
    """Draft tokens, and behind them the state as it was after those that were accepted: rows one before them on."""

    def forward(self, x: Tensor, pool: Tensor, starts: Tensor, slots: Tensor, accepted: Tensor) -> Tensor:
        given = {"query_start_loc": starts, "cache_indices": slots, "num_accepted_tokens": torch.ones_like(slots)}
        y = self.run(self.before(x), pool, UPDATE, **given)
        rows = (accepted - 1)[:, None] + torch.arange(W - 1)
        pool[slots, : W - 1] = pool[slots[:, None], rows]
        return y


class Unused(Layer):
    """Two calls whose results no one reads, each a step."""

    def forward(self, x: Tensor, pool: Tensor) -> Tensor:
        x = self.before(x)
        self.run(x, pool, UPDATE)
        self.run(x, pool, UPDATE)
        return x


class Between(Layer):
    """What the pool is before, between and behind equal calls."""

    def forward(self, x: Tensor, pool: Tensor) -> tuple[Tensor, ...]:
        x = self.before(x)
        sums = [pool.float().sum()]
        results = []
        for _ in range(2):
            results.append(self.run(x, pool, UPDATE))
            sums.append(pool.float().sum())
        return (*results, *sums)


class Scratch(Layer):
    """A state that is read and kept nowhere."""

    def forward(self, x: Tensor, pool: Tensor) -> tuple[Tensor, Tensor]:
        states = pool.clone()
        return self.run(self.before(x), states, UPDATE), states * 2


class Late(Layer):
    """The old state is read behind the call."""

    def forward(self, x: Tensor, pool: Tensor) -> tuple[Tensor, Tensor]:
        states = pool.clone()
        y = self.run(self.before(x), states, UPDATE)
        old = pool * 2
        pool.copy_(states)
        return y, old


def test_tracked_slots_get_what_is_there_at_the_time() -> None:
    inputs = (drawn(2, 2, D), drawn(SLOTS, 3, D), torch.tensor([3, 1]), torch.tensor([0]), torch.tensor([[0, 1, 3]]))
    found = check(Tracked(), inputs)
    assert "aten.clone.default" not in found.targets()
    ops = [t for t in found.targets() if "index" in t or "conv1d" in t]
    assert ops.index("aten.index_put_.default") < ops.index("npu.causal_conv1d.default")
    assert ops[-2:] == ["aten.index.Tensor", "aten.index_put_.default"]


def test_drafts_that_are_rejected_leave_the_state_of_those_accepted() -> None:
    """What stays in the pool is what the accepted tokens alone would have left, token by token."""
    model, (x, pool, starts, slots, _) = RolledBack(), ALL["verify"][1]
    accepted = torch.tensor([1, 3])
    found = check(model, (x, pool, starts, slots, accepted))
    assert site(found).status == "lowered"
    assert "aten.clone.default" not in found.targets()
    (own,) = again((pool,))
    with torch.no_grad():
        found.function(x, own, starts, slots, accepted)
        columns = model.before(x)
    for sequence, (slot, count) in enumerate(zip(slots.tolist(), accepted.tolist(), strict=True)):
        kept = columns[3 * sequence : 3 * sequence + count]
        assert same(own[slot, : W - 1], torch.cat([pool[slot, : W - 1], kept])[-(W - 1) :])
    untouched = [slot for slot in range(SLOTS) if slot not in slots]
    assert same(own[untouched], pool[untouched])


@pytest.mark.parametrize("kind", [Unused, Between])
def test_each_call_is_kept_in_its_place(kind: type[Layer]) -> None:
    found = check(kind(), (drawn(2, 1, D), drawn(2, 3, D)))
    assert found.targets().count("npu.causal_conv1d.default") == 2
    assert "aten.clone.default" not in found.targets()


@pytest.mark.parametrize("kind", [Scratch, Late])
def test_what_is_read_later_keeps_its_value(kind: type[Layer]) -> None:
    found = check(kind(), (drawn(2, 1, D), drawn(2, 3, D)))
    assert site(found).status == "lowered"


# What a program may do with a pool besides: (layer, x, pool) -> something that is given back.
STEPS: dict[str, Callable[[Layer, Tensor, Tensor], Tensor]] = {
    "call": lambda layer, x, pool: layer.run(x, pool, UPDATE),
    "call on a copy": lambda layer, x, pool: layer.run(x.clone(), pool.clone(), UPDATE),
    "call on a copy, put back": lambda layer, x, pool: copied(layer, x, pool, lambda: None),
    "the same with a write between": lambda layer, x, pool: copied(layer, x, pool, lambda: pool[1].add_(1)),
    "the same with a read behind": lambda layer, x, pool: copied(layer, x, pool, lambda: None) + pool.sum(),
    "rows of x": lambda layer, x, pool: pool.index_put_((torch.tensor([1]),), x[:1].expand(-1, W - 1, -1)).sum(),
    "scaled": lambda layer, x, pool: pool.mul_(0.5)[0] * 2,
    "read": lambda layer, x, pool: pool.float().sum(-1),
    "kept": lambda layer, x, pool: pool.clone(),
}


def copied(layer: Layer, x: Tensor, pool: Tensor, between: Callable[[], object]) -> Tensor:
    states = pool.clone()
    y = layer.run(x, states, UPDATE)
    between()
    pool.copy_(states)
    return y


class Program(Layer):
    """Some of these, one after the other."""

    def __init__(self, steps: list[str]) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, x: Tensor, pool: Tensor) -> tuple[Tensor, ...]:
        x = self.before(x)
        return tuple(STEPS[step](self, x, pool) for step in self.steps)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=2, max_size=5))
def test_any_order_of_calls_reads_and_writes_is_kept(steps: list[str]) -> None:
    found = check(Program(steps), (drawn(2, 1, D), drawn(2, W - 1, D)))
    assert all(site.status == "lowered" for site in found.report.sites if site.kind == "causal_conv1d")
