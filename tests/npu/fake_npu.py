"""Tensors and models on an NPU that isn't there: fake tensors of device "npu", which torch_npu's own dispatch sees."""

from collections.abc import Callable, Mapping

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["compile_on_fake_npu", "on_fake_npu"]


def on_fake_npu(module: torch.nn.Module) -> None:
    """Replace all parameters and buffers by fake npu tensors like them; call it inside the FakeTensorMode to use.

    A model that is *built* inside the mode would run its initialisation there, and some of it (a buffer made by
    ``torch.tensor``, a value read back) launches real kernels, of which there are none.
    """
    fakes: dict[torch.Tensor, torch.Tensor] = {}  # so that tied weights stay tied

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return fakes.setdefault(tensor, torch.empty_like(tensor, device="npu"))

    module._apply(fake)


def compile_on_fake_npu(
    module: torch.nn.Module, inputs: Mapping[str, torch.Tensor], backend: Callable[..., object]
) -> object:
    """Compile and call a module as on an NPU; it is left on the fake NPU.

    Args:
        module: a module on the CPU.
        inputs: its keyword arguments, on the CPU.
        backend: backend for ``torch.compile``.

    Returns:
        What the compiled module returns, in fake tensors.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        on_fake_npu(module)
        on_npu = {name: torch.empty_like(tensor, device="npu") for name, tensor in inputs.items()}
        return torch.compile(module, backend=backend, fullgraph=True)(**on_npu)
