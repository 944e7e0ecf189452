"""The example of a draft runs, and says so."""

import warnings

import draft_input_embeds
import torch


def test_every_step_is_eagers(capsys):
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "GraphRunner: a call of sizes")
        assert draft_input_embeds.main(["--steps", "30"]) == 0
    printed = capsys.readouterr().out
    assert "all 30 steps are eager's" in printed
    assert "npu_rms_norm" in printed
