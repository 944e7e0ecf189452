"""Python functions of sgl_kernel_npu as device kernels: found late, checked once, called by keyword.

The package changed the order of parameters between releases, so nothing is passed by place; and it can be imported only
where an NPU is, so nothing is imported before a kernel runs.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ..target import Target, package_version
from .contract import Lacking

__all__ = ["SglFunction", "package"]

_Outputs = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class SglFunction:
    """One function of sgl_kernel_npu; calling this calls it.

    Args:
        module: where it lives, "sgl_kernel_npu.norm.split_qkv_rmsnorm_rope".
        name: the function's name in it.
        like: the op's reference, whose parameters the function must take; this is called in their order.
        since: the first version of sgl_kernel_npu that takes them.
    """

    module: str
    name: str
    like: Callable[..., _Outputs]
    since: str

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of what the function must take."""
        return tuple(inspect.signature(self.like).parameters)

    def __call__(self, *args: object, **kwargs: object) -> _Outputs:
        """Calls the function with all arguments by keyword.

        Raises:
            RuntimeError: the installed function takes other parameters.
            ImportError: sgl_kernel_npu can't be imported.
        """
        by_place = dict(zip(self.parameters[: len(args)], args, strict=True))
        return _checked(self)(**by_place, **kwargs)


def package(target: Target, feature: str, since: str) -> Iterator[str]:
    """The package is there where its kernels are to run, and has a feature that came with version `since`."""
    if target.device == "cpu":
        return
    if "sgl_kernel_npu" not in target.packages:
        yield Lacking("sgl_kernel_npu, which has the kernel, can't be imported")
    if target.has_older("sgl_kernel_npu", since):
        yield Lacking(f"sgl_kernel_npu {target.packages['sgl_kernel_npu']} has no {feature}, {since} brought it")


@functools.cache
def _checked(wanted: SglFunction) -> Callable[..., _Outputs]:
    function: Callable[..., _Outputs] = getattr(importlib.import_module(wanted.module), wanted.name)
    found = inspect.signature(function).parameters
    missing = [name for name in wanted.parameters if name not in found]
    unknown = [
        name
        for name, parameter in found.items()
        if name not in wanted.parameters and parameter.default is inspect.Parameter.empty
    ]
    if missing or unknown:
        raise RuntimeError(
            f"sgl_kernel_npu {package_version('sgl_kernel_npu')}: {wanted.name} takes other parameters;"
            f" expected ({', '.join(wanted.parameters)}), found ({', '.join(found)});"
            f" install sgl_kernel_npu {wanted.since} or later"
        )
    return function
