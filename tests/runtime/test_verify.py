"""A wrong site is found by what it computes, and put back alone; a right one is left, and nobody's memory changes."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import npu_fuse
from npu_fuse import Backend
from npu_fuse.passes.lowering import LOWERINGS
from npu_fuse.passes.pipeline import Flow
from npu_fuse.passes.report import Site
from npu_fuse.patterns import values
from npu_fuse.runtime.ops import CONTRACTS
from npu_fuse.runtime.verify import Verified
from tiny_models import build, prompt

aten = torch.ops.aten
Tensor = torch.Tensor
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BATCH, TOKENS, HEADS, DIM = 2, 4, 4, 16
WIDTH = HEADS * DIM


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


# Layers ---------------------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self, dtype: torch.dtype = FP32, eps: float = 1e-6, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.rand(WIDTH) + 0.5).to(dtype))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.offset:
            return (normed * (self.offset + self.weight.float())).type_as(x)
        return self.weight * normed.to(x.dtype)


class Prologue(nn.Module):
    """q, k and v, the former two normed, each head or all together, and rotated by halves."""

    def __init__(self, normed: int = DIM) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.q_weight, self.k_weight = (nn.Parameter(torch.rand(normed) + 0.5) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        angles = torch.arange(x.shape[1])[:, None] / 100 ** (torch.arange(DIM // 2) / (DIM // 2))
        both = torch.cat((angles, angles), -1)
        cos, sin = both.cos(), both.sin()
        found = []
        for projection, weight in ((self.q, self.q_weight), (self.k, self.k_weight)):
            value = projection(x).unflatten(-1, (-1, len(weight)))
            value = weight * (value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + 1e-6))
            value = value.reshape(*x.shape[:2], HEADS, DIM).transpose(1, 2)
            a, b = value.chunk(2, -1)
            found.append(value * cos + torch.cat((-b, a), -1) * sin)
        return (*found, self.v(x))


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, seen)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 32, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return functional.silu(self.gate(x)) * self.up(x)


class Write(nn.Module):
    def forward(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        for cache, tokens in ((k_cache, k), (v_cache, v)):
            cache.view(-1, HEADS, 32)[slots] = tokens


class Pair(nn.Module):
    """Two layers of a kind, each with half of the inputs: what is wrong with one is not with the other."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.wrong, self.right = layer(), layer()

    def forward(self, *inputs: Tensor) -> tuple[Any, Any]:
        half = len(inputs) // 2
        return self.wrong(*inputs[:half]), self.right(*inputs[half:])


# Faults ---------------------------------------------------------------------------------------------------------------

Call = tuple[Any, dict[str, Any]]
Fault = Callable[[Any, Any, dict[str, Any]], Call]


def planted(kind: str, fault: Fault, within: str = "wrong") -> Flow:
    """A flow whose lowering of a kind gives its op something else, in some modules."""
    lower = LOWERINGS[kind]

    def faulty(match: Any, edit: Any) -> Any:
        op, functional_op = edit.op, edit.functional
        if within in (values.module_path(match.node) or ""):
            for name, call in (("op", op), ("functional", functional_op)):
                setattr(edit, name, lambda contract, call=call, **given: _called(edit, call, contract, given, fault))
        return lower(match, edit)

    return Flow(lowerings={**LOWERINGS, kind: faulty})


def _called(edit: Any, call: Callable[..., Any], contract: Any, given: dict[str, Any], fault: Fault) -> Any:
    instead, given = fault(edit, contract, given)
    found = call(instead, **given)
    return found if instead is contract else edit.item(found, 0)  # of one result in place of one


def argument(name: str, change: Callable[[Any, Any], Any]) -> Fault:
    """One argument is another."""
    return lambda edit, contract, given: (contract, {**given, name: change(edit, given[name])})


def swapped(a: str, b: str) -> Fault:
    return lambda edit, contract, given: (contract, {**given, a: given[b], b: given[a]})


def gelu(edit: Any, contract: Any, given: dict[str, Any]) -> Call:
    """The op of another activation, by the call of which this one gives its first result."""
    del contract
    given = {**given, "approximate": 0, "activate_left": True}
    return CONTRACTS["npu::npu_geglu"], given


def rounded(edit: Any, node: Any) -> Any:
    return edit.cast(edit.cast(node, BF16), FP32)


def stale(edit: Any, node: Any) -> Any:
    """The weight as it was when the graph was compiled."""
    weight = edit.rewriter.parameters[node]
    return edit.constant("_stale", weight.device, lambda _: weight.detach().clone())


def half_of_the_rotation(edit: Any, contract: Any, given: dict[str, Any]) -> Call:
    size = given["rotary_dim"] // 2
    tables = {n: edit.contiguous(edit.call(aten.slice.Tensor, given[n], -1, 0, size)) for n in ("cos", "sin")}
    return contract, {**given, **tables, "rotary_dim": size}


def tokens() -> Tensor:
    return torch.randn(BATCH, TOKENS, WIDTH)


def heads() -> list[Tensor]:
    return [torch.randn(BATCH, HEADS, TOKENS, DIM) for _ in range(3)]


def seen() -> Tensor:
    return torch.rand(BATCH, 1, TOKENS, TOKENS) < 0.6


def caches() -> list[Tensor]:
    rows = [torch.randn(TOKENS, HEADS, 32, dtype=FP16) for _ in range(2)]
    return [*rows, *(torch.randn(6, 16, HEADS, 32, dtype=FP16) for _ in range(2)), torch.tensor([3, 17, 40, 60])]


FAULTS: dict[str, tuple[str, Callable[[], nn.Module], Callable[[], list[Tensor]], Fault]] = {
    "eps": ("rms_norm", Norm, lambda: [tokens()], argument("epsilon", lambda _, eps: eps * 100)),
    "neox flag": ("qkv", Prologue, lambda: [tokens()], argument("is_neox_style", lambda _, flag: not flag)),
    "norm of another head": ("qkv", Prologue, lambda: [tokens()], swapped("q_weight", "k_weight")),
    "cos and sin": ("qkv", Prologue, lambda: [tokens()], swapped("cos", "sin")),
    "mask inverted": (
        "attention",
        Attention,
        lambda: [*heads(), seen()],
        argument("atten_mask", lambda edit, mask: edit.call(aten.logical_not.default, mask)),
    ),
    "scale": (
        "attention",
        Attention,
        lambda: [*heads(), seen()],
        argument("scale", lambda _, scale: scale * 1.01),
    ),
    "layout": (
        "attention",
        Attention,
        lambda: [*heads(), seen()],
        argument("input_layout", lambda _, layout: "BSND" if layout == "BNSD" else "BNSD"),
    ),
    "gate and up swapped": (
        "glu",
        Gated,
        lambda: [tokens()],
        argument("input", lambda edit, both: edit.call(aten.roll.default, both, [32], [-1])),
    ),
    "activation": ("glu", Gated, lambda: [tokens()], gelu),
    "weight offset": (
        "rms_norm",
        lambda: Norm(offset=1.0),
        lambda: [tokens()],
        argument("gamma", lambda edit, weight: edit.call(aten.add.Tensor, weight, 1.0)),
    ),
    "weight of another place": (
        "rms_norm",
        Norm,
        lambda: [tokens()],
        argument("gamma", lambda edit, weight: edit.call(aten.roll.default, weight, [1], [0])),
    ),
    "rounding": ("rms_norm", Norm, lambda: [tokens()], argument("input", rounded)),
    "rotary dim": ("qkv", lambda: Prologue(WIDTH), lambda: [tokens()], half_of_the_rotation),
    "row of the state": (
        "kv_cache_write",
        Write,
        caches,
        argument("slot_mapping", lambda edit, slots: edit.call(aten.add.Tensor, slots, 1)),
    ),
}


class Wrong(Backend):
    """A backend with a fault."""

    def __init__(self, flow: Flow, **settings: Any) -> None:
        super().__init__(flow=flow, verify="first", **settings)


def copies(inputs: list[Tensor]) -> list[Tensor]:
    return [value.clone() for value in inputs]


def warned(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if "npu_fuse" in str(w.message)]


def sites(backend: Backend, kind: str) -> dict[str, Site]:
    """The sites of a kind in the only graph, by the module that wrote them."""
    (report,) = backend.reports
    return {str(site.module): site for site in report.sites if site.kind == kind}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_put_back_alone(name: str, tmp_path: Path) -> None:
    kind, layer, inputs, fault = FAULTS[name]
    model, given = Pair(layer).eval(), [*inputs(), *inputs()]
    backend = Wrong(planted(kind, fault), dump=tmp_path, keep_graphs=True)
    function = torch.compile(model, backend=backend)
    own, wanted = copies(given), copies(given)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, expected = function(*own), model(*wanted)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)  # a call that is verified is the model's own
        torch.testing.assert_close(own, wanted, rtol=0, atol=0)
        (message,) = warned(caught)
        found, expected = function(*own), model(*wanted)
        assert warned(caught) == [message]  # what is left is right
    close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found, expected, **close)
    torch.testing.assert_close(own, wanted, **close)
    assert f"1 {kind}" in message
    assert len(backend.graphs) == 1
    of_kind = sites(backend, kind)
    assert (of_kind["wrong"].status, of_kind["right"].status) == ("refused", "lowered")
    assert of_kind["right"].verified
    reason = of_kind["wrong"].reason
    stated = r"max error \S+ > tolerance \S+ \(float(16|32), sums of \d+\)"
    assert re.match(f"verification failed: {stated}; reproducer in ", reason)
    (folder,) = tmp_path.glob("wrong_*")
    assert str(folder) in reason


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma3_text", "olmo2"])
def test_what_is_right_is_never_found_wrong(name: str, dtype: torch.dtype) -> None:
    model, given = build(name, dtype, num_hidden_layers=1), prompt()
    backend = Backend(verify="first", strict=True)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = torch.compile(model, backend=backend)(input_ids=given, use_cache=False).logits
        assert torch.equal(found, model(input_ids=given, use_cache=False).logits)
    assert not warned(caught)
    (report,) = backend.reports
    lowered = [site for site in report.sites if site.status == "lowered" and site.verified]
    assert {"qkv", "attention", "glu", "rms_norm"} <= {site.kind for site in lowered}
    assert all("within tolerance" in str(site.verified) for site in lowered)
    assert "verified" in report.summary()


def test_the_reproducer_runs_alone(tmp_path: Path) -> None:
    kind, layer, inputs, fault = FAULTS["neox flag"]
    backend = Wrong(planted(kind, fault), dump=tmp_path)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile(Pair(layer), backend=backend)(*inputs(), *inputs())
    (folder,) = tmp_path.glob("wrong_*")
    assert {path.name for path in folder.iterdir()} == {"reproduce.py", "inputs.safetensors"}
    script = str(folder / "reproduce.py")
    told = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, cwd="/").stdout
    (site,) = (site for name, site in sites(backend, kind).items() if name == "wrong")
    largest = re.search(r"max error (\S+) >", str(site.reason))
    assert largest is not None
    assert f"max error {largest[1]}, of numbers up to" in told
    assert "result 2: max error 0," in told  # v is no part of what is wrong


@pytest.mark.parametrize("when", ["always", 3])
def test_a_weight_that_goes_stale_later_is_found_when_it_is_looked_for(when: Any) -> None:
    model, x = Pair(Norm), [tokens(), tokens()]
    backend = Wrong(planted("rms_norm", argument("gamma", stale)))
    backend.options = npu_fuse.Options(verify=when)
    function = torch.compile(model, backend=backend)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*x)
        assert not warned(caught)
        model.wrong.weight.mul_(2)
        for _ in range(0 if when == "always" else 2):  # calls that nobody looks at
            assert not torch.equal(function(*x)[0], model(*x)[0])
        assert torch.equal(function(*x)[0], model(*x)[0])
        (message,) = warned(caught)
        assert "verification failed" in message
        assert torch.equal(function(*x)[0], model(*x)[0])
    assert {name: site.status for name, site in sites(backend, "rms_norm").items()} == {
        "wrong": "refused",
        "right": "lowered",
    }


def test_an_op_that_raises_is_put_back() -> None:
    def narrow(edit: Any, weight: Any) -> Any:
        node = edit.call(aten.slice.Tensor, weight, 0, 0, 8)
        node.meta["val"] = weight.meta["val"]  # as a wrong contract would have it
        return node

    model, x = Pair(Norm), [tokens(), tokens()]
    backend = Wrong(planted("rms_norm", argument("gamma", narrow)))
    function = torch.compile(model, backend=backend)
    with torch.no_grad():
        wanted = model(*x)[0]
        with pytest.warns(UserWarning, match="verification failed: the fused op raised"):
            found = function(*x)[0]
        assert torch.equal(found, wanted)
        assert torch.equal(function(*x)[0], wanted)


@pytest.mark.parametrize("is_wrong", [True, False])
def test_a_graph_of_any_size_is_captured_once_it_is_verified(is_wrong: bool) -> None:
    kind, layer, _, fault = FAULTS["gate and up swapped"]
    model = Pair(layer)
    backend = Wrong(planted(kind, fault, within="wrong" if is_wrong else "nowhere"), graphs={})
    function = torch.compile(model, backend=backend, dynamic=True)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for count in (4, 4, 6):
            x = [torch.randn(BATCH, count, WIDTH) for _ in range(2)]
            torch.testing.assert_close(function(*x), model(*x), rtol=1e-5, atol=1e-6)
    assert len(warned(caught)) == is_wrong
    assert len(backend.reports) == 1
    assert sites(backend, kind)["wrong"].status == ("refused" if is_wrong else "lowered")
    assert backend.runners[-1].runner.stats.captures == 2 - is_wrong  # its second call is looked at too


def test_what_the_model_does_once_is_done_once() -> None:
    def noisy(x: Tensor, count: Tensor) -> Tensor:
        count.add_(1)
        return functional.rms_norm(x + torch.rand_like(x), (WIDTH,)) + torch.rand_like(x)

    x, count = tokens(), torch.zeros(())
    function = torch.compile(noisy, backend=Backend(verify="always", strict=True))
    with torch.no_grad():
        for call in range(3):
            torch.manual_seed(call)
            wanted = noisy(x, torch.zeros(()))
            torch.manual_seed(call)
            assert torch.equal(function(x, count), wanted)
    assert count == 3


def test_a_call_of_which_a_runner_records_the_ops_is_not_verified() -> None:
    norm, x = Norm(), tokens()
    backend = Backend(verify="always", strict=True)
    runner = npu_fuse.GraphRunner(torch.compile(norm, backend=backend))
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(runner(x), norm(x))
    assert runner.stats.captures == 1
    assert all(site.verified is None for site in backend.report.sites)


def test_nothing_is_kept_of_a_graph_that_was_found_right() -> None:
    found: list[Verified] = []

    class Looked(Verified):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            found.append(self)

    from npu_fuse.runtime import backend as backend_module

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(backend_module, "Verified", Looked)
        torch.compile(Norm(), backend=Backend(verify="first", strict=True))(tokens())
    assert found[0]._rewrites is None
    assert found[0]._without is None


def test_an_order_that_the_model_leaves_open_is_none_to_compare() -> None:
    def gating(logits: Tensor) -> tuple[Tensor, Tensor]:
        return torch.topk(logits.softmax(-1), 4, sorted=False)

    backend = Backend(verify="first", strict=True)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.compile(gating, backend=backend)(torch.randn(6, 16))
    assert not warned(caught)
    (site,) = backend.report.sites
    assert site.status == "lowered"
    assert "within tolerance" in str(site.verified)


def test_experts_that_are_equally_good_may_be_chosen_either_way() -> None:
    logits = torch.randn(64, 16).mul(2).round().div(2)  # many are the same

    def gating(logits: Tensor) -> tuple[Tensor, Tensor]:
        return torch.topk(logits.softmax(-1), 4)

    backend = Backend(verify="first", strict=True)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.compile(gating, backend=backend)(logits)
    assert not warned(caught)
    (site,) = backend.report.sites
    assert site.verified
