"""Attention of inference, in two versions that name their arguments differently:

    out = softmax(scale * q k^T + pse_shift, hidden keys at -inf) v

Mind the defaults: scale is 1.0, num_heads 1 and input_layout "BSH". A mask's True hides a key.
"""

from collections.abc import Iterator, Sequence

import torch

from ..sizes import Size
from ..target import Soc, Target
from .attention_call import AttentionCall
from .attention_mask import BlankRows
from .attention_reference import attended, fake_lse, fake_result, lse, result, value_reasons
from .contract import OpContract
from .fused_infer_rules import doubtful, invalid
from .partly_covered import PartlyCovered
from .reasons import raise_first

__all__ = ["NPU_FUSED_INFER_ATTENTION_SCORE", "NPU_FUSED_INFER_ATTENTION_SCORE_V2"]

# Newer CANN has both on ascend950 too, with limits of its own.
_SOCS: frozenset[Soc] = frozenset({"ascend910b", "ascend910_93"})
_SOURCE = "torch_npu 2.13.0 (schema, shapes), op-plugin 517f2e7d (semantics and limits, documents of both versions)"

# The bit of inner_precise that makes rows which see no key zeros.
_FIX_BLANK_ROWS = 2


def _computed(name: str, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    raise_first(name, value_reasons(call))
    blank_rows: BlankRows = "zeros" if call.inner_precise & _FIX_BLANK_ROWS else "zeros if causal"
    results = attended(call, blank_rows, decodes=call.decodes)
    return result(call, results), lse(call, results)


# npu_fused_infer_attention_score


def _call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pse_shift: torch.Tensor | None,
    atten_mask: torch.Tensor | None,
    actual_seq_lengths: Sequence[Size] | None,
    actual_seq_lengths_kv: Sequence[Size] | None,
    block_table: torch.Tensor | None,
    num_heads: int,
    scale: float,
    pre_tokens: int,
    next_tokens: int,
    input_layout: str,
    num_key_value_heads: int,
    sparse_mode: int,
    inner_precise: int,
    block_size: int,
    softmax_lse_flag: bool,
) -> AttentionCall:
    """What the contract covers.

    Args:
        query: float16 or bfloat16, contiguous as all tensors, in the layout: B batch, S tokens or T tokens of packed
            sequences, N heads, D head_dim, H = N * D. D is a multiple of 16 up to 512; 128 or 192 for packed sequences.
        key: in the layout; with `block_table` [blocks, block_size, H], or [blocks, N, block_size, D] for "BNSD" and
            "TND".
        value: as key, of the same shape; packed values may be narrower.
        pse_shift: [B or 1, N, S, keys or more], of query's type; added to the scores.
        atten_mask: bool, int8 or uint8, True hides. In sparse modes 0 and 1 [B, 1, S, keys], [1, 1, S, keys],
            [1, S, keys], and in plain layouts [S, keys], or [B, keys] for one token; over a table the last dim may be
            larger. In modes 2 to 4 `compressed_causal_mask`.
        actual_seq_lengths: tokens of each batch entry, or one length for all; of packed sequences the ends, without the
            leading 0. Ignored for a query of one token.
        actual_seq_lengths_kv: likewise of key; with `block_table` lengths for packed sequences too, and needed.
        block_table: int32 [B, blocks of a sequence].
        num_heads: heads of query.
        scale: factor of the scores.
        pre_tokens: see `attention_mask`.
        next_tokens: likewise.
        input_layout: one of `LAYOUTS`; behind an underscore the layout of the result.
        num_key_value_heads: heads of key and value, 0 for num_heads; divides num_heads, by at most 64.
        sparse_mode: 0 to 4, see `attention_mask`. Without effect for a query of one token.
        inner_precise: bit 0 is speed (no matter here), bit 1 makes rows that see no key zeros.
        block_size: tokens of a block.
        softmax_lse_flag: whether the second result is asked for.
    """
    return AttentionCall(
        query=query,
        key=key,
        value=value,
        pse_shift=pse_shift,
        atten_mask=atten_mask,
        q_lengths=actual_seq_lengths,
        kv_lengths=actual_seq_lengths_kv,
        block_table=block_table,
        block_size=block_size,
        num_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        scale=scale,
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
        input_layout=input_layout,
        sparse_mode=sparse_mode,
        inner_precise=inner_precise,
        with_lse=softmax_lse_flag,
        names=("num_heads", "actual_seq_lengths", "actual_seq_lengths_kv"),
    )


_PART = PartlyCovered(
    "npu::npu_fused_infer_attention_score",
    "npu_fused_infer_attention_score(Tensor query, Tensor key, Tensor value, *, Tensor? pse_shift=None,"
    " Tensor? atten_mask=None, SymInt[]? actual_seq_lengths=None, SymInt[]? actual_seq_lengths_kv=None,"
    " Tensor? dequant_scale1=None, Tensor? quant_scale1=None, Tensor? dequant_scale2=None, Tensor? quant_scale2=None,"
    " Tensor? quant_offset2=None, Tensor? antiquant_scale=None, Tensor? antiquant_offset=None,"
    " Tensor? key_antiquant_scale=None, Tensor? key_antiquant_offset=None, Tensor? value_antiquant_scale=None,"
    " Tensor? value_antiquant_offset=None, Tensor? block_table=None, Tensor? query_padding_size=None,"
    " Tensor? kv_padding_size=None, Tensor? key_shared_prefix=None, Tensor? value_shared_prefix=None,"
    " SymInt[]? actual_shared_prefix_len=None, Tensor? query_rope=None, Tensor? key_rope=None,"
    " Tensor? key_rope_antiquant_scale=None, int num_heads=1, float scale=1.0, int pre_tokens=2147483647,"
    ' int next_tokens=2147483647, str input_layout="BSH", int num_key_value_heads=0, int sparse_mode=0,'
    " int inner_precise=0, int block_size=0, int antiquant_mode=0, int key_antiquant_mode=0,"
    " int value_antiquant_mode=0, bool softmax_lse_flag=False) -> (Tensor, Tensor)",
    _call,
)


@_PART.refuse
def _refuse(target: Target, call: AttentionCall) -> Iterator[str]:
    yield from invalid(call, takes_64=False)
    yield from doubtful(call)


@_PART.kernel
def fused_infer_attention_score_reference(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """What `npu::npu_fused_infer_attention_score` computes: all in float32, one rounding.

    Args:
        call: the arguments, see `_call`. The others of the schema have to keep their defaults.

    Returns:
        The result in query's type, and log(sum(exp(score))) of each row in float32, [B, N, S, 1] or [T, N, 1]; without
        the flag [0]. Rows of a sequence without keys are zeros (documented where key has no tokens at all; a length of
        0 is taken to be the same). Rows that see no key are zeros with bit 1 of inner_precise, and in mode 3 where
        there are more rows than keys. NaN stands for what is undefined on the device: other rows that see no key, rows
        of no sequence, and the second result for all of these.

    Raises:
        ValueError: the op raises, or what it computes is undefined.

    Source: torch_npu 2.13.0 (shapes), op-plugin 517f2e7d (semantics); that kv lengths with a table aren't ends is
    vllm-ascend 182b75ea. The single rounding is inferred, CANN's kernel is closed and rounds the weights, too.
    """
    raise_first(_PART.name, invalid(call, takes_64=False))
    return _computed(_PART.name, call)


@_PART.kernel
def fused_infer_attention_score_fake(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes of `fused_infer_attention_score_reference`."""
    return fake_result(call), fake_lse(call)


NPU_FUSED_INFER_ATTENTION_SCORE = OpContract(
    name=_PART.name,
    schema=_PART.schema,
    reference=fused_infer_attention_score_reference,
    fake=fused_infer_attention_score_fake,
    refuse=_refuse,
    socs=_SOCS,
    source=_SOURCE,
)


# npu_fused_infer_attention_score_v2


def _call_v2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pse_shift: torch.Tensor | None,
    atten_mask: torch.Tensor | None,
    actual_seq_qlen: Sequence[Size] | None,
    actual_seq_kvlen: Sequence[Size] | None,
    block_table: torch.Tensor | None,
    learnable_sink: torch.Tensor | None,
    num_query_heads: int,
    num_key_value_heads: int,
    softmax_scale: float,
    pre_tokens: int,
    next_tokens: int,
    input_layout: str,
    sparse_mode: int,
    block_size: int,
    inner_precise: int,
    return_softmax_lse: bool,
) -> AttentionCall:
    """What the contract covers.

    Args:
        query: as the first version's, save that D may be 64 in "TND", where key has as many heads.
        key: as the first version's.
        value: likewise.
        pse_shift: likewise.
        atten_mask: likewise.
        actual_seq_qlen: the first version's actual_seq_lengths.
        actual_seq_kvlen: the first version's actual_seq_lengths_kv.
        block_table: as the first version's.
        learnable_sink: bfloat16 [N], a score for each head that takes its part of the sum and has no value; for "TND"
            and "NTD_TND" with a D of value of at most 128, without return_softmax_lse.
        num_query_heads: the first version's num_heads.
        num_key_value_heads: as the first version's.
        softmax_scale: the first version's scale.
        pre_tokens: as the first version's.
        next_tokens: likewise.
        input_layout: likewise.
        sparse_mode: likewise.
        block_size: likewise.
        inner_precise: likewise.
        return_softmax_lse: the first version's softmax_lse_flag.
    """
    return AttentionCall(
        query=query,
        key=key,
        value=value,
        pse_shift=pse_shift,
        atten_mask=atten_mask,
        q_lengths=actual_seq_qlen,
        kv_lengths=actual_seq_kvlen,
        block_table=block_table,
        block_size=block_size,
        num_heads=num_query_heads,
        num_key_value_heads=num_key_value_heads,
        scale=softmax_scale,
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
        input_layout=input_layout,
        sparse_mode=sparse_mode,
        inner_precise=inner_precise,
        sink=learnable_sink,
        with_lse=return_softmax_lse,
        names=("num_query_heads", "actual_seq_qlen", "actual_seq_kvlen"),
    )


_PART_V2 = PartlyCovered(
    "npu::npu_fused_infer_attention_score_v2",
    "npu_fused_infer_attention_score_v2(Tensor query, Tensor key, Tensor value, *, Tensor? query_rope=None,"
    " Tensor? key_rope=None, Tensor? pse_shift=None, Tensor? atten_mask=None, SymInt[]? actual_seq_qlen=None,"
    " SymInt[]? actual_seq_kvlen=None, Tensor? block_table=None, Tensor? dequant_scale_query=None,"
    " Tensor? dequant_scale_key=None, Tensor? dequant_offset_key=None, Tensor? dequant_scale_value=None,"
    " Tensor? dequant_offset_value=None, Tensor? dequant_scale_key_rope=None, Tensor? quant_scale_out=None,"
    " Tensor? quant_offset_out=None, Tensor? quant_scale_p=None, Tensor? learnable_sink=None,"
    " int num_query_heads=1, int num_key_value_heads=0, float softmax_scale=1.0, int pre_tokens=2147483647,"
    ' int next_tokens=2147483647, str input_layout="BSH", int sparse_mode=0, int block_size=0,'
    " int query_quant_mode=0, int key_quant_mode=0, int value_quant_mode=0, int inner_precise=0,"
    " bool return_softmax_lse=False, int? query_dtype=None, int? key_dtype=None, int? value_dtype=None,"
    " int? query_rope_dtype=None, int? key_rope_dtype=None, int? key_shared_prefix_dtype=None,"
    " int? value_shared_prefix_dtype=None, int? dequant_scale_query_dtype=None,"
    " int? dequant_scale_key_dtype=None, int? dequant_scale_value_dtype=None,"
    " int? dequant_scale_key_rope_dtype=None, int? out_dtype=None) -> (Tensor, Tensor)",
    _call_v2,
)


@_PART_V2.refuse
def _refuse_v2(target: Target, call: AttentionCall) -> Iterator[str]:
    yield from invalid(call, takes_64=True)
    yield from doubtful(call)


@_PART_V2.kernel
def fused_infer_attention_score_v2_reference(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """What `npu::npu_fused_infer_attention_score_v2` computes: as the first version.

    Args:
        call: the arguments, see `_call_v2`. The others of the schema have to keep their defaults.

    Returns:
        As the first version.

    Raises:
        ValueError: the op raises, or what it computes is undefined.

    Source: as the first version's.
    """
    raise_first(_PART_V2.name, invalid(call, takes_64=True))
    return _computed(_PART_V2.name, call)


@_PART_V2.kernel
def fused_infer_attention_score_v2_fake(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes of `fused_infer_attention_score_v2_reference`."""
    return fake_result(call), fake_lse(call)


NPU_FUSED_INFER_ATTENTION_SCORE_V2 = OpContract(
    name=_PART_V2.name,
    schema=_PART_V2.schema,
    reference=fused_infer_attention_score_v2_reference,
    fake=fused_infer_attention_score_v2_fake,
    refuse=_refuse_v2,
    socs=_SOCS,
    source=_SOURCE,
)
