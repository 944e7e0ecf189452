"""Layers that declare themselves bidirectional lose the causal part of their mask, and no others do."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # its usual name

from helpers import Compiled, compiled
from npu_fuse import Backend, Options, Site, Target
from npu_fuse.passes.bidirectional import without_causal_part
from npu_fuse.passes.edit import Edit, Refused
from npu_fuse.passes.rewriter import Rewriter

Tensor = torch.Tensor
HEADS, KV_HEADS, TOKENS, HEAD_DIM = 4, 2, 6, 16
WINDOW = 3
FUSED = "npu::npu_fused_infer_attention_score"


class AttentionType(enum.Enum):
    """As SGLang has it."""

    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class VllmAttentionType(str, enum.Enum):
    """As vLLM has it."""

    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class Attention(nn.Module):
    """Without parameters. Any mask will do: none, "flag", or a tensor."""

    def forward(self, x: Tensor, mask: Tensor | str | None) -> Tensor:
        flag = isinstance(mask, str)
        return F.scaled_dot_product_attention(x, x.flip(-1), x.cos(), None if flag else mask, is_causal=flag)


class WrittenOut(Attention):
    """Spelled by matmuls and a softmax, as transformers does it in eager mode."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = torch.matmul(x, x.flip(-1).transpose(2, 3)) * HEAD_DIM**-0.5
        weights = F.softmax(scores + mask, dim=-1, dtype=torch.float32).to(x.dtype)
        return torch.matmul(weights, x.cos())


class Layer(nn.Module):
    def __init__(self, attn: nn.Module | None = None) -> None:
        super().__init__()
        self.attn = attn if attn is not None else Attention()

    def forward(self, x: Tensor, mask: Tensor | str | None) -> Tensor:
        return x + self.attn(x.sin(), mask)


class Model(nn.Module):
    """Two layers with one mask. The second is the one to be freed."""

    def __init__(self, mask: Callable[[Tensor], Tensor | str | None], attn: type[Attention] = Attention) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(attn()) for _ in range(2)])
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask(x)
        for layer in self.layers:
            x = layer(x, mask)
        return x

    def wanted(self, x: Tensor, freed: Tensor | None) -> Tensor:
        """With a mask of its own for the second layer."""
        return self.layers[1](self.layers[0](x, self.mask(x)), freed)


def places(x: Tensor) -> tuple[Tensor, Tensor]:
    i = torch.arange(x.shape[-2], device=x.device)
    return i[:, None], i


def causal(x: Tensor) -> Tensor:
    i, j = places(x)
    return j <= i


def flag(x: Tensor) -> str:
    return "flag"


def window(x: Tensor) -> Tensor:
    i, j = places(x)
    return (j <= i) & (j > i - WINDOW)


def additive(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[-2:-1] * 2, dtype=x.dtype).masked_fill(~causal(x), torch.finfo(x.dtype).min)


def declared(model: Model, attn_type: object = AttentionType.ENCODER_ONLY) -> Model:
    model.layers[0].attn.attn_type = AttentionType.DECODER
    model.layers[1].attn.attn_type = attn_type
    return model


def tokens(dtype: torch.dtype = torch.float32, length: int = TOKENS, batch: int = 2) -> Tensor:
    return torch.randn(batch, HEADS, length, HEAD_DIM, dtype=dtype)


def sites(found: Compiled) -> list[Site]:
    return [site for site in found.report.sites if site.kind == "encoder_only"]


def check(model: Model, x: Tensor, freed: Tensor | None, **settings: object) -> Site:
    """Compiles a model, and compares it with one whose second layer has another mask; the site of that layer."""
    with torch.no_grad():
        wanted, unfreed = model.wanted(x, freed), model(x)
    found = compiled(model, x, **settings)
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}[x.dtype]
    torch.testing.assert_close(found.output, wanted, atol=tolerance, rtol=0)
    assert (found.output - unfreed).abs().max() > 2 * tolerance, "it makes no difference"
    (site,) = sites(found)
    assert site.status == "lowered"
    return site


# The declaration ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "attn_type", [AttentionType.ENCODER_ONLY, VllmAttentionType.ENCODER_ONLY, "encoder_only", "ENCODER_ONLY"]
)
def test_a_modules_own_attn_type_declares_it(attn_type: object) -> None:
    site = check(declared(Model(causal), attn_type), tokens(), None)
    assert site.module == "layers.1.attn"
    assert site.params == {
        "declared": f"attn_type of layers.1.attn is {attn_type}",
        "old_mask": "causal",
        "new_mask": "none",
    }
    assert site.change == f"attn_type of layers.1.attn is {attn_type}: its mask was causal, and is none"


@pytest.mark.parametrize("attn_type", [AttentionType.DECODER, "decoder", "encoder", "encoder_decoder", None, 7])
def test_any_other_attn_type_declares_nothing(attn_type: object) -> None:
    model, x = declared(Model(causal), attn_type), tokens()
    found = compiled(model, x)
    torch.testing.assert_close(found.output, model(x))
    assert not sites(found)


@pytest.mark.parametrize("option", [("layers.1.*",), ["*.1.attn"], {"layers.1"}, ("other", "layers.1.attn")])
def test_patterns_of_paths_declare_it(option: object) -> None:
    site = check(Model(causal), tokens(), None, encoder_only=option)
    assert site.params["declared"].startswith("Options.encoder_only has '")


def test_a_function_of_path_and_class_declares_it() -> None:
    asked = []

    def is_encoder(path: str, kind: type) -> bool:
        asked.append((path, kind))
        return path == "layers.1" and kind is Layer

    check(Model(causal), tokens(), None, encoder_only=is_encoder)
    assert {("layers.1.attn", Attention), ("layers.1", Layer), ("layers.0", Layer)} <= set(asked)


def test_paths_that_are_not_there_declare_nothing() -> None:
    model, x = Model(causal), tokens()
    found = compiled(model, x, encoder_only=("layers.2.*", "layers.1.att", "attn"))
    torch.testing.assert_close(found.output, model(x))
    assert not sites(found)


@pytest.mark.parametrize("given", ["layers.*", 3, ("",), (1,)])
def test_what_is_neither_patterns_nor_a_function_is_an_error(given: object) -> None:
    with pytest.raises(ValueError, match=r"Options\.encoder_only: "):
        Options(encoder_only=given)  # type: ignore[arg-type]


def test_is_causal_is_only_a_hint() -> None:
    model, x = Model(causal), tokens()
    model.layers[0].attn.is_causal, model.layers[1].attn.is_causal = True, False
    found = compiled(model, x)
    torch.testing.assert_close(found.output, model(x))
    (site,) = sites(found)
    assert (site.status, site.module) == ("missed", "layers.1.attn")
    assert site.reason is not None
    assert site.reason.startswith("is_causal of layers.1.attn is False, and its mask is causal; that is no declaration")


def test_an_encoder_with_an_encoders_mask_gives_no_hint() -> None:
    model = Model(lambda x: (places(x)[1] < 4).expand(TOKENS, TOKENS))
    model.layers[1].attn.is_causal = False
    assert not sites(compiled(model, tokens()))


def test_it_can_be_turned_off() -> None:
    model, x = declared(Model(causal)), tokens()
    found = compiled(model, x, disable={"encoder_only"})
    torch.testing.assert_close(found.output, model(x))
    (site,) = sites(found)
    assert (site.status, site.reason) == ("refused", "encoder_only is turned off by Options.disable")


# How the model is compiled --------------------------------------------------------------------------------------------


def bound(model: Model, backend: Backend) -> Callable[[Tensor], Tensor]:
    return torch.compile(model.forward, backend=backend)


def in_no_grad(model: Model, backend: Backend) -> Callable[[Tensor], Tensor]:
    return torch.compile(torch.no_grad()(model.forward), backend=backend)


def in_place(model: Model, backend: Backend) -> Callable[[Tensor], Tensor]:
    model.compile(backend=backend)
    return model


def as_an_argument(model: Model, backend: Backend) -> Callable[[Tensor], Tensor]:
    through = torch.compile(lambda models, x: models[0](x), backend=backend)
    return lambda x: through([model], x)


def in_a_closure(model: Model, backend: Backend) -> Callable[[Tensor], Tensor]:
    return torch.compile(lambda x: model(x), backend=backend)


@pytest.mark.parametrize("way", [bound, in_no_grad, in_place, as_an_argument, in_a_closure])
def test_the_module_is_found_however_the_model_is_compiled(way: Callable) -> None:
    torch._dynamo.reset()
    model, x = declared(Model(causal)), tokens()
    wanted, backend = model.wanted(x, None), Backend(strict=True)
    with torch.no_grad():
        torch.testing.assert_close(way(model, backend)(x), wanted)
    (site,) = [site for site in backend.report.sites if site.kind == "encoder_only"]
    assert site.module == "layers.1.attn"


def test_the_compiled_module_may_declare_itself() -> None:
    attention, x = Attention(), tokens()
    attention.attn_type = "encoder_only"
    found = compiled(attention, x, "flag")
    torch.testing.assert_close(found.output, attention(x, None))
    (site,) = sites(found)
    assert site.params["declared"] == "attn_type of the compiled module is encoder_only"


def test_a_function_of_a_module_is_no_method_of_it() -> None:
    attention, x = Attention(), tokens()
    attention.attn_type = "encoder_only"

    def beside(module: nn.Module, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True) + (0 if module.training else 1)

    found = compiled(beside, attention, x)
    torch.testing.assert_close(found.output, beside(attention, x))
    assert not sites(found)


def test_a_layer_that_runs_twice_is_freed_twice() -> None:
    class Twice(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](super().forward(x), self.mask(x))

    model, x = declared(Twice(causal)), tokens()
    found = compiled(model, x)
    torch.testing.assert_close(found.output, model.layers[1](model.wanted(x, None), None))
    assert [(site.status, site.module) for site in sites(found)] == [("lowered", "layers.1.attn")] * 2


def test_behind_a_graph_break_a_layer_is_found_still() -> None:
    class Broken(Model):
        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x, "flag")
            torch._dynamo.graph_break()
            return self.layers[1](x, "flag")

    torch._dynamo.reset()
    model, x, backend = declared(Broken(flag)), tokens(), Backend(strict=True)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=backend)(x), model.wanted(x, None))
    assert backend.report.summary().count("1 changed as the model declares") == 1


def test_a_host_frees_too() -> None:
    check(declared(Model(causal)), tokens(), None, target=Target("host"))


def test_layers_of_one_class_that_are_compiled_alone_do_not_share_a_graph() -> None:
    """Dynamo would run the graph of the first for all that look alike to the model's own code."""
    torch._dynamo.reset()
    backend, x = Backend(strict=True), tokens()
    layers = [Layer() for _ in range(4)]
    for layer, attn_type in zip(layers, ("decoder", "encoder_only", AttentionType.DECODER), strict=False):
        layer.attn.attn_type = attn_type  # the last has none
    with torch.no_grad():
        wanted = [layer(x, None if layer is layers[1] else "flag") for layer in layers]
        for layer in layers:
            layer.compile(backend=backend)
        for _ in range(2):
            for layer, expected in zip(layers, wanted, strict=True):
                torch.testing.assert_close(layer(x, "flag"), expected)


def test_a_declaration_that_is_taken_back_is_seen() -> None:
    torch._dynamo.reset()
    model, x = declared(Model(causal)), tokens()
    through = torch.compile(model, backend=Backend(strict=True))
    with torch.no_grad():
        torch.testing.assert_close(through(x), model.wanted(x, None))
        model.layers[1].attn.attn_type = AttentionType.DECODER
        torch.testing.assert_close(through(x), model(x))
        del model.layers[1].attn.attn_type
        torch.testing.assert_close(through(x), model(x))


# Masks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("mask", [causal, flag, additive])
def test_a_causal_mask_goes(mask: Callable[[Tensor], Tensor | str], dtype: torch.dtype) -> None:
    site = check(declared(Model(mask)), tokens(dtype), None)
    assert site.params["old_mask"] == ("causal_flag" if mask is flag else "causal")
    assert site.params["new_mask"] == "none"


def test_a_causal_layer_in_the_same_graph_keeps_its_mode() -> None:
    found = compiled(declared(Model(causal)), tokens(torch.float16))
    calls = [n.kwargs for n in found.after.graph.nodes if str(n.target).startswith("npu.npu_fused_infer")]
    assert [call.get("sparse_mode", 0) for call in calls] == [3, 0]
    assert ["atten_mask" in call for call in calls] == [True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_written_out_attention_is_freed_too(dtype: torch.dtype) -> None:
    site = check(declared(Model(additive, WrittenOut)), tokens(dtype), torch.zeros(TOKENS, TOKENS, dtype=dtype))
    assert (site.params["old_mask"], site.params["new_mask"]) == ("causal", "all_true")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_window_reaches_as_far_ahead_as_back(dtype: torch.dtype) -> None:
    i, j = places(tokens())
    site = check(declared(Model(window)), tokens(dtype), (i - j).abs() < WINDOW)
    assert site.params["old_mask"] == "sliding_causal (query - 2 <= key <= query + 0)"
    assert site.params["new_mask"] == "sliding_bidirectional (query - 2 <= key <= query + 2)"


def test_a_window_becomes_a_band_of_the_fused_op() -> None:
    found = compiled(declared(Model(window)), tokens(torch.float16))
    bands = [
        tuple(n.kwargs[name] for name in ("sparse_mode", "pre_tokens", "next_tokens"))
        for n in found.after.graph.nodes
        if str(n.target).startswith("npu.npu_fused_infer")
    ]
    assert bands == [(4, WINDOW - 1, 0), (4, WINDOW - 1, WINDOW - 1)]


def test_padding_stays_hidden() -> None:
    keep = torch.tensor([[True] * TOKENS, [True] * 4 + [False] * 2])
    site = check(
        declared(Model(lambda x: causal(x) & keep[:, None, None, :])),
        tokens(),
        keep[:, None, None, :].expand(2, 1, 6, 6),
    )
    assert site.params["old_mask"] == "per_batch_or_head (key <= query + 0, no padding)"
    assert site.params["new_mask"] == "per_batch_or_head (no padding)"


def test_padding_stays_hidden_in_a_window() -> None:
    keep = torch.tensor([[True] * TOKENS, [True] * 4 + [False] * 2])[:, None, None, :]
    i, j = places(tokens())
    check(declared(Model(lambda x: window(x) & keep)), tokens(), ((i - j).abs() < WINDOW) & keep)


def test_unwritten_places_of_a_cache_stay_hidden() -> None:
    """Four queries behind two tokens in a cache of ten: they see six keys, and no query saw the rest."""

    class Cached(Attention):
        def forward(self, x: Tensor, past: Tensor) -> Tensor:
            place = torch.arange(4) + past
            return F.scaled_dot_product_attention(x[:, :, :4], x, x.cos(), torch.arange(10) <= place[:, None])

    attention, x, past = Cached(), tokens(length=10), torch.tensor(2)
    attention.attn_type = "encoder_only"
    found = compiled(attention, x, past)
    wanted = F.scaled_dot_product_attention(x[:, :, :4], x[:, :, :6], x[:, :, :6].cos())
    torch.testing.assert_close(found.output, wanted)
    (site,) = sites(found)
    assert site.params["old_mask"] == "causal_offset"
    assert site.params["new_mask"] != "none"


def test_queries_behind_a_context_see_all_of_it_and_each_other() -> None:
    class Extend(Attention):
        def forward(self, q: Tensor, x: Tensor) -> Tensor:
            i, j = torch.arange(q.shape[2])[:, None], torch.arange(x.shape[2])
            return F.scaled_dot_product_attention(q, x, x.cos(), j <= i + (x.shape[2] - q.shape[2]))

    attention = Extend()
    attention.attn_type = "encoder_only"
    for dynamic in (False, True):
        q, x = tokens(length=4), tokens(length=7)
        if dynamic:
            torch._dynamo.mark_dynamic(q, 2)
            torch._dynamo.mark_dynamic(x, 2)
        found = compiled(attention, q, x)
        torch.testing.assert_close(found.output, F.scaled_dot_product_attention(q, x, x.cos()))
        assert sites(found)[0].params["new_mask"] == "none"
        with torch.no_grad():
            q, x = tokens(length=5), tokens(length=9)
            torch.testing.assert_close(found.function(q, x), F.scaled_dot_product_attention(q, x, x.cos()))


def test_packed_sequences_stay_apart() -> None:
    segment = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 2, 2]])
    same = segment[:, None, :, None] == segment[:, None, None, :]

    class Packed(Attention):
        def forward(self, x: Tensor, segment: Tensor) -> Tensor:
            i, j = places(x)
            same = segment[:, None, :, None] == segment[:, None, None, :]
            return F.scaled_dot_product_attention(x, x.flip(-1), x.cos(), same & (j <= i))

    attention, x = Packed(), tokens()
    attention.attn_type = "encoder_only"
    found = compiled(attention, x, segment)
    torch.testing.assert_close(found.output, F.scaled_dot_product_attention(x, x.flip(-1), x.cos(), same))
    assert sites(found)[0].status == "lowered"


def test_chunks_stay_apart() -> None:
    def chunked(x: Tensor) -> Tensor:
        i, j = places(x)
        return (j <= i) & (i // 4 == j // 4)

    i, j = places(tokens())
    check(declared(Model(chunked)), tokens(), i // 4 == j // 4)


@pytest.mark.parametrize("mask", [causal, window])
def test_all_lengths(mask: Callable[[Tensor], Tensor]) -> None:
    model, x = declared(Model(mask)), tokens()
    torch._dynamo.mark_dynamic(x, 2)
    found = compiled(model, x)
    for length in (6, 2, 9):
        x = tokens(length=length)
        i, j = places(x)
        with torch.no_grad():
            wanted = model.wanted(x, (i - j).abs() < (WINDOW if mask is window else length))
            torch.testing.assert_close(found.function(x), wanted)


def test_what_sees_the_future_already_is_left_alone() -> None:
    def banded(x: Tensor) -> Tensor:
        i, j = places(x)
        return (i - j).abs() < WINDOW

    for mask in (banded, lambda x: None):
        model, x = declared(Model(mask)), tokens()
        found = compiled(model, x)
        torch.testing.assert_close(found.output, model(x))
        assert not sites(found)


def test_one_query_has_no_future() -> None:
    model, x = declared(Model(causal)), tokens(length=1)
    found = compiled(model, x)
    torch.testing.assert_close(found.output, model(x))
    assert not sites(found)


def test_a_bias_that_is_causal_too_is_refused() -> None:
    def alibi(x: Tensor) -> Tensor:
        i, j = places(x)
        return ((j - i) * 0.5).masked_fill(j > i, -math.inf)

    model, x = declared(Model(alibi)), tokens()
    found = compiled(model, x)
    torch.testing.assert_close(found.output, model(x))
    (site,) = sites(found)
    assert site.status == "refused"
    assert site.reason is not None
    assert site.reason.startswith("the causal part of its mask (bias) can't be told from the rest: it adds numbers")


def test_a_mask_that_is_given_is_refused() -> None:
    layer, x = Attention(), tokens()
    layer.attn_type = "encoder_only"
    mask = causal(x)
    found = compiled(layer, x, mask)
    torch.testing.assert_close(found.output, layer(x, mask))
    (site,) = sites(found)
    assert site.status == "refused"
    assert site.reason is not None
    assert site.reason.startswith("the causal part of its mask (")


def test_attention_that_is_not_recognised_is_told() -> None:
    class OfItsOwn(Attention):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            weights = (x @ x.transpose(2, 3)).masked_fill(~mask, 0.0).relu()
            return weights @ x

    model = declared(Model(causal, OfItsOwn))
    model.layers[1].attn_type = "encoder_only"
    x = tokens()
    found = compiled(model, x, encoder_only=("layers.0.*",))
    torch.testing.assert_close(found.output, model(x))
    assert {(site.status, site.module, site.reason) for site in sites(found)} == {
        ("missed", "layers.0.attn", "Options.encoder_only has 'layers.0.*', and no attention is recognised there"),
        (
            "missed",
            "layers.1.attn",
            "attn_type of layers.1.attn is AttentionType.ENCODER_ONLY, and no attention is recognised there",
        ),
        ("missed", "layers.1", "attn_type of layers.1 is encoder_only, and no attention is recognised there"),
    }


def test_attention_that_is_nearly_recognised_is_told_with_what_differs() -> None:
    class Scaled(Attention):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x[:, :3], x[:, :3].cos(), mask, enable_gqa=True)

    attention, x = Scaled(), torch.randn(2, 6, TOKENS, HEAD_DIM)
    attention.attn_type = "encoder_only"
    torch._dynamo.mark_dynamic(x, 3)
    found = compiled(attention, x, causal(x))
    (site,) = sites(found)
    assert site.status == "missed"
    assert (site.reason or "").startswith(
        "attn_type of the compiled module is encoder_only, and no attention is recognised there: its scale is known"
        f" only when it runs: its query is [2, 6, {TOKENS}, s"
    )


def test_a_layer_that_shares_its_keys_heads() -> None:
    class Grouped(Attention):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            k, v = (shared.repeat_interleave(HEADS // KV_HEADS, 1) for shared in (x[:, :KV_HEADS], x[:, KV_HEADS:]))
            return F.scaled_dot_product_attention(x, k, v, mask)

    check(declared(Model(causal, Grouped)), tokens(torch.float16), torch.ones(TOKENS, TOKENS, dtype=torch.bool))


# Queries that stand elsewhere -----------------------------------------------------------------------------------------


class Behind(nn.Module):
    """Queries over more keys than there are of them, behind `past` tokens."""

    attn_type = "encoder_only"

    def __init__(self, mask: Callable[[Tensor, Tensor, Tensor | int], Tensor] | None) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, q: Tensor, x: Tensor, past: Tensor | int = 0) -> Tensor:
        if self.mask is None:
            return F.scaled_dot_product_attention(q, x, x.cos(), is_causal=True)
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(x.shape[2])
        return F.scaled_dot_product_attention(q, x, x.cos(), self.mask(i, j, past))


@pytest.mark.parametrize(
    ("mask", "keys"),
    [
        (None, 7),  # a flag says nothing but causal
        (lambda i, j, past: j <= i, 4),  # the keys behind the last query were seen by none
        (lambda i, j, past: j <= i + 4, 7),  # the last query sees a key behind its own place
        (lambda i, j, past: j <= i + 1, 5),
    ],
)
def test_what_the_last_query_sees_all_see(mask: Callable[..., Tensor] | None, keys: int) -> None:
    layer, q, x = Behind(mask), tokens(length=4), tokens(length=7)
    found = compiled(layer, q, x)
    (site,) = sites(found)
    assert site.status == "lowered"
    torch.testing.assert_close(found.output, F.scaled_dot_product_attention(q, x[:, :, :keys], x[:, :, :keys].cos()))


def test_one_query_behind_a_context_has_no_future() -> None:
    layer, q, x, past = Behind(lambda i, j, past: j <= i + past), tokens(length=1), tokens(length=7), torch.tensor(3)
    found = compiled(layer, q, x, past)
    torch.testing.assert_close(found.output, layer(q, x, past))
    assert not sites(found)


@pytest.mark.parametrize(
    ("mask", "past", "reason"),
    [
        (lambda i, j, past: (j <= i + past) & (j > i + past - 3), torch.tensor(3), "where a query stands among"),
        (lambda i, j, past: (j <= i + 3) & (j > i - past), torch.tensor(3), "how far its window reaches is not known"),
    ],
)
def test_a_window_of_unknown_bounds_is_refused(mask: Callable[..., Tensor], past: Tensor, reason: str) -> None:
    layer, q, x = Behind(mask), tokens(length=4), tokens(length=7)
    found = compiled(layer, q, x, past)
    torch.testing.assert_close(found.output, layer(q, x, past))
    (site,) = sites(found)
    assert site.reason.startswith(reason)


def test_two_masks_are_refused() -> None:
    class Twice(nn.Module):
        attn_type = "encoder_only"

        def forward(self, x: Tensor, given: Tensor) -> Tensor:
            scores = (x @ x.flip(-1).mT * 0.25).masked_fill(~causal(x), -math.inf)
            return scores.masked_fill(given, -math.inf).softmax(-1) @ x.cos()

    layer, x, given = Twice(), tokens(), torch.zeros(2, 1, TOKENS, TOKENS, dtype=torch.bool)
    found = compiled(layer, x, given)
    torch.testing.assert_close(found.output, layer(x, given))
    (site,) = sites(found)
    assert "can't be told from the rest: " in site.reason


def test_padding_of_a_batch_has_no_axis_where_batch_and_heads_are_one() -> None:
    keep = torch.tensor([[True] * TOKENS, [True] * 4 + [False] * 2])[:, None, None, :]
    found = compiled(Model(lambda x: window(x) & keep), tokens())
    match = found.findings().of("attention")[0]
    merged = replace(match, params=replace(match.params, merged=True))
    rewriter = Rewriter(found.before, Target(), {}, pack_weights=True)
    with pytest.raises(Refused, match="are by batch, and its scores have 3 axes"):
        without_causal_part(merged, Edit(rewriter, match.node, match.claimed))
