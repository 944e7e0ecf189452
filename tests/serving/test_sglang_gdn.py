"""SGLang's gated delta net on an NPU, its own code: the layer and the attention backend that calls its convolution.

What comes behind the convolution (gating, the delta rule) is stood in for by what hands its parts through.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_on_cpu import ForwardMode as Mode
from sglang_on_cpu import ascend_gdn_backend, forward_context, memory_pool, radix_linear_attention

from npu_fuse import Backend
from npu_fuse.runtime.ops.register import register
from npu_fuse.runtime.target import Target

register(Target())
Tensor = torch.Tensor
HEADS, D, TAPS, DRAFT, SLOTS = 2, 16, 4, 3, 6
CHANNELS = 3 * HEADS * D
CONV = torch.ops.npu.causal_conv1d.default


@dataclass
class Server:
    """One layer with its pool, and what a batch says.

    Args:
        rows: of a slot of the pool.
    """

    rows: int
    pool: Tensor = field(init=False)
    backend: Any = field(init=False)
    layer: Any = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.pool = torch.randn(SLOTS, self.rows, CHANNELS).bfloat16()
        states = torch.zeros(SLOTS, HEADS, D, D)
        weight = torch.randn(CHANNELS, TAPS).bfloat16()
        bias = torch.randn(CHANNELS).bfloat16()
        sizes = {f"num_{x}_heads": HEADS for x in "qkv"} | {f"head_{x}_dim": D for x in "qkv"}
        self.layer = radix_linear_attention.RadixLinearAttention(0, **sizes, conv_weights=weight, bias=bias)
        cache = memory_pool.MambaPool.SpeculativeState(
            conv=[self.pool], temporal=states, intermediate_ssm=states, intermediate_conv_window=[self.pool]
        )
        kind = ascend_gdn_backend.AscendGDNAttnBackend
        self.backend = kind.__new__(kind)
        self.backend.req_to_token_pool = SimpleNamespace(mamba2_layer_cache=lambda layer_id: cache)
        self.backend.kernel_dispatcher = SimpleNamespace(decode=_handed_through)
        self.backend.chunk_gdn = lambda q, k, v, *_: (_handed_through(q, k, v), None, None)
        self.backend.fused_recurrent_gated_delta_rule_update = lambda mixed, *_, **__: mixed[..., -HEADS * D :]
        self.backend.graph_mode = True

    def batch(self, mode: Any, starts: list[int], slots: list[int], **others: Any) -> Any:
        """A ForwardBatch, as far as it is read, with the metadata that the backend makes of it."""
        metadata = dict.fromkeys(("retrieve_next_token", "retrieve_next_sibling", "retrieve_parent_token"))
        self.backend.forward_metadata = SimpleNamespace(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            mamba_cache_indices=torch.tensor(slots, dtype=torch.int32),
            has_mamba_track_mask=False,
            **metadata,
        )
        return SimpleNamespace(
            forward_mode=mode,
            batch_size=len(slots),
            mamba_track_mask=None,
            spec_info=SimpleNamespace(draft_token_num=DRAFT),
            input_ids=torch.zeros(starts[-1], dtype=torch.int64),
            global_num_token_non_padded_cpu=starts[-1],
            **others,
        )


def _handed_through(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.cat([x.flatten(-2) for x in (q, k, v)], -1)


class Dispatch:
    """Chooses between the two ways of a backend, as SGLang's hybrid one does."""

    def __init__(self, linear: Any) -> None:
        self.linear = linear

    def forward(self, **arguments: Any) -> Tensor:
        decodes = arguments["forward_batch"].forward_mode.is_decode()
        return (self.linear.forward_decode if decodes else self.linear.forward_extend)(**arguments)


@pytest.fixture
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    made = Server(request.param)
    for name in ("fused_gdn_gating", "fused_gdn_gating_kernel_without_sigmoid"):
        monkeypatch.setattr(ascend_gdn_backend, name, lambda A_log, a, b, dt_bias: (a, b))  # noqa: N803  # its name
    with forward_context.forward_context(forward_context.ForwardContext(attn_backend=Dispatch(made.backend))):
        yield made


def run(server: Server, batch: Any, tokens: int) -> tuple[Backend, Any]:
    """Compiles one call, and compares it and the pool behind it with eager's; returns the call of the convolution."""
    x = torch.randn(tokens, CHANNELS, generator=torch.Generator().manual_seed(tokens)).bfloat16()
    a, b = torch.randn(2, tokens, HEADS).unbind()
    before = server.pool.clone()
    with torch.no_grad():
        wanted = server.layer(batch, x, a, b)
        states = server.pool.clone()
        server.pool.copy_(before)
        torch._dynamo.reset()
        backend = Backend(strict=True, keep_graphs=True)
        found = torch.compile(server.layer, backend=backend, fullgraph=True, dynamic=False)(batch, x, a, b)
    assert torch.equal(server.pool, states)
    assert not torch.equal(states, before)
    assert torch.equal(found, wanted)
    (_, graph) = backend.graphs[-1]
    (call,) = graph.graph.find_nodes(op="call_function", target=CONV)
    names = [argument.name for argument in CONV._schema.arguments]
    return backend, dict(zip(names, call.args, strict=False)) | call.kwargs


@pytest.mark.parametrize("server", [TAPS - 1], indirect=True)
def test_a_token_of_each_request_is_convolved_on_the_pool(server: Server) -> None:
    batch = server.batch(Mode.DECODE, [0, 1, 2, 3], [3, 1, 5])
    backend, call = run(server, batch, 3)
    assert (call["run_mode"], call["activation_mode"]) == (1, 1)
    assert call["conv_states"].op == "placeholder"
    assert backend.report.launches_after < backend.report.launches_before


@pytest.mark.parametrize("server", [TAPS - 1], indirect=True)
def test_prompts_are_convolved_on_the_pool(server: Server) -> None:
    batch = server.batch(Mode.EXTEND, [0, 4, 6], [2, 4], extend_prefix_lens=torch.tensor([0, 3]))
    backend, call = run(server, batch, 6)
    assert (call.get("run_mode", 0), call["activation_mode"]) == (0, 1)
    assert call["conv_states"].op == "placeholder"
    assert [site.status for site in backend.report.sites if site.kind == "causal_conv1d"] == ["lowered"]


@pytest.mark.parametrize("server", [TAPS - 1 + DRAFT - 1], indirect=True)
def test_drafts_are_verified_on_the_pool(server: Server) -> None:
    batch = server.batch(Mode.TARGET_VERIFY, [0, DRAFT, 2 * DRAFT], [2, 4])
    _, call = run(server, batch, 2 * DRAFT)
    assert (call["run_mode"], call["activation_mode"]) == (1, 1)
    assert call["num_accepted_tokens"] is not None
    assert call["conv_states"].op == "placeholder"


@pytest.mark.parametrize("server", [TAPS - 1 + DRAFT - 1], indirect=True)
def test_prompts_before_drafts_keep_the_copy(server: Server) -> None:
    """They use the last rows of a slot, and the op the first of what it is given."""
    batch = server.batch(Mode.EXTEND, [0, 4, 6], [2, 4], extend_prefix_lens=torch.tensor([0, 3]))
    backend, call = run(server, batch, 6)
    (site,) = [site for site in backend.report.sites if site.kind == "causal_conv1d"]
    assert site.status == "refused"
    assert call["conv_states"].op != "placeholder"
