"""What a model is called with moves to another device, wherever its tensors are. The device itself needs torch_npu."""

from types import SimpleNamespace

import torch

from fake import _moved


def test_tensors_are_found_in_containers_and_objects() -> None:
    layer = SimpleNamespace(keys=torch.zeros(2), device=torch.device("cpu"), is_initialized=True, dtype=torch.float32)
    inputs = {"ids": torch.ones(3), "cache": SimpleNamespace(layers=[layer]), "pair": (torch.ones(1), None), "flag": 4}
    moved = _moved(inputs, lambda tensor: tensor - 1, torch.device("meta"))
    assert moved["ids"].tolist() == [0, 0, 0]
    assert moved["pair"][0].tolist() == [0]
    assert isinstance(moved["pair"], tuple)
    assert (moved["pair"][1], moved["flag"]) == (None, 4)
    assert moved["cache"] is inputs["cache"]
    assert layer.keys.tolist() == [-1, -1]
    assert layer.device == torch.device("meta")
    assert (layer.is_initialized, layer.dtype) == (True, torch.float32)
