"""Attention that `passes/preserve` doesn't see: in what Dynamo keeps whole, and under autocast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # its usual name

from helpers import Compiled, compiled

Tensor = torch.Tensor
BATCH, TOKENS, WIDTH, HEADS = 2, 6, 64, 4
INFER = "npu::npu_fused_infer_attention_score"
TRAINING = "npu::npu_fusion_attention_v3"  # which takes tokens before the batch, as torch's module has them


def layer() -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval().half()


def x() -> Tensor:
    return torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float16)


def check(function: Callable, *inputs: Tensor, exact: Tensor) -> Compiled:
    """Compiles a call that has one attention, and compares it."""
    found = compiled(function, *inputs)
    torch.testing.assert_close(found.output.double(), exact, rtol=0, atol=4e-3)
    assert found.report.count("attention") == 1
    return found


def exactly(module: nn.MultiheadAttention, x: Tensor, seen: Tensor) -> Tensor:
    """In float64, step by step; `seen` broadcasts to [batch, heads, tokens, keys]."""
    wide = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).double()
    wide.load_state_dict({name: p.double() for name, p in module.state_dict().items()})
    projected = F.linear(x.double(), wide.in_proj_weight, wide.in_proj_bias).chunk(3, -1)
    q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in projected)
    scores = (q @ k.mT / (WIDTH // HEADS) ** 0.5).masked_fill(~seen, -torch.inf)
    found: Tensor = wide.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)).detach()
    return found


EVERYTHING = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
CAUSAL = EVERYTHING.tril()


def test_attention_of_torchs_own_module() -> None:
    module, given = layer(), x()
    found = check(lambda x: module(x, x, x, need_weights=False)[0], given, exact=exactly(module, given, EVERYTHING))
    assert found.report.ops == {TRAINING: 1}


def test_its_causal_flag_is_a_mode() -> None:
    module, given = layer(), x()

    def function(x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(TOKENS, dtype=x.dtype)
        return module(x, x, x, need_weights=False, attn_mask=mask, is_causal=True)[0]

    found = check(function, given, exact=exactly(module, given, CAUSAL))
    (call,) = [node for node in found.after.graph.nodes if "npu_fusion_attention_v3" in str(node.target)]
    assert call.kwargs["sparse_mode"] in (2, 3)


@pytest.mark.parametrize("causal", [False, True])
def test_its_padding_is_one_for_all_heads_though_it_is_copied_for_each(causal: bool) -> None:
    module, given = layer(), x()
    padding = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    padding[0, 4:] = True

    def function(x: Tensor, padding: Tensor) -> Tensor:
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1) if causal else None
        return module(x, x, x, need_weights=False, key_padding_mask=padding, attn_mask=mask)[0]

    seen = (CAUSAL if causal else EVERYTHING) & ~padding[:, None, None]
    check(function, given, padding, exact=exactly(module, given, seen))


def test_a_mask_of_each_head_stays_one() -> None:
    """Heads hide other keys: what is given to the op for all would be wrong."""
    module, given = layer(), x()

    def function(x: Tensor) -> Tensor:
        head = torch.arange(BATCH * HEADS)[:, None, None] % HEADS
        mask = torch.arange(TOKENS) > torch.arange(TOKENS)[:, None] + head
        return module(x, x, x, need_weights=False, attn_mask=mask)[0]

    found = compiled(function, given)
    (site,) = [site for site in found.report.sites if site.kind == "attention"]
    assert site.status == "refused"
    with torch.no_grad():
        torch.testing.assert_close(found.output, function(given), rtol=0, atol=2e-3)


def test_dropout_in_training_draws_what_eager_draws() -> None:
    module, given = layer().train(), x()
    module.dropout = 0.5

    def function(x: Tensor) -> Tensor:
        return module(x, x, x, need_weights=False)[0]

    torch.manual_seed(0)
    found = compiled(function, given)
    assert found.report.count("attention") == 0
    torch.manual_seed(0)
    again = found.function(given)
    torch.manual_seed(0)
    with torch.no_grad():
        torch.testing.assert_close(again, function(given), rtol=0, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_under_autocast(dtype: torch.dtype) -> None:
    q, k, v = torch.randn(3, BATCH, HEADS, TOKENS, 16)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    found = compiled(function, q, k, v)
    assert found.output.dtype == dtype
    exact = F.scaled_dot_product_attention(*(t.to(dtype).double() for t in (q, k, v)), is_causal=True)
    torch.testing.assert_close(found.output.double(), exact, rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 3e-3)
    assert found.report.ops[INFER] == 1


def test_a_layer_that_declares_itself_is_freed_there_too() -> None:
    class Encoder(nn.Module):
        attn_type = "encoder_only"

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    q, k, v = torch.randn(3, BATCH, HEADS, TOKENS, 16)
    found = compiled(Encoder(), q, k, v)
    exact = F.scaled_dot_product_attention(*(t.bfloat16().double() for t in (q, k, v)))
    torch.testing.assert_close(found.output.double(), exact, rtol=0, atol=2e-2)
    assert found.report.count("encoder_only") == 1


def test_a_layer_that_torch_runs_as_a_whole_is_told() -> None:
    module = nn.TransformerEncoderLayer(WIDTH, HEADS, 96, batch_first=True).eval().half()
    found = compiled(module, x())
    (site,) = [site for site in found.report.sites if site.kind == "attention"]
    assert site.status == "missed"
    assert "set_fastpath_enabled(False)" in (site.reason or "")
