"""torch's own attention as a fused op: what it is not given."""

import pytest
import torch

from npu_fuse.runtime.ops.host_attention import HOST_ATTENTION
from npu_fuse.runtime.target import Target


def call(**changes):
    """A legal call, changed."""
    tensors = {"query": torch.ones(2, 4, 3, 8), "key": torch.ones(2, 2, 5, 8), "value": torch.ones(2, 2, 5, 6)}
    return tensors | {"enable_gqa": True} | changes


@pytest.mark.parametrize(
    ("outside", "reason", "inside"),
    [
        (call(query=torch.ones(2, 4, 3, 8).int()), "query is int32 (the kernel takes float16, bfloat16", call()),
        (call(value=torch.ones(2, 5, 6)), "value has 3 dims [2, 5, 6] (the kernel takes 4)", call()),
        (call(key=torch.ones(2, 2, 5, 8).half()), "key is float16 but query is float32", call()),
        (call(enable_gqa=False), "key [2, 2, 5, 8] has other heads than", call()),
        (call(value=torch.ones(2, 1, 5, 6)), "value [2, 1, 5, 6] has other tokens or heads", call()),
        (
            call(attn_mask=torch.ones(3, 5).half()),
            "attn_mask is float16 (it may be bool or float32)",
            call(attn_mask=torch.ones(3, 5)),
        ),
        (
            call(attn_mask=torch.ones(3, 5).bool(), is_causal=True),
            "is_causal and attn_mask are both given",
            call(is_causal=True),
        ),
        (call(dropout_p=0.1), "dropout_p is 0.1", call(dropout_p=0.0)),
    ],
)
def test_borders(outside, reason, inside):
    target = Target("host")
    assert reason in HOST_ATTENTION.refusal(target, **outside)
    assert HOST_ATTENTION.refusal(target, **inside) is None
