"""The stub libraries: enough of a device to be set up, counted and named."""

import os
import subprocess
import sys

import pytest
import torch


def run(code: str, **environment: str) -> str:
    """Run code in a fresh interpreter, as the stubs read their environment once; return its last line."""
    outcome = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, timeout=60
    )
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout.splitlines()[-1]


def test_a_tensor_travels_to_the_device_and_back() -> None:
    values = torch.arange(4.0)
    assert torch.equal(values.to("npu").cpu(), values)


def test_streams_and_events_are_never_pending() -> None:
    stream, event = torch.npu.Stream(), torch.npu.Event()
    event.record(stream)
    stream.synchronize()
    assert stream.query()
    assert event.query()


def test_there_is_no_device_unless_asked_for() -> None:
    code = "import torch; print(torch.npu.is_available(), torch.npu.device_count())"
    assert run(code, CANN_STUB_DEVICES="0") == "False 0"


@pytest.mark.parametrize(
    ("name", "soc"),
    [
        ("Ascend910B3", "ascend910b"),
        ("Ascend910_9391", "ascend910_93"),
        ("Ascend950PR_9589", "ascend950"),
        ("Ascend310P3", "ascend310p"),
    ],
)
def test_the_target_is_detected_from_the_device(name: str, soc: str) -> None:
    code = "from npu_fuse.runtime.target import Target; t = Target.detect(); print(t.soc, t.device, *t.packages)"
    assert run(code, CANN_STUB_SOC=name) == f"{soc} npu torch_npu"
