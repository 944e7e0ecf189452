"""One decoder layer on several ranks: what each fuses, and that it computes what one rank computes.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

Twice: with shards and collectives written by hand, as serving frameworks have them, and by `parallelize_module`, whose
weights are DTensors. q and k are normed over the heads of all ranks together, and their mean squares added up for that.
On the CPU the ranks talk by gloo, on NPUs by hccl.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F  # noqa: N812  # its usual name

import npu_fuse

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, EPS = 256, 8, 4, 64, 512, 1e-5

# The part of each weight that a rank holds: rows of what it computes, columns of what it adds up.
ROWS = ("q", "k", "v", "gate", "up")
COLUMNS = ("o", "down")


class Layer(nn.Module):
    """Attention and a gated unit; `add_up` adds up what ranks have computed apart."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k, self.v = (nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False) for _ in range(2))
        self.q_norm = nn.Parameter(torch.rand(HEADS * HEAD_DIM) + 0.5)
        self.k_norm = nn.Parameter(torch.rand(KV_HEADS * HEAD_DIM) + 0.5)
        self.o = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.norm = nn.RMSNorm(HIDDEN, eps=EPS)
        self.gate, self.up = (nn.Linear(HIDDEN, MLP, bias=False) for _ in range(2))
        self.down = nn.Linear(MLP, HIDDEN, bias=False)
        self.ranks = 1

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.ranks == 1 else fc.all_reduce(x, "sum", dist.group.WORLD)

    def normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        squares = self.add_up(wide.pow(2).mean(-1, keepdim=True)) / self.ranks
        return (wide * torch.rsqrt(squares + EPS) * weight).to(x.dtype)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        angles = positions[:, None] * torch.logspace(0, -3, HEAD_DIM // 2, device=x.device)
        cos, sin = (torch.cat((half, half), -1).to(x.dtype) for half in (angles.cos(), angles.sin()))

        def turned(heads: torch.Tensor) -> torch.Tensor:
            heads = heads.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            first, second = heads.chunk(2, -1)
            return heads * cos + torch.cat((-second, first), -1) * sin

        q = turned(self.normed(self.q(x), self.q_norm))
        k = turned(self.normed(self.k(x), self.k_norm))
        v = self.v(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.reduced(self.o(self.attend(x)))
        y = self.norm(x)
        return x + self.reduced(self.down(F.silu(self.gate(y)) * self.up(y)))

    def reduced(self, x: torch.Tensor) -> torch.Tensor:
        """What o and down give, of all ranks: a DTensor has seen to that itself."""
        return x if isinstance(self.o.weight, torch.distributed.tensor.DTensor) else self.add_up(x)


def shards_by_hand(layer: Layer) -> Layer:
    """Leaves this rank its part of each weight."""
    layer.ranks, rank = dist.get_world_size(), dist.get_rank()

    def part(weight: torch.Tensor, dim: int) -> nn.Parameter:
        return nn.Parameter(weight.detach().chunk(layer.ranks, dim)[rank].clone(memory_format=torch.contiguous_format))

    for name in ROWS:
        getattr(layer, name).weight = part(getattr(layer, name).weight, 0)
    for name in COLUMNS:
        getattr(layer, name).weight = part(getattr(layer, name).weight, 1)
    layer.q_norm, layer.k_norm = part(layer.q_norm, 0), part(layer.k_norm, 0)
    return layer


def shards_of_torch(layer: Layer) -> Layer:
    """Lets torch do that. What is no module it leaves whole, so the norms' weights are cut by hand."""
    layer.ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh(layer.q.weight.device.type, (layer.ranks,))
    plan = {**{name: ColwiseParallel() for name in ROWS}, **{name: RowwiseParallel() for name in COLUMNS}}
    parallelize_module(layer, mesh, plan)
    for name in ("q_norm", "k_norm"):
        setattr(layer, name, nn.Parameter(getattr(layer, name).detach().chunk(layer.ranks)[rank].clone()))
    return layer


def main() -> None:
    """Prints, for each rank, what was fused and how far off it is."""
    on_npu = npu_fuse.Target.detect().device == "npu"
    device = torch.device("npu" if on_npu else "cpu", int(os.environ["LOCAL_RANK"]) if on_npu else 0)
    dist.init_process_group("hccl" if on_npu else "gloo")
    x = torch.randn(2, 16, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)

    def layer() -> Layer:
        return Layer().bfloat16().eval().to(device)

    with torch.no_grad():
        exact = layer().double()(x.double())
        eager = layer()(x)
        for name, shared in (("by hand", shards_by_hand), ("DTensors", shards_of_torch)):
            backend = npu_fuse.Backend(strict=True)
            found = torch.compile(shared(layer()), backend=backend)(x)
            errors = [(value.double() - exact).abs().max().item() for value in (found, eager)]
            ops = ", ".join(f"{count} {op}" for op, count in sorted(backend.report.ops.items()))
            refused = sorted({site.kind for site in backend.report.sites if site.status == "refused"})
            for rank in range(dist.get_world_size()):
                dist.barrier()
                if rank == dist.get_rank():
                    print(f"{name}, rank {rank}: {ops}; not fused: {', '.join(refused) or 'nothing'}")
                    print(f"  error {errors[0]:.4f}; of one rank in eager execution {errors[1]:.4f}", flush=True)
            assert errors[0] < 2 * errors[1] + 2**-6
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
