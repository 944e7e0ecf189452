"""all_reduce(x @ weight.T) → npu_mm_all_reduce_base."""

from __future__ import annotations

import torch

from ...patterns import values
from ...patterns.match import Match
from ...patterns.mm_all_reduce import MmAllReduce
from ...runtime import ranks
from ...runtime.ops import CONTRACTS
from ...runtime.ops.contract import OpContract
from ...runtime.sizes import static_int
from ..edit import Edit, Refused
from ..effects import communicates

aten = torch.ops.aten

_RANKS = (2, 4, 8)


def lower(match: Match, edit: Edit) -> OpContract:
    """One op for the matmul and the sum of all ranks' results."""
    p = match.params
    assert isinstance(p, MmAllReduce)
    contract = CONTRACTS["npu::npu_mm_all_reduce_base"]
    if p.ranks not in _RANKS:
        raise Refused(f"its group has {p.ranks} ranks; the op takes 2, 4 or 8")
    if not ranks.share_a_host(p.group):
        raise Refused("its ranks are not known to be on one machine (LOCAL_WORLD_SIZE), where all NPUs are linked")
    x, weight = (edit.current(match.inputs[name]) for name in ("x", "weight"))
    shape = values.shape(x)
    if len(shape) == 3 and static_int(shape[1]) == 1:
        raise Refused("x is one token of each sequence; the op is for prompts, not for decoding")
    if any(node.users.keys() - set(match.claimed) for node in match.claimed if node is not match.node):
        raise Refused("what is added up over the ranks is used elsewhere too")
    hcom = ranks.hcom(p.group)
    calls = edit.rewriter.graph.find_nodes(op="call_function", target=contract.op)
    if any(call.args[2] != hcom for call in calls):
        raise Refused("another of these ops is over another group; one model may use one group for them")
    edit.note("the op adds up the ranks' results tile by tile, all_reduce the whole: roundings may differ")
    bias = {"bias": edit.current(match.inputs["bias"])} if p.bias else {}
    product = edit.op(contract, x1=edit.contiguous(x), x2=edit.permuted(weight, [1, 0]), hcom=hcom, **bias)
    edit.absorb(node for node in match.claimed if communicates(node))
    edit.replace(match.node, product)
    return contract
