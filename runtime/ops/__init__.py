"""The fused ops that a graph may be rewritten to, as contracts. Importing this registers nothing; `register` does."""

from collections.abc import Mapping
from types import MappingProxyType

from .contract import OpContract
from .norm_quant import (
    NPU_ADD_RMS_NORM_CAST,
    NPU_ADD_RMS_NORM_DYNAMIC_QUANT,
    NPU_ADD_RMS_NORM_QUANT,
    NPU_RMS_NORM_QUANT,
)
from .quantize import NPU_DYNAMIC_QUANT, NPU_QUANTIZE
from .rms_norm import NPU_ADD_RMS_NORM, NPU_GEMMA_RMS_NORM, NPU_RMS_NORM
from .rotary import NPU_ROTARY_MUL
from .split_qkv import SPLIT_QKV_RMSNORM_ROPE
from .swiglu import NPU_SWIGLU

__all__ = ["CONTRACTS", "OpContract"]

_ALL = (
    SPLIT_QKV_RMSNORM_ROPE,
    NPU_RMS_NORM,
    NPU_GEMMA_RMS_NORM,
    NPU_ADD_RMS_NORM,
    NPU_ADD_RMS_NORM_CAST,
    NPU_ADD_RMS_NORM_QUANT,
    NPU_ADD_RMS_NORM_DYNAMIC_QUANT,
    NPU_RMS_NORM_QUANT,
    NPU_QUANTIZE,
    NPU_DYNAMIC_QUANT,
    NPU_ROTARY_MUL,
    NPU_SWIGLU,
)

CONTRACTS: Mapping[str, OpContract] = MappingProxyType({contract.name: contract for contract in _ALL})
