"""What users of others weren't told, or were told wrongly, and what kept them from installing, by the public report."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from torch import nn

import npu_fuse

Tensor = torch.Tensor
PACKAGE = Path(npu_fuse.__file__).parent


def norm(x: Tensor, dim: int = -1) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + 1e-6)


@torch.no_grad()
def test_a_graph_in_which_nothing_fuses_says_what_was_nearly_that() -> None:
    """vllm-project/vllm#55720: passes that matched nothing were silent, and still cost compilations."""

    def model(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        a, b = x.chunk(2, -1)
        return norm(x, -2), norm(x - x.mean(-1, keepdim=True)), x * cos + torch.cat((b, -a), -1) * sin

    torch._dynamo.reset()
    backend = npu_fuse.Backend(strict=True, keep_graphs=True)
    call = torch.randn(5, 4, 8), torch.randn(5, 1, 8), torch.randn(5, 1, 8)
    for value, want in zip(torch.compile(model, backend=backend)(*call), model(*call), strict=True):
        torch.testing.assert_close(value, want)
    assert "no fused ops" in backend.report.summary()
    assert [site.status for site in backend.report.sites if site.status == "lowered"] == []
    reasons = {site.kind: site.reason for site in backend.report.sites}
    assert {"rms_norm", "rope"} <= reasons.keys()
    assert all(reasons.values())
    ((before, after),) = backend.graphs
    assert [str(node.target) for node in before.graph.nodes] == [str(node.target) for node in after.graph.nodes]


class Embedded(nn.Module):
    """Reads its ids beside the embeddings that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)

    def forward(self, input_ids: Tensor | None, input_embeds: Tensor | None = None) -> Tensor:
        hidden = self.embed(input_ids) if input_embeds is None else input_embeds
        return norm(hidden) * input_ids.ne(0).unsqueeze(-1)


SPECS = {name: npu_fuse.InputSpec("tokens") for name in ("input_ids", "input_embeds")}
WAYS: dict[str, Callable[[nn.Module], Callable[..., Tensor]]] = {
    "compiled": lambda model: torch.compile(model, backend="npu_fuse"),
    "captured": npu_fuse.GraphRunner,
    "padded": lambda model: npu_fuse.GraphRunner(model, buckets=[4], inputs=SPECS),
}


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
def test_an_argument_that_is_none_is_the_models_own_error(way: str) -> None:
    """vllm-project/vllm#55050: with embeddings alone, the error was one of Dynamo, and named nothing of the user's."""
    torch._dynamo.reset()
    model = Embedded()
    wrapped = WAYS[way](model)
    ids, embeds = torch.arange(3), torch.randn(3, 8)
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'ne'") as raised:
        wrapped(None, embeds)
    assert "input_ids.ne(0)" in "".join(traceback.format_exception(raised.value))
    torch.testing.assert_close(wrapped(ids, embeds), model(ids, embeds))
    torch.testing.assert_close(wrapped(ids), model(ids))


def test_what_a_message_names_is_there() -> None:
    """pytorch/pytorch#177192: the error advised a call that changes nothing."""

    def is_there(name: str) -> bool:
        owner, _, member = name.partition(".")
        if owner == "npu_fuse":
            return callable(resolve_name(name))
        scope = getattr(npu_fuse, owner)
        return hasattr(scope, member) or member in inspect.signature(scope).parameters

    names = set()
    for path in (*PACKAGE.glob("passes/**/*.py"), *PACKAGE.glob("patterns/**/*.py"), *PACKAGE.glob("runtime/**/*.py")):
        if path.parent.name == "mlir":  # its texts are those of MLIR
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "import" not in node.value:
                names |= set(re.findall(r"(?:npu_fuse(?:\.\w+)+|\b(?:Options|InputSpec|GraphRunner)\.\w+)", node.value))
    assert {"npu_fuse.register_side_effects", "Options.encoder_only", "InputSpec.host"} <= names
    assert [name for name in sorted(names) if not is_there(name)] == []


@pytest.fixture(scope="module")
def first_use() -> dict[str, Any]:
    """What a process sees that has no Triton and has imported nothing but torch."""
    program = """
import json, sys
sys.modules["triton"] = None
import torch
listed = "npu_fuse" in torch._dynamo.list_backends()
loaded = "npu_fuse" in sys.modules
compiled = torch.compile(torch.nn.RMSNorm(8), backend="npu_fuse")
with torch.no_grad():
    shape = compiled(torch.randn(3, 8)).shape
import npu_fuse
ops = npu_fuse.explain(torch.nn.RMSNorm(8), torch.randn(3, 8)).ops
print(json.dumps({"listed": listed, "loaded": loaded, "shape": list(shape), "ops": ops}))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_it_is_listed_before_its_first_use(first_use: dict[str, Any]) -> None:
    """pytorch/pytorch#131360: a backend that is an entry point was invisible until it had been used once."""
    assert first_use["listed"]
    assert not first_use["loaded"]


def test_it_needs_no_triton(first_use: dict[str, Any]) -> None:
    """vllm-project/vllm#16955: Triton was imported whether or not the machine could have it."""
    assert (first_use["shape"], first_use["ops"]) == ([3, 8], {"npu::npu_rms_norm": 1})
