"""Small models that several processes compile; `python kept_models.py FOLDER` is one of them."""

import sys
from enum import Enum

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # its usual name

import npu_fuse

Tensor = torch.Tensor


class Mlp(nn.Module):
    """A norm and a gated unit: its weights are packed."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16, eps=eps)
        self.gate, self.up = (nn.Linear(16, 32, bias=False) for _ in range(2))
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Causal(nn.Module):
    """Attention whose mask becomes a constant of the fused op."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Cached(nn.Module):
    """A cache that is written in place, and read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 8, 16))
        self.norm = nn.RMSNorm(16)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        self.cache.index_copy_(1, at, self.norm(x))
        return self.cache.sum(1)


class AttentionType(Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class Declared(nn.Module):
    """Attention that says of itself whether it is causal."""

    def __init__(self, attn_type: AttentionType) -> None:
        super().__init__()
        self.attn_type = attn_type

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def seeded(make: type[nn.Module], *args: object) -> nn.Module:
    torch.manual_seed(0)
    return make(*args).eval()


def main(folder: str) -> None:
    """Compiles one model several times with one cache, and prints what became of each."""
    for _ in range(3):
        torch._dynamo.reset()
        backend = npu_fuse.Backend(cache=folder, strict=True)
        model, x = seeded(Mlp), torch.randn(3, 16)
        with torch.no_grad():
            assert torch.equal(torch.compile(model, backend=backend)(x), torch.compile(model, backend="npu_fuse")(x))
        print(backend.report.cache)


if __name__ == "__main__":
    main(sys.argv[1])
