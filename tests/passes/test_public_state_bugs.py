"""What others got wrong about convolutions and the states that they keep, by the public report, where the op runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F  # noqa: N812  # its usual name

from npu_fuse import Backend
from npu_fuse.runtime.conv_state import in_pool_memory

Tensor = torch.Tensor
OP, NAME = "npu_fuse::causal_conv1d_columns", "npu_fuse.causal_conv1d_columns"
DTYPE = torch.bfloat16
BATCH, CHANNELS, WIDTH = 2, 16, 4


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pooled(slots: int = BATCH, columns: int = WIDTH - 1, dtype: torch.dtype = DTYPE) -> Tensor:
    """States [slots, channel, time] in the memory of the kernel's pool."""
    return in_pool_memory(drawn(slots, CHANNELS, columns, seed=9, dtype=dtype))


class Convolution(nn.Module):
    """A depthwise convolution, with its weight and bias as a model's own."""

    def __init__(
        self, width: int = WIDTH, bias: bool = True, activation: Callable[[Tensor], Tensor] | None = F.silu
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv1d = nn.Conv1d(CHANNELS, CHANNELS, width, groups=CHANNELS, bias=bias, dtype=DTYPE)
        self.activation = activation

    def run(self, x: Tensor, padding: int = 0) -> Tensor:
        """Over columns [batch, channel, time]."""
        y = F.conv1d(x, self.conv1d.weight, self.conv1d.bias, padding=padding, groups=CHANNELS)
        return y if self.activation is None else self.activation(y)


class Step(Convolution):
    """Tokens [batch, time, channel] behind a state, whose end is kept."""

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        seen = torch.cat((state, x.transpose(1, 2)), -1)
        state.copy_(seen[..., seen.shape[-1] - state.shape[-1] :])
        return self.run(seen)[..., -x.shape[1] :].transpose(1, 2)


def copied(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value)


def check(model: nn.Module, state: Tensor, calls: Sequence[tuple[Tensor, ...]]) -> tuple[Backend, Tensor]:
    """Makes the calls in turn on one state, and compares outputs and the state with eager's after each.

    Returns:
        What compiled them, and the state that they leave.
    """
    torch._dynamo.reset()
    backend = Backend(strict=True, keep_graphs=True)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    own, expected = copied(state), copied(state)
    with torch.no_grad():
        for x, *others in calls:
            wanted = model(x, expected, *others)
            torch.testing.assert_close(compiled(x, own, *others), wanted, rtol=3e-2, atol=3e-2)
            assert torch.equal(own, expected)
    return backend, own


def fused(backend: Backend) -> list[fx.Node]:
    """The call of the op in each graph, of which each must have one."""
    assert [report.ops[OP] for report in backend.reports] == [1] * len(backend.reports), str(backend.report)
    return [n for _, after in backend.graphs for n in after.graph.nodes if str(n.target).startswith(NAME)]


ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor] | None, int]] = {
    "none": (None, 0),
    "silu": (F.silu, 1),
    "silu, spelled out": (lambda y: y * torch.sigmoid(y), 1),
    "relu": (F.relu, 0),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_convolution_has_its_own_activation_and_bias(name: str, bias: bool) -> None:
    """sgl-project/sgl-kernel-npu#449, modelscope/twinkle#228: SiLU always, and a bias never."""
    activation, mode = ACTIVATIONS[name]
    backend, _ = check(Step(bias=bias, activation=activation), pooled(), [(drawn(BATCH, 1, CHANNELS),)])
    (call,) = fused(backend)
    assert (call.args[3] is not None, call.args[-1]) == (bias, mode)


@pytest.mark.parametrize("tokens", [6, CHANNELS])
def test_what_is_channels_is_not_told_by_sizes(tokens: int) -> None:
    """xLLM-AI/xllm#1536, fla-org/flash-linear-attention#871: tokens == channels, and rows of a wider tensor"""

    class Prompt(Convolution):
        def forward(self, whole: Tensor, state: Tensor) -> Tensor:
            x = whole[..., CHANNELS : 2 * CHANNELS].transpose(1, 2)
            state.copy_(x[..., -state.shape[-1] :])
            return self.run(x, WIDTH - 1)[..., :tokens].transpose(1, 2).contiguous()

    backend, _ = check(Prompt(), pooled(), [(drawn(BATCH, tokens, 3 * CHANNELS),)])
    fused(backend)


def test_one_state_serves_prefill_and_steps() -> None:
    """sgl-project/sglang#26055: each wanted the state in another layout"""
    backend, _ = check(Step(), pooled(), [(drawn(BATCH, n, CHANNELS, seed=n),) for n in (7, 1, 1, 2)])
    fused(backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_state_of_another_type_is_as_in_eager(dtype: torch.dtype) -> None:
    """sgl-project/sglang#30178, huggingface/transformers#32690"""

    class Cast(Convolution):
        def forward(self, x: Tensor, state: Tensor) -> Tensor:
            seen = torch.cat((state.to(x.dtype), x.transpose(1, 2)), -1)
            state.copy_(seen[..., -state.shape[-1] :])
            return self.run(seen).transpose(1, 2)

    backend, _ = check(Cast(), pooled(dtype=dtype), [(drawn(BATCH, 1, CHANNELS),)])
    (site,) = backend.report.sites
    assert f"is {str(dtype).removeprefix('torch.')} but x is bfloat16" in str(site.reason)


def test_pads_change_no_state() -> None:
    """sgl-project/sglang#16714: slot -1 was read as the last one, or clamped to the first, which a request uses"""

    class Padded(Convolution):
        def forward(self, x: Tensor, pool: Tensor, slots: Tensor) -> Tensor:
            live = slots >= 0
            seen = torch.cat((pool[slots.clamp(min=0)], x.transpose(1, 2)), -1)
            rows = (slots[:, None] == torch.arange(pool.shape[0])) & live[:, None]
            new = torch.einsum("bn,bcw->ncw", rows.to(x.dtype), seen[..., 1:])
            pool.copy_(torch.where(rows.any(0)[:, None, None], new, pool))
            return self.run(seen).transpose(1, 2) * live[:, None, None]

    x, pool = drawn(4, 1, CHANNELS), pooled(3)
    for slots in ([2, -1, 0, -1], [-1, 1, -1, 2]):
        _, left = check(Padded(), pool, [(x, torch.tensor(slots))])
        for row, slot in enumerate(slots):
            if slot >= 0:
                assert torch.equal(left[slot], torch.cat((pool[slot, :, 1:], x[row].T), -1))
        (unused,) = set(range(3)) - set(slots)
        assert torch.equal(left[unused], pool[unused])


@pytest.mark.parametrize("tokens", [2, 1, 5, 3])
def test_a_prompt_that_is_shorter_than_the_window_keeps_the_end_of_the_state(tokens: int) -> None:
    """vllm-project/vllm-ascend#8561, vllm-project/vllm#56196: the state got a slice of the wrong length"""
    x, state = drawn(BATCH, tokens, CHANNELS), pooled()
    backend, left = check(Step(), state, [(x,)])
    fused(backend)
    assert torch.equal(left, torch.cat((state, x.transpose(1, 2)), -1)[..., -(WIDTH - 1) :])


def test_a_new_request_does_not_see_who_had_its_slot() -> None:
    """vllm-project/tpu-inference#2431, vllm-project/vllm#51483: the flag of a first chunk was not honoured"""

    class Flagged(Convolution):
        def forward(self, x: Tensor, state: Tensor, has_initial: Tensor) -> Tensor:
            seen = torch.cat((torch.where(has_initial[:, None, None], state, 0), x.transpose(1, 2)), -1)
            state.copy_(seen[..., -(WIDTH - 1) :])
            return self.run(seen)[..., -x.shape[1] :].transpose(1, 2)

    flags = [[True, False], [True, True], [False, True]]
    calls = [(drawn(BATCH, 2, CHANNELS, seed=i), torch.tensor(flag)) for i, flag in enumerate(flags)]
    backend, _ = check(Flagged(), pooled(), calls)
    fused(backend)


@pytest.mark.parametrize("accepted", [1, 2, 4])
def test_a_state_is_rolled_back_to_what_was_accepted(accepted: int) -> None:
    """vllm-project/tpu-inference#3178, vllm-ascend#11408: the state kept the draft tokens that were refused"""

    class Verify(Convolution):
        def forward(self, x: Tensor, window: Tensor, state: Tensor) -> Tensor:
            seen = torch.cat((state, x.transpose(1, 2)), -1)
            window.copy_(seen)
            return self.run(seen).transpose(1, 2).contiguous()

    x, state = drawn(BATCH, 4, CHANNELS), pooled()
    backend, window = check(Verify(), pooled(columns=WIDTH + 3), [(x, state)])
    fused(backend)

    class RollBack(nn.Module):
        def forward(self, accepted: Tensor, state: Tensor, window: Tensor) -> Tensor:
            index = accepted[:, None, None] + torch.arange(WIDTH - 1)
            state.copy_(window.gather(-1, index.expand(-1, CHANNELS, -1)))
            return state.sum(-1)

    _, left = check(RollBack(), state, [(torch.tensor([accepted, accepted]), window)])
    assert torch.equal(left, torch.cat((state, x.transpose(1, 2)[..., :accepted]), -1)[..., -(WIDTH - 1) :])


def test_a_window_of_one_token_has_no_state() -> None:
    """vllm-project/vllm-gaudi#1484: `-state_len:` takes everything where state_len is 0"""
    backend, _ = check(Step(width=1), pooled(columns=0), [(drawn(BATCH, 3, CHANNELS),)])
    assert not backend.report.ops


@pytest.mark.parametrize("columns", [WIDTH - 1, WIDTH, WIDTH + 2])
def test_a_state_may_be_longer_than_the_window(columns: int) -> None:
    """Dao-AILab/causal-conv1d#42: reference and kernel disagreed on a state of length width or width - 1"""

    class Longer(Convolution):
        def forward(self, x: Tensor, state: Tensor) -> Tensor:
            seen = torch.cat((state, x.transpose(1, 2)), -1)
            state.copy_(seen[..., -state.shape[-1] :])
            return self.run(seen[..., -WIDTH:]).transpose(1, 2)

    calls = [(drawn(BATCH, 1, CHANNELS, seed=i),) for i in range(columns + 2)]
    backend, _ = check(Longer(), pooled(columns=columns), calls)
    fused(backend)
