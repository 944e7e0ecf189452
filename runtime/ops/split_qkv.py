"""The prologue of attention in one kernel: split a packed projection into q, k and v, norm and rotate q and k per head.

    q, k, v = split(input)
    h = head * (mean(head^2) + eps)^-1/2 * weight + bias      for each head of q and k; h = head without eps
    h[:rope_dim] = h[:rope_dim] * cos + rotate(h[:rope_dim]) * sin

sgl_kernel_npu has it as a Python function that launches a Triton kernel, no torch op; the op around it is ours.
"""

from collections.abc import Iterator

import torch

from ..sizes import known_equal, static_int
from ..target import Target
from .contract import OpContract
from .layout import row_major
from .reasons import contiguity, dtype_among, dtype_name, first_reason, raise_first, rank_between, shape_text
from .rotary import rotate_half, rotate_interleaved
from .sgl_kernel import SglFunction

__all__ = ["SPLIT_QKV_RMSNORM_ROPE"]

_NAME = "sgl_kernel_npu::split_qkv_rmsnorm_rope"

# The first release with is_neox_style, and the first that stays in float32 between norm and rotation.
_NEOX_FLAG_SINCE = "2026.05.01.post3"
_FLOAT32_SINCE = "2026.6.0"

# One tile holds all q heads of a kv head in float32 and lives in the unified buffer, 192 KiB on an ascend910b.
_TILE_BYTES_LIMIT = 192 * 1024


def _geometry(input: torch.Tensor, q_hidden_size: int, kv_hidden_size: int, head_dim: int) -> Iterator[str]:
    yield from dtype_among("input", input)
    yield from rank_between("input", input, 2, 2)
    for name, size in (
        ("q_hidden_size", q_hidden_size),
        ("kv_hidden_size", kv_hidden_size),
        ("head_dim", head_dim),
    ):
        if (static := static_int(size)) is None:
            yield f"{name} {size} is not static (the kernel is compiled for it)"
        elif static <= 0:
            yield f"{name} is {static}, not positive"
    if head_dim & (head_dim - 1):
        yield f"head_dim {head_dim} is no power of two (the kernel tiles by it)"
    if q_hidden_size % kv_hidden_size:
        yield f"q_hidden_size {q_hidden_size} is no multiple of kv_hidden_size {kv_hidden_size}"
    if kv_hidden_size % head_dim:
        yield f"kv_hidden_size {kv_hidden_size} is no multiple of head_dim {head_dim}"
    width = q_hidden_size + 2 * kv_hidden_size
    if not known_equal(input.shape[1], width):
        yield (
            f"input is {input.shape[1]} wide, not q_hidden_size + 2 * kv_hidden_size ="
            f" {q_hidden_size} + 2 * {kv_hidden_size} = {width}"
        )
    yield from contiguity("input", input)


def _rotation(input: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor, head_dim: int) -> Iterator[str]:
    for name, rows in (("sin", sin), ("cos", cos)):
        yield from dtype_among(name, rows)
        if not rows.dim():
            yield f"{name} has no dims (its last one is rope_dim)"
        rope_dim = static_int(rows.shape[-1])
        if rope_dim is None:
            yield f"the last dim {rows.shape[-1]} of {name} is not static"
        elif not 0 < rope_dim <= head_dim:
            yield f"rope_dim {rope_dim} of {name} is not in 1 to head_dim {head_dim}"
        elif rope_dim % 2:
            yield f"rope_dim {rope_dim} of {name} is odd (the kernel rotates pairs)"
        elif not known_equal(rows.numel(), input.shape[0] * rope_dim):
            yield (
                f"{name} {shape_text(rows.shape)} has {rows.numel()} elements, not one row of {rope_dim}"
                f" for each of {input.shape[0]} tokens"
            )
        yield from contiguity(name, rows)
    if not known_equal(sin.shape[-1], cos.shape[-1]):
        yield f"sin is {sin.shape[-1]} wide but cos is {cos.shape[-1]}"


def _norm(
    head_dim: int,
    eps: float | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    q_bias: torch.Tensor | None,
    k_bias: torch.Tensor | None,
) -> Iterator[str]:
    parameters = {"q_weight": q_weight, "k_weight": k_weight, "q_bias": q_bias, "k_bias": k_bias}
    given = {name: parameter for name, parameter in parameters.items() if parameter is not None}
    if eps is None and given:
        yield f"{', '.join(given)} given without eps (the kernel would ignore them)"
    if eps is not None:
        for name in ("q_weight", "k_weight"):
            if name not in given:
                yield f"eps is given without {name} (the kernel would read a null pointer)"
        if (q_bias is None) != (k_bias is None):
            there, missing = ("q_bias", "k_bias") if k_bias is None else ("k_bias", "q_bias")
            yield f"{there} is given without {missing} (the kernel reads both or none)"
    for name, parameter in given.items():
        yield from dtype_among(name, parameter)
        if parameter.dim() != 1 or not known_equal(parameter.shape[0], head_dim):
            yield f"{name} is {shape_text(parameter.shape)}, not [head_dim] = [{head_dim}]"
        yield from contiguity(name, parameter)


def _invalid(
    input: torch.Tensor,
    sin: torch.Tensor,
    cos: torch.Tensor,
    q_hidden_size: int,
    kv_hidden_size: int,
    head_dim: int,
    eps: float | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    q_bias: torch.Tensor | None,
    k_bias: torch.Tensor | None,
) -> Iterator[str]:
    yield from _geometry(input, q_hidden_size, kv_hidden_size, head_dim)
    yield from _rotation(input, sin, cos, head_dim)
    yield from _norm(head_dim, eps, q_weight, k_weight, q_bias, k_bias)


def _package(target: Target, input: torch.Tensor, eps: float | None) -> Iterator[str]:
    if target.device == "cpu":
        return
    if "sgl_kernel_npu" not in target.packages:
        yield "sgl_kernel_npu, which has the kernel, can't be imported"
    if target.has_older("sgl_kernel_npu", _NEOX_FLAG_SINCE):
        yield f"sgl_kernel_npu {target.packages['sgl_kernel_npu']} has no is_neox_style, {_NEOX_FLAG_SINCE} brought it"
    if eps is not None and input.dtype != torch.bfloat16 and target.has_older("sgl_kernel_npu", _FLOAT32_SINCE):
        yield (
            f"sgl_kernel_npu {target.packages['sgl_kernel_npu']} rounds normed {dtype_name(input.dtype)} heads to"
            f" bfloat16; {_FLOAT32_SINCE} and later do not"
        )


@first_reason
def _refuse(
    target: Target,
    input: torch.Tensor,
    sin: torch.Tensor,
    cos: torch.Tensor,
    q_hidden_size: int,
    kv_hidden_size: int,
    head_dim: int,
    eps: float | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    q_bias: torch.Tensor | None,
    k_bias: torch.Tensor | None,
    is_neox_style: bool,
) -> Iterator[str]:
    yield from _invalid(
        input, sin, cos, q_hidden_size, kv_hidden_size, head_dim, eps, q_weight, k_weight, q_bias, k_bias
    )
    tile_bytes = q_hidden_size // kv_hidden_size * head_dim * 4
    if tile_bytes > _TILE_BYTES_LIMIT:
        yield (
            f"{q_hidden_size // kv_hidden_size} q heads of head_dim {head_dim} for one kv head take {tile_bytes} bytes"
            f" in float32 (the kernel's buffer holds {_TILE_BYTES_LIMIT})"
        )
    yield from _package(target, input, eps)


def split_qkv_rmsnorm_rope_reference(
    input: torch.Tensor,
    sin: torch.Tensor,
    cos: torch.Tensor,
    q_hidden_size: int,
    kv_hidden_size: int,
    head_dim: int,
    eps: float | None = None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    q_bias: torch.Tensor | None = None,
    k_bias: torch.Tensor | None = None,
    is_neox_style: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What sgl_kernel_npu's `split_qkv_rmsnorm_rope` computes: all in float32, one rounding at the store; v is copied.

    Args:
        input: [T, q_hidden_size + 2 * kv_hidden_size], rows of q | k | v, head after head; contiguous; float16,
            bfloat16 or float32. T may be 0.
        sin: T rows of rope_dim = sin.shape[-1] in any contiguous shape, one per token; any float dtype. rope_dim is
            even and at most head_dim; the rest of a head is not rotated.
        cos: as sin. Mind the order: sin comes first.
        q_hidden_size: number of q heads * head_dim; a multiple of kv_hidden_size.
        kv_hidden_size: number of kv heads * head_dim.
        head_dim: a power of two.
        eps: added to the mean of squares; None leaves the norm out.
        q_weight: [head_dim], any float dtype, for every q head; with eps only, and then needed.
        k_weight: likewise for k.
        q_bias: [head_dim], added after the weight; with eps only, and for both q and k or neither.
        k_bias: likewise for k.
        is_neox_style: True rotates halves, with all columns of sin and cos. False rotates neighbours, with the first
            half of the columns, each used for one pair; the second half is not read.

    Returns:
        q [T, q_hidden_size], k and v [T, kv_hidden_size], of input's dtype.

    Raises:
        ValueError: the kernel would assert, or read or leave memory that it must not.

    Source: sgl-kernel-npu f425bdf1 (2026-08-21), kernel and wrapper; float32 throughout since 2026.6.0.
    """
    raise_first(
        _NAME,
        _invalid(input, sin, cos, q_hidden_size, kv_hidden_size, head_dim, eps, q_weight, k_weight, q_bias, k_bias),
    )
    tokens, rope_dim = input.shape[0], sin.shape[-1]

    def one_row_per_token(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.reshape(tokens, 1, rope_dim).float()
        return rows if is_neox_style else rows[..., : rope_dim // 2].repeat_interleave(2, dim=-1)

    wide_cos, wide_sin = one_row_per_token(cos), one_row_per_token(sin)
    rotate = rotate_half if is_neox_style else rotate_interleaved

    def normed_and_rotated(
        packed: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        heads = packed.reshape(tokens, packed.shape[-1] // head_dim, head_dim).float()
        if eps is not None:
            heads = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + eps)
        if weight is not None:
            heads = heads * weight.float()
        if bias is not None:
            heads = heads + bias.float()
        rotated, passed = heads[..., :rope_dim], heads[..., rope_dim:]
        rotated = rotate(rotated) * wide_sin + rotated * wide_cos
        return row_major(torch.cat((rotated, passed), dim=-1).flatten(-2).to(input.dtype))

    q, k, v = torch.split(input, [q_hidden_size, kv_hidden_size, kv_hidden_size], dim=-1)
    return (
        normed_and_rotated(q, q_weight, q_bias),
        normed_and_rotated(k, k_weight, k_bias),
        v.clone(memory_format=torch.contiguous_format),
    )


def split_qkv_rmsnorm_rope_fake(
    input: torch.Tensor,
    sin: torch.Tensor,
    cos: torch.Tensor,
    q_hidden_size: int,
    kv_hidden_size: int,
    head_dim: int,
    eps: float | None = None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    q_bias: torch.Tensor | None = None,
    k_bias: torch.Tensor | None = None,
    is_neox_style: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shapes of `split_qkv_rmsnorm_rope_reference`."""
    tokens = input.shape[0]
    return (
        input.new_empty((tokens, q_hidden_size)),
        input.new_empty((tokens, kv_hidden_size)),
        input.new_empty((tokens, kv_hidden_size)),
    )


SPLIT_QKV_RMSNORM_ROPE = OpContract(
    name=_NAME,
    schema=(
        "split_qkv_rmsnorm_rope(Tensor input, Tensor sin, Tensor cos, int q_hidden_size, int kv_hidden_size,"
        " int head_dim, float? eps=None, Tensor? q_weight=None, Tensor? k_weight=None, Tensor? q_bias=None,"
        " Tensor? k_bias=None, bool is_neox_style=True) -> (Tensor, Tensor, Tensor)"
    ),
    reference=split_qkv_rmsnorm_rope_reference,
    fake=split_qkv_rmsnorm_rope_fake,
    refuse=_refuse,
    socs=frozenset({"ascend910b", "ascend910_93", "ascend950"}),
    source="sgl_kernel_npu f425bdf1 (2026-08-21), kernel and wrapper",
    device_kernel=SglFunction(
        module="sgl_kernel_npu.norm.split_qkv_rmsnorm_rope",
        name="split_qkv_rmsnorm_rope",
        parameters=(
            "input",
            "sin",
            "cos",
            "q_hidden_size",
            "kv_hidden_size",
            "head_dim",
            "eps",
            "q_weight",
            "k_weight",
            "q_bias",
            "k_bias",
            "is_neox_style",
        ),
        since=_NEOX_FLAG_SINCE,
    ),
)
