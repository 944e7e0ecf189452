"""Attention of training, which torch_npu makes of scaled_dot_product_attention, in inference too:

    out = softmax(scale * q k^T + pse, hidden keys at -inf) v

It is here to be read, and to run without an NPU; for graphs of inference there are better ops. The spelling of
pre_tockens and next_tockens is the op's.
"""

from collections.abc import Iterator

import torch

from ..target import Target
from .attention import KeysOf, attention
from .attention_layout import AttentionSizes, heads_first, is_packed, result_shape, written
from .attention_mask import COMPRESSED, DEFAULT_MASK, BlankRows, Masking, four_dims
from .contract import OpContract
from .fusion_attention_call import FIX_BLANK_ROWS, FusionAttentionCall, invalid, packed_sequences, value_reasons
from .layout import row_major
from .partly_covered import PartlyCovered
from .reasons import raise_first

__all__ = ["NPU_FUSION_ATTENTION_V3"]

# Of each row's maximum and sum the kernel writes this many copies.
_COPIES = 8

_SixTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

_PART = PartlyCovered(
    "npu::npu_fusion_attention_v3",
    "npu_fusion_attention_v3(Tensor query, Tensor key, Tensor value, int head_num, str input_layout,"
    " Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1.0, float keep_prob=1.0,"
    " int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, SymInt[]? prefix=None,"
    " Tensor? actual_seq_qlen=None, Tensor? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True,"
    ' bool sync=False, str softmax_layout="", Tensor? sink=None)'
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    FusionAttentionCall,
)


@_PART.refuse
def _refuse(target: Target, call: FusionAttentionCall) -> Iterator[str]:
    yield from invalid(call)
    if call.atten_mask is None and call.sparse_mode != DEFAULT_MASK:
        yield f"sparse_mode {call.sparse_mode} has no effect without an atten_mask"


@_PART.kernel
def fusion_attention_v3_reference(call: FusionAttentionCall) -> _SixTensors:
    """What `npu::npu_fusion_attention_v3` computes without dropout: all in float32, one rounding.

    Args:
        call: the arguments, see `FusionAttentionCall`. The others of the schema have to keep their defaults.

    Returns:
        The result in the layout and of query's type; the highest score of each row and the sum of exp(score - highest)
        in float32, [B, N, S, 8] or [T, N, 8], eight times each; nothing ([0]); and zeros for the seed and offset of
        dropout, int64 [1]. Rows that see no key are zeros with inner_precise 2, and in mode 3 where there are more rows
        than keys. NaN stands for what is undefined on the device: other rows that see no key, rows of no sequence, the
        statistics of all of these, and those of "TND" without softmax_layout, whose order is another.

    Raises:
        ValueError: the op raises, or what it computes is undefined.

    Source: torch_npu 2.13.0 (shapes), op-plugin 517f2e7d (semantics, limits: documents of npu_fusion_attention).
    """
    raise_first(_PART.name, invalid(call))
    raise_first(_PART.name, value_reasons(call))
    packed = is_packed(call.input_layout)
    hides = call.atten_mask is not None
    blank_rows: BlankRows = "zeros" if call.inner_precise == FIX_BLANK_ROWS else "zeros if causal"
    attended = attention(
        heads_first(call.query, call.input_layout, call.head_num),
        _sequences(call),
        call.scale,
        Masking(
            sparse_mode=call.sparse_mode if hides else DEFAULT_MASK,
            mask=None if call.sparse_mode in COMPRESSED else four_dims(call.atten_mask),
            pre_tokens=call.pre_tockens,
            next_tokens=call.next_tockens,
            blank_rows=blank_rows,
        ),
        value_head_dim=int(call.value_sizes.head_dim),
        shift=call.pse,
    )
    out = written(attended.out.to(call.query.dtype), call.input_layout)
    statistics = [rows.expand(*rows.shape[:3], _COPIES) for rows in (attended.maximum, attended.total)]
    if packed:
        ordered = call.softmax_layout == "TND"
        statistics = [rows[0].transpose(0, 1) * (1.0 if ordered else torch.nan) for rows in statistics]
    maximum, total = map(row_major, statistics)
    seed, offset = (torch.zeros(1, dtype=torch.int64, device=call.query.device) for _ in range(2))
    return out, maximum, total, call.query.new_empty(0), seed, offset


def _sequences(call: FusionAttentionCall) -> Iterator[KeysOf]:
    heads = call.heads_of_key
    key, value = (heads_first(tensor, call.input_layout, heads) for tensor in (call.key, call.value))
    if not is_packed(call.input_layout):
        for batch in range(len(key)):
            yield KeysOf(batch, 0, int(call.query_sizes.tokens), key[batch], value[batch])
        return
    for (start, stop), (first, last) in packed_sequences(call):
        yield KeysOf(0, start, stop, key[0, :, first:last], value[0, :, first:last])


@_PART.kernel
def fusion_attention_v3_fake(call: FusionAttentionCall) -> _SixTensors:
    """Shapes of `fusion_attention_v3_reference`."""
    batch, tokens, heads, _ = call.query_sizes
    out = result_shape(call.input_layout, AttentionSizes(batch, tokens, heads, call.value_sizes.head_dim))
    statistics = (tokens, heads, _COPIES) if is_packed(call.input_layout) else (batch, heads, tokens, _COPIES)
    maximum, total = (call.query.new_empty(statistics, dtype=torch.float32) for _ in range(2))
    seed, offset = (call.query.new_empty(1, dtype=torch.int64) for _ in range(2))
    return call.query.new_empty(out), maximum, total, call.query.new_empty(0), seed, offset


NPU_FUSION_ATTENTION_V3 = OpContract(
    name=_PART.name,
    schema=_PART.schema,
    reference=fusion_attention_v3_reference,
    fake=fusion_attention_v3_fake,
    refuse=_refuse,
    socs=frozenset({"ascend910b", "ascend910_93"}),
    source=(
        "torch_npu 2.13.0 (schema, shapes, and that it stands for scaled_dot_product_attention on both SoCs),"
        " op-plugin 517f2e7d (semantics and limits, documents of npu_fusion_attention)"
    ),
)
