"""Models whose weights two ranks share, and what runs a function on two ranks with gloo."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F  # noqa: N812  # its usual name

import npu_fuse
from npu_fuse.passes.effects import communicates
from npu_fuse.runtime import ranks

Tensor = torch.Tensor
RANKS = 2


def on_two_ranks(function: Callable[..., Any], *args: Any) -> list[Any]:
    """What a function of a module gives on each rank. Both are processes of their own, of one host by what they see."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (folder, function, args), nprocs=RANKS)
        return [torch.load(Path(folder) / str(rank), weights_only=False) for rank in range(RANKS)]


def _rank(rank: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    with torch.no_grad():
        result = function(*args)
    dist.barrier()
    torch.save(result, Path(folder) / str(rank))
    dist.destroy_process_group()


def all_of(*functions: Callable[[], Any]) -> list[Any]:
    """Several after one another, for the start of two processes takes longer than they do."""
    return [function() for function in functions]


def rows(weight: Tensor) -> nn.Parameter:
    """This rank's rows of a weight."""
    return nn.Parameter(weight.chunk(RANKS)[dist.get_rank()].clone())


def columns(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.chunk(RANKS, dim=-1)[dist.get_rank()].contiguous())


def summed(x: Tensor) -> Tensor:
    return fc.all_reduce(x, "sum", dist.group.WORLD)


class Block(nn.Module):
    """Attention with a norm over all heads, and a gated unit, on as many ranks as share it."""

    HIDDEN, HEADS, HEAD_DIM, EPS = 64, 4, 16, 1e-5

    def __init__(self, shared: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = shared
        by_rows = rows if shared else nn.Parameter
        by_columns = columns if shared else nn.Parameter
        made = [torch.randn(64, 64) / 8 for _ in range(3)]
        self.q, self.k, self.v = map(by_rows, made)
        self.q_norm, self.k_norm = (by_rows(torch.rand(64) + 0.5) for _ in range(2))
        self.o = by_columns(torch.randn(64, 64) / 8)
        self.norm = nn.Parameter(torch.rand(64) + 0.5)
        self.gate, self.up = (by_rows(torch.randn(128, 64) / 8) for _ in range(2))
        self.down = by_columns(torch.randn(64, 128) / 8)
        angles = torch.arange(8)[:, None] * torch.logspace(0, -2, self.HEAD_DIM // 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def whole(self, x: Tensor) -> Tensor:
        return summed(x) if self.shared else x

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        mean = self.whole(wide.pow(2).sum(-1, keepdim=True)) / self.HIDDEN
        return (wide * torch.rsqrt(mean + self.EPS) * weight).to(x.dtype)

    def turned(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (-1, self.HEAD_DIM)).transpose(1, 2)
        cos, sin = (torch.cat((half, half), -1)[: x.shape[2]].to(x.dtype) for half in (self.cos, self.sin))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    def forward(self, x: Tensor) -> Tensor:
        q = self.turned(self.normed(F.linear(x, self.q), self.q_norm))
        k = self.turned(self.normed(F.linear(x, self.k), self.k_norm))
        v = F.linear(x, self.v).unflatten(-1, (-1, self.HEAD_DIM)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.whole(F.linear(y, self.o))
        y = F.rms_norm(x, (self.HIDDEN,), self.norm, self.EPS)
        return x + self.whole(F.linear(F.silu(F.linear(y, self.gate)) * F.linear(y, self.up), self.down))


# What is run on both ranks --------------------------------------------------------------------------------------------


def given() -> Tensor:
    return torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(3)).bfloat16()


def block(*, shared: bool) -> Block:
    return Block(shared).bfloat16().eval()


def compiled(model: nn.Module, x: Tensor, **settings: Any) -> dict[str, Any]:
    """What became of a model, and how far off it is from eager execution in float64 on one rank."""
    torch._dynamo.reset()
    backend = npu_fuse.Backend(strict=True, keep_graphs=True, **settings)
    through = torch.compile(model, backend=backend)
    wanted = block(shared=False).double()(x.double())
    outputs = [through(x), through(x)]
    ((before, after),) = backend.graphs
    return {
        "ops": dict(backend.report.ops),
        "cache": backend.report.cache,
        "refused": {site.kind: site.reason for site in backend.report.sites if site.status == "refused"},
        "error": max((output.double() - wanted).abs().max().item() for output in outputs),
        "eager": (model(x).double() - wanted).abs().max().item(),
        "collectives": [[str(n.target) for n in g.graph.nodes if communicates(n)] for g in (before, after)],
    }


def written_by_hand() -> dict[str, Any]:
    return compiled(block(shared=True), given(), disable={"mm_all_reduce"})


def matmuls_that_are_added_up() -> dict[str, Any]:
    """Twice: where all ranks are on one machine, and where that isn't known."""
    found = compiled(block(shared=True), given())
    del os.environ["LOCAL_WORLD_SIZE"]
    unknown = compiled(block(shared=True), given())
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS)
    return {**found, "unknown": unknown}


def kept() -> list[dict[str, Any]]:
    """Two starts with one cache."""
    with tempfile.TemporaryDirectory() as folder:
        return [compiled(block(shared=True), given(), cache=folder) for _ in range(2)]


def in_place() -> dict[str, Any]:
    """The same with `dist.all_reduce(x)`, which writes x."""

    def summed(x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    model = block(shared=True)
    model.whole = summed
    return compiled(model, given(), disable={"mm_all_reduce"})


class Dense(nn.Module):
    """A norm and a gated unit of modules, for `parallelize_module`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.RMSNorm(64, eps=1e-5)
        self.gate, self.up = (nn.Linear(64, 128, bias=False) for _ in range(2))
        self.down = nn.Linear(128, 64, bias=False)
        self.last = nn.RMSNorm(64, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.last(x + self.down(F.silu(self.gate(y)) * self.up(y)))


def dtensors() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (RANKS,))
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    whole, shared = Dense().bfloat16().eval(), Dense().bfloat16().eval()
    parallelize_module(shared, mesh, plan)
    backend = npu_fuse.Backend(strict=True, disable={"mm_all_reduce"})
    through = torch.compile(shared, backend=backend)
    errors = []
    for x in (given(), given()[:1], given()[0]):  # compiled again for each
        errors.append((through(x).double() - whole.double()(x.double())).abs().max().item())
    refused = {site.kind: site.reason for site in backend.report.sites if site.status == "refused"}
    return {"ops": dict(backend.reports[0].ops), "refused": refused, "error": max(errors), "all": len(backend.reports)}


def one_rank_may_not_move_its_weights() -> dict[str, Any]:
    model = block(shared=True)
    held = model.q.detach() if dist.get_rank() == 1 else None
    found = compiled(model, given(), disable={"mm_all_reduce"})
    return {**found, "held": held is not None}


def one_rank_compiles_alone() -> str:
    ranks._PATIENCE = 0.5
    if dist.get_rank() == 1:
        return "nothing"
    try:
        compiled(block(shared=True), given())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
