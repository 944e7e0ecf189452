"""Tensors that are shared among ranks: of a DTensor, AOTAutograd's graph reads this rank's part, its local tensor."""

from __future__ import annotations

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import SubclassGetAttrAOTInput
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_LOCAL = "_local_tensor"


def is_distributed(value: object) -> bool:
    """True for a DTensor of which this rank holds an ordinary tensor."""
    module = getattr(torch.distributed, "tensor", None)  # where nothing has imported it, there is no DTensor
    if module is None or not isinstance(value, module.DTensor):
        return False
    return not is_traceable_wrapper_subclass(getattr(value, _LOCAL))


def position(placeholder: fx.Node) -> int | None:
    """Which input of Dynamo's graph a placeholder of AOTAutograd's is, or is a part of."""
    description = placeholder.meta.get("desc")
    while isinstance(description, SubclassGetAttrAOTInput):
        description = description.base
    return getattr(description, "idx", None)


def is_part(placeholder: fx.Node) -> bool:
    """True for a placeholder of AOTAutograd's graph that is a part of an input of Dynamo's."""
    return isinstance(placeholder.meta.get("desc"), SubclassGetAttrAOTInput)
