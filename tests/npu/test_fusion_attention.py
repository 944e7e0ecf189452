"""Attention that torch_npu's own dispatch has made npu_fusion_attention_v3 of, compiled as on an NPU."""

from collections import Counter
from typing import NamedTuple

import pytest
import torch
from torch import fx, nn
from torch.nn import functional

import npu_fuse
from npu.fake_npu import on_fake_npu

Tensor = torch.Tensor
FUSION = "npu.npu_fusion_attention_v3.default"


class Dispatched(nn.Module):
    """Under autocast no op is kept whole, so that the dispatch sees scaled_dot_product_attention."""

    def __init__(self, attn_type: str) -> None:
        super().__init__()
        self.attn_type = attn_type
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i = torch.arange(q.shape[2], device=q.device)
        with torch.autocast("npu", dtype=torch.float16):
            return functional.scaled_dot_product_attention(q, k, v, i[:, None] >= i, enable_gqa=True)


class Flagged(Dispatched):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("npu", dtype=torch.float16):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Called(Dispatched):
    """The op by its name, with a mask of all places and repeated heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        return torch.ops.npu.npu_fusion_attention_v3(q, k, v, 4, "BNSD", scale=0.25, atten_mask=hidden)[0]


class Seen(NamedTuple):
    """A compilation: the ops of the graph before, the call that is left, and the report."""

    before: Counter[str]
    call: fx.Node
    report: npu_fuse.Report


class Recording(npu_fuse.Backend):
    def _optimised(self, module: fx.GraphModule, *others: object) -> fx.GraphModule:
        self.before = Counter(str(n.target) for n in module.graph.nodes if n.op == "call_function")
        self.after = super()._optimised(module, *others)
        return self.after


def seen(module: nn.Module, *tensors: Tensor) -> Seen:
    torch._dynamo.reset()
    backend = Recording(strict=True)
    torch.compile(module, backend=backend, fullgraph=True)(*tensors)
    calls = [n for n in backend.after.graph.nodes if n.op == "call_function"]
    assert [str(n.target) for n in calls[1:]] == ["<built-in function getitem>"], "no mask, no repeated heads"
    return Seen(backend.before, calls[0], backend.report)


def compiled(kind: type[Dispatched], attn_type: str, dtype: torch.dtype = torch.float16) -> Seen:
    tensors = (torch.randn(2, heads, 6, 16, dtype=dtype) for heads in (4, 2, 2))
    return on_fake_npu(seen, kind(attn_type).eval(), *tensors)


@pytest.mark.parametrize("kind", [Dispatched, Flagged, Called])
def test_it_becomes_attention_of_inference_with_a_mode(kind: type[Dispatched]) -> None:
    found = compiled(kind, "decoder")
    assert found.before[FUSION] == 1
    assert str(found.call.target) == "npu.npu_fused_infer_attention_score.default"
    assert found.call.kwargs["sparse_mode"] == 3
    assert found.call.kwargs["num_key_value_heads"] == 2


@pytest.mark.parametrize("kind", [Dispatched, Flagged, Called])
def test_a_declared_layer_has_no_mask(kind: type[Dispatched]) -> None:
    found = compiled(kind, "encoder_only")
    assert found.before[FUSION] == 1
    assert "sparse_mode" not in found.call.kwargs
    assert "atten_mask" not in found.call.kwargs
    (site,) = [site for site in found.report.sites if site.kind == "encoder_only"]
    assert site.params["new_mask"] == "none"
    assert site.params["old_mask"].startswith("causal (")


def test_in_float32_it_stays_that_op_and_gets_a_mode() -> None:
    found = compiled(Called, "decoder", torch.float32)
    assert str(found.call.target) == FUSION
    assert found.call.kwargs["sparse_mode"] == 3
