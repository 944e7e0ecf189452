"""What tests of attention ops share: calls in any layout, masks by the letter of their formulas, float64 results."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

NO_LIMIT = 2**31 - 1

# Of a result that is rounded once, after maths in float32.
TOLERANCE = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 2e-6}


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """[B, N, S, D] as query, key or value of a layout that isn't packed, contiguous."""
    dims = layout.partition("_")[0]
    if dims == "BNSD":
        return tensor
    by_token = tensor.transpose(1, 2).contiguous()
    if dims == "SBH":
        return by_token.flatten(2).transpose(0, 1).contiguous()
    return by_token.flatten(2) if dims == "BSH" else by_token


def taken_apart(result: torch.Tensor, layout: str, heads: int) -> torch.Tensor:
    """A result of a layout that isn't packed as [B, N, S, D]."""
    dims = layout.rpartition("_")[2]
    if dims == "BNSD":
        return result
    if dims == "NBSD":
        return result.transpose(0, 1)
    if dims == "SBH":
        result = result.transpose(0, 1)
    return (result.unflatten(2, (heads, -1)) if dims.endswith("H") else result).transpose(1, 2)


def seen(
    mode: int,
    rows: int,
    keys: int,
    mask: torch.Tensor | None = None,
    pre_tokens: int = NO_LIMIT,
    next_tokens: int = NO_LIMIT,
) -> torch.Tensor:
    """True where row i sees key j, pair by pair.

    Args:
        mode: the sparse mode.
        rows: how many rows.
        keys: how many keys.
        mask: [rows, keys] or more, True hides; for modes 0 and 1.
        pre_tokens: for modes 0 and 4.
        next_tokens: likewise.
    """
    see = torch.zeros(rows, keys, dtype=torch.bool)
    for i in range(rows):
        for j in range(keys):
            shown = mask is None or not bool(mask[i, j])
            if mode == 0:
                see[i, j] = shown and (mask is None or i - pre_tokens <= j <= i + next_tokens)
            elif mode == 1:
                see[i, j] = shown
            elif mode == 2:
                see[i, j] = j <= i
            elif mode == 3:
                see[i, j] = j <= i + (keys - rows)
            else:
                centre = i + (keys - rows)
                see[i, j] = centre - pre_tokens <= j <= centre + next_tokens
    return see


def exact(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    see: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one sequence by torch in float64, and the log-sum-exp of its scores.

    Args:
        query: [N, rows, D].
        key: [Nkv, keys, D].
        value: [Nkv, keys, Dv].
        scale: of the scores.
        see: [rows, keys] or [N, rows, keys], True where a key is seen.
        shift: [N, rows, keys], added to the scores.

    Returns:
        [N, rows, Dv] and [N, rows, 1].
    """
    query, key, value = query.double(), key.double(), value.double()
    bias = torch.zeros(len(query), query.shape[1], key.shape[1], dtype=torch.float64)
    if shift is not None:
        bias = bias + shift.double()
    if see is not None:
        bias = bias.masked_fill(~see, -torch.inf)
    out = scaled_dot_product_attention(
        query[None], key[None], value[None], attn_mask=bias[None], scale=scale, enable_gqa=True
    )[0]
    group = len(query) // len(key)
    scores = scale * torch.stack([q @ key[head // group].T for head, q in enumerate(query)]) + bias
    return out, scores.exp().sum(-1, keepdim=True).log()


def assert_near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """`actual` is `expected` but for the rounding of `dtype` and maths in float32."""
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def random_tensors(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Tensors of normal values."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def random_mask(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A mask that hides about a third of the keys, and none of the first: each row sees one."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.35
    mask[..., 0] = False
    return mask


def in_version_2(arguments: dict[str, object]) -> dict[str, object]:
    """Arguments of npu_fused_infer_attention_score by the names of its second version."""
    names = {
        "num_heads": "num_query_heads",
        "scale": "softmax_scale",
        "actual_seq_lengths": "actual_seq_qlen",
        "actual_seq_lengths_kv": "actual_seq_kvlen",
        "softmax_lse_flag": "return_softmax_lse",
    }
    return {names.get(name, name): value for name, value in arguments.items()}
