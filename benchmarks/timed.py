"""What the passes take of the processor's time."""

from __future__ import annotations

import time
from typing import Any

from torch import fx

import npu_fuse

__all__ = ["Timed"]


class Timed(npu_fuse.Backend):
    """A backend that takes the processor's time of its passes."""

    passes = 0.0

    def _optimised(self, *arguments: Any) -> fx.GraphModule:
        start = time.process_time()
        try:
            return super()._optimised(*arguments)
        finally:
            self.passes += time.process_time() - start
