"""Makes the ops of all contracts exist in torch, beside whatever torch_npu has registered already."""

import functools
from collections.abc import Iterable

import torch

from ..target import Target, probe_packages
from . import CONTRACTS
from .contract import OpContract
from .host_attention import BANDED_ATTENTION

__all__ = ["register"]

# The methods of torch.library.Library have no annotations: hence every `no-untyped-call` below.

# A kernel under one of these serves CPU, CUDA and Meta as well.
_COMPOSITE_KEYS = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")


def register(target: Target, contracts: Iterable[OpContract] = tuple(CONTRACTS.values())) -> None:
    """Registers what the contracts' ops lack; a second call finds nothing to do.

    An op that torch doesn't know is defined by the contract's schema. An op that is there, as torch_npu's are once it
    is loaded, keeps all it has; its schema must be the contract's. Either then gets the reference as its CPU and CUDA
    kernel and a fake kernel, where it has none. An installed torch_npu is loaded first, because it would fail to define
    what we had defined before it.

    Args:
        target: the machine; names the package versions in errors.
        contracts: the contracts to register, besides what is ours on a host.

    Raises:
        RuntimeError: an op is there with another schema than its contract's.
    """
    probe_packages()
    for contract in (*contracts, BANDED_ATTENTION):
        _register(target, contract)


def _register(target: Target, contract: OpContract) -> None:
    library = _library(contract.namespace)
    unqualified = contract.name.partition("::")[2]
    known = getattr(getattr(torch.ops, contract.namespace), unqualified, None)
    if known is None:
        library.define(contract.schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    elif str(known.default._schema) != str(contract.parsed_schema):
        versions = ", ".join(f"{package} {version}" for package, version in target.packages.items())
        raise RuntimeError(
            f"{contract.name} is registered with another schema than npu_fuse was written for.\n"
            f"  registered: {known.default._schema}\n"
            f"  expected:   {contract.parsed_schema}\n"
            f"  the latter is that of {contract.source}; loaded: {versions or 'no op package'}"
        )
    for key in ("CPU", "CUDA"):
        if not _has_kernel(contract, key):
            library.impl(unqualified, contract.reference, key)  # type: ignore[no-untyped-call]
    if contract.device_kernel is not None and not _has_kernel(contract, "PrivateUse1"):
        library.impl(unqualified, contract.device_kernel, "PrivateUse1")  # type: ignore[no-untyped-call]
    # torch keeps a registered fake kernel under the Meta key too, so this sees both kinds.
    if not _has_kernel(contract, "Meta"):
        torch.library.register_fake(contract.name, contract.fake, lib=library)


@functools.cache
def _library(namespace: str) -> torch.library.Library:
    # Cached to keep it alive: a Library takes its definitions and kernels with it when it is collected.
    return torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]


def _has_kernel(contract: OpContract, key: str) -> bool:
    return any(
        torch._C._dispatch_has_kernel_for_dispatch_key(contract.name, candidate)
        for candidate in (key, *_COMPOSITE_KEYS)
    )
