"""The collector of cycles rests while passes run, and is as it was afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import npu_fuse
from npu_fuse.runtime.collector import paused_collector


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.parametrize("is_on", [True, False])
def test_it_is_as_it_was_whatever_happens(is_on: bool) -> None:
    (gc.enable if is_on else gc.disable)()
    with paused_collector():
        assert not gc.isenabled()
    assert gc.isenabled() is is_on
    with pytest.raises(KeyError), paused_collector():
        raise KeyError
    assert gc.isenabled() is is_on


def test_it_rests_while_passes_run() -> None:
    seen: list[bool] = []

    class Looking(npu_fuse.Backend):
        def _passed(self, *arguments: Any) -> Any:
            seen.append(gc.isenabled())
            return super()._passed(*arguments)

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(lambda x: x * 2, backend=Looking())(torch.ones(2))
    assert seen == [False]
    assert gc.isenabled()
