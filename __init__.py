"""npu_fuse: a torch.compile backend that rewrites models, as their authors wrote them, to fused Ascend NPU kernels.

    compiled = torch.compile(model, backend="npu_fuse")
    print(npu_fuse.explain(model, *inputs))
"""

from .passes.report import Report, Site
from .runtime.backend import Backend, npu_fuse
from .runtime.explain import explain
from .runtime.options import Options
from .runtime.target import Target

__all__ = ["Backend", "Options", "Report", "Site", "Target", "explain", "npu_fuse"]
__version__ = "0.1.0"
