"""Ways in which public models and their authors write the same maths."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

# RMSNorm over the last axis, with EPS -------------------------------------------------------------------------------

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


def _weight_viewed(x, w):
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return normed.to(x.dtype) * w.view(1, 1, -1)


def _in_place(x, w):
    wide = x.float()
    scale = wide.pow(2).mean(-1, keepdim=True).add_(EPS).rsqrt_()
    return w * (wide * scale).to(x.dtype)


def _torch_functions(x, w):
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
    "weight as [1, 1, n]": _weight_viewed,
    "in place": _in_place,
    "torch.square, torch.mean": _torch_functions,
    "F.rms_norm": lambda x, w: functional.rms_norm(x, (x.shape[-1],), w.to(x.dtype), EPS),
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
    "F.rms_norm": lambda x: functional.rms_norm(x, (x.shape[-1],), None, EPS),
    "x / sqrt": lambda x: x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS),
    "float64": lambda x: x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + EPS),
}


# Rotation of the last axis by cos and sin ----------------------------------------------------------------------------

Rotation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _rotate_half(x):
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def _rotate_half_by_chunk(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _rotate_half_by_roll(x):
    rolled = torch.roll(x, x.shape[-1] // 2, -1)
    return torch.cat((-rolled[..., : x.shape[-1] // 2], rolled[..., x.shape[-1] // 2 :]), dim=-1)


def _rotate_half_by_view(x):
    first, second = x.view(*x.shape[:-1], 2, x.shape[-1] // 2).unbind(-2)
    return torch.cat([-second, first], dim=-1)


def _rotate_half_by_split(x):
    first, second = torch.split(x, x.shape[-1] // 2, dim=-1)
    return torch.cat((second.neg(), first), dim=-1)


def _rotate_half_by_stack(x):
    first, second = x.reshape(*x.shape[:-1], 2, -1).unbind(-2)
    return torch.stack((-second, first), dim=-2).reshape(x.shape)


def _rotate_pairs(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def _rotate_pairs_by_view(x):
    first, second = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([-second, first], dim=-1).flatten(-2)


def _rotate_pairs_by_index(x):
    pairs = x.unflatten(-1, (-1, 2))
    return torch.stack((-pairs[..., 1], pairs[..., 0]), -1).reshape(x.shape)


def _with(rotate):
    return lambda x, cos, sin: (x * cos) + (rotate(x) * sin)


def _upcast_first(x, cos, sin):
    wide = x.float()
    return (wide * cos.float() + _rotate_half(wide) * sin.float()).to(x.dtype)


def _upcast_terms(x, cos, sin):
    return ((x.float() * cos) + (_rotate_half(x).float() * sin)).to(x.dtype)


def _cast_back(x, cos, sin):
    return (x * cos + _rotate_half(x) * sin).to(x.dtype)


def _halves(x, cos, sin):
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _halves_swapped(x, cos, sin):
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat([cos * first + -(sin * second), sin * first + second * cos], -1)


def _halves_upcast(x, cos, sin):
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def _pairs(x, cos, sin):
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)


def _pairs_by_view(x, cos, sin):
    first, second = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack((first * cos - second * sin, first * sin + second * cos), -1).reshape(x.shape)


def _repeated(x, cos, sin):
    cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    return x * cos + _rotate_pairs(x) * sin


def _fused_rotate(x, cos, sin):
    return torch.addcmul(x * cos, _rotate_half(x), sin)


# By style, and by the width of the tables: as wide as x, or half of it.
ROTATIONS: dict[tuple[str, str], dict[str, Rotation]] = {
    ("half", "full"): {
        "llama": _with(_rotate_half),
        "chunk": _with(_rotate_half_by_chunk),
        "split": _with(_rotate_half_by_split),
        "view, unbind, cat": _with(_rotate_half_by_view),
        "reshape, unbind, stack": _with(_rotate_half_by_stack),
        "roll": _with(_rotate_half_by_roll),
        "upcast first": _upcast_first,
        "upcast of both terms": _upcast_terms,
        "cast back": _cast_back,
        "swapped": lambda x, cos, sin: sin * _rotate_half(x) + cos * x,
        "subtracted": lambda x, cos, sin: x * cos - -_rotate_half(x) * sin,
    },
    ("half", "half"): {
        "halves": _halves,
        "halves, swapped": _halves_swapped,
        "halves, upcast": _halves_upcast,
    },
    ("interleave", "full"): {
        "stride, stack": _with(_rotate_pairs),
        "reshape, unbind, stack": _with(_rotate_pairs_by_view),
        "unflatten, index": _with(_rotate_pairs_by_index),
        "repeat_interleave": lambda x, cos, sin: _repeated(x, cos[..., ::2], sin[..., ::2]),
    },
    ("interleave", "half"): {
        "stride, stack": _pairs,
        "reshape, unbind": _pairs_by_view,
    },
}
