"""Launches of a layer: by difference of two depths, with peers' patterns as one launch each, beside layers by hand."""

import pytest
import torch
from torch import fx

import handwritten
import launches
from handwritten import CACHE, LAYERS
from launches import measured, moved, table, with_patterns
from peers import LITERAL, rms_norm, rotary


def bfloat16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def counted(function: object, *inputs: torch.Tensor, peer: str) -> list[tuple[int, int]]:
    """Launches and bytes of a graph, as it is and with a peer's patterns; searched while it is compiled."""
    found = []

    class Backend(launches.Counting):
        def __call__(self, module: fx.GraphModule, example_inputs: object, **mode: object) -> object:
            result = super().__call__(module, example_inputs, **mode)
            before = self.graphs[-1][0]
            for graph in (before.graph, with_patterns(before, LITERAL[peer])):
                found.append(tuple(moved("", graph)["", what] for what in ("launches", "bytes")))
            return result

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=Backend("cpu"), fullgraph=True)(*inputs)
    return found


def test_a_match_is_one_launch_that_reads_its_inputs_and_writes_its_result() -> None:
    x, weight = bfloat16(2, 5, 48), bfloat16(48)
    peer = "torchair, traced in bfloat16"
    (eager, eager_bytes), (launched, size) = counted(lambda x, w: rms_norm(x, w, 1e-6) + 1, x, weight, peer=peer)
    assert (eager, launched) == (9, 2)
    tensor = x.numel() * 2
    assert size == (2 * tensor + 48 * 2) + 2 * tensor
    assert eager_bytes > 3 * size


def test_what_no_pattern_finds_stays_as_it_is() -> None:
    q, cos, sin = bfloat16(2, 3, 7, 16), bfloat16(2, 1, 7, 16), bfloat16(7, 16)
    eager, same = counted(rotary, q, cos, sin, peer="torchair, traced in bfloat16")
    assert eager == same
    _, (launched, _) = counted(rotary, q, cos, sin, peer="torchair")
    assert launched == 1


def test_a_layer_is_the_difference_of_two_depths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "DEPTHS", (1, 2))
    monkeypatch.setattr(launches, "TOKENS", 16)
    row = measured("qwen3", "prefill", "cpu")
    assert row["launches"]["npu_fuse"] == row["launches"]["by hand"] == 9
    assert row["launches"]["eager"] > 50
    assert row["launches"]["torchair"] == row["launches"]["eager"] - 8  # two rotations of five launches
    assert row["bytes"]["npu_fuse"] < row["bytes"]["eager"]
    assert "9 (" in str([*table([row]).columns[4].cells])


def test_layers_by_hand() -> None:
    assert handwritten.launches("llama", has_cache=True) == 10
    assert handwritten.launches("llama", has_cache=False) == 9
    assert all(layer.count(CACHE) == 1 for layer in LAYERS.values())
