"""Which ops take lists from the host that a replay can renew, and whether a captured run is right about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .errors import CaptureError

# The arguments that torch_npu 2.13 renews by `NPUGraph.update`: its UPDATE_SPECS, those whose value is a list.
HOST_LISTS: Mapping[str, frozenset[str]] = {
    "npu::npu_fused_infer_attention_score": frozenset({"actual_seq_lengths", "actual_seq_lengths_kv"}),
    "npu::npu_fused_infer_attention_score_v2": frozenset({"actual_seq_qlen", "actual_seq_kvlen"}),
}


def taken_lists(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[int]]]:
    """The lists of a call that can be renewed, by the names of the arguments."""
    keys = HOST_LISTS.get(op._schema.name, frozenset())
    if keys:
        for i, argument in enumerate(op._schema.arguments):
            if argument.name in keys:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                if value is not None:
                    yield argument.name, value


def check_host_lists(taken: Sequence[tuple[str, str, Sequence[int]]], lists: Mapping[str, Sequence[int]]) -> None:
    """Checks that each list has an op that takes it as it is.

    A key that no op knows would be ignored, and the op would go on with the lengths of the capture.

    Args:
        taken: what ops of the run took: the op, the argument, the value.
        lists: the inputs, by the names of the arguments.

    Raises:
        CaptureError: no op takes a list, or one takes another list by the same name, which the update would overwrite.
    """
    for key, expected in lists.items():
        values = [value for _, name, value in taken if name == key]
        if not values:
            known = sorted({f"{op} takes {', '.join(sorted(HOST_LISTS[op]))}" for op, _, _ in taken})
            raise CaptureError(
                f"no op of the run takes a list {key!r} that a replay can renew, so that it would keep the capture's; "
                + ("; ".join(known) or "none takes any")
            )
        for value in values:
            if list(value) != list(expected):
                raise CaptureError(
                    f"an op takes {list(value)} as {key!r}, but the input is {list(expected)}: give the op the input "
                    "as it is, as replays renew the op's list with it"
                )
