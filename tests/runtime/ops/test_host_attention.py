"""torch's own attention as a fused op: what it is not given."""

import pytest
import torch

from npu_fuse.runtime.ops.host_attention import BANDED_ATTENTION, CPU_ATTENTION, HOST_ATTENTION
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


def on_cpu(**changes):
    """A legal call of torch's kernel for CPUs, changed."""
    return {"query": torch.ones(2, 4, 3, 8), "key": torch.ones(2, 2, 5, 8), "value": torch.ones(2, 2, 5, 8)} | changes


@pytest.mark.parametrize(
    ("outside", "reason"),
    [
        (on_cpu(key=torch.ones(2, 2, 5, 8, device="meta")), "key is on meta (the kernel runs on a CPU)"),
        (on_cpu(query=torch.ones(2, 4, 3, 8).int()), "query is int32 (the kernel takes float16, bfloat16"),
        (on_cpu(query=torch.ones(4, 3, 8)), "query has 3 dims [4, 3, 8] (the kernel takes 4)"),
        (on_cpu(key=torch.ones(2, 2, 0, 8), value=torch.ones(2, 2, 0, 8)), "key [2, 2, 0, 8] is empty"),
        (on_cpu(value=torch.ones(2, 2, 5, 8).half()), "value is float16 but query is float32"),
        (on_cpu(query=torch.ones(2, 4, 8, 3).mT), "query has strides [96, 24, 1, 3], of which the last isn't 1"),
        (on_cpu(value=torch.ones(2, 2, 5, 6)), "value [2, 2, 5, 6] has another shape than key [2, 2, 5, 8]"),
        (on_cpu(query=torch.ones(1, 4, 3, 8)), "another batch or head_dim than query [1, 4, 3, 8]"),
        (on_cpu(query=torch.ones(2, 4, 3, 6)), "another batch or head_dim than query [2, 4, 3, 6]"),
        (on_cpu(query=torch.ones(2, 3, 3, 8)), "query has 3 heads, no multiple of key's 2"),
        (on_cpu(attn_mask=torch.ones(2, 4, 3, 5).bool()), "attn_mask is bool (it may be float32)"),
        (on_cpu(attn_mask=torch.ones(2, 4)), "attn_mask [2, 4] does not spread over [2, 4, 3, 5]"),
        (on_cpu(attn_mask=torch.ones(3, 5)), "attn_mask [3, 5] does not spread over [2, 4, 3, 5]"),
        (on_cpu(attn_mask=torch.ones(2, 1, 3, 4)), "attn_mask [2, 1, 3, 4] does not spread over [2, 4, 3, 5]"),
        (on_cpu(dropout_p=0.1), "dropout_p is 0.1"),
    ],
)
def test_borders_of_the_kernel_for_cpus(outside, reason):
    assert reason in CPU_ATTENTION.refusal(Target("host"), **outside)
    for mask in (None, torch.ones(1, 4, 1, 5), torch.ones(2, 1, 3, 5)):
        assert CPU_ATTENTION.refusal(Target("host"), **on_cpu(attn_mask=mask)) is None


def banded(**changes):
    """A legal call of a band, changed."""
    tensors = {"query": torch.ones(2, 4, 5, 8), "key": torch.ones(2, 2, 5, 8), "value": torch.ones(2, 2, 5, 8)}
    return tensors | {"seen": torch.ones(2, 5).bool(), "window": 1} | changes


@pytest.mark.parametrize(
    ("outside", "reason"),
    [
        (banded(value=torch.ones(2, 2, 5, 6)), "value [2, 2, 5, 6] has another shape than key [2, 2, 5, 8]"),
        (banded(query=torch.ones(2, 4, 4, 8), seen=None), "query [2, 4, 4, 8] has other tokens than key [2, 2, 5, 8]"),
        (banded(window=0), "window is 0 (a query sees one key at least)"),
        (banded(seen=torch.ones(2, 5)), "seen is float32 [2, 5] (it may be bool [batch or 1, keys])"),
        (banded(seen=torch.ones(2, 5, 1).bool()), "seen is bool [2, 5, 1] (it may be bool [batch or 1, keys])"),
        (banded(seen=torch.ones(2, 4).bool()), "seen [2, 4] is not for keys [2, 2, 5, 8]"),
        (banded(seen=torch.ones(3, 5).bool()), "seen [3, 5] is not for keys [2, 2, 5, 8]"),
    ],
)
def test_borders_of_a_band(outside, reason):
    assert reason in BANDED_ATTENTION.refusal(Target("host"), **outside)
    for seen in (None, torch.ones(1, 5).bool(), torch.ones(2, 5).bool()):
        assert BANDED_ATTENTION.refusal(Target("host"), **banded(seen=seen)) is None
    assert BANDED_ATTENTION.refusal(Target("host"), **banded(window=None)) is None
