"""Ways in which public models and their authors write attention, with numbers that no default gives."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn import functional

Tensor = torch.Tensor
Attention = Callable[..., Tensor]

BATCH, HEADS, KV_HEADS, TOKENS, HEAD_DIM = 2, 4, 2, 6, 16
SCALE = 0.3


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **settings: object) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, mask, scale=SCALE, **settings)


def wide(x: Tensor) -> Tensor:
    """In float32; what is float64 stays so."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def softmax(scores: Tensor) -> Tensor:
    """In float32, as most models have it."""
    return torch.softmax(wide(scores), -1).to(scores.dtype)


def attend(scores: Tensor, v: Tensor) -> Tensor:
    return softmax(scores) @ v


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """What transformers calls eager attention; a mask is added."""
    scores = q @ k.transpose(2, 3) * SCALE
    return attend(scores if mask is None else scores + mask, v)


# q, k and v [batch, heads, tokens, head_dim] -------------------------------------------------------------------------


def _row_maximum_less(scores: Tensor) -> Tensor:
    return scores - scores.max(dim=-1, keepdim=True).values


def _written_out(scores: Tensor) -> Tensor:
    scores = wide(scores)
    exponentials = torch.exp(scores - scores.amax(-1, keepdim=True))
    return exponentials / exponentials.sum(-1, keepdim=True)


def _merged(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[2:])


def _bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.softmax(torch.bmm(_merged(q), _merged(k).transpose(1, 2)) * SCALE, -1)
    return torch.bmm(weights, _merged(v)).view(q.shape)


def _bmm_viewed_between(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    batch, heads, tokens, _ = q.shape
    scores = torch.bmm(_merged(q), _merged(k).transpose(1, 2)).view(batch, heads, tokens, -1) * SCALE
    return torch.bmm(softmax(scores).view(batch * heads, tokens, -1), _merged(v))


PLAIN: dict[str, Attention] = {
    "sdpa": sdpa,
    "sdpa, scale on q": lambda q, k, v: functional.scaled_dot_product_attention(q * (SCALE * 4), k, v),
    "scale on scores": eager,
    "scale on the left": lambda q, k, v: attend(SCALE * (q @ k.mT), v),
    "scale on q": lambda q, k, v: attend((q * SCALE) @ k.transpose(-1, -2), v),
    "scale on k": lambda q, k, v: attend(q @ (k * SCALE).transpose(-2, -1), v),
    "scale on k, transposed": lambda q, k, v: attend(q @ (k.transpose(2, 3) * SCALE), v),
    "scale on both": lambda q, k, v: attend((q * SCALE**0.5) @ (k * SCALE**0.5).mT, v),
    "scale in two steps": lambda q, k, v: attend((q / 2) @ k.mT * (2 * SCALE), v),
    "divided": lambda q, k, v: attend(q @ k.permute(0, 1, 3, 2) / (1 / SCALE), v),
    "q divided": lambda q, k, v: attend((q / (1 / SCALE)) @ k.mT, v),
    "number as a tensor": lambda q, k, v: attend(q @ k.mT / torch.tensor(1 / SCALE), v),
    "number as a tensor on the left": lambda q, k, v: attend(torch.tensor(SCALE) * (q @ k.mT), v),
    "number as a full tensor": lambda q, k, v: attend(q @ k.mT * torch.full([], SCALE, dtype=torch.float32), v),
    "softmax in the dtype": lambda q, k, v: torch.softmax(q @ k.mT * SCALE, -1) @ v,
    "softmax along dim 3": lambda q, k, v: torch.softmax(q @ k.mT * SCALE, 3) @ v,
    "scores in float32": lambda q, k, v: attend(wide(q @ k.mT) * SCALE, wide(v)).to(q.dtype),
    "rows less their maximum": lambda q, k, v: attend(_row_maximum_less(q @ k.mT * SCALE), v),
    "softmax written out": lambda q, k, v: _written_out(q @ k.mT * SCALE).to(q.dtype) @ v,
    "dropout that drops nothing": lambda q, k, v: functional.dropout(softmax(q @ k.mT * SCALE), 0.0) @ v,
    "dropout of an evaluation": lambda q, k, v: functional.dropout(softmax(q @ k.mT * SCALE), 0.1, False) @ v,
    "contiguous weights": lambda q, k, v: softmax(q @ k.mT * SCALE).contiguous() @ v,
    "torch.matmul": lambda q, k, v: torch.matmul(softmax(torch.matmul(q, k.transpose(2, 3)) * SCALE), v),
}

# Batch and heads made one axis before the products.
MERGED: dict[str, Attention] = {
    "bmm": _bmm,
    "bmm, scores viewed by head": _bmm_viewed_between,
    "baddbmm of nothing": lambda q, k, v: torch.bmm(
        softmax(torch.baddbmm(q.new_zeros(1, 1, 1), _merged(q), _merged(k).mT, beta=1, alpha=SCALE)), _merged(v)
    ),
}

# With a causal mask --------------------------------------------------------------------------------------------------


def seen(q: Tensor, k: Tensor) -> Tensor:
    """True on and below the diagonal."""
    return torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()


def hidden(q: Tensor, k: Tensor) -> Tensor:
    return ~seen(q, k)


def added(q: Tensor, k: Tensor, number: float) -> Tensor:
    """0 where a key is seen, elsewhere a number."""
    return torch.zeros(q.shape[-2], k.shape[-2], dtype=q.dtype, device=q.device).masked_fill(hidden(q, k), number)


def lowest(q: Tensor) -> float:
    return torch.finfo(q.dtype).min


def _upper_triangle(q: Tensor, k: Tensor) -> Tensor:
    return torch.full((q.shape[-2], k.shape[-2]), -math.inf, dtype=q.dtype, device=q.device).triu(1)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * SCALE


def _filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = _scores(q, k)
    return attend(torch.where(seen(q, k), scores, torch.full_like(scores, -math.inf)), v)


# Each with what it gives a query that sees no key.
CAUSAL: dict[str, tuple[Attention, str]] = {
    "sdpa, flag": (lambda q, k, v: sdpa(q, k, v, is_causal=True), "zeros"),
    "sdpa, bool": (lambda q, k, v: sdpa(q, k, v, seen(q, k)), "zeros"),
    "sdpa, float": (lambda q, k, v: sdpa(q, k, v, added(q, k, -math.inf)), "zeros"),
    "sdpa, lowest": (lambda q, k, v: sdpa(q, k, v, added(q, k, lowest(q))), "mean"),
    "added": (lambda q, k, v: eager(q, k, v, added(q, k, -math.inf)), "NaN"),
    "lowest added": (lambda q, k, v: eager(q, k, v, added(q, k, lowest(q))), "mean"),
    "on the left": (lambda q, k, v: attend(added(q, k, -math.inf) + _scores(q, k), v), "NaN"),
    "upper triangle": (lambda q, k, v: eager(q, k, v, _upper_triangle(q, k)), "NaN"),
    "masked_fill": (lambda q, k, v: attend(_scores(q, k).masked_fill(hidden(q, k), -math.inf), v), "NaN"),
    "masked_fill, lowest": (lambda q, k, v: attend(_scores(q, k).masked_fill(hidden(q, k), lowest(q)), v), "mean"),
    "masked_fill, then scaled": (
        lambda q, k, v: attend((q @ k.mT).masked_fill(hidden(q, k), -math.inf) * SCALE, v),
        "NaN",
    ),
    "where": (lambda q, k, v: attend(torch.where(seen(q, k), _scores(q, k), -math.inf), v), "NaN"),
    "where, the other way": (lambda q, k, v: attend(torch.where(hidden(q, k), lowest(q), _scores(q, k)), v), "mean"),
    "where, filled": (_filled, "NaN"),
    "sdpa, expanded": (lambda q, k, v: sdpa(q, k, v, seen(q, k)[None, None].expand(len(q), 1, -1, -1)), "zeros"),
}

# k and v [batch, kv heads, tokens, head_dim] -------------------------------------------------------------------------


def _repeated(x: Tensor, times: int) -> Tensor:
    """repeat_kv of transformers."""
    batch, heads, tokens, head_dim = x.shape
    x = x[:, :, None, :, :].expand(batch, heads, times, tokens, head_dim)
    return x.reshape(batch, heads * times, tokens, head_dim)


GROUP = HEADS // KV_HEADS
GROUPED: dict[str, Attention] = {
    "sdpa": lambda q, k, v: sdpa(q, k, v, enable_gqa=True),
    "sdpa, repeat_kv": lambda q, k, v: sdpa(q, _repeated(k, GROUP), _repeated(v, GROUP)),
    "repeat_kv": lambda q, k, v: eager(q, _repeated(k, GROUP), _repeated(v, GROUP)),
    "repeat_interleave": lambda q, k, v: eager(q, k.repeat_interleave(GROUP, 1), v.repeat_interleave(GROUP, dim=-3)),
    "after the scale": lambda q, k, v: attend(q @ _repeated(k * SCALE, GROUP).mT, _repeated(v, GROUP)),
    "bmm": lambda q, k, v: _bmm(q, _repeated(k, GROUP), _repeated(v, GROUP)),
}

# k and v [batch, 1, tokens, head_dim]
ONE_KV_HEAD: dict[str, Attention] = {
    "broadcast": eager,
    "expanded": lambda q, k, v: eager(q, k.expand(q.shape), v.expand(q.shape)),
    "sdpa": lambda q, k, v: sdpa(q, k, v, enable_gqa=True),
    "sdpa, expanded": lambda q, k, v: sdpa(q, k.expand(q.shape), v.expand(q.shape)),
}

# Scores to which something is done that is no mask -------------------------------------------------------------------


def _with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = _scores(q, k)
    columns = sinks.reshape(1, -1, 1, 1).expand(len(q), -1, q.shape[-2], -1)
    return torch.softmax(_row_maximum_less(torch.cat([scores, columns], -1)), -1)[..., :-1] @ v


def _capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(torch.tanh(_scores(q, k) / 5) * 5, v)


def _alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    bias = (slopes.reshape(-1, 1, 1) * torch.arange(k.shape[-2], device=q.device)).to(q.dtype)
    bias = bias.expand(len(q), *bias.shape).reshape(-1, 1, k.shape[-2])
    scores = torch.baddbmm(bias, _merged(q), _merged(k).mT, beta=1.0, alpha=SCALE)
    return torch.bmm(softmax(scores), _merged(v)).view(q.shape)


def _regrouped(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    batch, heads, tokens, _ = q.shape
    scores = torch.bmm(_merged(q), _merged(k).mT).view(heads, batch, tokens, -1) * SCALE + bias
    return torch.bmm(softmax(scores).view(batch * heads, tokens, -1), _merged(v))


# Each with what of it no op takes.
MARKED: dict[str, tuple[Attention, str]] = {
    "soft-capping": (lambda q, k, v, x: _capped(q, k, v), "soft-capping"),
    "sinks": (lambda q, k, v, x: _with_sinks(q, k, v, x[:, 0, 0]), "sinks"),
    "two masks": (
        lambda q, k, v, x: attend((_scores(q, k) + _upper_triangle(q, k)).masked_fill(hidden(q, k), -math.inf), v),
        "a second mask",
    ),
    "two biases": (lambda q, k, v, x: attend(_scores(q, k) + x + x[:1], v), "a second bias"),
    "a mask, then scaled": (
        lambda q, k, v, x: attend((q @ k.mT + _upper_triangle(q, k)) * SCALE, v),
        "a mask that is scaled",
    ),
    "a mask, then turned over": (
        lambda q, k, v, x: attend((q @ k.mT).masked_fill(hidden(q, k), -math.inf) * -SCALE, v),
        "a mask that is scaled",
    ),
    "hidden by a number": (
        lambda q, k, v, x: attend(_scores(q, k).masked_fill(hidden(q, k), -10.0), v),
        "the score -10 for hidden keys",
    ),
    "shown by a number": (
        lambda q, k, v, x: attend(_scores(q, k).masked_fill(hidden(q, k), 10.0), v),
        "the score 10 for hidden keys",
    ),
    "a scaled bias": (
        lambda q, k, v, x: torch.bmm(
            softmax(torch.baddbmm(x[:1], _merged(q), _merged(k).mT, beta=0.5, alpha=SCALE)), _merged(v)
        ),
        "a bias times 0.5",
    ),
    "heads and batch exchanged": (
        lambda q, k, v, x: _regrouped(q, k, v, x[: len(q)]),
        f"a mask of scores [{HEADS}, {BATCH}, {TOKENS}, {TOKENS}] for a q of {[BATCH, HEADS, TOKENS, HEAD_DIM]}",
    ),
}

# Numbers added that depend on the head: x is [heads, tokens, tokens].
BIASED: dict[str, Attention] = {
    "sdpa": lambda q, k, v, x: sdpa(q, k, v, x[None]),
    "added": lambda q, k, v, x: eager(q, k, v, x[None]),
    "of three axes": eager,
    "on the left": lambda q, k, v, x: attend(x + _scores(q, k), v),
    "alibi": lambda q, k, v, x: _alibi(q, k, v, x[:, 0, 0]),
    "bmm, scores viewed by head": lambda q, k, v, x: torch.bmm(
        softmax(torch.bmm(_merged(q), _merged(k).mT).view(*q.shape[:3], -1) * SCALE + x).view(-1, *x.shape[1:]),
        _merged(v),
    ),
}

# What only looks like attention, or like another one -----------------------------------------------------------------

NOT_ATTENTION: dict[str, Attention] = {
    "softmax along the queries": lambda q, k, v: torch.softmax(_scores(q, k), -2) @ v,
    "softmax along the heads": lambda q, k, v: torch.softmax(_scores(q, k), 1) @ v,
    "sigmoid": lambda q, k, v: torch.sigmoid(_scores(q, k)) @ v,
    "log_softmax": lambda q, k, v: torch.log_softmax(_scores(q, k), -1) @ v,
    "sums along the queries": lambda q, k, v: (
        (torch.exp(_scores(q, k)) / torch.exp(_scores(q, k)).sum(-2, keepdim=True)) @ v
    ),
    "sums of other exponentials": lambda q, k, v: (
        (torch.exp(_scores(q, k)) / torch.exp(_scores(k, q)).sum(-1, keepdim=True)) @ v
    ),
    "less the maximum of each key": lambda q, k, v: attend(
        (lambda x: x - x.max(dim=-2, keepdim=True).values)(_scores(q, k)), v
    ),
    "less the index of the maximum": lambda q, k, v: attend(
        (lambda x: x - x.max(dim=-1, keepdim=True).indices)(_scores(q, k)), v
    ),
    "scaled by a tensor": lambda q, k, v: attend(q @ k.mT * q.mean(-1, keepdim=True), v),
    "weights squared": lambda q, k, v: softmax(_scores(q, k)) ** 2 @ v,
    "weights scaled": lambda q, k, v: (softmax(_scores(q, k)) * 0.5) @ v,
    "weights from the right": lambda q, k, v: v.mT @ softmax(_scores(q, k)),
    "scores squared": lambda q, k, v: attend(_scores(q, k) ** 2, v),
    "keys of another batch": lambda q, k, v: attend(q @ k[:1].mT * SCALE, v),
}
