"""bmm(x, weight).transpose(0, 1) → npu_transpose_batchmatmul."""

from __future__ import annotations

import torch
from torch import fx

from ...patterns import values
from ...patterns.match import Match
from ...patterns.movement import COPIES, trace
from ...patterns.transpose_batchmatmul import TransposeBatchmatmul
from ...runtime.ops import CONTRACTS
from ...runtime.ops.contract import OpContract
from ...runtime.ops.transpose_batchmatmul import BATCH_FIRST, BATCH_SECOND
from ...runtime.sizes import is_contiguous
from ..edit import Edit, Refused

aten = torch.ops.aten


def lower(match: Match, edit: Edit) -> OpContract:
    """One op, whose result stands for the copies that the model makes of the transposed view."""
    p = match.params
    assert isinstance(p, TransposeBatchmatmul)
    contract = CONTRACTS["npu::npu_transpose_batchmatmul"]
    results = _row_major(match.node)
    if results is None:
        raise Refused("its result is read as the view that it is; the op's would have to be copied into that layout")
    matmul, _ = trace(match.node)
    inner = (node for node in match.claimed if matmul <= node < match.node)
    if any(node.users.keys() - {*match.claimed} for node in inner):
        raise Refused("the matmul is used elsewhere too, so that its own kernel would stay")
    product = edit.op(
        contract,
        input=edit.current(match.inputs["x"]),
        weight=edit.current(match.inputs["weight"]),
        # All of them: their defaults differ between versions.
        perm_x1=list(BATCH_SECOND if p.batch_second else BATCH_FIRST),
        perm_x2=list(BATCH_FIRST),
        perm_y=list(BATCH_SECOND),
    )
    edit.replace(results[0], product)
    for result in results[1:]:  # each a tensor of its own
        edit.replace(result, edit.call(aten.clone.default, product, memory_format=torch.contiguous_format))
    return contract


def _row_major(node: fx.Node) -> list[fx.Node] | None:
    """What is row-major of a transposed view: itself, or the copies that are all that reads it; None otherwise."""
    value = values.tensor(node)
    assert value is not None
    if is_contiguous(value):
        return [node]
    copies = list(node.users)
    fakes = [values.tensor(copy) for copy in copies]
    if all(copy.target in COPIES for copy in copies) and all(f is not None and is_contiguous(f) for f in fakes):
        return copies
    return None
