"""The example of several ranks: two processes, each of which fuses its part."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "tensor_parallel.py"


def test_two_ranks_fuse_alike_and_compute_what_one_does() -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    by_rank = dict(re.findall(r"by hand, rank (\d): (.*); not fused: nothing", done.stdout))
    assert by_rank.keys() == {"0", "1"}
    assert by_rank["0"] == by_rank["1"]
    assert "1 sgl_kernel_npu::split_qkv_tp_rmsnorm_rope" in by_rank["0"]
    assert "2 npu::npu_mm_all_reduce_base" in by_rank["0"]
    assert len(re.findall(r"DTensors, rank \d: .*1 npu::npu_fused_infer_attention_score", done.stdout)) == 2
