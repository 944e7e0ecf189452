"""The depthwise causal convolution of a sequence that goes on where its state ends, and the state after it:

    window = state | x
    y[t] = activation(bias + sum_j weight[j] * window[t + j])
    state = the last width - 1 rows of window

sgl_kernel_npu's op writes the states without saying so, and leaves the rows of pads as they were allocated. Ours is the
same kernel behind a schema that says what it writes, with zeros in those rows. Only ours is put into graphs.
"""

import dataclasses
from collections.abc import Iterator

import torch

from ..target import Soc, Target
from .causal_conv1d_call import PREFILL, SILU, UPDATE, ConvCall, invalid
from .causal_conv1d_reference import convolved, skipped_rows, value_reasons
from .contract import OpContract
from .partly_covered import PartlyCovered
from .reasons import raise_first
from .sgl_kernel import package

__all__ = ["CAUSAL_CONV1D", "NPU_CAUSAL_CONV1D", "PREFILL", "SILU", "UPDATE"]

_SOCS: frozenset[Soc] = frozenset({"ascend910b", "ascend910_93"})
_SOURCE = (
    "sgl_kernel_npu f425bdf1 (2026-08-21), kernel and host; alignment and sizes as its twin in vllm-ascend checks them"
)

# The first with this schema. Before, the op had another one, and was for prefill alone.
_SINCE = "2026.7.1"

_REST = (
    " Tensor? bias=None, Tensor? query_start_loc=None, Tensor? cache_indices=None, Tensor? has_initial_state=None,"
    " Tensor? num_accepted_tokens=None, int activation_mode=0, int pad_slot_id=-1, int run_mode=0) -> Tensor"
)
_RAW = PartlyCovered(
    "npu::causal_conv1d", f"causal_conv1d(Tensor x, Tensor weight, Tensor conv_states,{_REST}", ConvCall
)
_OURS = PartlyCovered(
    "npu_fuse::causal_conv1d", f"causal_conv1d(Tensor x, Tensor weight, Tensor(a!) conv_states,{_REST}", ConvCall
)


def _refusals(target: Target, call: ConvCall) -> Iterator[str]:
    yield from invalid(call)
    yield from package(target, "causal_conv1d with a run_mode", _SINCE)


def _computed(name: str, call: ConvCall, skipped: float) -> torch.Tensor:
    raise_first(name, invalid(call))
    raise_first(name, value_reasons(call))
    return convolved(call, skipped)


@_OURS.kernel
def causal_conv1d_reference(call: ConvCall) -> torch.Tensor:
    """What `npu_fuse::causal_conv1d` computes: float32 inside, one rounding; the states bit for bit.

    Prefill and update write the first width - 1 rows of a slot, and no other row. An update with `num_accepted_tokens`
    writes 2 + L rows where the slot has as many: the two before its L tokens, and these. After it the rows from k - 1
    on are the history if k of the L tokens are accepted, which the next call is told; after a prefill it is told 1.

    Args:
        call: the arguments, see `ConvCall`.

    Returns:
        Of x's shape and dtype; zeros in rows of pads, and where query_start_loc has no sequence.

    Raises:
        ValueError: shapes or dtypes don't fit, an argument would be ignored, query_start_loc falls, a slot is outside
            of conv_states, or two sequences have one slot. Sequences without tokens have no say in the last two.

    Source: sgl-kernel-npu f425bdf1 (2026-08-21), kernel and host.
    """
    return _computed(_OURS.name, call, skipped=0)


@_OURS.kernel
def causal_conv1d_fake(call: ConvCall) -> torch.Tensor:
    """Shape of `causal_conv1d_reference`."""
    return call.x.new_empty(call.x.shape)


@_OURS.kernel
def _causal_conv1d_on_device(call: ConvCall) -> torch.Tensor:
    out: torch.Tensor = NPU_CAUSAL_CONV1D.op(
        **{field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
    )
    skipped = skipped_rows(call)
    return out if skipped is None else out.masked_fill_(skipped.unsqueeze(-1), 0)


@_RAW.kernel
def npu_causal_conv1d_reference(call: ConvCall) -> torch.Tensor:
    """What `npu::causal_conv1d` computes: `causal_conv1d_reference`, but NaN in rows that it leaves uninitialised."""
    return _computed(_RAW.name, call, skipped=torch.nan)


@_RAW.kernel
def npu_causal_conv1d_fake(call: ConvCall) -> torch.Tensor:
    """Shape of `npu_causal_conv1d_reference`."""
    return call.x.new_empty(call.x.shape)


CAUSAL_CONV1D = OpContract(
    name=_OURS.name,
    schema=_OURS.schema,
    reference=causal_conv1d_reference,
    fake=causal_conv1d_fake,
    refuse=_OURS.refuse(_refusals),
    socs=_SOCS,
    source=_SOURCE,
    mutates=("conv_states",),
    device_kernel=_causal_conv1d_on_device,
)

NPU_CAUSAL_CONV1D = OpContract(
    name=_RAW.name,
    schema=_RAW.schema,
    reference=npu_causal_conv1d_reference,
    fake=npu_causal_conv1d_fake,
    refuse=_RAW.refuse(_refusals),
    socs=_SOCS,
    source=_SOURCE,
    mutates=("conv_states",),
)
