"""Every fused op's reference through MLIR: lowered to linalg, run by MLIR's JIT, and compared with torch.

    python benchmarks/mlir_ops.py [OP …]

Prints a Markdown table: of each op, in each of its dtypes, the largest difference of a result from what the reference
gives in torch, as a part of the result's largest number; or why it can't be lowered.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from npu_fuse.runtime.conv_state import in_pool_memory
from npu_fuse.runtime.mlir.decomposition import decomposition
from npu_fuse.runtime.mlir.errors import MlirError
from npu_fuse.runtime.ops import CONTRACTS

Call = Mapping[str, Any]

FLOAT, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
EVERY = (FLOAT, HALF, BRAIN)
SHORT = (HALF, BRAIN)

# How far a result may be off, as a part of its largest number: both sides round where the reference says, but add up in
# another order, and MLIR's functions are of another library. A short float may so become its neighbour. Integers that
# are rounded from floats may be neighbours too.
TOLERANCE = {FLOAT: 2e-6, HALF: 2**-10, BRAIN: 2**-7}


def drawn(*shape: int, dtype: torch.dtype = FLOAT, seed: int = 0) -> torch.Tensor:
    """Random numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(*numbers: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """These numbers."""
    return torch.tensor(numbers, dtype=dtype)


def turns(*shape: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of some angles, the halves of a row alike."""
    angles = drawn(*shape[:-1], shape[-1] // 2, seed=8).repeat(*(1 for _ in shape[:-1]), 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


# One call of each op, of a dtype --------------------------------------------------------------------------------------


def split_qkv(dtype: torch.dtype) -> Call:
    cos, sin = turns(3, 1, 1, 16, dtype=dtype)
    weights = {"q_weight": drawn(16, dtype=dtype, seed=2), "k_weight": drawn(16, dtype=dtype, seed=3)}
    sizes = {"q_hidden_size": 64, "kv_hidden_size": 32, "head_dim": 16, "eps": 1e-6}
    return {"input": drawn(3, 128, dtype=dtype), "sin": sin, "cos": cos, **sizes, **weights}


def split_qkv_pos_cache(dtype: torch.dtype) -> Call:
    call = dict(split_qkv(dtype))
    del call["sin"], call["cos"]
    cache = {"positions": ints(4, 0, 6, dtype=torch.int64), "cos_sin_cache": drawn(7, 16, dtype=dtype, seed=1)}
    return {"input_tensor": call.pop("input"), **cache, **call}


def split_qkv_tp(dtype: torch.dtype) -> Call:
    cos, sin = turns(3, 16, dtype=dtype)
    weights = {"q_weight": drawn(64, dtype=dtype, seed=2), "k_weight": drawn(32, dtype=dtype, seed=3)}
    return {**split_qkv(dtype), "cos": cos, "sin": sin, "rotary_dim": 16, **weights}


def split_qkvgate(dtype: torch.dtype) -> Call:
    cos, sin = turns(3, 8, dtype=dtype)
    return {**split_qkv(dtype), "input": drawn(3, 192, dtype=dtype), "cos": cos, "sin": sin, "rope_dim": 8}


def split_qkv_mrope(dtype: torch.dtype) -> Call:
    return {
        "qkv": drawn(3, 12 * 16, dtype=dtype),
        "q_weight": drawn(16, dtype=dtype, seed=2),
        "k_weight": drawn(16, dtype=dtype, seed=3),
        "cos_sin": drawn(3, 3, 16, dtype=dtype, seed=1),
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "head_size": 16,
        "eps": 1e-6,
        "mrope_section": [2, 3, 3],
        "is_interleaved": True,
        "has_gate": True,
    }


def fused_rope_qk(dtype: torch.dtype) -> Call:
    rows = {"query": drawn(3, 4, 32, dtype=dtype), "key": drawn(3, 1, 32, dtype=dtype, seed=1)}
    return {**rows, "cos_sin": drawn(3, 16, dtype=dtype, seed=2), "rotary_dim": 16, "is_neox_style": True}


def rms_norm(dtype: torch.dtype) -> Call:
    return {"input": drawn(3, 5, 32, dtype=dtype), "gamma": drawn(32, dtype=dtype, seed=1), "epsilon": 1e-5}


def add_rms_norm(dtype: torch.dtype) -> Call:
    sides = {"x1": drawn(3, 5, 32, dtype=dtype), "x2": drawn(3, 5, 32, dtype=dtype, seed=1)}
    return {**sides, "gamma": drawn(32, dtype=dtype, seed=2)}


def add_rms_norm_quant(dtype: torch.dtype) -> Call:
    scales = {"scales1": drawn(32, dtype=FLOAT if dtype == HALF else dtype, seed=3).abs() + 0.1, "zero_points1": None}
    return {**add_rms_norm(dtype), **scales}


def rms_norm_quant(dtype: torch.dtype) -> Call:
    x = {"x": drawn(3, 5, 32, dtype=dtype), "gamma": drawn(32, dtype=dtype, seed=1)}
    beta = drawn(32, dtype=dtype, seed=2)
    return {**x, "beta": beta, "scale": ints(20, dtype=dtype), "offset": ints(3, dtype=torch.int8)}


def quantize(dtype: torch.dtype) -> Call:
    x = {"input": drawn(5, 32, dtype=dtype), "scales": drawn(32, seed=1).abs() + 0.1}
    return {**x, "zero_points": None, "dtype": 1, "axis": -1}


def dynamic_quant(dtype: torch.dtype) -> Call:
    return {"input": drawn(5, 32, dtype=dtype)}


def rotary_mul(dtype: torch.dtype) -> Call:
    cos, sin = turns(2, 1, 3, 16, dtype=dtype)
    return {"input": drawn(2, 4, 3, 16, dtype=dtype), "r1": cos, "r2": sin}


def mrope(dtype: torch.dtype) -> Call:
    rows = {"query": drawn(3, 256, dtype=dtype), "key": drawn(3, 64, dtype=dtype, seed=1)}
    positions = ints(4, 0, 6, dtype=torch.int64)
    return {"positions": positions, **rows, "cos_sin_cache": drawn(7, 32, dtype=dtype, seed=2), "head_size": 64}


def interleave_rope(dtype: torch.dtype) -> Call:
    cos, sin = turns(2, 1, 3, 64, dtype=dtype)
    return {"x": drawn(2, 4, 3, 64, dtype=dtype), "cos": cos, "sin": sin}


def one(*shape: int, name: str = "input", **others: Any) -> Callable[[torch.dtype], Call]:
    """Calls with one tensor."""
    return lambda dtype: {name: drawn(*shape, dtype=dtype), **others}


def group_norm_silu(dtype: torch.dtype) -> Call:
    weights = {"weight": drawn(8, dtype=dtype, seed=1), "bias": drawn(8, dtype=dtype, seed=2)}
    return {"input": drawn(2, 8, 3, 3, dtype=dtype), **weights, "group": 4}


def transpose_batchmatmul(dtype: torch.dtype) -> Call:
    x = {"input": drawn(3, 4, 128, dtype=dtype), "weight": drawn(4, 128, 128, dtype=dtype, seed=1)}
    return {**x, "perm_x1": [1, 0, 2], "perm_x2": [0, 1, 2], "perm_y": [1, 0, 2]}


def mm_all_reduce(dtype: torch.dtype) -> Call:
    return {"x1": drawn(3, 16, dtype=dtype), "x2": drawn(16, 32, dtype=dtype, seed=1), "hcom": "a group"}


def moe_gating_top_k(dtype: torch.dtype) -> Call:
    groups = {"k_group": 2, "group_count": 4, "group_select_mode": 1, "norm_type": 1, "renorm": 0}
    return {"x": drawn(5, 64, dtype=dtype), "k": 8, "bias": drawn(64, dtype=dtype, seed=1), **groups}


def attention(heads: str, **others: Any) -> Callable[[torch.dtype], Call]:
    """Calls of attention: eight heads of query and two of key, [batch, heads, tokens, 64]; `heads` names the former."""

    def call(dtype: torch.dtype) -> Call:
        query = drawn(2, 8, 5, 64, dtype=dtype)
        keys = {name: drawn(2, 2, 7, 64, dtype=dtype, seed=i) for i, name in enumerate(("key", "value"), 1)}
        return {"query": query, **keys, heads: 8, "input_layout": "BNSD", **others}

    return call


def scatter_pa_kv_cache(dtype: torch.dtype) -> Call:
    tokens = {name: drawn(3, 2, 64, dtype=dtype, seed=i) for i, name in enumerate(("key", "value"))}
    caches = {f"{name}_cache": drawn(4, 16, 2, 64, dtype=dtype, seed=i) for i, name in enumerate(("key", "value"), 2)}
    return {**tokens, **caches, "slot_mapping": ints(5, 63, 17), "cache_mode": "Norm"}


def kv_rmsnorm_rope_cache(dtype: torch.dtype) -> Call:
    cos, sin = turns(2, 1, 3, 64, dtype=dtype)
    return {
        "kv": drawn(2, 1, 3, 576, dtype=dtype),
        "gamma": drawn(512, dtype=dtype, seed=1),
        "cos": cos,
        "sin": sin,
        "index": ints(5, 63, 17, 2, 9, 40, dtype=torch.int64),
        "k_cache": drawn(4, 16, 1, 64, dtype=dtype, seed=2),
        "ckv_cache": drawn(4, 16, 1, 512, dtype=dtype, seed=3),
        "cache_mode": "PA",
        "is_output_kv": True,
    }


def causal_conv1d(dtype: torch.dtype) -> Call:
    x = {"x": drawn(2, 3, 16, dtype=dtype), "weight": drawn(4, 16, dtype=dtype, seed=1)}
    states = {"conv_states": drawn(5, 3, 16, dtype=dtype, seed=2), "cache_indices": ints(4, 1)}
    return {**x, **states, "bias": drawn(16, dtype=dtype, seed=3), "activation_mode": 1, "run_mode": 1}


def causal_conv1d_columns(dtype: torch.dtype) -> Call:
    x = {"x": drawn(2, 3, 16, dtype=dtype), "weight": drawn(4, 16, dtype=dtype, seed=1)}
    return {**x, "states": in_pool_memory(drawn(2, 16, 4, dtype=dtype, seed=2)), "activation_mode": 1}


def gated_delta_rule(tokens: int, width: int, dtype: torch.dtype) -> Call:
    unit = torch.nn.functional.normalize
    return {
        "query": unit(drawn(tokens, 2, width), dim=-1).to(dtype),
        "key": unit(drawn(tokens, 2, width, seed=1), dim=-1).to(dtype),
        "value": drawn(tokens, 4, width, dtype=dtype, seed=2),
        "beta": drawn(tokens, 4, dtype=dtype, seed=3).sigmoid(),
        "g": -drawn(tokens, 4, seed=4).sigmoid(),
        "scale": 0.25,
    }


def recurrent_gated_delta_rule(dtype: torch.dtype) -> Call:
    state = {"state": drawn(4, 4, 16, 16, dtype=dtype, seed=5), "ssm_state_indices": ints(2, 0, 3)}
    return {**gated_delta_rule(3, 16, dtype), **state, "actual_seq_lengths": ints(1, 2)}


def chunk_gated_delta_rule(dtype: torch.dtype) -> Call:
    state = {"initial_state": drawn(1, 4, 128, 128, dtype=dtype, seed=5)}
    return {**gated_delta_rule(5, 128, dtype), "g": None, **state, "actual_seq_lengths": ints(5)}


CALLS: Mapping[str, tuple[Callable[[torch.dtype], Call], tuple[torch.dtype, ...]]] = {
    "sgl_kernel_npu::split_qkv_rmsnorm_rope": (split_qkv, EVERY),
    "sgl_kernel_npu::split_qkv_rmsnorm_rope_pos_cache_half_npu": (split_qkv_pos_cache, (BRAIN,)),
    "sgl_kernel_npu::split_qkv_tp_rmsnorm_rope": (split_qkv_tp, EVERY),
    "sgl_kernel_npu::split_qkvgate_gemma_rmsnorm_rope": (split_qkvgate, EVERY),
    "sgl_kernel_npu::triton_split_qkv_rmsnorm_mrope": (split_qkv_mrope, EVERY),
    "sgl_kernel_npu::fused_rope_qk_mqa": (fused_rope_qk, EVERY),
    "npu::npu_rms_norm": (rms_norm, EVERY),
    "npu::npu_gemma_rms_norm": (rms_norm, EVERY),
    "npu::npu_add_rms_norm": (add_rms_norm, EVERY),
    "npu::npu_add_rms_norm_cast": (add_rms_norm, SHORT),
    "npu::npu_add_rms_norm_quant": (add_rms_norm_quant, SHORT),
    "npu::npu_add_rms_norm_dynamic_quant": (add_rms_norm, SHORT),
    "npu::npu_rms_norm_quant": (rms_norm_quant, SHORT),
    "npu::npu_quantize": (quantize, EVERY),
    "npu::npu_dynamic_quant": (dynamic_quant, SHORT),
    "npu::npu_rotary_mul": (rotary_mul, EVERY),
    "npu::npu_mrope": (mrope, EVERY),
    "npu::npu_interleave_rope": (interleave_rope, SHORT),
    "npu::npu_swiglu": (one(3, 5, 32), EVERY),
    "npu::npu_clipped_swiglu": (one(3, 5, 32, name="x"), EVERY),
    "npu::npu_fast_gelu": (one(3, 5, 32), EVERY),
    "npu::npu_geglu": (one(3, 5, 32), EVERY),
    "npu::npu_group_norm_silu": (group_norm_silu, EVERY),
    "npu::npu_transpose_batchmatmul": (transpose_batchmatmul, EVERY),
    "npu::npu_mm_all_reduce_base": (mm_all_reduce, SHORT),
    "npu::npu_moe_gating_top_k_softmax": (one(5, 16, name="x", k=4), EVERY),
    "npu::npu_moe_gating_top_k": (moe_gating_top_k, EVERY),
    "npu::npu_fused_infer_attention_score": (attention("num_heads", num_key_value_heads=2, scale=0.125), SHORT),
    "npu::npu_fused_infer_attention_score_v2": (
        attention("num_query_heads", num_key_value_heads=2, softmax_scale=0.125),
        SHORT,
    ),
    "npu::npu_prompt_flash_attention": (attention("num_heads", num_key_value_heads=2, scale_value=0.125), SHORT),
    "npu::npu_fusion_attention_v3": (attention("head_num", scale=0.125), EVERY),
    "npu::npu_scatter_pa_kv_cache": (scatter_pa_kv_cache, SHORT),
    "npu::npu_kv_rmsnorm_rope_cache": (kv_rmsnorm_rope_cache, SHORT),
    "npu::npu_kv_rmsnorm_rope_cache_v2": (kv_rmsnorm_rope_cache, SHORT),
    "npu_fuse::causal_conv1d": (causal_conv1d, SHORT),
    "npu::causal_conv1d": (causal_conv1d, SHORT),
    "npu_fuse::causal_conv1d_columns": (causal_conv1d_columns, SHORT),
    "npu::npu_recurrent_gated_delta_rule": (recurrent_gated_delta_rule, (BRAIN,)),
    "npu::npu_chunk_gated_delta_rule": (chunk_gated_delta_rule, (BRAIN,)),
}


# What comes of it -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One op in one dtype.

    Args:
        op: its name.
        dtype: of the tensors of the call.
        errors: of each result the largest difference, as a part of the largest number, and what is allowed.
        has_read: whether the reference reads values: what is lowered holds for those of the call.
        reason: why it isn't lowered, or None.
    """

    op: str
    dtype: torch.dtype
    errors: tuple[tuple[float, float], ...] = ()
    has_read: bool = False
    reason: str | None = None

    @property
    def is_right(self) -> bool:
        return all(error <= allowed for error, allowed in self.errors)


def measured(name: str, dtype: torch.dtype) -> Row:
    """Lowers an op's reference, runs it, and compares."""
    from npu_fuse.runtime.mlir.importer import Importer
    from npu_fuse.runtime.mlir.jit import Jit
    from npu_fuse.runtime.mlir.lower import check, decompositions, to_linalg

    contract, (make, _) = CONTRACTS[name], CALLS[name]
    call = make(dtype)
    try:
        graph = decomposition(contract, call, decompositions())
        check(graph.module.graph)
        importer = Importer()
        importer.add(graph, "main", overwrites=False)
        run = Jit(str(to_linalg(importer.module)))
    except MlirError as error:
        return Row(name, dtype, reason=str(error))
    found = run(*(value for value in contract.bind(**call).values() if isinstance(value, torch.Tensor)))
    given = {key: copied(value) for key, value in contract.bind(**call).items()}
    results = contract.reference(**given)
    results = results if isinstance(results, tuple) else () if results is None else (results,)
    wanted = [*results, *(given[key] for key in given if key in contract.mutates)]
    return Row(name, dtype, tuple(off_by(*pair) for pair in zip(found, wanted, strict=True)), graph.has_read)


def copied(value: Any) -> Any:
    """A tensor with memory of its own, laid out as it was."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def off_by(found: torch.Tensor, wanted: torch.Tensor) -> tuple[float, float]:
    """The largest difference and what is allowed; infinite where shapes, dtypes, NaNs or infinities differ."""
    allowed = TOLERANCE.get(wanted.dtype, float(wanted.dtype == torch.int8))
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return torch.inf, allowed
    if not wanted.numel():
        return 0.0, allowed
    one, other = found.double(), wanted.double()
    if not torch.equal(one.isfinite(), other.isfinite()) or not torch.equal(*map(_without_numbers, (one, other))):
        return torch.inf, allowed
    finite = other.isfinite()
    difference = (one - other)[finite].abs().max().item() if finite.any() else 0.0
    largest = other[finite].abs().max().item() if wanted.is_floating_point() and finite.any() else 1.0
    return difference / largest if difference else 0.0, allowed


def _without_numbers(tensor: torch.Tensor) -> torch.Tensor:
    return torch.where(tensor.isnan(), 2.0, torch.where(tensor.isinf(), tensor.sign(), 0.0))


def cell(row: Row) -> str:
    """What is said of an op in one dtype."""
    if row.reason is not None:
        return f"not lowered: {row.reason}"
    worst = max((error for error, _ in row.errors), default=0.0)
    return ("0" if worst == 0 else f"{worst:.0e}") + ("" if row.is_right else " (wrong)")


def main(names: list[str]) -> int:
    """Prints the table; the exit status is 1 where a number is off."""
    print(f"| op | {' | '.join(str(dtype).removeprefix('torch.') for dtype in EVERY)} | |")
    print("|---|---|---|---|---|")
    is_right = True
    for name in names or CALLS:
        found = {dtype: measured(name, dtype) for dtype in CALLS[name][1]}
        cells = " | ".join(cell(found[dtype]) if dtype in found else "" for dtype in EVERY)
        note = "reads values" if any(row.has_read for row in found.values()) else ""
        print(f"| `{name}` | {cells} | {note} |", flush=True)
        is_right &= all(row.is_right for row in found.values())
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
