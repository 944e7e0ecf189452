"""The gated delta rule of one token stays as it is: torch code keeps its states otherwise than the kernel does."""

from __future__ import annotations

from typing import NoReturn

from ...patterns import values
from ...patterns.match import Match
from ...runtime.ops import CONTRACTS
from ..edit import Edit, Refused


def lower(match: Match, edit: Edit) -> NoReturn:
    """Refuses each."""
    contract = CONTRACTS["npu::npu_recurrent_gated_delta_rule"]
    state = match.inputs["state"]
    shape, dtype = tuple(values.shape(state)), str(values.dtype(state)).removeprefix("torch.")
    raise Refused(
        f"its state {shape} is {dtype} with keys before values; {contract.name} keeps [blocks, heads, value_dim,"
        " key_dim] in bfloat16"
    )
