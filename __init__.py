"""npu_fuse: a torch.compile backend that rewrites models, as their authors wrote them, to fused Ascend NPU kernels.

compiled = torch.compile(model, backend="npu_fuse")
print(npu_fuse.explain(model, *inputs))
"""

from .passes.report import Report, Site
from .runtime.audit import Audit, audit
from .runtime.backend import Backend, npu_fuse
from .runtime.effects import register_side_effects
from .runtime.explain import explain
from .runtime.graphs import CaptureError, GraphRunner, InputSpec, PoisonError
from .runtime.options import Options
from .runtime.target import Target
from .runtime.weights import unpack

__all__ = [
    "Audit",
    "Backend",
    "CaptureError",
    "GraphRunner",
    "InputSpec",
    "Options",
    "PoisonError",
    "Report",
    "Site",
    "Target",
    "audit",
    "explain",
    "npu_fuse",
    "register_side_effects",
    "unpack",
]
__version__ = "0.1.0"
