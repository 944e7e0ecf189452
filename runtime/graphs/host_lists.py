"""Which ops take lists from the host that a replay can renew, and whether a captured run is right about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .errors import CaptureError
from .record import Call

# The arguments that torch_npu 2.13 renews by `NPUGraph.update`: its UPDATE_SPECS, those whose value is a list.
HOST_LISTS: Mapping[str, frozenset[str]] = {
    "npu::npu_fused_infer_attention_score": frozenset({"actual_seq_lengths", "actual_seq_lengths_kv"}),
    "npu::npu_fused_infer_attention_score_v2": frozenset({"actual_seq_qlen", "actual_seq_kvlen"}),
}


def check_host_lists(calls: Sequence[Call], lists: Mapping[str, Sequence[int]]) -> None:
    """Checks that each list has an op that takes it as it is.

    A key that no op knows would be ignored, and the op would go on with the lengths of the capture.

    Raises:
        CaptureError: no op takes a list, or one takes another list by the same name, which the update would overwrite.
    """
    takers = [call for call in calls if call.op._schema.name in HOST_LISTS]
    for key, expected in lists.items():
        values = [value for call in takers for name, value in host_arguments(call) if name == key]
        if not values:
            known = {call.op._schema.name: sorted(HOST_LISTS[call.op._schema.name]) for call in takers}
            raise CaptureError(
                f"no captured op takes {key!r} as a list that a replay can renew, so that it would keep the capture's; "
                + ("; ".join(f"{name} takes {', '.join(keys)}" for name, keys in sorted(known.items())) or "none does")
            )
        for value in values:
            if list(value) != list(expected):
                raise CaptureError(
                    f"an op takes {list(value)} as {key!r}, but the input is {list(expected)}: give the op the input "
                    "as it is, as replays renew the op's list with it"
                )


def host_arguments(call: Call) -> list[tuple[str, Sequence[int]]]:
    """The lists of a call that can be renewed, by name."""
    found = []
    for i, argument in enumerate(call.op._schema.arguments):
        if argument.name in HOST_LISTS.get(call.op._schema.name, ()):
            value = call.args[i] if i < len(call.args) else call.kwargs.get(argument.name)
            if value is not None:
                found.append((argument.name, value))
    return found
