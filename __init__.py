"""npu_fuse: a torch.compile backend that rewrites models, as their authors wrote them, to fused Ascend NPU kernels.

compiled = torch.compile(model, backend="npu_fuse")
print(npu_fuse.explain(model, *inputs))
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .passes.report import Report, Site
    from .runtime.audit import Audit, audit
    from .runtime.backend import Backend, npu_fuse
    from .runtime.effects import register_side_effects
    from .runtime.explain import explain
    from .runtime.graphs import CaptureError, GraphRunner, InputSpec, PoisonError
    from .runtime.mlir.export import export_mlir
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
    "export_mlir",
    "npu_fuse",
    "register_side_effects",
    "unpack",
]
__version__ = "0.1.0"

# Each name is loaded when it is asked for. So the command `npu-fuse doctor` runs where torch can't be imported as it
# stands, and the plug-ins cost the frameworks nothing that load them and leave them off.
_HOMES = {
    "Audit": ".runtime.audit",
    "Backend": ".runtime.backend",
    "CaptureError": ".runtime.graphs",
    "GraphRunner": ".runtime.graphs",
    "InputSpec": ".runtime.graphs",
    "Options": ".runtime.options",
    "PoisonError": ".runtime.graphs",
    "Report": ".passes.report",
    "Site": ".passes.report",
    "Target": ".runtime.target",
    "audit": ".runtime.audit",
    "explain": ".runtime.explain",
    "export_mlir": ".runtime.mlir.export",
    "npu_fuse": ".runtime.backend",
    "register_side_effects": ".runtime.effects",
    "unpack": ".runtime.weights",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home, __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
