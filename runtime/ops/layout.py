"""The memory layout of what a kernel returns."""

import torch

__all__ = ["row_major"]


def row_major(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with exactly the strides of a freshly allocated one; itself if it has them already.

    `Tensor.contiguous()` doesn't do: it accepts any stride on a dim of size 1, and then the strides that a fake kernel
    promised would differ from the real ones.
    """
    fresh_strides = torch.empty(tensor.shape, device="meta").stride()
    if tensor.stride() == fresh_strides:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
