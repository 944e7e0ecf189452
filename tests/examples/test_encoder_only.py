"""The example of a layer that is freed from a causal mask: it passes, and fails where something is not as it says."""

from dataclasses import replace

import encoder_only
import pytest
import torch
from encoder_only import BOUNDS, Outcome

import npu_fuse


@pytest.fixture(scope="module", params=list(BOUNDS))
def outcome(request: pytest.FixtureRequest) -> tuple[Outcome, str]:
    return encoder_only.run(getattr(torch, request.param), context=9, block=5), request.param


def test_it_is_as_it_should_be(outcome: tuple[Outcome, str]) -> None:
    assert list(encoder_only.check(*outcome)) == []


def test_a_layer_that_stays_causal_is_a_failure(outcome: tuple[Outcome, str]) -> None:
    found, dtype = outcome
    failures = list(encoder_only.check(replace(found, output=found.unfreed, report=npu_fuse.Report()), dtype))
    assert [failure.split()[:3] for failure in failures] == [
        ["the", "report", "has"],
        ["the", "output", "is"],
        ["the", "draft", "layer"],
    ]


def test_other_modes_are_a_failure() -> None:
    found = encoder_only.run(torch.bfloat16, context=9, block=5)
    (failure,) = encoder_only.check(replace(found, calls=found.calls[::-1]), "bfloat16")
    assert failure == "modes and masks of the fused op are [(0, False), (3, True), (3, True)]"


def test_the_draft_layer_looks_ahead_and_the_causal_ones_do_not() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = encoder_only.Drafter().eval()
    context, block = torch.randn(1, 9, encoder_only.HIDDEN), torch.randn(1, 5, encoder_only.HIDDEN)
    changed = block.clone()
    changed[:, -1] += 1
    compiled = torch.compile(model, backend=npu_fuse.Backend(strict=True))
    with torch.no_grad():
        first, eager = ((m(context, changed) - m(context, block))[:, 0].abs().max() for m in (compiled, model))
    assert first > 1e-4
    assert eager == 0


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert encoder_only.main(["--context", "7", "--block", "3", "--dtype", "bfloat16"]) == 0
    text = capsys.readouterr().out
    assert "draft.attn" in text
    assert "sparse_mode 0, no mask" in text
