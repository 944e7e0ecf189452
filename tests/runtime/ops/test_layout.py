"""Results have a fresh tensor's strides, even where torch would call others contiguous."""

import pytest
import torch

from npu_fuse.runtime.ops.layout import row_major


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(12.0).view(3, 4)[:, 1:],
        torch.arange(4.0).expand(3, 4),
        torch.arange(4.0).as_strided((1, 4), (99, 1)),
        torch.empty(0, 4).t(),
    ],
)
def test_other_strides_are_copied(tensor):
    result = row_major(tensor)
    assert torch.equal(result, tensor)
    assert result.stride() == torch.empty(tensor.shape).stride()


def test_a_tensor_that_has_them_is_returned_itself():
    tensor = torch.empty(3, 4)
    assert row_major(tensor) is tensor
