"""A graph comes back as it was, whatever is done to the one that was taken."""

import torch
from torch import fx, nn

from helpers import capture
from npu_fuse.runtime.snapshot import Snapshot

Told = list[tuple[object, ...]]


def told(module: fx.GraphModule) -> Told:
    return [(n.op, n.name, str(n.target), str(n.args), str(n.kwargs), list(n.meta)) for n in module.graph.nodes]


def model() -> fx.GraphModule:
    norm = nn.RMSNorm(8)
    scale = torch.arange(8.0)
    return capture(lambda x: norm(x).transpose(0, 1) * scale + torch.tensor([1.0, 2.0]).sum(), torch.randn(3, 8, 8))


def test_what_was_taken_may_be_changed() -> None:
    module, x = model(), torch.randn(3, 8, 8)
    inputs = [x if n.meta["val"].dim() == 3 else torch.rand(8) for n in module.graph.find_nodes(op="placeholder")]
    wanted, before = module(*inputs), told(module)
    snapshot = Snapshot(module)
    taken = snapshot.take()
    assert taken.graph is module.graph
    for node in reversed(list(taken.graph.nodes)):
        node.meta["val"] = None
        if node.op == "call_function" and not node.users:
            taken.graph.erase_node(node)
    (output,) = taken.graph.find_nodes(op="output")
    output.args = ((),)
    assert told(taken) != before
    first, second = snapshot.take(), snapshot.restored()
    for restored in (first, second):
        assert told(restored) == before
        restored.graph.lint()
        assert restored.graph is not taken.graph
        for result, of_model in zip(restored(*inputs), wanted, strict=True):
            assert torch.equal(result, of_model)
    first.graph.find_nodes(op="output")[0].meta["mine"] = True
    assert "mine" not in second.graph.find_nodes(op="output")[0].meta
