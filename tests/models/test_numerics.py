"""With exact numerics what is fused gives the model's bits, in each type; what would not is refused and says where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from npu_fuse import Backend, Report
from tiny_models import build, prompt

Tensor = torch.Tensor
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ANY = {BF16, FP16, FP32}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def compiled(model: Callable[..., Tensor], *inputs: Tensor, **settings: object) -> Report:
    """Compares a call of the fused graph bit for bit, behind one that compares each site."""
    backend = Backend(strict=True, numerics="exact", verify="first")
    function = torch.compile(model, backend=backend)
    with torch.no_grad():
        for _ in range(2):
            own, wanted = ([value.clone() for value in inputs] for _ in range(2))
            found, expected = function(*own, **settings), model(*wanted, **settings)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(own, wanted, rtol=0, atol=0)
    (report,) = backend.reports
    verified = [site.verified for site in report.sites if site.verified is not None]
    assert all(told.startswith("max error 0 within") for told in verified), report
    assert len(verified) >= sum(report.ops.values()) > 0 or not report.ops
    return report


def kinds(report: Report) -> Counter[str]:
    return Counter(site.kind for site in report.sites if site.status == "lowered")


MODELS = {
    ("qwen3", BF16): {"rms_norm": 5, "add_rms_norm": 0, "qkv": 0, "glu": 0},
    ("qwen3", FP32): {"rms_norm": 5, "add_rms_norm": 2, "qkv": 1, "glu": 1},
    ("gemma3_text", BF16): {"qkv": 0, "glu": 0},
    ("gemma3_text", FP16): {"qkv": 0, "glu": 1},
    ("gemma3_text", FP32): {"qkv": 1, "glu": 1},
    ("olmo2", BF16): {"qkv": 1, "glu": 0},
    ("olmo2", FP32): {"qkv": 1, "glu": 1},
}


@pytest.mark.parametrize(("name", "dtype"), MODELS)
def test_a_model(name: str, dtype: torch.dtype) -> None:
    model = build(name, dtype, num_hidden_layers=1)
    report = compiled(lambda ids: model(input_ids=ids, use_cache=False).logits, prompt())
    found = kinds(report)
    assert {kind: found[kind] for kind in MODELS[name, dtype]} == MODELS[name, dtype]
    assert not found["attention"]  # whose kernels round as they like


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def normed_groups(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.silu(functional.group_norm(x, 4, weight, bias, 1e-5))


def absorbed(x: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(x, weight).transpose(0, 1).contiguous()


def written(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Tensor:
    for cache, tokens in ((k_cache, k), (v_cache, v)):
        cache.view(-1, *cache.shape[2:])[slots] = tokens
    return k_cache[1] + v_cache[1]


def quick(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def caches() -> list[Tensor]:
    return [torch.randn(*shape) for shape in [(4, 2, 32)] * 2 + [(6, 16, 2, 32)] * 2]


KINDS: dict[str, tuple[Callable[..., Tensor], Callable[[], list[Tensor]], set[torch.dtype]]] = {
    "rope": (rotated, lambda: [torch.randn(2, 4, 8, 16), *torch.randn(2, 8, 16)], {FP32}),
    "glu": (lambda x: gated(*x.chunk(2, -1)), lambda: [torch.randn(3, 64)], {FP32}),
    "group_norm_silu": (normed_groups, lambda: [torch.randn(2, 8, 4, 4), torch.rand(8), torch.rand(8)], {FP32}),
    "transpose_batchmatmul": (absorbed, lambda: [torch.randn(2, 16, 128), torch.randn(2, 128, 128)], ANY),
    "kv_cache_write": (written, caches, {BF16, FP16}),
    "fast_gelu": (quick, lambda: [torch.randn(3, 64)], {FP32}),
}


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind(kind: str, dtype: torch.dtype) -> None:
    function, inputs, exact = KINDS[kind]
    given = [value.to(dtype) for value in inputs()]
    if kind == "kv_cache_write":
        given.append(torch.tensor([3, 17, 40, 60]))
    report = compiled(function, *given)
    (site,) = (site for site in report.sites if site.kind == kind)
    assert (site.status == "lowered") == (dtype in exact), site
    if dtype not in exact:
        if kind == "kv_cache_write":
            assert "float32" in str(site.reason)
        else:
            assert "Options.numerics is 'exact', and " in str(site.reason)
