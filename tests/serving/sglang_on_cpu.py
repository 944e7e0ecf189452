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
from sglang.srt.plugins import hook_registry  # noqa: E402
from sglang.srt.utils import common  # noqa: E402

__all__ = ["common", "hook_registry", "npu_graph_runner", "plugins", "transformers"]
