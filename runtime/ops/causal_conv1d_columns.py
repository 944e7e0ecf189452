"""The causal convolution on states as frameworks keep them: the last `state_len` columns of all that was seen, whole.

    seen = states | x
    y[t] = activation(bias + sum_j weight[j] * seen[t + j - (width - 1)])
    states = the last state_len columns of seen

The kernel of `causal_conv1d` reads and writes the last width - 1 columns in place, where their memory is its pool
(`runtime.conv_state`). transformers keeps one column more, which no result depends on; a copy of its own moves it up.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..conv_state import has_pool_memory, pool, write_back
from ..sizes import known_equal
from ..target import Soc, Target
from .causal_conv1d import CAUSAL_CONV1D, PREFILL, UPDATE
from .causal_conv1d_call import ConvCall, invalid
from .causal_conv1d_reference import convolved
from .contract import OpContract
from .partly_covered import PartlyCovered
from .reasons import raise_first, rank_between, shape_text
from .sgl_kernel import package

__all__ = ["CAUSAL_CONV1D_COLUMNS"]

_SOCS: frozenset[Soc] = CAUSAL_CONV1D.socs
_SCHEMA = (
    "causal_conv1d_columns(Tensor x, Tensor weight, Tensor(a!) states, Tensor? bias=None,"
    " Tensor? has_initial_state=None, bool reads_states=True, int activation_mode=0) -> Tensor"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """The arguments of one call.

    Args:
        x: [batch, S, dim]; float16 or bfloat16, contiguous.
        weight: [width, dim], the last row meets the current token.
        states: [batch, dim, state_len], channels side by side in memory; written.
        bias: [dim], or None.
        has_initial_state: [batch] bool: the states of the others count as zeros. None where all count.
        reads_states: whether there are states before x; without them they count as zeros.
        activation_mode: 0 for none, 1 for SiLU.
    """

    x: torch.Tensor
    weight: torch.Tensor
    states: torch.Tensor
    bias: torch.Tensor | None
    has_initial_state: torch.Tensor | None
    reads_states: bool
    activation_mode: int

    def on(self, conv_states: torch.Tensor, *, run_mode: int, flags: torch.Tensor | None = None) -> ConvCall:
        """The call of the kernel on a pool."""
        return ConvCall(
            x=self.x,
            weight=self.weight,
            conv_states=conv_states,
            bias=self.bias,
            query_start_loc=None,
            cache_indices=None,
            has_initial_state=flags,
            num_accepted_tokens=None,
            activation_mode=self.activation_mode,
            pad_slot_id=-1,
            run_mode=run_mode,
        )

    @property
    def run_mode(self) -> int:
        return UPDATE if self.reads_states and self.has_initial_state is None else PREFILL

    @property
    def before(self) -> torch.Tensor:
        """The states before x."""
        if not self.reads_states:
            return torch.zeros_like(self.states)
        if self.has_initial_state is None:
            return self.states
        return torch.where(self.has_initial_state[:, None, None], self.states, 0)

    @property
    def unread(self) -> int:
        """How many columns of the states no result depends on."""
        return int(self.states.shape[2]) - int(self.weight.shape[0]) + 1


_OURS = PartlyCovered("npu_fuse::causal_conv1d_columns", _SCHEMA, _Call)


def _invalid(call: _Call) -> Iterator[str]:
    yield from rank_between("x", call.x, 3, 3)
    yield from rank_between("states", call.states, 3, 3)
    if not known_equal(call.states.shape[0], call.x.shape[0]):
        yield f"states {shape_text(call.states.shape)} is not known to have one for each of {call.x.shape[0]} sequences"
    if call.has_initial_state is not None and not call.reads_states:
        yield "has_initial_state is given where no states are read"
    laid = call.states.transpose(1, 2)
    yield from invalid(call.on(laid.new_empty(laid.shape), run_mode=call.run_mode, flags=call.has_initial_state))


def _refusals(target: Target, call: _Call) -> Iterator[str]:
    yield from _invalid(call)
    yield from package(target, "causal_conv1d with a run_mode", "2026.7.1")
    if not has_pool_memory(call.states):
        yield (
            f"states {shape_text(call.states.shape)} have strides {tuple(call.states.stride())}, so that their channels"
            " don't lie side by side and each call would copy them in and out;"
            " npu_fuse.runtime.conv_state.adopt(cache) moves those of a transformers cache once"
        )
    if not isinstance(call.states.shape[2], int):
        yield f"the number of columns of states {shape_text(call.states.shape)} is not static"


@_OURS.kernel
def causal_conv1d_columns_reference(call: _Call) -> torch.Tensor:
    """What `npu_fuse::causal_conv1d_columns` computes: float32 inside, one rounding; the states bit for bit.

    Args:
        call: x [batch, S, dim], weight [width, dim], states [batch, dim, state_len] and the rest.

    Returns:
        [batch, S, dim], of x's dtype.

    Raises:
        ValueError: shapes or dtypes don't fit.
    """
    raise_first(_OURS.name, _invalid(call))
    before = call.before
    seen = torch.cat((before, call.x.transpose(1, 2)), -1)
    history = before[..., call.unread :].transpose(1, 2).contiguous()
    out = convolved(call.on(history, run_mode=UPDATE), 0)
    call.states.copy_(seen[..., seen.shape[2] - before.shape[2] :])
    return out


@_OURS.kernel
def causal_conv1d_columns_fake(call: _Call) -> torch.Tensor:
    """Shape of `causal_conv1d_columns_reference`."""
    return call.x.new_empty(call.x.shape)


@_OURS.kernel
def _on_device(call: _Call) -> torch.Tensor:
    if call.unread:
        call.states[..., : call.unread] = _moved_up(call)
    rows = pool(call.states, call.weight.shape[0])
    flags = call.has_initial_state
    out: torch.Tensor = CAUSAL_CONV1D.op(
        call.x,
        call.weight,
        rows,
        call.bias,
        has_initial_state=flags,
        activation_mode=call.activation_mode,
        run_mode=call.run_mode,
    )
    write_back(call.states, rows)
    return out


def _moved_up(call: _Call) -> torch.Tensor:
    """The columns that the kernel doesn't write, as they are after x; memory apart from where they go."""
    tokens, columns = call.x.shape[1], call.states.shape[2]
    if tokens >= columns:
        return call.x[:, tokens - columns : tokens - columns + call.unread].transpose(1, 2)
    moved = call.before[..., tokens : tokens + call.unread]
    missing = call.unread - moved.shape[2]
    if missing:
        return torch.cat((moved, call.x[:, :missing].transpose(1, 2)), -1)
    return moved if tokens >= call.unread else moved.clone()


CAUSAL_CONV1D_COLUMNS = OpContract(
    name=_OURS.name,
    schema=_OURS.schema,
    reference=causal_conv1d_columns_reference,
    fake=causal_conv1d_columns_fake,
    refuse=_OURS.refuse(_refusals),
    socs=_SOCS,
    source=CAUSAL_CONV1D.source,
    mutates=("states",),
    device_kernel=_on_device,
)
