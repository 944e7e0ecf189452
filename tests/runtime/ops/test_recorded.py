"""References of sgl_kernel_npu's kernels against results recorded of the kernels themselves."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from npu_fuse.runtime.ops import CONTRACTS
from npu_fuse.runtime.target import Target

RECORDED = Path(__file__).parents[2] / "data" / "other_kernels"
CALLS = json.loads(RECORDED.with_suffix(".json").read_text())
RESULTS = {
    "split_qkvgate_gemma_rmsnorm_rope": ("q", "k", "v", "gate"),
    "triton_split_qkv_rmsnorm_mrope": ("q", "k", "v", "gate"),
    "split_qkv_tp_rmsnorm_rope": ("q", "k", "v"),
    "fused_rope_qk_mqa": ("q", "k"),
}


@pytest.fixture(scope="module")
def recorded():
    with np.load(RECORDED.with_suffix(".npz")) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


@pytest.mark.parametrize("call", CALLS)
def test_the_kernels_own_results(recorded, call):
    def tensors(kind):
        prefix = f"{call}.{kind}."
        return {name.removeprefix(prefix): tensor for name, tensor in recorded.items() if name.startswith(prefix)}

    kernel = call.partition(".")[0]
    contract = CONTRACTS[f"sgl_kernel_npu::{kernel}"]
    arguments = {**tensors("in"), **CALLS[call]}
    assert contract.refusal(Target(), **arguments) is None
    results = dict(zip(RESULTS[kernel], contract.op(**arguments), strict=True))
    expected = tensors("out")
    assert results.keys() == expected.keys()
    for name, actual in results.items():
        wanted = expected[name]
        assert (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape)
        if wanted.dtype == torch.float32:
            torch.testing.assert_close(actual, wanted, rtol=0, atol=2e-6)
        else:
            # Neighbouring float16 numbers of one sign are neighbours as integers too; ±0 are equal.
            apart = (actual.view(torch.int16).int() - wanted.view(torch.int16).int()).abs()
            assert bool(((apart <= 1) | (actual == wanted)).all())


@pytest.mark.parametrize("kernel", RESULTS)
def test_every_kernel_has_recorded_results(kernel):
    assert any(call.startswith(f"{kernel}.") for call in CALLS)
