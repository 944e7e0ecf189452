"""The fixed memory that inputs are copied into, shared by the graphs of all sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Buffers:
    """One piece of memory for each input name and dtype; a graph's buffer is a view of its beginning.

    Replays of a runner follow each other, so graphs of all sizes may use the same memory. A graph that needs more than
    there is gets a new piece, and the graphs captured before keep theirs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def buffer(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, order: Sequence[int] | None = None
    ) -> torch.Tensor:
        """A tensor of this shape at a fixed address, without gaps; its dims lie in their own order, or in another."""
        count = 1
        for size in shape:
            count *= size
        memory = self._memory.get((name, dtype))
        if memory is None or memory.numel() < count:
            with torch.inference_mode(False):  # it outlives the inference mode of the first call
                memory = torch.empty(count, dtype=dtype, device=self.device)
            self._memory[name, dtype] = memory
        with torch.inference_mode(False):
            if order is None:
                return memory[:count].view(tuple(shape))
            lying = memory[:count].view([shape[dim] for dim in order])
            return lying.permute([order.index(dim) for dim in range(len(order))])

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(memory.nbytes for memory in self._memory.values())
