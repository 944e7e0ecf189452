"""SGLang's own modules, imported on a CPU."""

import os

import transformers.image_utils  # looks for torchvision, which is stood in for below
from stand_ins import stand_in_for
from transformers.utils.import_utils import is_torchvision_available

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
is_torchvision_available()  # and keeps what it finds
stand_in_for("einops", "partial_json_parser", "sentencepiece", "sgl_kernel", "torchvision", "tvm_ffi")

from sglang.srt import plugins  # noqa: E402  # what is not installed has its stand-in now
from sglang.srt.hardware_backend.npu.graph_runner import npu_graph_runner  # noqa: E402
from sglang.srt.layers import layernorm  # noqa: E402
from sglang.srt.layers.activation import SiluAndMul  # noqa: E402
from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm  # noqa: E402
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod  # noqa: E402
from sglang.srt.layers.radix_attention import AttentionType  # noqa: E402
from sglang.srt.layers.rotary_embedding import base as rotary_embedding  # noqa: E402
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding  # noqa: E402
from sglang.srt.models import dflash  # noqa: E402
from sglang.srt.plugins import hook_registry  # noqa: E402
from sglang.srt.utils import common  # noqa: E402

__all__ = [
    "AttentionType",
    "GemmaRMSNorm",
    "RMSNorm",
    "RotaryEmbedding",
    "SiluAndMul",
    "UnquantizedLinearMethod",
    "common",
    "dflash",
    "hook_registry",
    "layernorm",
    "npu_graph_runner",
    "plugins",
    "rotary_embedding",
    "transformers",
]
