"""Modules and tensors on an NPU that isn't there: fake tensors of device "npu", which torch_npu's own dispatch sees."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["on_fake_npu"]

Result = TypeVar("Result")


def on_fake_npu(call: Callable[..., Result], module: torch.nn.Module, *tensors: torch.Tensor) -> Result:
    """Move a module and tensors to the fake NPU, and return ``call(module, *tensors)``, made there.

    The module is built on the CPU before, and stays on the fake NPU. A module that is *built* there would run its
    initialisation there, and some of it (filling a ``torch.tensor``, reading a value back) launches real kernels, of
    which there are none.

    Args:
        call: what to do with the module and the tensors; compiling the module belongs in here.
        module: a module on the CPU.
        tensors: tensors on the CPU; only their shapes and dtypes are seen.
    """
    fakes: dict[torch.Tensor, torch.Tensor] = {}  # so that tied weights stay tied

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return fakes.setdefault(tensor, torch.empty_like(tensor, device="npu"))

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        module._apply(fake)
        return call(module, *(fake(tensor) for tensor in tensors))
