"""Models and what they are called with as fake tensors: on an NPU that isn't there, under torch_npu, or on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["on_fake"]


def _ones(size: list[int], *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=device)


@contextmanager
def on_fake(device: str, module: nn.Module, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Moves a module to a fake device, for good, and gives its inputs there.

    Everything is made elsewhere before, the contents of caches too: what makes it would launch real kernels on an NPU.

    Args:
        device: "npu:0" or "cpu".
        module: a module on the CPU, or on the meta device.
        inputs: its keyword arguments: tensors, or containers and objects that hold tensors, such as caches.
    """
    fakes: dict[torch.Tensor, torch.Tensor] = {}  # so that tied weights stay tied

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return fakes.setdefault(tensor, torch.empty_like(tensor, device=device))

    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.no_grad(),
        torch.library._scoped_library("aten", "IMPL") as library,
    ):
        # A compilation makes its constants as real tensors; without a kernel, as nobody looks into them.
        library.impl("ones", _ones, "PrivateUse1", allow_override=True)
        module._apply(fake)
        for part in module.modules():  # tensors that are neither parameters nor buffers
            vars(part).update({name: fake(value) for name, value in vars(part).items() if torch.is_tensor(value)})
        yield _moved(inputs, fake, torch.device(device))


def _moved(value: Any, move: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> Any:
    """The same with its tensors moved, and devices that it notes; objects are changed in place."""
    if isinstance(value, torch.Tensor):
        return move(value)
    if isinstance(value, torch.device):
        return device
    if isinstance(value, dict):
        return {key: _moved(item, move, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, move, device) for item in value)
    if hasattr(value, "__dict__") and not isinstance(value, type):
        vars(value).update({name: _moved(item, move, device) for name, item in vars(value).items()})
    return value
