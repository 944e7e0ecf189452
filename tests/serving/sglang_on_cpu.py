"""SGLang's own modules, imported on a CPU."""

import os

import torch
import transformers.image_utils  # looks for torchvision, which is stood in for below
from stand_ins import stand_in_for
from transformers.utils.import_utils import is_torchvision_available

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
is_torchvision_available()  # and keeps what it finds
stand_in_for("einops", "fastapi", "partial_json_parser", "sentencepiece", "torchvision", "tvm_ffi", "uvicorn")
stand_in_for("sgl_kernel", "sgl_kernel_npu")

# Ops of sgl_kernel that are asked for when a file is imported.
_library = torch.library.Library("sgl_kernel", "FRAGMENT")
for _name in ("fused_sigmoid_gating_delta_rule_update_cpu", "chunk_gated_delta_rule_cpu", "fused_gdn_gating_cpu"):
    _library.define(f"{_name}() -> ()")

from sglang.srt import plugins  # noqa: E402  # what is not installed has its stand-in now
from sglang.srt.hardware_backend.npu.attention import ascend_gdn_backend  # noqa: E402
from sglang.srt.hardware_backend.npu.graph_runner import npu_graph_runner  # noqa: E402
from sglang.srt.layers import layernorm, radix_linear_attention  # noqa: E402
from sglang.srt.layers.activation import SiluAndMul  # noqa: E402
from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm  # noqa: E402
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod  # noqa: E402
from sglang.srt.layers.radix_attention import AttentionType  # noqa: E402
from sglang.srt.layers.rotary_embedding import base as rotary_embedding  # noqa: E402
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding  # noqa: E402
from sglang.srt.mem_cache import memory_pool  # noqa: E402
from sglang.srt.model_executor import forward_context  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.models import dflash, qwen3_next  # noqa: E402
from sglang.srt.plugins import hook_registry  # noqa: E402
from sglang.srt.utils import common  # noqa: E402

__all__ = [
    "AttentionType",
    "ForwardMode",
    "GemmaRMSNorm",
    "RMSNorm",
    "RotaryEmbedding",
    "SiluAndMul",
    "UnquantizedLinearMethod",
    "ascend_gdn_backend",
    "common",
    "dflash",
    "forward_context",
    "hook_registry",
    "layernorm",
    "memory_pool",
    "npu_graph_runner",
    "plugins",
    "qwen3_next",
    "radix_linear_attention",
    "rotary_embedding",
    "transformers",
]
