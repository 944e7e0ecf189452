"""Ways in which public models and their authors write the same maths. EPS and the axis are the same in all."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

Norm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
EPS = 1e-5


def _llama(x, w):
    dtype = x.dtype
    x = x.to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return w * x.to(dtype)


def _llama4(x, w):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).type_as(x) * w


def _cpmant(x, w):
    dtype = x.dtype
    variance = x.to(torch.float32).pow(2).mean(dim=-1, keepdim=True)
    return (x * torch.rsqrt(variance + EPS)).to(dtype) * w


def _olmo(x, w):
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    return (w * (x * torch.rsqrt(variance + EPS))).to(dtype)


def _helium(x, w):
    dtype = x.dtype
    x = x.to(torch.float32)
    variance = x.pow(2).mean(-1, keepdim=True)
    return (w.to(torch.float32) * (x * torch.rsqrt(variance + EPS))).to(dtype)


def _t5(x, w):
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + EPS)
    return w * (x.to(w.dtype) if w.dtype in (torch.float16, torch.bfloat16) else x)


def _gemma(x, w):
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (normed * (1.0 + w.float())).type_as(x)


def _gemma_narrow(x, w):
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)
    return normed * (1 + w)


def _gemma_swapped(x, w):
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return ((w.float() + 1) * normed).to(x.dtype)


def _gemma3n(x, w):
    wide = x.float()
    mean_squared = wide.pow(2).mean(-1, keepdim=True) + EPS
    return (wide * torch.pow(mean_squared, -0.5) * w.float()).type_as(x)


def _gradium(x, w):
    variance = x.pow(2).mean(-1, keepdim=True)
    return w * x * torch.rsqrt(variance + EPS)


def _scale_first(x, w):
    wide = x.float()
    return (wide * (torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * w)).to(x.dtype)


def _fla(x, w):
    wide = x.float()
    rstd = 1 / torch.sqrt(wide.square().mean(dim=-1, keepdim=True) + EPS)
    return (wide * rstd * w).to(x.dtype)


def _divided(x, w):
    wide = x.float()
    return w * (wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def _divided_by_half_power(x, w):
    wide = x.float()
    return w * (wide / (wide**2).mean(-1, keepdim=True).add(EPS).pow(0.5)).to(x.dtype)


def _reciprocal(x, w):
    wide = x.float()
    return w * (wide * (EPS + (wide**2).mean(-1, keepdim=True)).sqrt().reciprocal()).to(x.dtype)


def _sum_over_size(x, w):
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) / x.shape[-1] + EPS)).to(x.dtype)


def _unsqueezed(x, w):
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1) + EPS)
    return w * (wide * scale.unsqueeze(-1)).to(x.dtype)


def _indexed(x, w):
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1)[..., None] + EPS)
    return w * (scale * wide).to(x.dtype)


def _positive_axis(x, w):
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(x.dim() - 1, keepdim=True) + EPS)).to(x.dtype)


def _all_narrow(x, w):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * w


def _scale_rounded(x, w):
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS).to(x.dtype) * w


def _double(x, w):
    wide = x.double()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * w).to(x.dtype)


def _variance_rounded(x, w):
    wide = x.float()
    variance = wide.pow(2).mean(-1, keepdim=True).to(x.dtype)
    return w * (x * torch.rsqrt(variance + EPS))


def _weight_viewed(x, w):
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return normed.to(x.dtype) * w.view(1, 1, -1)


def _expanded(x, w):
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS).expand_as(x)
    return w * (wide * scale).to(x.dtype)


def _in_place(x, w):
    wide = x.float()
    scale = wide.pow(2).mean(-1, keepdim=True).add_(EPS).rsqrt_()
    return w * (wide * scale).to(x.dtype)


def _einsum_weight(x, w):
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return torch.einsum("bsd,d->bsd", normed.to(x.dtype), w.to(x.dtype))


def _norm_over_root(x, w):
    wide = x.float()
    return w * (wide * torch.rsqrt(torch.mean(torch.square(wide), dim=-1, keepdim=True) + EPS)).to(x.dtype)


# With a weight, nothing added to it.
WEIGHTED: dict[str, Norm] = {
    "llama": _llama,
    "llama4": _llama4,
    "cpmant": _cpmant,
    "olmo": _olmo,
    "helium": _helium,
    "t5": _t5,
    "gemma3n": _gemma3n,
    "gradium": _gradium,
    "scale times weight first": _scale_first,
    "fla": _fla,
    "x / sqrt": _divided,
    "x / pow 0.5": _divided_by_half_power,
    "sqrt reciprocal": _reciprocal,
    "sum / size": _sum_over_size,
    "keepdim=False, unsqueeze": _unsqueezed,
    "keepdim=False, [..., None]": _indexed,
    "positive axis": _positive_axis,
    "in the type of x": _all_narrow,
    "scale rounded": _scale_rounded,
    "float64": _double,
    "mean rounded": _variance_rounded,
    "weight as [1, 1, n]": _weight_viewed,
    "scale expanded": _expanded,
    "in place": _in_place,
    "torch.square, torch.mean": _norm_over_root,
    "F.rms_norm": lambda x, w: F.rms_norm(x, (x.shape[-1],), w.to(x.dtype), EPS),
    "einsum": _einsum_weight,
}

# 1 + weight.
OFFSET: dict[str, Norm] = {
    "gemma": _gemma,
    "gemma, rounded first": _gemma_narrow,
    "gemma, swapped": _gemma_swapped,
}


def _bare(x):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).type_as(x)


def _bare_rounded(x):
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS).to(x.dtype)


# Without a weight.
BARE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "llama4, nanochat": _bare,
    "deepseek_v4": _bare_rounded,
    "gemma4": lambda x: (x.float() * torch.pow(x.float().pow(2).mean(-1, keepdim=True) + EPS, -0.5)).type_as(x),
    "F.rms_norm": lambda x: F.rms_norm(x, (x.shape[-1],), None, EPS),
    "x / sqrt": lambda x: x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS),
    "float64": lambda x: x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + EPS),
}
